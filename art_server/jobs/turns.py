"""A trajectory's turns with their exact tokens, and the token sequences that they form."""

from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import Any

from art_protocol.wire import TeacherTop
from art_server.jobs import reasons
from art_server.shared.trainer_messages import Distribution, SampledSpan, TaughtSpan, TokenSequence


@dataclass(frozen=True, slots=True)
class ResolvedTurn:
    """One turn with its exact tokens."""

    prompt_token_ids: list[int]
    token_ids: list[int]
    logprobs: list[float] | None
    """As long as token_ids; None if the trainer has to compute them."""
    origin: str
    """How the tokens were found: a key of `JobReport.turns`."""
    choice_id: str | None = None
    distributions: list[Distribution | None] | None = None
    """The distribution under which each token is scored. None, for a token or for all: the model's own."""
    step: int | None = None
    """The model's step that sampled the turn, from its record."""
    unscored: dict[str, Any] = field(default_factory=dict)
    """Sampling parameters that `logprobs` does not include: the log-probabilities under these parameters are unknown, or
    sampling="raw" ignores the parameters."""
    reward: float | None = None
    advantages: list[float] | None = None
    """One advantage for each token, from the client."""
    targets: TeacherTop | None = None
    """A teacher's log-probabilities, from the client."""
    rewards_before: list[float] = field(default_factory=list)
    """Rewards of dropped turns between the trained turn before and this turn."""
    requested_at: int | None = None
    """When the turn was requested (`clock.tick`), from its record."""
    session: str | None = None
    """The session of the turn's request, from its record."""
    is_unrecorded: bool = False
    """Only the client's choice has the tokens; no record confirms them."""
    claimed_step: int | None = None
    """The step that the choice of an unrecorded turn names."""


class UnusableTurn(Exception):
    """A turn cannot be trained; the message is the reason in the report."""


class ForeignTurn(UnusableTurn):
    """Another model sampled the turn, or nothing tells which model sampled it."""


@dataclass(frozen=True, slots=True)
class TurnSignal:
    """What the client gives for a turn to learn from."""

    reward: float | None = None
    advantages: float | list[float] | None = None
    targets: TeacherTop | None = None
    num_targets: int = 0
    """Tokens that `targets` has log-probabilities for."""


def with_signal(turn: ResolvedTurn, signal: TurnSignal) -> ResolvedTurn:
    """The turn with what the client gives for it.

    Raises:
        UnusableTurn: advantages or targets are of another number of tokens, or targets of another distribution.
    """
    advantages = signal.advantages
    if isinstance(advantages, list) and len(advantages) != len(turn.token_ids):
        raise UnusableTurn(reasons.other_number_of_advantages(len(advantages), len(turn.token_ids)))
    if isinstance(advantages, float):
        advantages = [advantages] * len(turn.token_ids)
    if signal.targets is not None:
        if signal.num_targets != len(turn.token_ids):
            raise UnusableTurn(reasons.other_number_of_targets(signal.num_targets, len(turn.token_ids)))
        if any(distribution is not None for distribution in turn.distributions or ()):
            raise UnusableTurn(reasons.TARGETS_OF_OTHERS)
    return replace(turn, reward=signal.reward, advantages=advantages, targets=signal.targets)


@dataclass(frozen=True, slots=True)
class TurnSpan:
    """The tokens [start, stop) of a sequence that one turn sampled. The trainer gets a `SampledSpan`, which has the step."""

    sequence: int
    """Index among the sequences of the conversation."""
    start: int
    stop: int
    is_joined: bool
    """The turn extends the sequence, with which its prompt begins. False: the turn begins the sequence."""


