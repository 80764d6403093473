"""The HTTP bodies that client and server exchange, defined once for both sides.

Requests refuse unknown fields; in replies they are ignored. Trajectories contain plain dictionaries (messages and
OpenAI choices), so neither side needs the `openai` package to parse a body. docs/routes.md lists the routes, and
`/openapi.json` their bodies.
"""

import operator
import sys
from typing import Annotated, Any, Literal, Self, cast

from pydantic import AfterValidator, BaseModel, BeforeValidator, ConfigDict, Field, model_validator

from art_protocol.demonstrations import read_tools
from art_protocol.display import Displayed, counted

NAME_PATTERN = r"^[A-Za-z0-9][A-Za-z0-9._-]{0,127}$"
"""Valid names of projects, models and sessions. A name becomes a folder or a part of URLs."""
NAME_RULE = "use 1 to 128 letters, digits, '.', '_' or '-', and begin with a letter or digit"

IDEMPOTENCY_HEADER = "idempotency-key"
"""Request header with the key of a train request. A repeated request with the same key gets the same job."""
DIGEST_HEADER = "x-art-request-digest"
"""Request header of a train request that is repeated after the error "records_missing": the SHA-256 of the body that got
the error. With the same idempotency key, both bodies count as one request."""

NDJSON = "application/x-ndjson"
"""The media type of train and log requests, and of a job's events."""

TOKEN_FIELDS = frozenset({"token_ids", "prompt_token_ids", "logprobs"})
"""The fields of a choice that contain its tokens."""
BY_REFERENCE = "by_reference"
"""The field of a choice whose tokens the client has and does not send."""

STEP_HEADER = "x-art-step"
"""In a reply: the step that answered the inference request. In a request: the step that answers if `model` is the name of a
trainable model without a step, a kept step or "base" for the base model. So an agent that knows one name can be evaluated at
any step."""
SEED_HEADER = "x-art-seed"
"""Request header with the `seed` of an inference request whose body has none."""


class Body(BaseModel):
    """Base of requests: unknown fields are refused."""

    model_config = ConfigDict(extra="forbid", frozen=True)


class Reply(BaseModel):
    """Base of replies: unknown fields are ignored, so that older clients can parse the replies of newer servers."""

    model_config = ConfigDict(extra="ignore", frozen=True)


def _finite(value: float) -> float:
    if not abs(value) <= sys.float_info.max:  # also for an int that no float can hold, and NaN
        raise ValueError("must be a finite number, not NaN or infinity")
    return value


def _is_half(value: object) -> bool:
    return value == 0.5


def is_none(value: object) -> bool:
    """For `exclude_if`: leaves a field that is None out of the JSON, for parsers that do not know the field."""
    return value is None


FiniteFloat = Annotated[float, AfterValidator(_finite)]
Number = Annotated[float | int | bool, AfterValidator(_finite)]
Name = Annotated[str, Field(pattern=NAME_PATTERN)]
Split = Annotated[str, Field(pattern=NAME_PATTERN)]


# --- errors -------------------------------------------------------------------------------------------------------


class ErrorDetail(Reply):
    """One error, in the format that OpenAI clients parse."""

    message: str
    """What happened, to what, and what to do."""
    type: str = "invalid_request_error"
    code: str = "error"
    """Stable identifier for programs: `unknown_model`, `bad_name`, `no_trainable_turn`..."""
    param: str | None = None
    """The invalid field, as a path into the body, or the invalid header."""
    retryable: bool = False
    """True: the unchanged request may succeed later."""
    ids: list[str] = Field(default=[], exclude_if=operator.not_)
    """With the code `records_missing`: ids of the choices that the request must contain with their tokens."""


class ErrorBody(Reply):
    error: ErrorDetail


# --- models -------------------------------------------------------------------------------------------------------


class LoRAConfig(Body):
    """Configuration of the trained adapter, fixed when a model is first registered."""

    rank: int = Field(default=8, ge=1, le=512)
    """Inner dimension of the two matrices that are trained for each layer."""
    alpha: float = Field(default=16.0, gt=0, le=65_536)
    """The adapter's output is multiplied by alpha / rank."""
    target_modules: list[str] | None = None
    """Names of the linear layers to adapt. None: all linear layers of the language model except the output head; in a
    mixture of experts, the linear layers of the attention only."""


