"""From a client's trajectories to the exact tokens that are trained, and a report of what became of every turn.

A choice's tokens are, in this order: those that it carries; those that the ledger holds for its id, or for its words
(and log-probabilities, or conversation) when only these came; ids in its log-probability entries behind a prompt that
is rendered; its text, rendered. What has no log-probabilities is trained only on request. Anything else is dropped and
counted.

Turns whose prompt begins with all that came before join one row; another prompt (a template that drops earlier thinking,
a context that was cut) begins a new row of the same trajectory. A sampled token is trained once in its trajectory, where
it was sampled; elsewhere it is context.
"""

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from art.wire import (
    Dropped,
    HistoryBody,
    JobReport,
    TrainConfig,
    TrajectoryBody,
    TrajectoryGroupBody,
)
from art_server.errors import InvalidInput
from art_server.ledger import conversation
from art_server.ledger.ledger import Record
from art_server.training.advantages import group_advantages
from art_server.training.task import Batch, Row, TrainableGroup, TrainableTrajectory

MAX_EXAMPLES = 5
"""Places named for each reason in a report; the count is always whole."""

RAW_SAMPLING = {
    "temperature": 1.0,
    "top_p": 1.0,
    "top_k": 0,
    "min_p": 0.0,
    "presence_penalty": 0.0,
    "frequency_penalty": 0.0,
    "repetition_penalty": 1.0,
    "structured": False,
}
"""With which a token's raw log-probability is the one that it was sampled with."""

POSITIVE_LOGPROB_TOLERANCE = 1e-3
"""Engines round: a log-probability may come out a hair above zero."""

TOKEN_ID_PREFIX = "token_id:"
"""vLLM writes a token so in log-probability entries when asked for ids (`return_tokens_as_token_ids`)."""

Message = dict[str, Any]


@dataclass(frozen=True, slots=True)
class Turn:
    """One turn with its exact tokens."""

    prompt_token_ids: list[int]
    token_ids: list[int]
    logprobs: list[float] | None
    """As long as token_ids; None when the trainer has to take its own."""
    origin: str
    """How the tokens were found, as in `JobReport.turns`."""
    choice_id: str | None = None
    reward: float | None = None
    advantages: list[float] | None = None
    """One for each token, given by the client."""


class UnusableTurn(Exception):
    """Why a turn cannot be trained."""


@dataclass(frozen=True, slots=True)
class Sources:
    """Where tokens are looked for. The last two ask the engine, and block."""

    find_record: Callable[[str], Record | None]
    find_text: Callable[[bytes | None, Sequence[float] | None], Sequence[Record]]
    """From what was said (None: anything), and its log-probabilities if known, to the records of the job's model, newest
    first."""
    render: Callable[[list[Message], list[dict[str, Any]] | None], list[int]]
    """A conversation with tools to the prompt of the next answer."""
    tokenize: Callable[[str], list[int]]
    end_id: int | None
    """The token that ends a turn."""


@dataclass(frozen=True, slots=True)
class Limits:
    """What the loaded model can take."""

    vocab_size: int
    max_seq_length: int


@dataclass(slots=True)
class Report:
    """Counts, as the batch is built."""

    turns: dict[str, int] = field(default_factory=dict)
    continuations: dict[str, int] = field(default_factory=dict)
    dropped: dict[str, tuple[int, list[str]]] = field(default_factory=dict)
    sampling: dict[str, set[str]] = field(default_factory=dict)
    """Sampling parameters that change probabilities, with the values seen."""

    def trained(self, origin: str) -> None:
        self.turns[origin] = self.turns.get(origin, 0) + 1

    def continued(self, how: str) -> None:
        self.continuations[how] = self.continuations.get(how, 0) + 1

    def sampled_with(self, sampling: dict[str, Any]) -> None:
        for name, raw in RAW_SAMPLING.items():
            if sampling.get(name, raw) != raw:
                self.sampling.setdefault(name, set()).add(str(sampling[name]))

    def notes(self) -> list[str]:
        if not self.sampling:
            return []
        seen = ", ".join(f"{name} {'/'.join(sorted(v))}" for name, v in self.sampling.items())
        return [
            f"sampled with {seen}: the loss compares raw log-probabilities (temperature 1, nothing cut off), so its "
            "ratios are those of the policy, not of what was drawn from it"
        ]

    def drop(self, reason: str, where: str) -> None:
        count, examples = self.dropped.get(reason, (0, []))
        self.dropped[reason] = (count + 1, [*examples, where][:MAX_EXAMPLES])


