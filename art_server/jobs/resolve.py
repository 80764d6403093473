"""Resolves a client's trajectories to the exact tokens that are trained, and reports what happened to every turn.

A choice's tokens come from the ledger, by the choice's id, else by its log-probabilities, else by its text in the same
conversation; from the choice itself, if it carries its ids and those of its prompt; or, with
`allow_training_without_logprobs`, from its text as the chat template writes it. Every other turn is dropped and counted.
If a choice was sent by reference, and its record is missing, nothing is trained: the client sends it whole.

The log-probability of a recorded token is the one under its behaviour policy (with sampling="raw", the model's own). That
of any other token is known only with sampling="raw", because only the record has the settings that it was sampled with.

A turn whose prompt begins with the whole sequence so far extends that sequence. Any other prompt (the template drops
earlier thinking, the agent cut the context) begins a new sequence of the same trajectory. A sampled token is trained
once in its trajectory, where it was sampled; elsewhere it is context.
"""

import base64
import math
from collections.abc import Callable, Collection, Hashable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from art_protocol.wire import (
    BY_REFERENCE,
    Dropped,
    FailureBody,
    HistoryBody,
    JobReport,
    TrainConfig,
    TrajectoryBody,
    TrajectoryGroupBody,
)
from art_server.errors import InvalidInput, RecordsMissing
from art_server.jobs.turns import (
    Place,
    ResolvedTurn,
    TurnTrace,
    UnusableTurn,
    add_rewards,
    join_turns,
    with_signal,
)
from art_server.ledger import conversation
from art_server.ledger.records import Match, Record
from art_server.process.shared.advantages import (
    GroupTokens,
    has_advantage,
    is_identical,
    is_masked,
    trained_tokens,
)
from art_server.process.shared.trainer_messages import (
    Batch,
    Distribution,
    TokenSequence,
    TrainableGroup,
    TrainableTrajectory,
)

MAX_EXAMPLES = 5
"""Examples that a report lists for each reason; the count includes all."""

RAW_SAMPLING = {
    "temperature": 1.0,
    "top_p": 1.0,
    "top_k": 0,
    "min_p": 0.0,
    "presence_penalty": 0.0,
    "frequency_penalty": 0.0,
    "repetition_penalty": 1.0,
    "structured": False,
    "logit_bias": None,
    "min_tokens": 0,
    "bad_words": False,
    "allowed_token_ids": False,
    "thinking_token_budget": None,
}
"""Sampling parameters under which the model's own distribution is the behaviour policy."""

CHANGED_IDS = "the choice's token ids are not those that were sampled: keep the choice as the server sent it"
NO_RECORD = (
    "the choice's record is not in the ledger, and the choice carries no tokens: request `logprobs` so that choices carry "
    "them, train on the server that sampled, or start it with a larger --ledger-max-gb or --ledger-max-age-days"
)
NO_TOKENS = (
    "the choice carries no token ids and is not in the ledger: put the choice object of the server's answer into the "
    "trajectory unchanged, or set allow_training_without_logprobs"
)
MISSING = "the choice was sent by reference, and its record is not in the ledger"
AMBIGUOUS = "samples with different prompts or tokens match the choice: keep the choice unchanged, with `art.id`"

NO_TURN = "the trajectory holds no trainable turn"
TWICE = "the trajectory contains the same choice twice"

POSITIVE_LOGPROB_TOLERANCE = 1e-3
"""Engines round, so a log-probability can be slightly above zero."""

PART_OF_CHARACTER = "\ufffd"

MAX_STEP = 2**31
"""Of the step that a choice names."""

Message = dict[str, Any]


@dataclass(frozen=True, slots=True)
class Sources:
    """Where the resolver finds tokens. `render` and `tokenize` call the engine, and block."""

    find_record: Callable[[str], Record | None]
    find_by_logprobs: Callable[[Sequence[float]], Sequence[Match]]
    """From log-probabilities to records of the job's model, newest first."""
    find_by_conversation: Callable[[bytes, bytes], Sequence[Match]]
    """From the digests of a conversation and of its answer to records of the job's model, newest first."""
    render: Callable[[list[Message], list[dict[str, Any]] | None, bool], list[int]]
    """From messages and tools to the conversation's tokens, with or without the header of the next answer."""
    tokenize: Callable[[str], list[int]]
    decode: Callable[[Sequence[int]], str | None]
    """The text of tokens; None without a tokenizer."""
    end_id: int | None
    """The token that usually ends a turn; None if it is unknown."""
    end_ids: Collection[int]
    """All tokens that end a turn."""
    stop_ids: Collection[int]
    """Those of them at which the engine stops."""