class RegisterRequest(Body):
    name: Name
    project: Name
    base_model: str = Field(min_length=1, max_length=1024)
    """A Hugging Face id, a folder on the server, "art/tiny" or "smollm2"."""
    lora: LoRAConfig | None = None
    """None: the registered model's configuration, or the defaults for a new model."""
    # Left out if empty: an older server refuses fields that it does not know.
    engine_args: dict[str, Any] = Field(default={}, exclude_if=operator.not_)
    """Requested engine arguments: vLLM's arguments that `--engine-arg` takes, and `max_seq_length`. They have an effect if
    this call starts the engine. The server's flags take precedence."""


class ModelInfo(Reply):
    name: str
    project: str
    base_model: str
    step: int
    """The newest complete checkpoint; 0 before the first train call."""
    inference_name: str
    """The value for `model` in inference requests: "PROJECT/NAME". Append "@k" for an earlier step."""
    lora: LoRAConfig
    max_seq_length: int | None = None
    """Maximum number of tokens of prompt plus completion; None before a base model is loaded."""
    notes: list[str] = Field(default=[], exclude_if=operator.not_)
    """In the answer to a registration: sentences about the base model's chat template that the user has to know, and a
    sentence about each requested engine argument that is not in effect. In the answer to a fork: how the learning rate continues."""


class ModelList(Reply):
    models: list[ModelInfo]


# --- trajectories -------------------------------------------------------------------------------------------------


class TeacherTop(Displayed, Body):
    """A teacher's log-probabilities of `top_k` tokens at each sampled token of a turn. What these tokens leave of the
    distribution is one further entry, the tail. Text is base64; numbers are little-endian, token after token."""

    top_k: int = Field(ge=1)
    """Number of tokens of the vocabulary at each sampled token; the same in all turns of a request."""
    token_ids: str
    """int32: tokens x top_k ids, at a sampled token all different."""
    logprobs: str
    """float32: tokens x top_k log-probabilities of these ids, in nats, at temperature 1 over the whole vocabulary."""


class HistoryBody(Body):
    """One conversation of a trajectory: the main one, a sub-agent's, or the part after a context reset."""

    messages_and_choices: list[dict[str, Any]]
    """OpenAI messages, and for sampled answers OpenAI choices: entries with `message` and `finish_reason`. A choice with
    an `art.id` needs no tokens, because the server that sampled the choice has recorded them. `by_reference: true` states
    that the client has the tokens: if the record is missing, a train request is refused with "records_missing"."""
    tools: Annotated[list[dict[str, Any]] | None, BeforeValidator(read_tools)] = None
    """A list, or JSON text as in columns of data sets."""
    turn_rewards: list[FiniteFloat | None] | None = Field(default=None, exclude_if=is_none)
    """For each choice a reward or null, in addition to the trajectory's reward. The reward applies to all tokens up to
    the end of the choice (process supervision)."""
    turn_advantages: list[FiniteFloat | list[FiniteFloat] | None] | None = Field(default=None, exclude_if=is_none)
    """For each choice an advantage, a list with an advantage for each token, or null. An advantage here replaces the
    advantage from rewards."""
    turn_targets: list[TeacherTop | None] | None = Field(default=None, exclude_if=is_none)
    """For each choice a teacher's log-probabilities (`art.distill(..., top_k=K)`), or null. The divergence from them is a term
    of the loss, beside the advantages."""


class TrajectoryBody(HistoryBody):
    reward: FiniteFloat
    additional_histories: list[HistoryBody] = []
    initial_policy_version: int | None = None
    final_policy_version: int | None = None
    metrics: dict[str, Number] = {}
    metadata: dict[str, Any] = {}
    logs: list[str] = []


class FailureBody(Body):
    """The exception of a failed rollout. Failures are counted, never trained with a reward of zero."""

    type: str
    message: str
    traceback: str = ""


class TrajectoryGroupBody(Body):
    trajectories: list[TrajectoryBody]
    exceptions: list[FailureBody] = []
    metadata: dict[str, Any] = {}
    metrics: dict[str, Number] = {}
    logs: list[str] = []