def resolve(
    groups: Sequence[TrajectoryGroupBody],
    config: TrainConfig,
    model_id: str,
    sources: Sources,
    limits: Limits,
) -> tuple[Batch, JobReport]:
    """The batch that a job trains, and what became of everything else.

    Raises:
        InvalidInput: nothing in the request can be trained; the message tells the first reasons.
    """
    report = Report()
    resolver = _Resolver(model_id, sources, limits, report, config.allow_training_without_logprobs)
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


def has_signal(group: TrainableGroup, config: TrainConfig) -> bool:
    """Whether anything in a group says what is better: its rewards, or those of its turns and tokens.

    Raises:
        InvalidInput: the rewards are beyond arithmetic.
    """
    rewards = [trajectory.reward for trajectory in group.trajectories]
    rows = [row for trajectory in group.trajectories for row in trajectory.rows]
    try:
        advantages = group_advantages(rewards, config)
    except FloatingPointError as error:
        raise InvalidInput(str(error), code="bad_reward", param="groups") from error
    return advantages is not None or any(
        any(row.rewards.values()) or any(row.advantages.values()) for row in rows
    )


class _Resolver:
    """Resolves the trajectories of one job; a record is given to one turn, as long as there are equal ones left."""

    def __init__(
        self,
        model_id: str,
        sources: Sources,
        limits: Limits,
        report: Report,
        trains_without_logprobs: bool,
    ):
        self._model_id = model_id
        self._sources = sources
        self._limits = limits
        self._report = report
        self._trains_without_logprobs = trains_without_logprobs
        self._taken: set[str] = set()

    def trajectory(self, trajectory: TrajectoryBody, where: str) -> TrainableTrajectory | None:
        histories: list[tuple[str, HistoryBody]] = [("", trajectory)]
        for index, history in enumerate(trajectory.additional_histories):
            histories.append((f"additional_histories[{index}].", history))
        seen: set[str] = set()
        rows: list[Row] = []
        is_truncated = False
        for prefix, history in histories:
            entries, tools = history.messages_and_choices, history.tools
            given = self._given(history, f"{where}.{prefix}")
            messages = [entry["message"] if is_choice(entry) else entry for entry in entries]
            prefixes = conversation.prefix_digests(messages)
            turns: list[Turn] = []
            for position, entry in enumerate(entries):
                if not (is_choice(entry) or self._is_trained_message(entry)):
                    continue
                place = f"{where}.{prefix}messages_and_choices[{position}]"
                reward, advantages = next(given)
                before = (messages[:position], prefixes[position], tools)
                try:
                    turn = with_signal(self._turn(entry, before, seen), reward, advantages)
                except UnusableTurn as reason:
                    self._report.drop(str(reason), place)
                    continue
                self._report.trained(turn.origin)
                if not turns and turn.choice_id is not None:
                    record = self._sources.find_record(turn.choice_id)
                    self._report.sampled_with(record.sampling if record is not None else {})
                is_truncated = entry.get("finish_reason") == "length"
                turns.append(turn)
            rows += join_turns(turns, self._count_continuation)
        if not rows:
            self._report.drop("the trajectory holds no trainable turn", where)
            return None
        return TrainableTrajectory(reward=trajectory.reward, rows=rows, truncated=is_truncated)

    def _given(
        self, history: HistoryBody, where: str
    ) -> Iterator[tuple[float | None, float | list[float] | None]]:
        """The reward and the advantages that the client gives each turn.

        Raises:
            InvalidInput: it gives more or fewer than there are turns.
        """
        entries = history.messages_and_choices
        num = sum(is_choice(entry) or self._is_trained_message(entry) for entry in entries)
        rewards = history.turn_rewards or [None] * num
        advantages = history.turn_advantages or [None] * num
        for name, values in (("turn_rewards", rewards), ("turn_advantages", advantages)):
            if len(values) != num:
                raise InvalidInput(
                    f"{name} has {len(values)} entries for {num} choices: give one for each, or null",
                    code="bad_turns",
                    param=where + name,
                )
        return iter(list(zip(rewards, advantages, strict=True)))

    def _is_trained_message(self, entry: dict[str, Any]) -> bool:
        return self._trains_without_logprobs and entry.get("role") == "assistant"

    def _count_continuation(self, turn: Turn, is_joined: bool) -> None:
        """Count how a turn goes on from those before it, and why it could not be joined."""
        if is_joined:
            self._report.continued("joined")
            return
        record = self._sources.find_record(turn.choice_id) if turn.choice_id is not None else None
        is_explained = record is not None and record.link in ("dropped", "ambiguous", "retokenized")
        self._report.continued(str(record.link) if record and is_explained else "changed")

    def _turn(
        self,
        entry: dict[str, Any],
        before: tuple[list[Message], bytes, list[dict[str, Any]] | None],
        seen: set[str],
    ) -> Turn:
        choice = entry if is_choice(entry) else {"message": entry}
        mark = choice.get("art")
        mark = mark if isinstance(mark, dict) else {}
        identity = mark.get("id") if isinstance(mark.get("id"), str) else None
        if mark.get("model", self._model_id) != self._model_id:
            raise UnusableTurn(f"the choice was sampled by '{mark['model']}', another model")
        turn = carried_tokens(choice, identity)
        if turn is None and identity is not None:
            turn = self._recorded(identity)
        if turn is None:
            turn = self._found_by_words(choice, before[1])
        if turn is None:
            turn = self._rendered(choice, before[0], before[2])
        if turn.choice_id is not None:
            if turn.choice_id in seen:
                raise UnusableTurn("the same choice stands in the trajectory twice")
            seen.add(turn.choice_id)
            self._taken.add(turn.choice_id)
        self._check(turn)
        return turn

    def _recorded(self, identity: str) -> Turn | None:
        record = self._sources.find_record(identity)
        if record is None:
            return None
        sampled_by = f"{record.request.project}/{record.request.name}"
        if sampled_by != self._model_id:
            raise UnusableTurn(f"the choice was sampled by '{sampled_by}', another model")
        return from_record(record)

    def _found_by_words(self, choice: dict[str, Any], before: bytes) -> Turn | None:
        """By what was said and its log-probabilities; without these, only in the same conversation."""
        said = conversation.said_by(choice["message"])
        logprobs = logprob_values(choice)
        found = self._sources.find_text(said, logprobs)
        if not found and logprobs is not None and said == conversation.SILENCE:
            found = self._said_elsewise(logprobs, before)
        in_place = [record for record in found if record.request.before == before]
        if logprobs is None or in_place:
            found = in_place
        fresh = [record for record in found if record.choice_id not in self._taken]
        return from_record((fresh or found)[0]) if found else None

    def _said_elsewise(self, logprobs: list[float], before: bytes) -> Sequence[Record]:
        """For a choice that says nothing, because its client dropped the tool calls: by the log-probabilities alone,
        unless they stand for different tokens."""
        found = self._sources.find_text(None, logprobs)
        found = [record for record in found if record.request.before == before] or found
        return found if len({tuple(record.token_ids) for record in found}) == 1 else ()

    def _rendered(
        self, choice: dict[str, Any], messages: list[Message], tools: list[dict[str, Any]] | None
    ) -> Turn:
        """The last resort: the chat template's rendering, and the text's tokens."""
        logprobs = logprob_values(choice)
        if logprobs is None and not self._trains_without_logprobs:
            raise UnusableTurn(
                "the choice carries no log-probabilities and is not in the ledger: put the choice object of the server's "
                "answer into the trajectory as it came, or set allow_training_without_logprobs"
            )
        ids = entry_ids(choice)
        if ids is not None and logprobs is not None:
            return Turn(self._sources.render(messages, tools), ids, logprobs, "logprob_entries")
        ids = self._sources.tokenize(spoken_text(choice["message"]))
        end = [] if self._sources.end_id is None else [self._sources.end_id]
        if logprobs is None:
            return Turn(self._sources.render(messages, tools), ids + end, None, "recomputed")
        if len(logprobs) == len(ids) + len(end):
            ids += end
        if len(logprobs) != len(ids):
            raise UnusableTurn(
                f"the choice's text has other tokens than were sampled ({len(ids)} tokens, {len(logprobs)} "
                "log-probabilities), and the sample is not in the ledger"
            )
        return Turn(self._sources.render(messages, tools), ids, logprobs, "rendered")

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
            math.isfinite(value) and value <= POSITIVE_LOGPROB_TOLERANCE
            for value in turn.logprobs or ()
        ):
            raise UnusableTurn("a log-probability that is not a finite number of at most 0")