@dataclass(frozen=True, slots=True)
class Limits:
    """Limits of the loaded base model."""

    vocab_size: int
    max_seq_length: int


@dataclass(slots=True)
class Report:
    """What happened to the turns of a job, counted while they are resolved."""

    turns: dict[str, int] = field(default_factory=dict)
    continuations: dict[str, int] = field(default_factory=dict)
    dropped: dict[str, tuple[int, list[str]]] = field(default_factory=dict)
    unscored: dict[str, set[str]] = field(default_factory=dict)
    """The names of all turns' `ResolvedTurn.unscored`, with their values."""
    num_unscored: int = 0
    """Number of tokens in turns with such sampling parameters."""
    num_unrecorded: int = 0
    """Number of tokens that clients carried, and whose records are missing."""
    steps: dict[int, int] = field(default_factory=dict)
    """Number of tokens by the step that sampled them."""

    def trained(self, origin: str) -> None:
        self.turns[origin] = self.turns.get(origin, 0) + 1

    def continued(self, how: str) -> None:
        self.continuations[how] = self.continuations.get(how, 0) + 1

    def sampled_by(self, turn: ResolvedTurn) -> None:
        if turn.unscored:
            self.num_unscored += len(turn.token_ids)
        for name, value in turn.unscored.items():
            self.unscored.setdefault(name, set()).add(str(value))
        if turn.is_unrecorded:
            self.num_unrecorded += len(turn.token_ids)
        if turn.step is not None:
            self.steps[turn.step] = self.steps.get(turn.step, 0) + len(turn.token_ids)

    def notes(self, config: TrainConfig) -> list[str]:
        notes = self._unscored_notes(config)
        if self.num_unrecorded:
            what = f"{self.num_unrecorded} tokens came with their choices, and their records are not in the ledger"
            how = "sampling='raw' scores them at temperature 1 over the whole vocabulary"
            if config.sampling != "raw":
                how = (
                    "how they were sampled is unknown, so they are trained with ratio 1, as if the trainer had sampled "
                    "them"
                )
            notes.append(f"{what}: {how}. `max_staleness` takes their step from their `art.step`")
        return notes

    def _unscored_notes(self, config: TrainConfig) -> list[str]:
        if not self.unscored:
            return []
        seen = ", ".join(f"{name} {'/'.join(sorted(v))}" for name, v in self.unscored.items())
        what = f"{self.num_unscored} tokens were sampled with {seen}"
        if config.sampling == "raw":
            return [f"{what}; sampling='raw' scores them at temperature 1 over the whole vocabulary"]
        return [
            f"{what}. Their log-probabilities under these settings are unknown, so they are trained with ratio 1, as "
            "if the trainer had sampled them. For exact ratios, sample at a temperature above 0 and without penalties, on "
            "a GPU with art-server --record-distributions"
        ]

    def drop(self, reason: str, where: str) -> None:
        count, examples = self.dropped.get(reason, (0, []))
        self.dropped[reason] = (count + 1, [*examples, where][:MAX_EXAMPLES])


@dataclass(frozen=True, slots=True)
class Before:
    """What a turn answers: the messages before it, their digest, and the tools."""

    messages: list[Message]
    digest: bytes
    tools: list[dict[str, Any]] | None
    other_part: str | None
    """The type of a part that is no text, in these messages or in the turn itself; None: there is none."""


@dataclass(frozen=True, slots=True)
class Resolved:
    """The batch that a job trains, and the report."""

    batch: Batch
    report: JobReport


