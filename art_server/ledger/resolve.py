"""From a client's trajectories to the exact tokens that are trained, and a report of what became of every turn.

Each choice's tokens are those that it carries, else those that the ledger holds for its id. A turn without either is
dropped and counted. Turns whose prompt begins with all that came before join one row; another prompt (a template that
drops earlier thinking, a context that was cut) begins a new row of the same trajectory. A sampled token is trained once
in its trajectory, where it was sampled; elsewhere it is context.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from art.wire import Dropped, JobReport, TrainConfig, TrajectoryBody, TrajectoryGroupBody
from art_server.errors import InvalidInput
from art_server.ledger.ledger import Record
from art_server.training.task import Batch, Row, TrainableGroup, TrainableTrajectory

MAX_EXAMPLES = 5
"""Places named for each reason in a report; the count is always whole."""

POSITIVE_LOGPROB_TOLERANCE = 1e-3
"""Engines round: a log-probability may come out a hair above zero."""


@dataclass(frozen=True, slots=True)
class Turn:
    """One sampled choice with its exact tokens. token_ids and logprobs have equal length."""

    prompt_token_ids: list[int]
    token_ids: list[int]
    logprobs: list[float]
    origin: str
    """How the tokens were found: "ids" or "ledger"."""


class UnusableTurn(Exception):
    """Why a turn cannot be trained."""


@dataclass(slots=True)
class Report:
    """Counts, as the batch is built."""

    turns: dict[str, int] = field(default_factory=dict)
    dropped: dict[str, tuple[int, list[str]]] = field(default_factory=dict)

    def trained(self, origin: str) -> None:
        self.turns[origin] = self.turns.get(origin, 0) + 1

    def drop(self, reason: str, where: str) -> None:
        count, examples = self.dropped.get(reason, (0, []))
        self.dropped[reason] = (count + 1, [*examples, where][:MAX_EXAMPLES])


@dataclass(frozen=True, slots=True)
class Limits:
    """What the loaded model can take."""

    vocab_size: int
    max_seq_length: int


def resolve(
    groups: Sequence[TrajectoryGroupBody],
    config: TrainConfig,
    model_id: str,
    find_record: Callable[[str], Record | None],
    limits: Limits,
) -> tuple[Batch, JobReport]:
    """The batch that a job trains, and what became of everything else.

    Raises:
        InvalidInput: nothing in the request can be trained; the message tells the first reasons.
    """
    report = Report()
    resolver = _Resolver(model_id, find_record, limits, report)
    trainable: list[TrainableGroup] = []
    for index, group in enumerate(groups):
        trajectories = [
            resolved
            for position, trajectory in enumerate(group.trajectories)
            if (
                resolved := resolver.trajectory(
                    trajectory, f"groups[{index}].trajectories[{position}]"
                )
            )
        ]
        if trajectories:
            trainable.append(TrainableGroup(trajectories=trajectories))
    num_failed = sum(len(group.exceptions) for group in groups)
    if not trainable:
        raise InvalidInput(
            _nothing_trainable(groups, report, num_failed), code="no_trainable_turn", param="groups"
        )
    batch = Batch(groups=trainable)
    return batch, _summary(groups, batch, report, num_failed, config)


def has_signal(group: TrainableGroup) -> bool:
    """Whether a group's rewards differ: only then does a comparison within the group say anything."""
    return len({trajectory.reward for trajectory in group.trajectories}) > 1


class _Resolver:
    def __init__(
        self,
        model_id: str,
        find_record: Callable[[str], Record | None],
        limits: Limits,
        report: Report,
    ):
        self._model_id = model_id
        self._find_record = find_record
        self._limits = limits
        self._report = report

    def trajectory(self, trajectory: TrajectoryBody, where: str) -> TrainableTrajectory | None:
        histories = [("", trajectory.messages_and_choices)] + [
            (f"additional_histories[{i}].", history.messages_and_choices)
            for i, history in enumerate(trajectory.additional_histories)
        ]
        seen: set[str] = set()
        rows: list[Row] = []
        for prefix, entries in histories:
            turns: list[Turn] = []
            for position, entry in enumerate(entries):
                if not is_choice(entry):
                    continue
                place = f"{where}.{prefix}messages_and_choices[{position}]"
                try:
                    turn = self._turn(entry, seen)
                except UnusableTurn as reason:
                    self._report.drop(str(reason), place)
                    continue
                self._report.trained(turn.origin)
                turns.append(turn)
            rows += join_turns(turns)
        if not rows:
            self._report.drop("the trajectory holds no trainable turn", where)
            return None
        return TrainableTrajectory(reward=trajectory.reward, rows=rows)

    def _turn(self, choice: dict[str, Any], seen: set[str]) -> Turn:
        mark = choice.get("art")
        mark = mark if isinstance(mark, dict) else {}
        identity = mark.get("id")
        if isinstance(identity, str):
            if identity in seen:
                raise UnusableTurn("the same choice stands in the trajectory twice")
            seen.add(identity)
        if mark.get("model", self._model_id) != self._model_id:
            raise UnusableTurn(f"the choice was sampled by '{mark['model']}', another model")
        turn = carried_tokens(choice)
        if turn is None and isinstance(identity, str):
            turn = self._recorded_tokens(identity)
        if turn is None:
            raise UnusableTurn(
                "the choice carries neither token ids with log-probabilities nor the `art.id` of a recorded sample: "
                "put the choice object of the server's answer into the trajectory, as it came"
            )
        self._check(turn)
        return turn

    def _recorded_tokens(self, identity: str) -> Turn | None:
        record = self._find_record(identity)
        if record is None:
            return None
        sampled_by = f"{record.request.project}/{record.request.name}"
        if sampled_by != self._model_id:
            raise UnusableTurn(f"the choice was sampled by '{sampled_by}', another model")
        return Turn(record.prompt_token_ids, record.token_ids, record.logprobs, "ledger")

    def _check(self, turn: Turn) -> None:
        if not turn.prompt_token_ids or not turn.token_ids:
            raise UnusableTurn("the prompt or the sampled text is empty")
        length = len(turn.prompt_token_ids) + len(turn.token_ids)
        if length > self._limits.max_seq_length:
            raise UnusableTurn(
                f"longer than the model's context of {self._limits.max_seq_length} tokens "
                "(start the server with a larger --max-seq-length)"
            )
        highest = max(max(turn.prompt_token_ids), max(turn.token_ids))
        lowest = min(min(turn.prompt_token_ids), min(turn.token_ids))
        if lowest < 0 or highest >= self._limits.vocab_size:
            raise UnusableTurn("a token id outside the model's vocabulary")
        if not all(
            math.isfinite(value) and value <= POSITIVE_LOGPROB_TOLERANCE for value in turn.logprobs
        ):
            raise UnusableTurn("a log-probability that is not a finite number of at most 0")