@dataclass(frozen=True, slots=True)
class TurnTrace:
    """What became of a turn, for people who read its rollout. `trajectory_row` stores the trace."""

    history: int
    """0: the trajectory's own messages; k: the messages of `additional_histories[k - 1]`."""
    entry: int
    """Index into messages_and_choices."""
    origin: str | None = None
    """How the tokens were found (`JobReport.turns`); None for a dropped turn."""
    dropped: str | None = None
    """Why the turn is not trained."""
    continues: str | None = None
    """"joined", or why the turn begins a new sequence (`JobReport.continuations`). None for a history's first turn."""
    step: int | None = None
    """The model's step that sampled the turn."""
    sequence: int | None = None
    """Index of the sequence among the trajectory's sequences. The turn sampled its tokens [start, stop)."""
    start: int | None = None
    stop: int | None = None
    difference: str | None = None
    """The first difference from the turns before, if this turn begins a new sequence."""
    is_taught: bool | None = None
    """Whether the turn has a teacher's log-probabilities; None for no."""

    def as_json(self) -> dict[str, Any]:
        return {name: value for name, value in asdict(self).items() if value is not None}


def join_turns(
    turns: Sequence[ResolvedTurn],
    index: Callable[[Distribution | None], int] = lambda _: -1,
) -> tuple[list[TokenSequence], list[TurnSpan]]:
    """The token sequences of one conversation, and each turn's span. A turn whose prompt begins with the whole sequence
    so far extends this sequence. `index` gives the index of a distribution in the batch.

    The reward of a dropped turn is added at the end of the sequence so far. The reward counts in the group, and for the
    tokens before this end.
    """
    sequences: list[TokenSequence] = []
    turn_spans: list[TurnSpan] = []
    is_timed = all(turn.requested_at is not None for turn in turns)
    requested_at = 0
    for turn in turns:
        is_joined = bool(sequences) and starts_with(turn.prompt_token_ids, sequences[-1].token_ids)
        if not is_joined:
            sequences.append(_empty_sequence())
        sequence = sequences[-1]
        tokens = sequence.token_ids
        add_rewards(sequence, turn.rewards_before)
        new_context = turn.prompt_token_ids[len(tokens) :]
        tokens.extend(new_context)
        sequence.logprobs.extend([None] * len(new_context))
        sequence.distributions.extend([-1] * len(new_context))
        for distribution in turn.distributions or [None] * len(turn.token_ids):
            sequence.distributions.append(index(distribution))
        sampled = range(len(tokens), len(tokens) + len(turn.token_ids))
        if turn.logprobs is None:
            sequence.recompute.extend(sampled)
        step = turn.claimed_step if turn.step is None else turn.step
        if step is not None:
            sequence.spans.append(SampledSpan(start=sampled.start, stop=sampled.stop, step=step))
        if turn.advantages is not None:
            sequence.advantages.update(zip(sampled, turn.advantages, strict=True))
        if turn.targets is not None:
            sequence.taught.append(TaughtSpan(start=sampled.start, stop=sampled.stop, top=turn.targets))
        if turn.reward is not None:
            sequence.rewards.append((sampled[-1], turn.reward))
        tokens.extend(turn.token_ids)
        sequence.logprobs.extend(turn.logprobs or [None] * len(turn.token_ids))
        if is_timed:
            requested_at = max(requested_at, turn.requested_at or 0)  # never before an earlier turn's request
            sequence.turns.append((len(tokens), requested_at))
        turn_spans.append(TurnSpan(len(sequences) - 1, sampled.start, sampled.stop, is_joined))
    return sequences, turn_spans


def add_rewards(sequence: TokenSequence, rewards: Sequence[float]) -> None:
    """Adds rewards of dropped turns, which count at the end of the sequence's tokens so far."""
    sequence.rewards.extend((len(sequence.token_ids), reward) for reward in rewards)


def _empty_sequence() -> TokenSequence:
    return TokenSequence(
        token_ids=[],
        logprobs=[],
        distributions=[],
        spans=[],
        recompute=[],
        advantages={},
        taught=[],
        rewards=[],
        turns=[],
    )


def starts_with(token_ids: list[int], beginning: list[int]) -> bool:
    return token_ids[: len(beginning)] == beginning