class Resolver:
    """Resolves the groups of one job, one after another. Each record is used for one turn while equal records remain.

    Keeps the exact tokens of the groups, and drops their messages.
    """

    def __init__(
        self,
        config: TrainConfig,
        model_id: str,
        sources: Sources,
        limits: Limits,
    ):
        self._config = config
        self._model_id = model_id
        self._sources = sources
        self._limits = limits
        self._report = Report()
        self._trains_without_logprobs = config.allow_training_without_logprobs
        self._is_raw = config.sampling == "raw"
        self._taken: set[str] = set()
        self._missing: list[str] = []
        """Choices that were sent by reference, and have no record."""
        self._distributions: list[Distribution] = []
        self._indices: dict[Hashable, int] = {}
        self._trainable: list[TrainableGroup] = []
        self._num_groups = 0
        self._num_trajectories = 0
        self._num_failed = 0
        self._first_failure: FailureBody | None = None
        self._has_choice = False

    def trace_turns(self, group: TrajectoryGroupBody) -> list[list[TurnTrace]]:
        """Finds the exact tokens of a group. Returns what became of each turn, by trajectory (blocking).

        Raises:
            InvalidInput: the number of turn rewards or advantages is wrong.
        """
        index = self._num_groups
        found = [
            self._trajectory(trajectory, f"groups[{index}].trajectories[{position}]")
            for position, trajectory in enumerate(group.trajectories)
        ]
        trajectories = [trajectory for trajectory, _ in found]
        if any(trajectory.sequences for trajectory in trajectories):
            self._trainable.append(TrainableGroup(trajectories=trajectories, number=index))
        self._num_groups += 1
        self._num_trajectories += len(trajectories)
        self._num_failed += len(group.exceptions)
        self._first_failure = self._first_failure or next(iter(group.exceptions), None)
        self._has_choice = self._has_choice or any(
            is_choice(entry) for each in group.trajectories for entry in each.messages_and_choices
        )
        return [traces for _, traces in found]

    def finish(self) -> Resolved:
        """The batch of all groups, and its report (blocking).

        Raises:
            InvalidInput: nothing can be trained (the message has the reasons), or rewards or advantages are invalid.
            RecordsMissing: choices were sent by reference, and their records are missing.
        """
        if self._missing:
            raise RecordsMissing(
                f"the ledger does not have the records of {len(self._missing)} choices that were sent by reference: send "
                f"them with their tokens, without `{BY_REFERENCE}`",
                self._missing,
            )
        if not self._trainable:
            raise InvalidInput(self._nothing_trainable(), code="no_trainable_turn", param="groups")
        batch = Batch(groups=self._trainable, distributions=self._distributions, num_groups=self._num_groups)
        return Resolved(batch, self._summary(batch))

    def _trajectory(self, trajectory: TrajectoryBody, where: str) -> tuple[TrainableTrajectory, list[TurnTrace]]:
        seen: set[Hashable] = set()
        sequences: list[TokenSequence] = []
        traces: list[TurnTrace] = []
        rewards: list[float] = []
        for number, history in enumerate([trajectory, *trajectory.additional_histories]):
            prefix = f"additional_histories[{number - 1}]." if number else ""
            found, dropped, is_truncated = self._turns(history, f"{where}.{prefix}", seen, rewards)
            made, places = join_turns([turn for _, turn in found], self._index)
            placed = zip(found, places, strict=True)
            traces += [TurnTrace(number, entry, dropped=reason) for entry, reason in dropped]
            traces += [
                self._trace(number, entry, turn, place, len(sequences), is_first=index == 0)
                for index, ((entry, turn), place) in enumerate(placed)
            ]
            sequences += [sequence.model_copy(update={"truncated": is_truncated}) for sequence in made]
            if sequences:  # of turns behind the history's last trained one
                add_rewards(sequences[-1], rewards)
                rewards.clear()
        if not sequences:
            self._report.drop(NO_TURN, where)
        traces.sort(key=lambda trace: (trace.history, trace.entry))
        return TrainableTrajectory(reward=trajectory.reward, sequences=sequences), traces

    def _turns(
        self, history: HistoryBody, where: str, seen: set[Hashable], rewards: list[float]
    ) -> tuple[list[tuple[int, ResolvedTurn]], list[tuple[int, str]], bool]:
        """The entries of a history that are trained, those that are dropped, with the reason, and whether its last turn
        was cut at a length limit. `rewards` collects those of dropped turns for the next turn."""
        entries, tools = history.messages_and_choices, history.tools
        given = self._given(history, where)
        messages = [entry["message"] if is_choice(entry) else entry for entry in entries]
        prefixes = conversation.prefix_digests(messages)
        first_other, kind = first_other_part(messages)
        turns: list[tuple[int, ResolvedTurn]] = []
        dropped: list[tuple[int, str]] = []
        is_truncated = False
        for position, entry in enumerate(entries):
            if not (is_choice(entry) or self._is_trained_message(entry)):
                continue
            reward, advantages = next(given)
            other_part = kind if position >= first_other else None
            before = Before(messages[:position], prefixes[position], tools, other_part)
            is_truncated = entry.get("finish_reason") == "length"
            try:
                turn = with_signal(self._turn(entry, before, seen), reward, advantages)
            except UnusableTurn as reason:
                self._report.drop(str(reason), f"{where}messages_and_choices[{position}]")
                dropped.append((position, str(reason)))
                if reward is not None:
                    rewards.append(reward)
                continue
            self._report.trained(turn.origin)
            self._report.sampled_by(turn)
            turns.append((position, replace(turn, rewards_before=[*rewards])))
            rewards.clear()
        return turns, dropped, is_truncated

    def _trace(
        self,
        history: int,
        entry: int,
        turn: ResolvedTurn,
        place: Place,
        num_before: int,
        *,
        is_first: bool,
    ) -> TurnTrace:
        """The trace of a trained turn. `num_before` is the number of the trajectory's sequences before the history."""
        continues = None if is_first else self._continuation(turn, place.is_joined)
        if continues is not None:
            self._report.continued(continues)
        return TurnTrace(
            history,
            entry,
            origin=turn.origin,
            continues=continues,
            step=turn.step,
            sequence=num_before + place.sequence,
            start=place.start,
            stop=place.stop,
        )

    def _index(self, drawn: Distribution | None) -> int:
        """The index of a distribution in the batch, which contains each once; -1 for None."""
        if drawn is None:
            return -1
        name = (drawn.temperature, tuple(sorted(drawn.logit_bias.items())), drawn.kept)
        if name not in self._indices:
            self._indices[name] = len(self._distributions)
            self._distributions.append(drawn)
        return self._indices[name]

    def _given(self, history: HistoryBody, where: str) -> Iterator[tuple[float | None, float | list[float] | None]]:
        """The reward and the advantages that the client gives for each turn.

        Raises:
            InvalidInput: their number differs from that of the turns.
        """
        entries = history.messages_and_choices
        num = sum(is_choice(entry) or self._is_trained_message(entry) for entry in entries)
        rewards = history.turn_rewards or [None] * num
        advantages = history.turn_advantages or [None] * num
        for name, values in (("turn_rewards", rewards), ("turn_advantages", advantages)):
            if len(values) != num:
                raise InvalidInput(
                    f"{name} has {len(values)} entries for {num} choices: give one entry per choice, null for none",
                    code="bad_turns",
                    param=where + name,
                )
        return iter(list(zip(rewards, advantages, strict=True)))

    def _is_trained_message(self, entry: dict[str, Any]) -> bool:
        return self._trains_without_logprobs and entry.get("role") == "assistant"

    def _continuation(self, turn: ResolvedTurn, is_joined: bool) -> str:
        """How a turn continues the turns before it: joined to their sequence, or why not."""
        if is_joined:
            return "joined"
        record = self._sources.find_record(turn.choice_id) if turn.choice_id is not None else None
        is_explained = record is not None and record.link in ("dropped", "retokenized")
        return str(record.link) if record and is_explained else "changed"

    def _turn(
        self,
        entry: dict[str, Any],
        before: Before,
        seen: set[Hashable],
    ) -> ResolvedTurn:
        choice = entry if is_choice(entry) else {"message": entry}
        mark = choice.get("art")
        mark = mark if isinstance(mark, dict) else {}
        identity = mark.get("id") if isinstance(mark.get("id"), str) else None
        if mark.get("model", self._model_id) != self._model_id:
            by = "the base model" if mark["model"] is None else f"'{mark['model']}'"
            raise UnusableTurn(f"the choice was sampled by {by}, another model")
        if before.other_part is not None:
            raise UnusableTurn(
                f"the conversation contains a part of type '{before.other_part}': only text can be trained"
            )
        turn = self._recorded(identity) if identity is not None else None
        carried = carried_tokens(choice, identity)
        if turn is None and identity is not None and choice.get(BY_REFERENCE) is True:
            self._missing.append(identity)
            raise UnusableTurn(MISSING)
        if turn is not None and carried is not None:
            if not is_same(carried, turn.prompt_token_ids, turn.token_ids):
                raise UnusableTurn(CHANGED_IDS)
            turn = replace(turn, origin="ids")
        if turn is None and carried is not None:
            is_findable = identity is None and carried.logprobs is not None
            turn = (self._found_by_tokens(carried) if is_findable else None) or carried
        # Of a choice whose record is missing, the text alone would find a sibling's.
        is_known = identity is None or logprob_values(choice) is not None
        if turn is None and entry is choice and is_known:
            turn = self._found(choice, before.digest, seen)
        if turn is None:
            turn = self._recomputed(choice, identity, before)
        self._check(turn)
        if turn is carried:
            turn = self._unrecorded(turn, mark.get("step"))
        if entry is choice:
            own: set[Hashable] = set() if turn.choice_id is None else {turn.choice_id}
            same = own.copy()
            logprobs = tuple(logprob_values(choice) or ())
            if logprobs or carried is not None:
                # Choices with equal content are different samples only if both have an id.
                content = (tuple(turn.prompt_token_ids), tuple(turn.token_ids), logprobs)
                same |= {("no id", content)} if own else {content}
                own |= {content} if own else {content, ("no id", content)}
            if same & seen:
                raise UnusableTurn(TWICE)
            seen |= own
        if turn.choice_id is not None:
            self._taken.add(turn.choice_id)
        return turn

    def _recorded(self, identity: str) -> ResolvedTurn | None:
        record = self._sources.find_record(identity)
        if record is None:
            return None
        request = record.request
        if request.project != self._model_id.partition("/")[0]:
            return None  # records of other projects are never used
        sampled_by = f"{request.project}/{request.name}"
        if sampled_by != self._model_id:
            raise UnusableTurn(f"the choice was sampled by '{sampled_by}', another model")
        return self._from_record(record)

    def _from_record(self, record: Record) -> ResolvedTurn:
        """A recorded turn, scored under its behaviour policy or, with sampling="raw", under the model's own."""
        logprobs, drawn = (record.logprobs, None) if self._is_raw else as_sampled(record)
        is_unscored = logprobs is None or self._is_raw
        return ResolvedTurn(
            record.prompt_token_ids,
            record.token_ids,
            logprobs,
            "ledger",
            record.choice_id,
            drawn,
            record.request.step,
            unusual(record.sampling) if is_unscored else {},
            requested_at=record.request.requested_at,
        )

    def _unrecorded(self, turn: ResolvedTurn, step: Any) -> ResolvedTurn:
        """A turn that its client carried, with the step that its choice names."""
        claimed = step if type(step) is int and 0 <= step < MAX_STEP else None
        logprobs = turn.logprobs if self._is_raw else None
        return replace(turn, logprobs=logprobs, is_unrecorded=True, claimed_step=claimed)

    def _found_by_tokens(self, carried: ResolvedTurn) -> ResolvedTurn | None:
        """The record of a choice that carries its tokens, found by its log-probabilities: one that no turn has taken, if
        there is one."""
        found: Record | None = None
        for match in self._sources.find_by_logprobs(carried.logprobs or ()):
            if found is not None and match.choice_id in self._taken:
                continue
            record = match.load()
            if record and is_same(carried, record.prompt_token_ids, record.token_ids):
                found = record
                if match.choice_id not in self._taken:
                    break
        return None if found is None else replace(self._from_record(found), origin="ids")

    def _found(self, choice: dict[str, Any], prefix_digest: bytes, seen: set[Hashable]) -> ResolvedTurn | None:
        """Finds a choice's record by its log-probabilities; without these by its text, in the same conversation. All matches
        must have the same prompt and tokens; a record of the newest step is used.

        Raises:
            UnusableTurn: the matches differ, or the trajectory contains one of them already.
        """
        answer_digest = conversation.message_digest(choice["message"])
        logprobs = logprob_values(choice)
        if logprobs is None:
            found = self._sources.find_by_conversation(prefix_digest, answer_digest)
        else:
            found = self._sources.find_by_logprobs(logprobs)
            of_text = [match for match in found if match.answer_digest == answer_digest]
            of_prefix = [match for match in found if match.prefix_digest == prefix_digest]
            # NVIDIA's plugin drops tool calls, which can leave no text.
            is_empty = answer_digest == conversation.EMPTY_ANSWER
            found = of_text or of_prefix or (found if is_empty else ())
            found = [match for match in found if match.prefix_digest == prefix_digest] or found
        found = self._with_thinking_of(choice["message"], found)
        if not found:
            return None
        if any(match.choice_id in seen for match in found):
            raise UnusableTurn(TWICE)
        if len({(each.prompt, each.tokens) for each in found}) > 1:
            raise UnusableTurn(AMBIGUOUS)
        newest = max(each.step or 0 for each in found)
        latest = [each for each in found if (each.step or 0) == newest]
        fresh = [match for match in latest if match.choice_id not in self._taken]
        record = (fresh or latest)[0].load()
        return self._from_record(record) if record is not None else None

    def _with_thinking_of(self, message: Message, found: Sequence[Match]) -> Sequence[Match]:
        """The matches whose thinking is the message's, if it has any: digests of answers leave thinking out."""
        told = message.get("reasoning") or message.get("reasoning_content")
        if not isinstance(told, str):
            return found
        is_equal: dict[Hashable, bool] = {}
        for match in found:
            if match.tokens not in is_equal:
                record = match.load()
                text = self._sources.decode(record.token_ids) if record is not None else None
                thinking = None if text is None else conversation.split_thinking(text)[0]
                is_equal[match.tokens] = thinking is None or thinking.split() == told.split()
        return [match for match in found if is_equal[match.tokens]]

    def _recomputed(self, choice: dict[str, Any], identity: str | None, before: Before) -> ResolvedTurn:
        """The last resort: prompt and answer as the chat template writes them."""
        if not self._trains_without_logprobs:
            raise UnusableTurn(NO_TOKENS if identity is None else NO_RECORD)
        prompt, ids = self._written(choice["message"], before.messages, before.tools)
        return ResolvedTurn(prompt, ids, None, "recomputed")

    def _render(self, messages: list[Message], tools: list[dict[str, Any]] | None, has_header: bool) -> list[int]:
        made = [conversation.for_engine(message) for message in messages]
        try:
            return self._sources.render(made, tools, has_header)
        except InvalidInput as error:  # the chat template refuses it
            raise UnusableTurn(error.message) from error

    def _written(
        self, message: Message, messages: list[Message], tools: list[dict[str, Any]] | None
    ) -> tuple[list[int], list[int]]:
        """A prompt, and the tokens that the chat template writes for the answer, to the end of the turn.

        Raises:
            UnusableTurn: the template writes the answer elsewhere than behind the prompt, or writes no end.
        """
        render = self._render
        prompt, whole = render(messages, tools, True), render([*messages, message], tools, False)
        if whole[: len(prompt)] == prompt:
            answer = whole[len(prompt) :]
        else:  # the prompt's last characters may have merged with the answer's first ones
            answer = self._behind(prompt, whole)
        calls = conversation.as_list(message.get("tool_calls"))
        if calls and whole == render([*messages, {**message, "tool_calls": None}], tools, False):
            raise UnusableTurn("the chat template writes no tool calls")
        # Behind the end some templates close the whole conversation, and in gpt-oss's one thinking has an end of its own.
        ends = [i for i, token in enumerate(answer) if token in self._sources.stop_ids]
        ends = ends[:1] or [i for i, token in enumerate(answer) if token in self._sources.end_ids]
        if ends:
            return prompt, answer[: ends[-1] + 1]
        # In some families the next role's header ends the turn.
        following: Message = {"role": "user", "content": "x"}
        if calls and isinstance(calls[0], dict):
            following = {"role": "tool", "content": "x", "tool_call_id": calls[0].get("id")}
        more = render([*messages, message, following], tools, False)
        is_behind = more[: len(whole)] == whole and len(more) > len(whole)
        end = more[len(whole)] if is_behind else self._sources.end_id
        if end is None or (is_behind and end not in self._sources.end_ids):
            raise UnusableTurn("the chat template writes no end of this turn")
        return prompt, [*answer, end]

    def _behind(self, prompt: list[int], whole: list[int]) -> list[int]:
        """The tokens behind a prompt in a rendering that begins with its text, where they merged with its last ones.
        Only the merged token's text is tokenised again: the rest may contain texts that spell control tokens."""
        pairs = zip(prompt, whole, strict=False)
        same = next((i for i, (a, b) in enumerate(pairs) if a != b), min(len(prompt), len(whole)))
        before = self._sources.decode(prompt[same:])
        for end in range(same + 1, len(whole) + 1):
            text = self._sources.decode(whole[same:end])
            if before is None or text is None:
                break
            if text.startswith(before):
                rest = text[len(before) :]
                return [*(self._sources.tokenize(rest) if rest else ()), *whole[end:]]
            if not before.startswith(text.rstrip(PART_OF_CHARACTER)):
                break
        raise UnusableTurn(
            "the chat template does not write this answer behind the prompt that the model gets: if the prompt opens "
            "thinking, give the message its `reasoning_content`"
        )

    def _check(self, turn: ResolvedTurn) -> None:
        if not turn.prompt_token_ids or not turn.token_ids:
            raise UnusableTurn("the prompt or the sampled text is empty")
        length = len(turn.prompt_token_ids) + len(turn.token_ids)
        if length > self._limits.max_seq_length:
            raise UnusableTurn(
                f"the turn is longer than the model's context of {self._limits.max_seq_length} tokens "
                "(start the server with a larger --max-seq-length)"
            )
        if turn.origin == "ledger":
            return  # the engine made them
        highest = max(max(turn.prompt_token_ids), max(turn.token_ids))
        lowest = min(min(turn.prompt_token_ids), min(turn.token_ids))
        if lowest < 0 or highest >= self._limits.vocab_size:
            raise UnusableTurn("a token id is outside the model's vocabulary")
        if not all(math.isfinite(value) and value <= POSITIVE_LOGPROB_TOLERANCE for value in turn.logprobs or ()):
            raise UnusableTurn("a log-probability is not a finite number of at most 0")

    def _nothing_trainable(self) -> str:
        if not self._num_trajectories:
            first = self._first_failure
            why = f"; the first: {first.type}: {first.message[:300]}" if first else ""
            return f"the groups contain no trajectory ({self._num_failed} rollouts failed{why}): nothing to train"
        reasons = "; ".join(
            f"{reason} ({count} times, e.g. {examples[0]})"
            for reason, (count, examples) in self._report.dropped.items()
        )
        hint = ""
        if not self._has_choice:
            hint = (
                ". No trajectory contains a choice: put `completion.choices[0]` into it, not only its message; an agent "
                "under art.rollout needs the rollout's base_url or api_key"
            )
        return f"no group holds a trainable turn: {reasons}{hint}"

    def _summary(self, batch: Batch) -> JobReport:
        report, config, num_failed = self._report, self._config, self._num_failed
        try:
            found = trained_tokens(batch.groups, config)
        except FloatingPointError as error:
            raise InvalidInput(str(error), code="bad_reward", param="groups") from error
        kept = [
            [pair for pair in zip(each.sequences, of_trajectory, strict=True) if pair[1]]
            for group, of_group in zip(batch.groups, found, strict=True)
            if of_group is not None
            for each, of_trajectory in zip(group.trajectories, of_group, strict=True)
        ]
        trained = [pair for of_trajectory in kept for pair in of_trajectory]
        return JobReport(
            num_groups=self._num_groups,
            num_groups_trained=sum(each is not None for each in found),
            num_trajectories=self._num_trajectories,
            num_trajectories_trained=sum(map(bool, kept)),
            num_failed_rollouts=num_failed,
            num_rows=len(trained),
            num_trained_tokens=sum(len(tokens) for _, tokens in trained),
            turns=report.turns,
            continuations=report.continuations,
            dropped=_left_out(batch, report, num_failed, config),
            config=config.model_dump(),
            num_tokens_without_logprob=sum(
                sequence.logprobs[position] is None for sequence, tokens in trained for position, _ in tokens
            ),
            sampled_steps=dict(sorted(report.steps.items())),
            notes=report.notes(config) + _group_notes(batch, found),
        )