def is_choice(entry: dict[str, Any]) -> bool:
    """Whether an entry of a trajectory is an OpenAI choice; the others are messages, which are context only."""
    return isinstance(entry.get("message"), dict) and "finish_reason" in entry


def carried_tokens(choice: dict[str, Any]) -> Turn | None:
    """The tokens that a choice carries itself, None unless prompt, ids and log-probabilities are all there."""
    prompt, tokens = id_list(choice.get("prompt_token_ids")), id_list(choice.get("token_ids"))
    logprobs = choice.get("logprobs")
    content = logprobs.get("content") if isinstance(logprobs, dict) else None
    if prompt is None or tokens is None or not isinstance(content, list):
        return None
    values = [entry.get("logprob") for entry in content if isinstance(entry, dict)]
    numbers = [float(value) for value in values if isinstance(value, int | float)]
    if len(numbers) != len(tokens) or len(content) != len(tokens):
        return None
    return Turn(prompt, tokens, numbers, "ids")


def id_list(value: Any) -> list[int] | None:
    """`value` if it is a list of integers."""
    if isinstance(value, list) and all(type(item) is int for item in value):
        return value
    return None


def join_turns(turns: Sequence[Turn]) -> list[Row]:
    """The rows of one conversation: a turn whose prompt begins with all of the row so far extends it."""
    rows: list[tuple[list[int], list[float | None]]] = []
    for turn in turns:
        tokens, logprobs = rows[-1] if rows else ([], [])
        if not tokens or turn.prompt_token_ids[: len(tokens)] != tokens:
            tokens, logprobs = [], []
            rows.append((tokens, logprobs))
        new_context = turn.prompt_token_ids[len(tokens) :]
        tokens += new_context
        logprobs += [None] * len(new_context)
        tokens += turn.token_ids
        logprobs += turn.logprobs
    return [Row(token_ids=tokens, logprobs=logprobs) for tokens, logprobs in rows]


def _nothing_trainable(
    groups: Sequence[TrajectoryGroupBody], report: Report, num_failed: int
) -> str:
    if not any(group.trajectories for group in groups):
        first = next((group.exceptions[0] for group in groups if group.exceptions), None)
        why = f"; the first: {first.type}: {first.message[:300]}" if first else ""
        return f"groups hold no trajectory ({num_failed} rollouts failed{why}): nothing to train"
    reasons = "; ".join(
        f"{reason} ({count} times, e.g. {examples[0]})"
        for reason, (count, examples) in report.dropped.items()
    )
    return f"no group holds a trainable turn: {reasons}"


def _summary(
    groups: Sequence[TrajectoryGroupBody],
    batch: Batch,
    report: Report,
    num_failed: int,
    config: TrainConfig,
) -> JobReport:
    trained = [group for group in batch.groups if has_signal(group)]
    equal = len(batch.groups) - len(trained)
    dropped = [
        Dropped(reason=reason, count=count, examples=examples)
        for reason, (count, examples) in report.dropped.items()
    ]
    if equal:
        reason = "all rewards in the group are equal: no signal"
        dropped.append(Dropped(reason=reason, count=equal))
    if num_failed:
        dropped.append(Dropped(reason="the rollout failed", count=num_failed))
    rows = [row for group in trained for t in group.trajectories for row in t.rows]
    return JobReport(
        num_groups=len(groups),
        num_groups_trained=len(trained),
        num_trajectories=sum(len(group.trajectories) for group in groups),
        num_trajectories_trained=sum(len(group.trajectories) for group in trained),
        num_failed_rollouts=num_failed,
        num_rows=len(rows),
        num_trained_tokens=sum(value is not None for row in rows for value in row.logprobs),
        turns=report.turns,
        dropped=dropped,
        config=config.model_dump(),
    )
