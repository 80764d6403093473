"""The report of a job: what it trains, what it leaves out and why, counted while its turns are resolved (`resolve.py`)."""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field

from art_protocol.demonstrations import SHAREGPT, is_sharegpt
from art_protocol.display import counted
from art_protocol.wire import (
    Difference,
    Dropped,
    FailureBody,
    HistoryBody,
    JobReport,
    TrainConfig,
    TrajectoryBody,
    TrajectoryGroupBody,
    Unused,
)
from art_server.errors import InvalidInput
from art_server.jobs.advice import advise
from art_server.jobs.batch_signs import BatchSigns, Past
from art_server.jobs.choices import is_choice
from art_server.jobs.differences import FirstDifference, messages_of
from art_server.jobs.turns import ResolvedTurn
from art_server.ledger import conversation
from art_server.shared.advantages import (
    GroupTokens,
    count_masked,
    is_masked,
    teaches,
    trained_positions,
    trained_tokens,
)
from art_server.shared.trainer_messages import Batch, TrainableGroup, TrainableTrajectory

MAX_EXAMPLES = 5
"""Examples that a report lists for each reason; the count includes all."""

MAX_SHAPES = 10
"""Differences that a report lists."""

NO_TURN = "the trajectory holds no trainable turn"
EQUAL = "all rewards in the group are equal: no signal"
CUT = "cut at a length limit, and overlong='mask' leaves it out"
FAILED = "the rollout failed"

MAX_OPENING = 60
"""Characters of a demonstration's first user message in an error, by which its row is found in a shuffled file."""


@dataclass(frozen=True, slots=True)
class Untrained:
    """A demonstration without any trained token."""

    where: str
    number: int
    """Index among all trajectories."""
    opening: str
    """The beginning of the demonstration's first user message."""
    reason: str

    def __str__(self) -> str:
        return f"demonstration {self.number} ({self.where}, {self.opening!r}): {self.reason}"