def is_choice(entry: dict[str, Any]) -> bool:
    """Whether an entry of a trajectory is an OpenAI choice; other entries are messages."""
    return isinstance(entry.get("message"), dict) and "finish_reason" in entry


def unusual(sampling: dict[str, Any]) -> dict[str, Any]:
    """The sampling parameters that make the behaviour policy differ from the model's own distribution."""
    given = {name: sampling.get(name) for name in RAW_SAMPLING}
    given["top_k"] = max(0, given["top_k"] or 0)  # -1 also means off
    return {name: value for name, value in given.items() if value is not None and value != RAW_SAMPLING[name]}


def as_sampled(record: Record) -> tuple[list[float] | None, list[Distribution | None] | None]:
    """The log-probabilities of a record's tokens under their behaviour policy (None: unknown), and the distribution of
    each token (None: the model's own)."""
    if record.sampled_logprobs is None:
        return (None if unusual(record.sampling) else record.logprobs), None
    temperature = record.sampling.get("temperature", 1.0)
    bias = {int(token): float(value) for token, value in (record.sampling.get("logit_bias") or {}).items()}
    whole = None
    if temperature != 1.0 or bias:
        whole = Distribution(temperature=temperature, logit_bias=bias)
    cut = [
        Distribution(temperature=temperature, logit_bias=bias, kept=base64.b64encode(packed).decode())
        for packed in record.sets
    ]
    kept = record.kept or [-1] * len(record.token_ids)
    return record.sampled_logprobs, [whole if index < 0 else cut[index] for index in kept]


