"""Resolves a client's trajectories to the exact tokens that are trained, and reports what happened to every turn.

A choice's tokens come from

    the ledger     by the choice's id, else by its log-probabilities, else by its text in the same conversation
    the choice     if it carries its token ids and the ids of its prompt
    the template   which writes the choice's text, with `allow_training_without_logprobs`

Every other turn is dropped and counted. If a choice was sent by reference, and its record is missing, nothing is trained:
the client sends the choice whole.

The log-probability of a recorded token is the log-probability under the token's behaviour policy (with sampling="raw",
under the model's own distribution). The log-probability of any other token is known only with sampling="raw", because only
a record has the settings with which its tokens were sampled.

A turn whose prompt begins with the whole sequence so far extends that sequence. Any other prompt (the template drops
earlier thinking, the agent cut the context) begins a new sequence of the same trajectory. A sampled token is trained
once in its trajectory, in the sequence of its turn; elsewhere it is context.

    choices.py          what the client sent                  turns.py         turns, joined to sequences
    recorded_turns.py   a turn from the ledger's record       job_report.py    what became of all turns
    template_turns.py   a turn as the chat template writes it reasons.py       why turns are dropped
"""

import math
from collections.abc import Hashable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from art_protocol.wire import (
    BY_REFERENCE,
    HistoryBody,
    JobReport,
    TeacherTop,
    TrainConfig,
    TrajectoryBody,
    TrajectoryGroupBody,
)
from art_server.errors import InvalidInput, RecordsMissing
from art_server.jobs import reasons
from art_server.jobs.batch_signs import BatchSigns, Past, signs_of
from art_server.jobs.choices import SentTurn, first_other_part, is_choice, is_weightless, read_turn
from art_server.jobs.differences import FirstDifference, OtherHistory, of_histories, of_prompt
from art_server.jobs.job_report import NO_TURN, ReportCounts, make_report
from art_server.jobs.recorded_turns import recorded_turn
from art_server.jobs.template_turns import TemplateTurns
from art_server.jobs.token_sources import Limits, TokenSources
from art_server.jobs.turns import (
    ForeignTurn,
    ResolvedTurn,
    TurnSignal,
    TurnSpan,
    TurnTrace,
    UnusableTurn,
    add_rewards,
    join_turns,
    with_signal,
)
from art_server.ledger import conversation
from art_server.ledger.conversation import Message
from art_server.ledger.records import Match, Record, num_requests
from art_server.shared.advantages import trained_positions
from art_server.shared.teacher_top import check_top
from art_server.shared.trainer_messages import (
    Batch,
    Distribution,
    TokenSequence,
    TrainableGroup,
    TrainableTrajectory,
)

POSITIVE_LOGPROB_TOLERANCE = 1e-3
"""Engines round, so a log-probability can be slightly above zero."""


@dataclass(frozen=True, slots=True)
class Before:
    """The conversation that a turn answers: the messages, their digest, and the tools."""

    messages: list[Message]
    digest: bytes
    tools: list[dict[str, Any]] | None
    other_part: str | None
    """The type of a part that is no text, in these messages or in the turn itself; None: all parts are text."""


@dataclass(slots=True)
class HistoryTurns:
    """The turns of one conversation, by their index in `messages_and_choices`."""

    digests: Sequence[bytes]
    """`conversation.prefix_digests` of the conversation's messages."""
    trained: list[tuple[int, ResolvedTurn]] = field(default_factory=list)
    dropped: list[tuple[int, str]] = field(default_factory=list)
    """With each dropped turn, the reason."""
    is_truncated: bool = False
    """Whether the last turn is the trained model's, and was cut at a length limit."""


@dataclass(frozen=True, slots=True)
class ResolvedHistory:
    """One conversation of a trajectory with its exact tokens."""

    history: HistoryBody
    path: str
    """Its path in the request."""
    turns: HistoryTurns
    sequences: list[TokenSequence]
    spans: list[TurnSpan]
    num_before: int
    """The number of the trajectory's sequences before the history."""

    def as_other(self) -> OtherHistory:
        """What is compared with another history of the trajectory."""
        return OtherHistory(self.history, self.turns.digests, [sequence.token_ids for sequence in self.sequences])


@dataclass(frozen=True, slots=True)
class Resolved:
    """The batch that a job trains, the report, and the batch's signs."""

    batch: Batch
    report: JobReport
    signs: BatchSigns | None


