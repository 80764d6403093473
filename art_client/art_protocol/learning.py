"""The bodies of feedback, and of learning from feedback. A score judges an answer, or a session, of an agent in use."""

import itertools
from typing import Annotated, Literal, Self

from pydantic import Field, model_validator

from art_protocol.wire import NAME_PATTERN, Body, FiniteFloat, Name, Number, Reply, TrainConfig

MAX_LINES = 1000
"""Scores in one request."""
MAX_TEXT = 16_384
"""Characters of a comment or a correction."""
MAX_TOKEN_SECONDS = 30 * 86400.0
"""How long a browser's token may be valid."""
ANSWER_HEADER = "x-art-answer"
"""In a reply: the answer's id for feedback, where the id is known before the answer begins."""
LEARN_HEADER = "x-art-learn"
"""Request header; "never": no score of the answer is trained."""

ROLLOUT_SESSION = "rollout-"
"""How the names of sessions begin that `art.rollout` makes. A canary does not answer their requests."""

ScoreState = Literal["scored", "queued", "trained", "dropped", "replaced", "retracted"]
LearningState = Literal["on", "paused", "off"]
ReleaseState = Literal["steps", "canary", "promoted", "rolled_back"]
"""steps: its steps are trained and guarded, and none serves yet; canary: its newest step answers a share of the requests."""


class Feedback(Body):
    """A score of an answer, or of a session."""

    answer: str | None = Field(default=None, min_length=1, max_length=200)
    """The `id` of the answer, as the client got it from any of the four APIs. For choice number 2 of an answer with several
    choices: `ID-2`, or the choice's `art.id`."""
    session: str | None = Field(default=None, pattern=NAME_PATTERN)
    """In place of `answer`: a session, whose turns so far the score judges together."""
    name: str = Field(default="thumb", pattern=NAME_PATTERN)
    """What the score is about. The policy of learning lists the names that are trained, with their ranges."""
    value: bool | FiniteFloat | None = None
    """true is the upper end of the name's range, false the lower end. A score without a value has a comment or a correction."""
    comment: str | None = Field(default=None, max_length=MAX_TEXT)
    """What was wrong with the answer, unless `value` is the best. `Policy.text` says whether it teaches."""
    correction: str | None = Field(default=None, max_length=MAX_TEXT)
    """What the answer should have been."""
    user: str | None = Field(default=None, min_length=1, max_length=256)
    """Who gave the score. The server keeps a keyed hash only. A second score of the same user and name replaces the first."""
    id: str | None = Field(default=None, min_length=1, max_length=200)
    """A name that the client chooses for the score: the same id and content once more get the same reply."""
    made_at: FiniteFloat | None = None
    """When the user gave the score, in seconds since 1970; for the statistics of delays only."""
    metadata: dict[str, Annotated[str, Field(max_length=1000)] | Number | None] = Field(default={}, max_length=32)

    @model_validator(mode="after")
    def _names_one(self) -> Self:
        if (self.answer is None) == (self.session is None):
            raise ValueError("name either answer or session")
        if self.value is None and not self.has_text:
            raise ValueError("give a value, a comment or a correction")
        return self

    @property
    def has_text(self) -> bool:
        """Whether there is a comment or a correction that is not blank."""
        return any(text is not None and text.strip() for text in (self.comment, self.correction))


class Score(Reply):
    """A score as the server has it."""

    id: str
    state: ScoreState
    reason: str | None = None
    """Why the score is dropped."""
    answer: str | None = None
    session: str | None = None
    name: str
    value: float | None = None
    """None: the score has texts only."""
    step: int | None = None
    """The step that sampled the answer."""
    job_id: str | None = None
    trained_step: int | None = None
    """The step that the score trained."""
    replaces: str | None = None
    """The earlier score that this score has replaced."""
    comment: str | None = None
    created_at: float
    """Seconds since 1970."""


class FeedbackTokenRequest(Body):
    """For a token with which a browser gives one score."""

    answer: str = Field(min_length=1, max_length=200)
    """As in `Feedback`."""
    name: str = Field(default="thumb", pattern=NAME_PATTERN)
    user: str | None = Field(default=None, min_length=1, max_length=256)
    """Who will give the score. The token has a keyed hash only."""
    seconds: float = Field(default=3600.0, gt=0, le=MAX_TOKEN_SECONDS)
    """How long the token is valid."""


class FeedbackToken(Reply):
    token: str
    path: str
    """`POST` the score there, without a key."""
    expires_at: float
    """Seconds since 1970."""


class TokenScore(Body):
    """What a browser sends with a token."""

    value: bool | FiniteFloat
    comment: str | None = Field(default=None, max_length=MAX_TEXT)


class TokenReply(Reply):
    """What a browser learns of its score."""

    name: str
    value: float
    state: ScoreState
    reason: str | None = None


class ScoreList(Reply):
    scores: list[Score]
    next: int | None = None
    """The value of `after` for the scores that follow; None: there are no more."""


class Deleted(Reply):
    """What a deletion has deleted, and what it cannot delete."""

    answers: int = 0
    """Records of the ledger."""
    scores: int = 0
    rollouts: int = 0
    """Lines of the rollouts of trained steps."""
    steps: tuple[int, ...] = ()
    """The steps that have trained what is deleted. Their weights, and those of later steps, cannot forget it."""
    continued_by: tuple[str, ...] = ()
    """The answers whose conversations contain what is deleted."""