def carried_tokens(choice: dict[str, Any], identity: str | None) -> ResolvedTurn | None:
    """The tokens that a choice carries itself; None unless it has prompt ids and token ids, and log-probabilities of these
    or none at all."""
    prompt, tokens = id_list(choice.get("prompt_token_ids")), id_list(choice.get("token_ids"))
    logprobs = logprob_values(choice)
    if prompt is None or tokens is None:
        return None
    if logprob_entries(choice) and (logprobs is None or len(logprobs) != len(tokens)):
        return None
    return ResolvedTurn(prompt, tokens, logprobs, "ids", identity)


def logprob_entries(choice: dict[str, Any]) -> list[dict[str, Any]]:
    logprobs = choice.get("logprobs")
    content = logprobs.get("content") if isinstance(logprobs, dict) else None
    entries = content if isinstance(content, list) else []
    return [entry for entry in entries if isinstance(entry, dict)]


def logprob_values(choice: dict[str, Any]) -> list[float] | None:
    """The log-probabilities that a choice carries; None if there are none or one is missing."""
    values = [entry.get("logprob") for entry in logprob_entries(choice)]
    numbers = [float(value) for value in values if isinstance(value, int | float)]
    return numbers if numbers and len(numbers) == len(values) else None


def is_same(turn: ResolvedTurn, prompt: list[int], tokens: list[int]) -> bool:
    """Whether a turn has this prompt and these tokens."""
    return turn.prompt_token_ids == prompt and turn.token_ids == tokens