def is_choice(entry: dict[str, Any]) -> bool:
    """Whether an entry of a trajectory is an OpenAI choice; the others are messages, which are context only."""
    return isinstance(entry.get("message"), dict) and "finish_reason" in entry


def from_record(record: Record) -> Turn:
    return Turn(
        record.prompt_token_ids, record.token_ids, record.logprobs, "ledger", record.choice_id
    )


def with_signal(turn: Turn, reward: float | None, advantages: float | list[float] | None) -> Turn:
    """The turn with what the client gives for it alone."""
    if isinstance(advantages, list) and len(advantages) != len(turn.token_ids):
        raise UnusableTurn(
            f"{len(advantages)} advantages were given for {len(turn.token_ids)} sampled tokens"
        )
    if isinstance(advantages, float):
        advantages = [advantages] * len(turn.token_ids)
    return replace(turn, reward=reward, advantages=advantages)


def carried_tokens(choice: dict[str, Any], identity: str | None) -> Turn | None:
    """The tokens that a choice carries itself, None unless prompt, ids and log-probabilities are all there."""
    prompt, tokens = id_list(choice.get("prompt_token_ids")), id_list(choice.get("token_ids"))
    logprobs = logprob_values(choice)
    if prompt is None or tokens is None or logprobs is None or len(logprobs) != len(tokens):
        return None
    return Turn(prompt, tokens, logprobs, "ids", identity)