class Resolver:
    """Resolves the groups of one job, one after another. Each record is used for one turn while equal records remain.

    Keeps the exact tokens of the groups, and drops their messages.
    """

    def __init__(
        self,
        config: TrainConfig,
        model_id: str,
        sources: TokenSources,
        limits: Limits,
        past: Past = tuple,
    ):
        self._config = config
        self._model_id = model_id
        self._sources = sources
        self._template = TemplateTurns(sources)
        self._limits = limits
        self._past = past
        self._counts = ReportCounts()
        self._trains_without_logprobs = config.allow_training_without_logprobs
        self._trains_demonstrations = config.objective == "likelihood" and config.allow_training_without_logprobs
        self._is_raw = config.sampling == "raw"
        self._top_k: int | None = None
        """The `top_k` of the job's targets; None before the first."""
        self._taken: set[str] = set()
        self._missing: list[str] = []
        """Choices that were sent by reference, and have no record."""
        self._distributions: list[Distribution] = []
        self._indices: dict[Hashable, int] = {}
        self._trainable: list[TrainableGroup] = []

    def trace_turns(self, group: TrajectoryGroupBody) -> list[list[TurnTrace]]:
        """Finds the exact tokens of a group. Returns what became of each turn, by trajectory (blocking).

        Raises:
            InvalidInput: the number of turn rewards, advantages or targets is wrong, or targets are no log-probabilities.
        """
        number = self._counts.num_groups
        trajectories: list[TrainableTrajectory] = []
        traces: list[list[TurnTrace]] = []
        for index, trajectory in enumerate(group.trajectories):
            where = f"groups[{number}].trajectories[{index}]"
            resolved, of_turns = self._trajectory(trajectory, where)
            if self._trains_demonstrations and not any(map(is_trained, resolved.sequences)):
                dropped = [trace.dropped for trace in of_turns if trace.dropped is not None]
                self._counts.add_untrained(index, where, trajectory, dropped)
            trajectories.append(resolved)
            traces.append(of_turns)
        if any(trajectory.sequences for trajectory in trajectories):
            self._trainable.append(TrainableGroup(trajectories=trajectories, number=number))
        self._counts.add_group(group)
        return traces

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
        if self._counts.untrained:
            raise InvalidInput(
                self._counts.untrained_demonstrations(), code="no_trainable_turn", param=self._counts.untrained[0].where
            )
        self._counts.num_without_thinking = self._template.num_without_thinking
        num_trained = self._counts.num_groups - self._config.held_out
        trained = [group for group in self._trainable if group.number is not None and group.number < num_trained]
        held_out = self._trainable[len(trained) :]
        self._counts.num_groups = num_trained
        self._counts.num_trajectories -= sum(len(group.trajectories) for group in held_out)
        if not trained:
            raise InvalidInput(self._counts.nothing_trainable(), code="no_trainable_turn", param="groups")
        self._counts.num_unnamed = self._count_unnamed()
        batch = Batch(
            groups=trained,
            distributions=self._distributions,
            num_groups=num_trained,
            held_out=held_out,
        )
        signs = signs_of(batch, self._counts.steps)
        return Resolved(batch, make_report(batch, self._counts, self._config, signs, self._past), signs)

    def _count_unnamed(self) -> int:
        """The number of requests that came without a session while the job's rollouts had one."""
        if self._counts.session_began_at is None:
            return 0
        choices = self._sources.find_unnamed(self._counts.session_began_at)
        return num_requests(choice for choice in choices if choice not in self._taken)

    # --- trajectories and their histories ---

    def _trajectory(self, trajectory: TrajectoryBody, where: str) -> tuple[TrainableTrajectory, list[TurnTrace]]:
        """A trajectory's sequences with their exact tokens, and the traces of all its turns. `where` is the trajectory's path
        in the request. The report shows the trajectory's first difference, with the tokens of all."""
        seen: set[Hashable] = set()
        dropped_rewards: list[float] = []
        sequences: list[TokenSequence] = []
        histories: list[ResolvedHistory] = []
        for number, history in enumerate([trajectory, *trajectory.additional_histories]):
            path = f"{where}.additional_histories[{number - 1}]." if number else f"{where}."
            turns = self._turns(history, path, seen, dropped_rewards)
            joined, spans = join_turns([turn for _, turn in turns.trained], self._index)
            histories.append(ResolvedHistory(history, path, turns, joined, spans, len(sequences)))
            sequences += [sequence.model_copy(update={"truncated": turns.is_truncated}) for sequence in joined]
            if sequences:  # no trained turn of this history takes the rewards that are left
                add_rewards(sequences[-1], dropped_rewards)
                dropped_rewards.clear()
        traces: list[TurnTrace] = []
        first_difference: tuple[HistoryBody, int, FirstDifference, str] | None = None
        num_again = 0
        for number, resolved in enumerate(histories):
            # The main history comes first, whether or not the others were before it.
            others = [other.as_other() for other in histories if other is not resolved]
            differences = self._differences(resolved, others)
            traces += [TurnTrace(number, entry, dropped=reason) for entry, reason in resolved.turns.dropped]
            traces += self._traces(number, resolved, differences)
            for (entry, _), difference in zip(resolved.turns.trained, differences, strict=True):
                if difference is not None:
                    first_difference = first_difference or (resolved.history, entry, difference, resolved.path)
                    num_again += difference.num_tokens
        if first_difference is not None:
            self._counts.add_difference(*first_difference, num_again)
        if not sequences:
            self._counts.add_dropped(NO_TURN, where)
        traces.sort(key=lambda trace: (trace.history, trace.entry))
        return TrainableTrajectory(reward=trajectory.reward, sequences=sequences), traces

    def _differences(
        self,
        resolved: ResolvedHistory,
        others: Sequence[OtherHistory],
    ) -> list[FirstDifference | None]:
        """For each trained turn of a history, the first difference from what came before; None without a difference.

        The first turn has no turns before it in its history, so its messages are compared with the trajectory's other
        histories. A joined turn extends the sequence so far, and differs in nothing. Any other turn begins a new sequence, and
        its prompt is compared with the sequence before. The turns of that sequence show whose text differs.
        """
        differences: list[FirstDifference | None] = []
        earlier_turns: list[tuple[int, TurnSpan]] = []
        for (entry, turn), span in zip(resolved.turns.trained, resolved.spans, strict=True):
            if not earlier_turns:
                prompt = turn.prompt_token_ids
                difference = of_histories(others, resolved.history, resolved.turns.digests, entry, prompt)
            elif span.is_joined:
                difference = None
            else:
                last = span.sequence - 1
                of_last = [earlier_turn for earlier_turn in earlier_turns if earlier_turn[1].sequence == last]
                tokens = resolved.sequences[last].token_ids
                difference = of_prompt(resolved.history, of_last, tokens, turn.prompt_token_ids, self._sources.decode)
            differences.append(difference)
            earlier_turns.append((entry, span))
        return differences

    def _turns(
        self, history: HistoryBody, where: str, seen: set[Hashable], dropped_rewards: list[float]
    ) -> HistoryTurns:
        """The turns of a history. `dropped_rewards` collects the rewards of dropped turns for the next trained turn."""
        entries, tools = history.messages_and_choices, history.tools
        signals = self._turn_signals(history, where)
        messages = [entry["message"] if is_choice(entry) else entry for entry in entries]
        digests = conversation.prefix_digests(messages)
        first_other, kind = first_other_part(messages)
        turns = HistoryTurns(digests)
        for index, entry in enumerate(entries):
            if not self._is_turn(entry):
                continue
            signal = next(signals)
            other_part = kind if index >= first_other else None
            before = Before(messages[:index], digests[index], tools, other_part)
            turns.is_truncated = entry.get("finish_reason") == "length"
            if not is_choice(entry) and is_weightless(entry, f"{where}messages_and_choices[{index}]"):
                signal = replace(signal, advantages=0.0)
            try:
                turn = with_signal(self._turn(entry, before, seen), signal)
            except UnusableTurn as reason:
                if isinstance(reason, ForeignTurn):
                    turns.is_truncated = False
                self._counts.add_dropped(str(reason), f"{where}messages_and_choices[{index}]")
                turns.dropped.append((index, str(reason)))
                if signal.reward is not None:
                    dropped_rewards.append(signal.reward)
                continue
            self._counts.add_trained(turn)
            turns.trained.append((index, replace(turn, rewards_before=[*dropped_rewards])))
            dropped_rewards.clear()
        return turns

    def _traces(
        self,
        number: int,
        resolved: ResolvedHistory,
        differences: Sequence[FirstDifference | None],
    ) -> list[TurnTrace]:
        """The traces of the trained turns of a trajectory's history. Its first turn continues other turns only if the history repeats
        another history."""
        traces: list[TurnTrace] = []
        for (entry, turn), span, difference in zip(resolved.turns.trained, resolved.spans, differences, strict=True):
            continues: str | None = None
            if traces or difference is not None:
                continues = self._continuation(turn, span.is_joined)
                self._counts.add_continuation(continues)
            trace = TurnTrace(
                number,
                entry,
                origin=turn.origin,
                continues=continues,
                difference=None if difference is None else str(difference),
                step=turn.step,
                sequence=resolved.num_before + span.sequence,
                start=span.start,
                stop=span.stop,
                is_taught=True if turn.targets is not None else None,
            )
            traces.append(trace)
        return traces

    def _index(self, distribution: Distribution | None) -> int:
        """The index of a distribution in the batch, which contains each distribution once; -1 for None."""
        if distribution is None:
            return -1
        key = (distribution.temperature, tuple(sorted(distribution.logit_bias.items())), distribution.kept)
        if key not in self._indices:
            self._indices[key] = len(self._distributions)
            self._distributions.append(distribution)
        return self._indices[key]

    def _turn_signals(self, history: HistoryBody, where: str) -> Iterator[TurnSignal]:
        """What the client gives for each turn.

        Raises:
            InvalidInput: the number of rewards, advantages or targets differs from the number of turns, or targets are no
                log-probabilities.
        """
        num = sum(map(self._is_turn, history.messages_and_choices))
        rewards = history.turn_rewards or [None] * num
        advantages = history.turn_advantages or [None] * num
        targets = history.turn_targets or [None] * num
        for name, values in (
            ("turn_rewards", rewards),
            ("turn_advantages", advantages),
            ("turn_targets", targets),
        ):
            if len(values) != num:
                raise InvalidInput(
                    f"{name} has {len(values)} entries for {num} choices: give one entry per choice, null for none",
                    code="bad_turns",
                    param=where + name,
                )
        signals: list[TurnSignal] = []
        for index, (reward, advantage, target) in enumerate(zip(rewards, advantages, targets, strict=True)):
            num_targets = 0 if target is None else self._num_targets(target, f"{where}turn_targets[{index}]")
            signals.append(TurnSignal(reward, advantage, target, num_targets))
        return iter(signals)

    def _num_targets(self, target: TeacherTop, where: str) -> int:
        """The number of tokens that a turn's targets are for.

        Raises:
            InvalidInput: the targets are no log-probabilities, have another top_k than others of the job, or the job has
                another objective.
        """
        if self._config.objective != "policy":
            fault = f"objective is '{self._config.objective}', and a teacher's log-probabilities need 'policy'"
            raise InvalidInput(f"{where}: {fault}", code="bad_targets", param=where)
        self._top_k = self._top_k or target.top_k
        if target.top_k != self._top_k:
            fault = f"top_k is {target.top_k}, and {self._top_k} in an earlier turn: give all turns of a job the same"
            raise InvalidInput(f"{where}: {fault}", code="bad_targets", param=where)
        try:
            return check_top(target, self._limits.vocab_size)
        except ValueError as error:
            raise InvalidInput(f"{where}: {error}", code="bad_targets", param=where) from error

    def _is_turn(self, entry: dict[str, Any]) -> bool:
        return is_choice(entry) or (self._trains_without_logprobs and entry.get("role") == "assistant")

    def _continuation(self, turn: ResolvedTurn, is_joined: bool) -> str:
        """How a turn continues the turns before it: joined to their sequence, or why not."""
        if is_joined:
            return "joined"
        record = self._sources.find_record(turn.choice_id) if turn.choice_id is not None else None
        if record is not None and record.link in ("dropped", "retokenized"):
            return str(record.link)
        return "changed"

    # --- one turn ---

    def _turn(self, entry: dict[str, Any], before: Before, seen: set[Hashable]) -> ResolvedTurn:
        """The turn with its exact tokens. `seen` holds the turns of the trajectory so far.

        Raises:
            UnusableTurn: the turn cannot be trained.
        """
        sent = read_turn(entry, self._model_id)
        if sent.model_id != self._model_id:
            raise ForeignTurn(reasons.other_model(sent.model_id))
        if before.other_part is not None:
            raise UnusableTurn(reasons.other_part(before.other_part))
        turn = self._tokens_of(sent, before, seen)
        self._check(turn)
        if turn is sent.carried:  # no record confirms the tokens
            logprobs = turn.logprobs if self._is_raw else None
            turn = replace(turn, logprobs=logprobs, is_unrecorded=True, claimed_step=sent.step)
        if sent.is_choice:
            _refuse_second(turn, sent, seen)
        if turn.choice_id in self._taken:
            self._counts.copied.add(self._counts.num_groups)
        if turn.choice_id is not None:
            self._taken.add(turn.choice_id)
        return turn

    def _tokens_of(self, sent: SentTurn, before: Before, seen: set[Hashable]) -> ResolvedTurn:
        """The turn from the first source that has its tokens: the record that the choice names; the tokens that it carries,
        if possible with a record of them; a record with its log-probabilities or its text; the chat template."""
        recorded = self._named_record(sent)
        if recorded is not None:
            if sent.carried is None:
                return recorded
            if not has_same_tokens(sent.carried, recorded.prompt_token_ids, recorded.token_ids):
                raise UnusableTurn(reasons.CHANGED_IDS)
            return replace(recorded, origin="ids")
        if sent.is_reference:
            assert sent.choice_id is not None, "a reference names its record"
            self._missing.append(sent.choice_id)
            raise UnusableTurn(reasons.MISSING)
        if sent.carried is not None:
            return self._record_of_tokens(sent) or sent.carried
        recorded = self._matching_record(sent, before.digest, seen)
        return recorded if recorded is not None else self._written(sent, before)

    def _named_record(self, sent: SentTurn) -> ResolvedTurn | None:
        """The turn from the record that the choice names; None if the choice names no record, or the record is missing.

        Raises:
            UnusableTurn: another model sampled the choice.
        """
        record = None if sent.choice_id is None else self._sources.find_record(sent.choice_id)
        if record is None:
            return None
        request = record.request
        if request.model is None or request.owner != self._model_id.partition("/")[0]:
            return None  # records of other projects are never used
        if request.model != self._sources.model:
            raise ForeignTurn(reasons.other_model(self._sources.name_of(request.model)))
        return recorded_turn(record, is_raw=self._is_raw)

    def _record_of_tokens(self, sent: SentTurn) -> ResolvedTurn | None:
        """The turn of a choice that carries its tokens but no id, from a record with the same log-probabilities and tokens.
        Records that no turn has taken come first."""
        carried = sent.carried
        if carried is None or carried.logprobs is None or sent.choice_id is not None:
            return None
        chosen: Record | None = None
        for match in self._sources.find_by_logprobs(carried.logprobs):
            is_taken = match.choice_id in self._taken
            if chosen is not None and is_taken:
                continue
            record = match.load()
            if record and has_same_tokens(carried, record.prompt_token_ids, record.token_ids):
                chosen = record
                if not is_taken:
                    break
        return None if chosen is None else replace(recorded_turn(chosen, is_raw=self._is_raw), origin="ids")

    def _matching_record(self, sent: SentTurn, prefix_digest: bytes, seen: set[Hashable]) -> ResolvedTurn | None:
        """The turn from a record with the choice's log-probabilities; without log-probabilities, from a record with its text
        in the same conversation. All matches must have the same prompt and tokens; a record of the newest step is used.

        Raises:
            UnusableTurn: the matches differ, or the trajectory contains one of the matches already.
        """
        # If the record that a choice names is missing, the text alone would find the record of a sibling.
        if not sent.is_choice or (sent.choice_id is not None and sent.logprobs is None):
            return None
        matches = self._matches(sent, prefix_digest)
        if not matches:
            return None
        if any(match.choice_id in seen for match in matches):
            raise UnusableTurn(reasons.TWICE)
        samples = {(match.prompt, match.tokens) for match in matches}
        if len(samples) > 1:
            raise UnusableTurn(reasons.AMBIGUOUS)
        newest = max(match.step or 0 for match in matches)
        of_newest = [match for match in matches if (match.step or 0) == newest]
        untaken = [match for match in of_newest if match.choice_id not in self._taken]
        record = (untaken or of_newest)[0].load()
        return None if record is None else recorded_turn(record, is_raw=self._is_raw)

    def _matches(self, sent: SentTurn, prefix_digest: bytes) -> Sequence[Match]:
        """The records that may be the choice's."""
        answer_digest = conversation.message_digest(sent.message)
        if sent.logprobs is None:
            matches = self._sources.find_by_conversation(prefix_digest, answer_digest)
        else:
            matches = self._sources.find_by_logprobs(sent.logprobs)
            matches = of_same_text(matches, prefix_digest, answer_digest)
        return self._with_thinking_of(sent.message, matches)

    def _with_thinking_of(self, message: Message, matches: Sequence[Match]) -> Sequence[Match]:
        """The matches without records whose thinking differs from the message's: digests of answers leave thinking out."""
        thinking = message.get("reasoning") or message.get("reasoning_content")
        if not isinstance(thinking, str):
            return matches
        is_equal: dict[Hashable, bool] = {}
        for match in matches:
            if match.tokens not in is_equal:
                recorded = self._recorded_thinking(match)
                is_equal[match.tokens] = recorded is None or recorded.split() == thinking.split()
        return [match for match in matches if is_equal[match.tokens]]

    def _recorded_thinking(self, match: Match) -> str | None:
        """The thinking in a record's answer; None if the answer has none, or without a record or a tokenizer."""
        record = match.load()
        text = None if record is None else self._sources.decode(record.token_ids)
        return None if text is None else conversation.split_thinking(text)[0]

    def _written(self, sent: SentTurn, before: Before) -> ResolvedTurn:
        """The last resort: prompt and answer as the chat template writes them."""
        if not self._trains_without_logprobs:
            raise ForeignTurn(reasons.NO_TOKENS) if sent.choice_id is None else UnusableTurn(reasons.NO_RECORD)
        prompt, ids = self._template.write(sent.message, before.messages, before.tools)
        return ResolvedTurn(prompt, ids, None, "recomputed")

    def _check(self, turn: ResolvedTurn) -> None:
        if not turn.prompt_token_ids or not turn.token_ids:
            raise UnusableTurn(reasons.EMPTY)
        length = len(turn.prompt_token_ids) + len(turn.token_ids)
        if length > self._limits.max_seq_length:
            raise UnusableTurn(reasons.too_long(self._limits.max_seq_length))
        if turn.origin == "ledger":
            return  # the engine made the tokens and log-probabilities
        highest = max(max(turn.prompt_token_ids), max(turn.token_ids))
        lowest = min(min(turn.prompt_token_ids), min(turn.token_ids))
        if lowest < 0 or highest >= self._limits.vocab_size:
            raise UnusableTurn(reasons.OUTSIDE_VOCABULARY)
        if not all(math.isfinite(value) and value <= POSITIVE_LOGPROB_TOLERANCE for value in turn.logprobs or ()):
            raise UnusableTurn(reasons.BAD_LOGPROB)