# --- training -----------------------------------------------------------------------------------------------------


class LossConfig(Displayed, Body):
    """The loss, a member of the GRPO family; PRESETS contains the published members.

    r is the ratio pi_new / pi_old of a trained token, and A is the token's advantage. pi_old is the trainer's policy at
    the start of the job. pi_sampled is the behaviour policy, from which the engine sampled. Averages are over the whole
    optimizer step. Formulas and sources: docs/training.md.
    """

    objective: Literal["policy", "likelihood"] = "policy"
    """policy: the policy gradient of the fields below. likelihood: A log pi_new, without ratio, clip or correction; with
    A = 1, the cross-entropy of supervised training (`TrainSFTConfig`)."""
    ratio_to: Literal["start", "sampled"] = "start"
    """The denominator of r. start: pi_old, computed by the trainer; `correction` then weighs tokens by
    pi_old / pi_sampled. sampled: pi_sampled, without correction (the meaning of ART's options)."""
    ratio: Literal["token", "sequence", "geometric"] = "token"
    """token: r itself. sequence: exp of the trajectory's mean log-ratio (GSPO). geometric: sqrt(token * sequence)."""
    clip: Literal["two_sided", "dual", "cispo", "none"] = "two_sided"
    """The maximised objective. two_sided: min(r A, clip(r) A). dual: the same, but at least dual_clip * A where A < 0.
    cispo: clip(r) A log pi_new, without gradient through clip(r). none: r A."""
    epsilon: float = Field(default=0.2, gt=0)
    """The lower bound of clip(r) is 1 - epsilon."""
    epsilon_high: float | None = Field(default=None, gt=0)
    """The upper bound of clip(r) is 1 + epsilon_high. None: 1 + epsilon."""
    dual_clip: float = Field(default=3.0, gt=1)
    """With clip="dual": a token with a negative advantage and a ratio above this gets no gradient."""

    normalisation: Literal["tokens", "trajectory", "constant"] = "tokens"
    """tokens: the sum over trained tokens / their number. trajectory: the mean over trajectories of each trajectory's
    mean. constant: the sum / (number of trajectories * constant_length)."""
    constant_length: int = Field(default=1024, ge=1)
    """The number of tokens by which normalisation="constant" divides."""

    baseline: Literal["group_mean", "leave_one_out", "similar_prompts", "none"] = "group_mean"
    """What is subtracted from a reward: the mean of its group, the mean of its group's other rewards, the reward that the batch's other
    trajectories with similar prompts lead to expect (for answers without siblings; not with scaling="group_std"), or nothing."""
    scaling: Literal["group_std", "batch_std", "none"] = "group_std"
    """group_std: advantages are divided by the standard deviation of the group's rewards. batch_std: advantages are
    standardised over all groups with signal; with baseline="none" or "similar_prompts" these are all groups, unless all rewards of the
    batch are equal. none: advantages are not scaled. Turn rewards get the same baseline and scaling, over turn rewards alone; with
    "similar_prompts" they have no baseline of their own."""

    correction: Literal["off", "truncate", "mask", "sequence_mask"] = "truncate"
    """The weight of a token's policy term, with c = pi_old / pi_sampled. truncate: min(c, correction_high). mask: c, or
    0 outside [correction_low, correction_high]. sequence_mask: as mask, with the geometric mean of the trajectory's c.
    off: 1."""
    correction_high: float = Field(default=2.0, gt=0)
    """The largest weight, or the upper end of the range that a mask keeps."""
    correction_low: float = Field(default=0.0, ge=0)
    """The lower end of the range that a mask keeps."""

    beta: float = Field(default=0.0, ge=0)
    """Weight of the KL penalty against the reference policy (the base model without adapter); 0: no penalty."""
    kl_estimator: Literal["k1", "k2", "k3"] = "k3"
    """With d = log reference - log policy. k1: -d. k2: d^2 / 2. k3: exp(d) - d - 1."""
    kl_in: Literal["loss", "reward", "advantage"] = "loss"
    """loss: a term of the loss, over all groups. reward: subtracted from each trajectory's reward. advantage: beta *
    (mean KL - KL of the token) is added to each token's advantage. The last two compute KL from the sampler's
    log-probabilities, and change only groups whose rewards differ."""

    entropy_bonus: float = Field(default=0.0, ge=0)
    """Weight of the entropy at the sampled tokens of all groups, which is subtracted from the loss."""

    # Left out at the defaults: an older server refuses fields that it does not know.
    distill_alpha: float = Field(default=0.5, ge=0, le=1, exclude_if=_is_half)
    """At tokens with a teacher's log-probabilities (`turn_targets`), with the student S and the teacher T: 0 is KL(T || S), 1 is
    KL(S || T), and between them (1 - alpha) KL(S || M) + alpha KL(T || M) with M = (1 - alpha) S + alpha T."""
    distill_clip: float | None = Field(default=None, gt=0, exclude_if=is_none)
    """The largest part of this divergence that one token of the vocabulary may have. A token above it has no gradient of its own.
    None: no limit. OPSD uses 0.05."""

    overlong: Literal["keep", "mask", "soft_penalty"] = "keep"
    """keep: train conversations that were cut at a length limit as they are. mask: leave them out. soft_penalty: add a
    penalty to the reward of every trajectory, which falls linearly from 0 to -1 over the last overlong_buffer of
    overlong_length trained tokens."""
    overlong_length: int | None = Field(default=None, ge=1)
    """Trained tokens at which the soft penalty reaches -1."""
    overlong_buffer: int | None = Field(default=None, ge=1)
    """Number of tokens before `overlong_length` over which the soft penalty grows."""