@dataclass(slots=True)
class ReportCounts:
    """What happened to the groups and turns of a job so far."""

    num_groups: int = 0
    num_trajectories: int = 0
    num_failed: int = 0
    first_failure: FailureBody | None = None
    has_choice: bool = False
    """Whether any trajectory contains a choice."""
    has_sharegpt: bool = False
    turns: dict[str, int] = field(default_factory=dict)
    continuations: dict[str, int] = field(default_factory=dict)
    differences: dict[tuple[str, ...], tuple[int, int, FirstDifference, str]] = field(default_factory=dict)
    """By whose text differs, and the roles of the messages up to the turn: the number of such rollouts, the tokens that they compute
    again, the first difference, and its path."""
    dropped: dict[str, tuple[int, list[str]]] = field(default_factory=dict)
    unscored: dict[str, set[str]] = field(default_factory=dict)
    """The names of all turns' `ResolvedTurn.unscored`, with their values."""
    num_unscored: int = 0
    """Number of tokens in turns with such sampling parameters."""
    num_unrecorded: int = 0
    """Number of tokens that choices carried, and whose records are missing."""
    steps: dict[int, int] = field(default_factory=dict)
    """Number of tokens by the step that sampled them."""
    session_began_at: int | None = None
    """When the first request with a session came, among the requests of the job's turns."""
    num_unnamed: int = 0
    """Number of requests since `session_began_at` that name no session, and whose answers are not in the job."""
    num_without_thinking: int = 0
    """Demonstrations' messages whose thinking the chat template does not write."""
    num_untrained: int = 0
    untrained: list[Untrained] = field(default_factory=list)
    """The first untrained demonstrations."""
    copied: set[int | None] = field(default_factory=set)
    """Numbers of groups in which a choice is in several trajectories."""

    def add_group(self, group: TrajectoryGroupBody) -> None:
        self.num_groups += 1
        self.num_trajectories += len(group.trajectories)
        self.num_failed += len(group.exceptions)
        if self.first_failure is None and group.exceptions:
            self.first_failure = group.exceptions[0]
        for trajectory in group.trajectories:
            self.has_choice = self.has_choice or any(map(is_choice, trajectory.messages_and_choices))
            self.has_sharegpt = self.has_sharegpt or any(map(is_sharegpt, trajectory.messages_and_choices))

    def add_trained(self, turn: ResolvedTurn) -> None:
        self.turns[turn.origin] = self.turns.get(turn.origin, 0) + 1
        num_tokens = len(turn.token_ids)
        if turn.unscored:
            self.num_unscored += num_tokens
        for name, value in turn.unscored.items():
            self.unscored.setdefault(name, set()).add(str(value))
        if turn.is_unrecorded:
            self.num_unrecorded += num_tokens
        if turn.session is not None and turn.requested_at is not None:
            self.session_began_at = min(turn.requested_at, self.session_began_at or turn.requested_at)
        if turn.step is not None:
            self.steps[turn.step] = self.steps.get(turn.step, 0) + num_tokens

    def add_continuation(self, how: str) -> None:
        self.continuations[how] = self.continuations.get(how, 0) + 1

    def add_difference(
        self, history: HistoryBody, entry: int, difference: FirstDifference, where: str, num_tokens: int
    ) -> None:
        """Counts a rollout's first difference, which the turn at `entry` has. `num_tokens`: what the rollout computes again."""
        shape = (difference.whose, *(str(message.get("role")) for message in messages_of(history)[:entry]))
        new = (0, 0, difference, f"{where}messages_and_choices[{entry}]")
        count, before, first, path = self.differences.get(shape, new)
        self.differences[shape] = (count + 1, before + num_tokens, first, path)

    def add_dropped(self, reason: str, where: str) -> None:
        count, examples = self.dropped.get(reason, (0, []))
        self.dropped[reason] = (count + 1, [*examples, where][:MAX_EXAMPLES])

    def add_untrained(self, index: int, where: str, trajectory: TrajectoryBody, reasons: Sequence[str]) -> None:
        """Counts a demonstration of which nothing is trained. `index` is the trajectory's index in its group, `reasons` has
        the reason of each dropped turn."""
        self.num_untrained += 1
        if self.num_untrained > MAX_EXAMPLES:
            return
        messages = [
            message for history in [trajectory, *trajectory.additional_histories] for message in messages_of(history)
        ]
        roles = {message.get("role") for message in messages}
        if reasons:
            reason = reasons[0]
        elif any(map(is_sharegpt, messages)):
            reason = f"its messages are of the form ShareGPT: {SHAREGPT}"
        elif "assistant" in roles:
            reason = "each message of the assistant has the weight 0: leave the demonstration out"
        else:
            reason = "it has no message of the role 'assistant', and only these are trained"
        questions = (
            conversation.content_text(message.get("content")) for message in messages if message.get("role") == "user"
        )
        opening = next(questions, "")[:MAX_OPENING]
        self.untrained.append(Untrained(where, self.num_trajectories + index, opening, reason))

    def untrained_demonstrations(self) -> str:
        """Which demonstrations have no trained token, and why."""
        shown = "; ".join(map(str, self.untrained))
        num_more = self.num_untrained - len(self.untrained)
        more = f"; and {num_more} more" if num_more > 0 else ""
        return (
            f"{self.num_untrained} of {self.num_trajectories} demonstrations have no trained token: {shown}{more}. Nothing was "
            "trained: mend them or leave them out"
        )

    def nothing_trainable(self) -> str:
        """Why no group can be trained."""
        if not self.num_trajectories:
            first = self.first_failure
            why = f"; the first: {first.type}: {first.message[:300]}" if first else ""
            return f"the groups contain no trajectory ({self.num_failed} rollouts failed{why}): nothing to train"
        reasons = "; ".join(
            f"{reason} ({counted(count, 'time')}, e.g. {examples[0]})"
            for reason, (count, examples) in self.dropped.items()
        )
        hint = ""
        if self.has_sharegpt:
            hint = f". The messages are of the form ShareGPT: {SHAREGPT}"
        elif not self.has_choice:
            hint = (
                ". No trajectory contains a choice: put `completion.choices[0]` into it, not only its message; an agent "
                "under art.rollout needs the rollout's base_url or api_key, and the model's name: the logs of its trajectory "
                "say where its requests went"
            )
        return f"no group holds a trainable turn: {reasons}{hint}"