def id_list(value: Any) -> list[int] | None:
    """`value` if it is a list of integers, else None."""
    if isinstance(value, list) and all(type(item) is int for item in value):
        return value
    return None


TEXT_PARTS = frozenset({"text", "input_text", "output_text", "refusal", "thinking", "redacted_thinking", "reasoning"})


def first_other_part(messages: Sequence[Message]) -> tuple[float, str | None]:
    """The number of the first message with a part that is no text, and the part's type, such as "image_url"; infinity
    and None if there is none."""
    for number, message in enumerate(messages):
        for part in conversation.as_list(message.get("content")):
            kind = str(part.get("type", "text"))[:40] if isinstance(part, dict) else "text"
            if kind not in TEXT_PARTS:
                return number, kind
    return math.inf, None


def _group_notes(batch: Batch, found: Sequence[GroupTokens | None]) -> list[str]:
    """What is special about the batch's groups, of which `found` has the trained tokens."""
    notes: list[str] = []
    num_dead = sum(tokens is not None and not has_advantage(tokens) for tokens in found)
    if num_dead:
        notes.append(
            f"{num_dead} groups have no signal, because all their rewards are equal: only the KL divergence and the "
            "entropy in the loss train their tokens, which have the advantage 0"
        )
    num_identical = sum(map(is_identical, batch.groups))
    if num_identical:
        notes.append(
            f"in {num_identical} groups all trajectories have the same sampled tokens, so that nothing tells the better "
            "answer. Check for temperature 0, one seed for the group or cached answers; the policy may also have collapsed"
        )
    return notes