PRESETS: dict[str, LossConfig] = {
    "grpo": LossConfig(),
    "dr_grpo": LossConfig(normalisation="constant", scaling="none"),
    "dapo": LossConfig(epsilon_high=0.28),
    "gspo": LossConfig(ratio="sequence", epsilon=3e-4, epsilon_high=4e-4, normalisation="trajectory"),
    "cispo": LossConfig(clip="cispo", epsilon=1.0, epsilon_high=4.0),
    "rloo": LossConfig(
        clip="none",
        baseline="leave_one_out",
        scaling="none",
        normalisation="constant",
        constant_length=1,
    ),
    "reinforce_pp": LossConfig(scaling="batch_std"),
    "ppo": LossConfig(clip="dual", scaling="batch_std"),
}
"""The published losses, by name. Sources: docs/training.md."""


class TrainConfig(LossConfig):
    """The configuration of one train call. Defaults: GRPO with group mean and standard deviation, the loss averaged
    over the batch's tokens, one AdamW step without weight decay (Shao et al. 2024, arXiv:2402.03300)."""

    preset: Literal["grpo", "dr_grpo", "dapo", "gspo", "cispo", "rloo", "reinforce_pp", "ppo"] = "grpo"
    """Supplies the fields of the loss that are not given."""
    learning_rate: Annotated[float, Field(gt=0, le=1)] | list[Annotated[float, Field(ge=0, le=1)]] | Literal["auto"] = (
        5e-6
    )
    """A list has the rate of each optimizer step of the job. auto: computed from the model's width, see docs/training.md;
    the notes in the job's report contain the value."""
    warmup_steps: int = Field(default=0, ge=0)
    """The learning rate rises linearly over this number of optimizer steps, counted from `schedule_begins`."""
    schedule: Literal["constant", "cosine"] = "constant"
    """How the learning rate changes after the warm-up."""
    schedule_steps: int | None = Field(default=None, ge=1)
    """With cosine: the learning rate reaches 0 after this number of optimizer steps, counted from `schedule_begins`."""
    schedule_begins: int = Field(default=0, ge=0)
    """The model's optimizer step at which warm-up and schedule begin. For a run that continues a model: `optimizer_steps` of the
    newest of `model.checkpoints()` at the run's beginning."""
    max_grad_norm: float = Field(default=1.0, gt=0)
    """A gradient with a larger norm is scaled down to this norm."""
    passes: int = Field(default=1, ge=1, le=64)
    """Number of passes over the groups."""
    mini_batches: int = Field(default=1, ge=1, le=1024)
    """Number of optimizer steps in each pass. The groups are shuffled and divided among these steps."""
    batch_size: int | None = Field(default=None, ge=1)
    """Number of groups in each optimizer step, in the order of the request; instead of `mini_batches`. A group that is not
    trained still counts, so that the other groups keep their steps and rates."""
    # Left out if 0: an older server refuses fields that it does not know.
    held_out: int = Field(default=0, ge=0, exclude_if=operator.not_)
    """Number of the request's last groups that are not trained. The mean cross-entropy of these demonstrations under the new step is
    the metric `val/loss`. Needs objective="likelihood"; `model.train_sft(validation=...)` sets both."""
    sampling: Literal["as_sampled", "raw"] = "as_sampled"
    """The distribution of a token's log-probabilities, both the sampler's and the trainer's. as_sampled: the distribution
    that the token was sampled from (temperature, kept set, logit bias). raw: the model's own distribution at temperature 1."""
    max_staleness: int | None = Field(default=None, ge=0)
    """Tokens that were sampled more than this number of steps before the job's start are counted and only used as
    context. None: all tokens are trained, weighted by `correction`."""
    allow_training_without_logprobs: bool = False
    """Also train demonstrations (assistant messages as plain dictionaries) and choices whose tokens are unknown. Their
    text is tokenised, and the trainer uses its own log-probabilities for them."""
    plot_tensors: bool = False
    """Save a plot of the step's packed prefix trees in the checkpoint's folder."""

    @model_validator(mode="before")
    @classmethod
    def _fill_from_preset(cls, data: Any) -> Any:  # Any: the input is not validated yet
        if not isinstance(data, dict):
            return data
        fields = cast("dict[str, Any]", data)
        if fields.get("ratio_to") == "sampled":
            fields = {"correction": "off", **fields}
        preset = PRESETS.get(str(fields.get("preset", "grpo")))
        return fields if preset is None else {**preset.model_dump(exclude_unset=True), **fields}

    @model_validator(mode="after")
    def _check_lengths(self) -> Self:
        if self.batch_size is not None and self.mini_batches != 1:
            raise ValueError("batch_size and mini_batches both divide the groups: give one of them")
        if self.held_out and self.objective != "likelihood":
            raise ValueError(
                f"held_out is {self.held_out}, and measures demonstrations, with objective='likelihood': use "
                "model.train_sft(validation=...)"
            )
        if isinstance(self.learning_rate, list) and not self.learning_rate:
            raise ValueError("learning_rate is an empty list: give a rate for each optimizer step")
        if self.overlong == "soft_penalty" and (self.overlong_length is None or self.overlong_buffer is None):
            raise ValueError("overlong='soft_penalty' needs overlong_length and overlong_buffer")
        if self.ratio_to == "sampled" and self.correction != "off":
            raise ValueError(
                f"correction='{self.correction}' weighs tokens by pi_old / pi_sampled, which ratio_to='sampled' already"
                " includes: leave correction out, or set ratio_to='start'"
            )
        if self.baseline == "similar_prompts" and self.scaling == "group_std":
            raise ValueError(
                "baseline='similar_prompts' compares over the batch, and scaling='group_std' within groups: use scaling='batch_std' or 'none'"
            )
        if self.correction_low > self.correction_high:
            raise ValueError("correction_low is above correction_high")
        return self

    @model_validator(mode="after")
    def _check_schedule(self) -> Self:
        if self.schedule == "cosine" and self.schedule_steps is None:
            raise ValueError("schedule='cosine' needs schedule_steps")
        return self

    def num_optimizer_steps(self, num_groups: int) -> int:
        """The number of optimizer steps of a job on so many groups."""
        steps_per_pass = self.mini_batches if self.batch_size is None else -(-num_groups // self.batch_size)
        return steps_per_pass * self.passes

    def check_rates(self, num_groups: int) -> None:
        """Checks that `learning_rate`, if it is a list, has a rate for each optimizer step of a job, and that `held_out` leaves a
        group to train.

        Raises:
            ValueError: the list has fewer rates, or all groups are held out.
        """
        if self.held_out and num_groups <= self.held_out:
            raise ValueError(
                f"held_out is {self.held_out}, which leaves none of {num_groups} groups to train: lower it"
            )
        if not isinstance(self.learning_rate, list):
            return
        num_rates, num_steps = len(self.learning_rate), self.num_optimizer_steps(num_groups - self.held_out)
        if num_rates < num_steps:
            raise ValueError(f"learning_rate lists {num_rates} rates, and the job takes {num_steps} optimizer steps")


class TrainRequest(Body):
    """Sent as NDJSON: a line with this object, then a line for each further group. The server reads one line at a time."""

    groups: list[TrajectoryGroupBody] = []
    config: TrainConfig = TrainConfig()
    expected_step: int | None = Field(default=None, ge=0)
    """The step that sampled the trajectories. The request is refused if the model is at another step, or has a job that
    will change its step."""


class Dropped(Reply):
    """One reason why parts of a job were not trained."""

    reason: str
    count: int
    unit: Literal["turn", "trajectory", "group", "rollout"] = "turn"
    """What `count` counts."""
    examples: list[str] = []
    """The first few paths of such parts, for example "groups[0].trajectories[2].messages_and_choices[1]"."""

    def __str__(self) -> str:
        """What was left out, and why."""
        return f"{counted(self.count, self.unit)}, because {self.reason}"


class Unused(Reply):
    """Rollouts of a job of which nothing was trained, for one reason."""

    reason: str
    num_rollouts: int
    num_tokens: int = 0
    """Sampled tokens of these rollouts, as far as the server knows them."""


class Difference(Reply):
    """Why turns begin a new sequence: the first text that differs from the earlier turns. A report has one difference for
    each shape of rollouts (the roles of the messages, and whose text differs), with the texts of the first such rollout."""

    whose: str
    """"the policy's answer", "the tool message", "the user message"..., "the tool definitions", or "the chat template's own
    text"."""
    expected: str
    """The text of the earlier turns at the difference; empty if the earlier turns end there."""
    found: str
    """The text of the later request at the difference."""
    count: int
    """Rollouts of this shape whose first difference this is."""
    num_tokens: int = 0
    """Tokens of these rollouts that are computed again, for all of their differences."""
    example: str
    """The path of the turn, for example "groups[0].trajectories[2].messages_and_choices[3]"."""

    def __str__(self) -> str:
        """Which turns do not continue the earlier turns, and where."""
        has = "has" if self.count == 1 else "have"
        return (
            f"{counted(self.count, 'rollout')} {has} turns that do not continue those before them, and are sequences of their own: {self.whose} was "
            f"{self.expected!r} and is {self.found!r} in a later request ({self.example}), so that {counted(self.num_tokens, 'token')} "
            "are computed again"
        )


class JobReport(Reply):
    """What a job trains. The report is fixed when the server accepts the job; only notes are added until the job is done."""

    num_groups: int = 0
    num_groups_trained: int = 0
    num_trajectories: int = 0
    num_trajectories_trained: int = 0
    num_failed_rollouts: int = 0
    num_rows: int = 0
    num_trained_tokens: int = 0
    num_tokens_without_logprob: int = 0
    """Tokens trained with ratio 1, because their log-probability under the behaviour policy is unknown."""
    sampled_steps: dict[int, int] = {}
    """Number of sampled tokens by the step that sampled them, without tokens whose step the ledger does not know."""
    turns: dict[str, int] = {}
    """Number of trained turns by where their tokens come from: the ledger ("ledger"), token ids in the choice ("ids"), or
    the tokenised text, with log-probabilities from the trainer ("recomputed")."""
    continuations: dict[str, int] = {}
    """Number of later turns by how they continue earlier turns. "joined": in the same sequence. All others begin a new
    sequence: "dropped", the template removed thinking; "retokenized", rendering changed tokens while splicing was off;
    "changed", the context changed in another way."""
    differences: list[Difference] = []
    """Where turns that begin a new sequence first differ from the turns before them, by shape of rollouts."""
    dropped: list[Dropped] = []
    num_sampled_tokens: int = 0
    """Sampled tokens of all trajectories that the server resolved, also of those that were not trained."""
    unused: list[Unused] = []
    """The rollouts of which nothing was trained, failed ones included. Each rollout counts for one reason."""
    num_unnamed_requests: int = 0
    """Number of requests to the model that name no session and whose answers are not in the job, counted since the job's
    first rollout with a session began."""
    config: dict[str, Any] = {}
    """The configuration in effect, defaults included."""
    losses: list[float] = []
    """The loss of each optimizer step, in order: known when the job is done. `loss/train` is their mean."""
    notes: list[str] = []
    """Further information: settings without effect, and decisions of the trainer."""


JobState = Literal["queued", "running", "done", "failed", "cancelled"]


class JobInfo(Reply):
    job_id: str
    project: str
    name: str
    state: JobState
    phase: str | None = None
    """"queued", then what the job does now: "engine", "pause", "train", "save", "load"... An ended job keeps its last phase."""
    completed: int | None = None
    total: int | None = None
    """The phase has completed `completed` of `total` units; None if the phase has no units."""
    step: int | None = None
    """The step that the job made; None before the job is done."""
    metrics: dict[str, float] = {}
    report: JobReport = JobReport()
    attempts: int = 0
    """Attempts that ended with an error."""
    error: ErrorDetail | None = None
    """Why the job failed; for a job that has not ended, why its last attempt failed."""
    created_at: float = 0.0
    """Seconds since 1970."""
    finished_at: float | None = None
    """When the job ended, in seconds since 1970; None before the end."""
    waits_for: str | None = None
    """What the job waits for; None if it does not wait."""


class JobList(Reply):
    jobs: list[JobInfo]
    """Jobs that have not ended, in the order in which they run, then ended jobs, newest first."""


class MoveJobRequest(Body):
    before: str | None = None
    """Id of the queued job that the moved job will precede; None: the end of the queue."""


class JobEvent(Reply):
    """One line of a job's event stream, which ends with `done` or `error`."""

    event: Literal["accepted", "progress", "waiting", "done", "error"]
    job_id: str
    number: int | None = None
    """Increases with the job's progress. `GET /api/jobs/{job_id}/events?after=NUMBER` resumes after this event."""
    phase: str | None = None
    """With `progress` and `waiting`: "queued", "train", "save", "load"..."""
    completed: int | None = None
    total: int | None = None
    waits_for: str | None = None
    """What the job waits for: other jobs, its base model, the engine's start, the next attempt after an error."""
    step: int | None = None
    metrics: dict[str, float] = {}
    report: JobReport | None = None
    error: ErrorDetail | None = None


# --- logs and checkpoints -----------------------------------------------------------------------------------------


class LogRequest(Body):
    """Sent as NDJSON, as `TrainRequest` is."""

    groups: list[TrajectoryGroupBody] = []
    split: Split = "val"
    step: int | None = Field(default=None, ge=0)
    """None: the newest step."""
    metrics: dict[str, FiniteFloat] = {}


class LogReply(Reply):
    step: int
    metrics: dict[str, float]
    """The metrics that were added to the step's history."""


class CheckpointInfo(Reply):
    """One kept step of a model."""

    step: int
    created_at: float
    """Seconds since 1970."""
    metrics: dict[str, float] = {}
    """The metrics in the step's history. The values of `train/*` are of the samples that the step was trained on."""
    size_bytes: int
    unchanged: bool = False
    """The weights equal the previous step's weights: the batch had no signal, or the learning rate was 0."""
    optimizer_steps: int | None = None
    """Optimizer steps of the model until here. None: another program made the checkpoint."""
    is_serving: bool = False
    is_best: bool = False


class CheckpointList(Reply):
    checkpoints: list[CheckpointInfo]
    """Oldest first."""
    best_metric: str | None = None
    """The metric behind `is_best`: the first of "val/reward", "train/reward" and "val/loss" that the history has, of which the loss is
    best when it is lowest; None if the history has none."""


class DeleteCheckpointsRequest(Body):
    best_metric: str | None = Field(default=None, max_length=256)
    """Besides the newest step, keep the step with the highest mean of this metric in the history, of "val/loss" the lowest. None: the
    first of "val/reward", "train/reward" and "val/loss" that the history has."""
    keep: list[int] | None = None
    """The steps to keep besides the newest. If given, `best_metric` has no effect."""


class DeleteCheckpointsReply(Reply):
    kept: list[int]
    """All kept steps. The step that serves and steps that requests sample from are always kept."""
    deleted: list[int]


class ForkRequest(Body):
    """Makes a new model that starts from a step of another model."""

    name: Name
    project: Name
    step: int | None = Field(default=None, ge=0)
    """The step of the source model; None: the step that serves."""


class RenameRequest(Body):
    """Gives a model another name in its project. Programs that use the old name must be started with the new one."""

    name: Name


class About(Body):
    """What people noted about a run, on its page."""

    tags: list[Annotated[str, Field(min_length=1, max_length=40)]] = Field(default=[], max_length=20)
    notes: str = Field(default="", max_length=20_000)
    price_per_hour: float | None = Field(default=None, ge=0, allow_inf_nan=False)
    """What an hour of the run's machines costs, in any currency."""


class RollbackRequest(Body):
    step: int = Field(ge=0)
    """The kept step that becomes the newest."""


# --- sessions -----------------------------------------------------------------------------------------------------


SESSION_HEADER = "x-art-session"
"""Request header with the name of the session. The base URL `/s/SESSION/v1` or the API key `KEY::SESSION` have the same
effect, for agents whose headers cannot be set."""


UNNAMED_SECONDS = 600
NOT_DELIVERED = "the answer did not reach the agent in full: the agent closed the connection before the end"
NOT_ENDED = "the answer was still being sampled when the session was read: read the session after its last answer"
"""NOT_DELIVERED, NOT_ENDED: reasons of `SessionReply.unused` that say of an answer that the answer was not finished."""


HistoryKind = Literal["main", "branch", "context_reset", "sub_agent", "side_call"]
"""What a conversation of a session is to the agent (docs/agents.md, "What an agent asks beside its conversation")."""


class SessionReply(Reply):
    """One model's answers in one session, as the conversations of a trajectory."""

    histories: list[HistoryBody]
    """The conversations: the main one, which has the most answers, and the others in the order in which they began. A request that
    continues a conversation extends it."""
    kinds: list[HistoryKind] = []
    """What each of the histories is; empty from a server of an earlier version."""
    num_choices: int
    """Number of choices in the histories."""
    unused: dict[str, int] = {}
    """Number of excluded choices by reason: not fully delivered, requested again, discarded for another answer to the same
    conversation, or not recorded any longer."""
    other_models: dict[str, int] = {}
    """If this model has no answer in the session: the number of answers by the name of the trained model that gave them."""
    num_base_answers: int = 0
    """If this model has no answer in the session: the number of answers of the base model."""
    unknown_models: dict[str, int] = {}
    """If this model has no answer in the session: the number of refused requests by the name that no model has."""
    refused_keys: dict[str, int] = {}
    """If this model has no answer in the session: the number of requests that were refused for their key, by the reason."""
    num_unnamed_requests: int = 0
    """If the session has no choice of the model: the number of requests to the model in the last `UNNAMED_SECONDS` that name
    no session. A thread, process or HTTP client of the session that does not know its name may have sent them."""


# --- health -------------------------------------------------------------------------------------------------------


class ProgressLine(Reply):
    """One thing that the server's start has done."""

    number: int
    """Grows from line to line."""
    seconds: float
    """Since the start began."""
    text: str


class ReplicaHealth(Reply):
    """One of several engines."""

    name: str
    engine: Literal["none", "starting", "ready", "failed"] = "none"
    detail: str | None = None
    """Why the engine is not ready; None when the engine is ready."""
    num_requests: int = 0
    """Requests that the engine has."""
    num_starts: int = 0


class Health(Reply):
    status: Literal["ok"] = "ok"
    engine: Literal["none", "starting", "ready", "failed"] = "none"
    base_model: str | None = None
    version: str = ""
    detail: str | None = None
    """Why the engine is not ready, with the engine's last log line; None when the engine is ready."""
    waits_for: str | None = None
    """What inference requests wait for; None if none waits."""
    progress: list[ProgressLine] = []
    """What the newest start of base model, trainer and engine has done so far."""
    replicas: list[ReplicaHealth] = []
    """The engines, if there are several; `engine` is then the state of the one that is closest to serving."""
    longest_stall_seconds: float = 0.0
    """The longest time that the server's event loop was blocked since its start."""
    faults: dict[str, str] = {}
    """Parts of the server that currently fail ("job runner", "records"...), each with its last error."""