def make_report(
    batch: Batch, counts: ReportCounts, config: TrainConfig, signs: BatchSigns | None, past: Past
) -> JobReport:
    """The report of a job that trains this batch. `signs` are the signs of the batch, `past` the signs of earlier batches,
    for advice.

    Raises:
        InvalidInput: rewards or advantages are invalid.
    """
    try:
        tokens_of_groups = trained_tokens(batch.groups, config)
    except FloatingPointError as error:
        raise InvalidInput(str(error), code="bad_reward", param="groups") from error
    unmasked = tokens_of_groups
    if config.overlong == "mask":  # a group that is masked as a whole counts as masked, not as a group without signal
        unmasked = trained_tokens(batch.groups, config.model_copy(update={"overlong": "keep"}))
    num_groups = num_trajectories = num_sequences = num_tokens = num_without_logprob = 0
    for group, group_tokens in zip(batch.groups, tokens_of_groups, strict=True):
        if group_tokens is None:  # it has no signal
            continue
        num_groups += 1
        for trajectory, tokens_of_sequences in zip(group.trajectories, group_tokens, strict=True):
            if any(tokens_of_sequences):
                num_trajectories += 1
            for sequence, tokens in zip(trajectory.sequences, tokens_of_sequences, strict=True):
                if tokens:
                    num_sequences += 1
                num_tokens += len(tokens)
                num_without_logprob += sum(sequence.logprobs[position] is None for position, _ in tokens)
    return JobReport(
        num_groups=counts.num_groups,
        num_groups_trained=num_groups,
        num_trajectories=counts.num_trajectories,
        num_trajectories_trained=num_trajectories,
        num_failed_rollouts=counts.num_failed,
        num_rows=num_sequences,
        num_trained_tokens=num_tokens,
        turns=counts.turns,
        continuations=counts.continuations,
        differences=[
            Difference(
                whose=first.whose,
                expected=first.expected,
                found=first.actual,
                count=count,
                num_tokens=num_tokens,
                example=path,
            )
            for count, num_tokens, first, path in [*counts.differences.values()][:MAX_SHAPES]
        ],
        dropped=_left_out(batch, unmasked, counts, config),
        num_sampled_tokens=sum(num_sampled(trajectory) for group in batch.groups for trajectory in group.trajectories),
        unused=_unused(batch, tokens_of_groups, unmasked, counts, config),
        config=config.model_dump(),
        num_tokens_without_logprob=num_without_logprob,
        sampled_steps=dict(sorted(counts.steps.items())),
        num_unnamed_requests=counts.num_unnamed,
        notes=[
            *_unscored_notes(counts, config),
            *_unrecorded_notes(counts, config),
            *_unnamed_notes(counts),
            *_thinking_notes(counts),
            *_group_notes(batch.groups, tokens_of_groups),
            *_advice(batch, unmasked, counts, config, signs, past),
        ],
    )


def _left_out(
    batch: Batch, unmasked: Sequence[GroupTokens | None], counts: ReportCounts, config: TrainConfig
) -> list[Dropped]:
    """What the job does not train, with the reasons. `unmasked`: the tokens of each group before `overlong` masks any."""
    dropped: list[Dropped] = []
    for reason, (count, examples) in counts.dropped.items():
        unit = "trajectory" if reason == NO_TURN else "turn"
        dropped.append(Dropped(reason=reason, count=count, unit=unit, examples=examples))
    num_equal = sum(tokens is None for tokens in unmasked)
    if num_equal:
        dropped.append(Dropped(reason=EQUAL, count=num_equal, unit="group"))
    num_masked = sum(count_masked(group, config) for group in batch.groups)
    if num_masked:
        dropped.append(Dropped(reason=CUT, count=num_masked, unit="trajectory"))
    if counts.num_failed:
        dropped.append(Dropped(reason=FAILED, count=counts.num_failed, unit="rollout"))
    return dropped