def _left_out(batch: Batch, report: Report, num_failed: int, config: TrainConfig) -> list[Dropped]:
    """What the job does not train, with the reasons."""
    is_mask = config.overlong == "mask"
    whole = config.model_copy(update={"overlong": "keep"}) if is_mask else config
    equal = sum(each is None for each in trained_tokens(batch.groups, whole))
    dropped = [
        Dropped(
            reason=reason,
            count=count,
            unit="trajectory" if reason == NO_TURN else "turn",
            examples=examples,
        )
        for reason, (count, examples) in report.dropped.items()
    ]
    if equal:
        reason = "all rewards in the group are equal: no signal"
        dropped.append(Dropped(reason=reason, count=equal, unit="group"))
    if num_masked := _num_masked(batch.groups, config):
        reason = "cut at a length limit, and overlong='mask' leaves it out"
        dropped.append(Dropped(reason=reason, count=num_masked, unit="trajectory"))
    if num_failed:
        dropped.append(Dropped(reason="the rollout failed", count=num_failed, unit="rollout"))
    return dropped


def _num_masked(groups: Sequence[TrainableGroup], config: TrainConfig) -> int:
    """The number of trajectories of which a sequence is left out because it was cut."""
    return sum(
        any(is_masked(sequence, config) for sequence in trajectory.sequences)
        for group in groups
        for trajectory in group.trajectories
    )