class ScoreName(Body):
    """What a name of scores counts in the reward."""

    weight: FiniteFloat = 1.0
    low: FiniteFloat = 0.0
    high: FiniteFloat = 1.0

    @model_validator(mode="after")
    def _has_range(self) -> Self:
        if not self.low < self.high:
            raise ValueError("low must be below high")
        return self


def default_config() -> TrainConfig:
    """How scores train. Scores are few and late: a batch trains eight small steps in place of a large one, and old answers count as
    long as the policy has not left them. Of such answers k3, the usual estimate of the KL divergence, has a gradient that grows without
    bound and holds the policy back; k2 has not. All tokens have the same weight: if all answers had, the tokens of a bad
    long answer would weigh less, and answers would lose their ends (docs/benchmarks.md, "Learning in use"). Answers have no siblings, and
    some questions get low scores whatever the answer is, so a reward is compared with those of similar questions."""
    return TrainConfig(
        learning_rate=1e-4,
        passes=4,
        mini_batches=2,
        epsilon=0.4,
        baseline="similar_prompts",
        scaling="batch_std",
        beta=0.01,
        kl_estimator="k2",
        max_staleness=8,
    )


class Policy(Body):
    """How a model learns from scores."""

    names: dict[Name, ScoreName] = Field(default={"thumb": ScoreName()}, min_length=1, max_length=32)
    """The names of scores that are taken."""
    batch: int = Field(default=128, ge=2, le=10_000)
    """Scored answers that a step trains."""
    every_hours: float = Field(default=6.0, gt=0)
    """After so many hours a step trains fewer answers, if at least `least` are scored."""
    least: int = Field(default=32, ge=2)
    user_share: float = Field(default=0.05, gt=0, le=1)
    """The largest share of a batch that one user's scores may have."""
    max_age_days: float = Field(default=7.0, gt=0)
    """Scores of older answers are not trained."""
    text: Literal["teach", "off"] = "teach"
    """Whether comments and corrections train. teach: the serving step reads the question with the text, and the answer's tokens learn
    from what that changes in their probabilities; meanwhile the server keeps the messages of requests. off: they are kept, and train
    nothing."""
    config: TrainConfig = Field(default_factory=default_config)
    release: Literal["direct", "canary"] = "direct"
    """How a new step comes to serve. direct: once it has passed the guard. canary: it answers a share of the requests first, side by
    side with the step that serves, and the scores of both decide."""
    max_kl: float = Field(default=1.0, gt=0)
    """The guard refuses a step whose answers are less likely for the serving step by more than this, in nats per token."""
    steps_per_release: int = Field(default=4, ge=1, le=100)
    """Steps that are trained between two canaries."""
    share: float = Field(default=0.3, ge=0.01, le=0.5)
    """The part of the users that a canary answers."""
    looks: list[Annotated[int, Field(ge=2)]] = Field(default=[100, 200, 400, 800], min_length=1, max_length=10)
    """The numbers of scored answers, of both steps, at which a canary may be decided. The last decides."""
    z: float = Field(default=2.5, gt=0)
    """Before the last look, a canary is decided by a difference of so many standard errors."""
    max_days: float = Field(default=14.0, gt=0)
    """A canary without enough scores is rolled back after so many days."""

    @model_validator(mode="after")
    def _looks_grow(self) -> Self:
        if any(later <= earlier for earlier, later in itertools.pairwise(self.looks)):
            raise ValueError("looks must grow, as in [100, 200, 400, 800]")
        return self


class LearningAction(Body):
    action: Literal["pause", "resume", "train", "promote", "rollback"]
    """train: the scores that wait, also if they are fewer than a batch. promote: the newest step of the open release serves.
    rollback: the open release ends, and its steps are set aside."""


class ReleaseArm(Reply):
    """What the users of a step said during a canary."""

    step: int
    scored: int
    """Scored answers and sessions."""
    users: int
    mean: float | None = None
    """The mean reward; None without scores."""
    interval: tuple[float, float] | None = None
    """The 95% interval of the mean, computed over users; None: fewer than two users."""


class ReleaseInfo(Reply):
    """Steps on their way to serve."""

    state: ReleaseState
    incumbent: int
    """The step that serves meanwhile."""
    passed: int
    """The newest step that has passed the guard."""
    candidate: int | None = None
    """The step of the canary."""
    share: float | None = None
    arms: tuple[ReleaseArm, ...] = ()
    """Of a canary: the incumbent's users and the candidate's."""
    z: float | None = None
    """Of a canary: the difference of the means in standard errors; positive: the candidate is better."""
    reason: str | None = None
    """What was decided last, in a sentence with numbers."""
    began_at: float
    """Seconds since 1970."""


class LearningInfo(Reply):
    """How a model learns at this moment."""

    state: LearningState
    policy: Policy
    reason: str
    """What the model's learning waits for, or why it is paused, in a sentence with numbers."""
    counts: dict[str, int]
    """Scores by state, and for `dropped` by reason too (`dropped: capped`)."""
    serving_step: int
    newest_step: int
    release: ReleaseInfo | None = None
    """The newest release: the open one, or the one that ended last."""