def _unused(
    batch: Batch,
    tokens_of_groups: Sequence[GroupTokens | None],
    unmasked: Sequence[GroupTokens | None],
    counts: ReportCounts,
    config: TrainConfig,
) -> list[Unused]:
    """The rollouts of which nothing is trained, by reason."""
    num_rollouts: Counter[str] = Counter()
    num_tokens: Counter[str] = Counter()
    for group, trained, trainable in zip(batch.groups, tokens_of_groups, unmasked, strict=True):
        for index, trajectory in enumerate(group.trajectories):
            if trained is not None and any(trained[index]):
                continue
            reason = NO_TURN
            if any(is_masked(sequence, config) for sequence in trajectory.sequences):
                reason = CUT
            elif trajectory.sequences and trainable is None:
                reason = EQUAL
            num_rollouts[reason] += 1
            num_tokens[reason] += num_sampled(trajectory)
    # The batch has no groups without a trainable turn.
    num_rollouts[NO_TURN] += counts.num_trajectories - sum(len(group.trajectories) for group in batch.groups)
    num_rollouts[FAILED] += counts.num_failed
    return [
        Unused(reason=reason, num_rollouts=num, num_tokens=num_tokens[reason])
        for reason, num in num_rollouts.most_common()
        if num
    ]


def num_sampled(trajectory: TrainableTrajectory) -> int:
    """Number of sampled tokens of a trajectory."""
    return sum(len(trained_positions(sequence)) for sequence in trajectory.sequences)


def _unscored_notes(counts: ReportCounts, config: TrainConfig) -> list[str]:
    if not counts.unscored:
        return []
    seen = ", ".join(f"{name} {'/'.join(sorted(values))}" for name, values in counts.unscored.items())
    what = f"{counts.num_unscored} tokens were sampled with {seen}"
    if config.sampling == "raw":
        return [f"{what}; sampling='raw' scores them at temperature 1 over the whole vocabulary"]
    return [
        f"{what}. Their log-probabilities under these settings are unknown, so they are trained with ratio 1, as "
        "if the trainer had sampled them. For exact ratios, sample at a temperature above 0 and without penalties, on "
        "a GPU with art-server --record-distributions"
    ]


def _unrecorded_notes(counts: ReportCounts, config: TrainConfig) -> list[str]:
    if not counts.num_unrecorded:
        return []
    what = f"{counts.num_unrecorded} tokens came with their choices, and their records are not in the ledger"
    if config.sampling == "raw":
        how = "sampling='raw' scores them at temperature 1 over the whole vocabulary"
    else:
        how = "how they were sampled is unknown, so they are trained with ratio 1, as if the trainer had sampled them"
    return [f"{what}: {how}. `max_staleness` takes their step from their `art.step`"]


def _unnamed_notes(counts: ReportCounts) -> list[str]:
    if not counts.num_unnamed:
        return []
    return [
        f"{counts.num_unnamed} requests reached this model without a session since the first rollout of this job began: "
        "their answers are in no trajectory. They came from a thread, process or HTTP client that does not know its rollout: "
        "give it `base_url` or `api_key` of the rollout (docs/agents.md). Requests under art.no_capture() and of other "
        "programs are counted, too"
    ]


def _thinking_notes(counts: ReportCounts) -> list[str]:
    if not counts.num_without_thinking:
        return []
    return [
        f"the chat template writes no thinking of {counts.num_without_thinking} messages, which is not trained: with templates "
        "that know thinking in the content only, write it there between <think> and </think>"
    ]


def _group_notes(groups: Sequence[TrainableGroup], tokens_of_groups: Sequence[GroupTokens | None]) -> list[str]:
    num_dead = sum(
        tokens is not None and not teaches(group, tokens)
        for group, tokens in zip(groups, tokens_of_groups, strict=True)
    )
    if not num_dead:
        return []
    return [
        f"{num_dead} groups have no signal, because all their rewards are equal: only the KL divergence and the "
        "entropy in the loss train their tokens, which have the advantage 0"
    ]


def _advice(
    batch: Batch,
    unmasked: Sequence[GroupTokens | None],
    counts: ReportCounts,
    config: TrainConfig,
    signs: BatchSigns | None,
    past: Past,
) -> list[str]:
    is_equal = [
        tokens is None or not teaches(group, tokens) for group, tokens in zip(batch.groups, unmasked, strict=True)
    ]
    return advise(
        list(zip(batch.groups, is_equal, strict=True)),
        copied=counts.copied,
        is_greedy=any(float(value) == 0 for value in counts.unscored.get("temperature", ())),
        compares_group=config.baseline in ("group_mean", "leave_one_out"),
        signs=signs,
        learning_rate=config.learning_rate,
        past=past,
    )