def logprob_entries(choice: dict[str, Any]) -> list[dict[str, Any]]:
    logprobs = choice.get("logprobs")
    content = logprobs.get("content") if isinstance(logprobs, dict) else None
    entries = content if isinstance(content, list) else []
    return [entry for entry in entries if isinstance(entry, dict)]


def logprob_values(choice: dict[str, Any]) -> list[float] | None:
    """The log-probabilities that a choice carries, None when there are none."""
    values = [entry.get("logprob") for entry in logprob_entries(choice)]
    numbers = [float(value) for value in values if isinstance(value, int | float)]
    return numbers if numbers and len(numbers) == len(values) else None


def entry_ids(choice: dict[str, Any]) -> list[int] | None:
    """Token ids that stand in the log-probability entries as "token_id:N"."""
    texts = [str(entry.get("token")) for entry in logprob_entries(choice)]
    numbers = [text.removeprefix(TOKEN_ID_PREFIX) for text in texts]
    is_all = all(
        text != number and number.isdigit() for text, number in zip(texts, numbers, strict=True)
    )
    return [int(number) for number in numbers] if texts and is_all else None


def id_list(value: Any) -> list[int] | None:
    """`value` if it is a list of integers."""
    if isinstance(value, list) and all(type(item) is int for item in value):
        return value
    return None


def spoken_text(message: Message) -> str:
    """What an assistant message says, tool calls in the commonest markup."""
    calls = [
        f"<tool_call>\n{conversation.call_text(call)}\n</tool_call>"
        for call in conversation.as_list(message.get("tool_calls"))
    ]
    content = conversation.text_of(message.get("content"))
    return "\n".join(([content] if content else []) + calls)


def join_turns(
    turns: Sequence[Turn], on_continuation: Callable[[Turn, bool], None] = lambda *_: None
) -> list[Row]:
    """The rows of one conversation: a turn whose prompt begins with all of the row so far extends it."""
    rows: list[Row] = []
    for turn in turns:
        is_joined = bool(rows) and starts_with(turn.prompt_token_ids, rows[-1].token_ids)
        if rows:
            on_continuation(turn, is_joined)
        if not is_joined:
            rows.append(Row(token_ids=[], logprobs=[], recompute=[], advantages={}, rewards={}))
        row = rows[-1]
        tokens = row.token_ids
        new_context = turn.prompt_token_ids[len(tokens) :]
        tokens.extend(new_context)
        row.logprobs.extend([None] * len(new_context))
        sampled = range(len(tokens), len(tokens) + len(turn.token_ids))
        if turn.logprobs is None:
            row.recompute.extend(sampled)
        if turn.advantages is not None:
            row.advantages.update(zip(sampled, turn.advantages, strict=True))
        if turn.reward is not None:
            row.rewards[sampled[-1]] = turn.reward
        tokens.extend(turn.token_ids)
        row.logprobs.extend(turn.logprobs or [None] * len(turn.token_ids))
    return rows


def starts_with(token_ids: list[int], beginning: list[int]) -> bool:
    return token_ids[: len(beginning)] == beginning


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
    trained = [group for group in batch.groups if has_signal(group, config)]
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
        num_trained_tokens=sum(
            sum(value is not None for value in row.logprobs) + len(row.recompute) for row in rows
        ),
        turns=report.turns,
        continuations=report.continuations,
        dropped=dropped,
        config=config.model_dump(),
        notes=report.notes(),
    )