def is_trained(sequence: TokenSequence) -> bool:
    """Whether any token of a demonstration has a weight."""
    return any(sequence.advantages.get(position, 1.0) for position in trained_positions(sequence))


def has_same_tokens(turn: ResolvedTurn, prompt: list[int], tokens: list[int]) -> bool:
    """Whether a turn has this prompt and these tokens."""
    return turn.prompt_token_ids == prompt and turn.token_ids == tokens


def of_same_text(matches: Sequence[Match], prefix_digest: bytes, answer_digest: bytes) -> Sequence[Match]:
    """The records that may be a choice's, among records with its log-probabilities.

    Records with the choice's text count first, and among these the records of its conversation. If no record has the text,
    the records of the conversation count.
    """
    of_text = [match for match in matches if match.answer_digest == answer_digest]
    of_conversation = [match for match in matches if match.prefix_digest == prefix_digest]
    if of_text:
        return [match for match in of_text if match.prefix_digest == prefix_digest] or of_text
    if of_conversation:
        return of_conversation
    # NVIDIA's plugin drops tool calls, which can leave no text.
    return matches if answer_digest == conversation.EMPTY_ANSWER else ()


def _refuse_second(turn: ResolvedTurn, sent: SentTurn, seen: set[Hashable]) -> None:
    """Adds a choice to `seen`, the choices of its trajectory. Choices with equal content are different samples only if both
    have an id.

    Raises:
        UnusableTurn: the trajectory contains the choice already.
    """
    same: set[Hashable] = set()
    names: set[Hashable] = set()
    if turn.choice_id is not None:
        same.add(turn.choice_id)
        names.add(turn.choice_id)
    if sent.logprobs is not None or sent.carried is not None:
        content = (tuple(turn.prompt_token_ids), tuple(turn.token_ids), tuple(sent.logprobs or ()))
        without_id = ("no id", content)
        if turn.choice_id is None:
            same.add(content)
            names |= {content, without_id}
        else:
            same.add(without_id)
            names.add(content)
    if same & seen:
        raise UnusableTurn(reasons.TWICE)
    seen |= names
