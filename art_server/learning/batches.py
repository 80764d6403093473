"""What a batch of scores has: which scores are chosen, and what is trained of their answers.

A unit is what one advantage is for: an answer, or a session with all of its turns. All scores of a unit make its reward. Where the text
of a score teaches (`teacher.py`), the advantages of the answer's tokens replace the reward's, as in SDPO (arXiv:2601.20802, section 3),
whose loss has no term with the reward.
"""

import math
import statistics
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence, Set
from dataclasses import dataclass, field
from typing import Any

from art_protocol.learning import Policy
from art_protocol.wire import HistoryBody, TrajectoryBody, TrajectoryGroupBody
from art_server.jobs.choices import is_choice
from art_server.learning.feedback import has_messages
from art_server.learning.pinned import Pinned
from art_server.learning.rewards import DAY, is_best, reward_of, teachers_of
from art_server.learning.scores import TOO_OLD, WaitingScore
from art_server.learning.teacher import Lesson
from art_server.ledger.records import Record

TOO_STALE = "too_stale"


@dataclass(slots=True)
class Unit:
    """An answer or a session with its scores."""

    scores: list[WaitingScore] = field(default_factory=list)
    turn_scores: dict[str, list[WaitingScore]] = field(default_factory=dict)
    """Of a session: the scores of single answers in it, by choice id."""
    is_taught: bool = False
    """A text teaches some of its answers."""

    @property
    def users(self) -> set[str]:
        return {score.user for score in self.all_scores if score.user is not None}

    @property
    def all_scores(self) -> list[WaitingScore]:
        return [*self.scores, *(score for of_turn in self.turn_scores.values() for score in of_turn)]

    @property
    def has_value(self) -> bool:
        return any(score.value is not None for score in self.all_scores)

    @property
    def pinned_by(self) -> WaitingScore:
        """The score that has the pinned tokens: the newest; of an answer with messages the newest that has the messages."""
        with_messages = [
            score for score in self.scores if score.teaches is not None and score.target.startswith("answer ")
        ]
        return (with_messages or self.scores or self.all_scores)[-1]

    def has_teachers(self, policy: Policy) -> bool:
        """Whether the text of a score teaches some of its answers."""
        return any(teachers_of(scores, policy) for scores in (self.scores, *self.turn_scores.values()))


@dataclass(frozen=True, slots=True)
class Chosen:
    """What the collector decides about the scores that wait."""

    units: list[Unit]
    """The next batch, oldest first; fewer than the policy's batch if fewer wait."""
    expired: Mapping[str, list[int]]
    """The numbers of scores that no batch may take any more, by reason."""
    capped: list[Unit]
    """The units above their users' share, which the batch leaves out for good."""
    has_signal: bool
    """Two units have different rewards, or texts teach all units."""
    num_equal: int = 0
    """Units that wait, because they have the same reward and no text teaches them."""


@dataclass(slots=True)
class Filling:
    """A batch that is being filled: at most so many units, and at most so many of each user."""

    size: int
    user_limit: int
    units: list[Unit] = field(default_factory=list)
    later: list[Unit] = field(default_factory=list)
    capped: list[Unit] = field(default_factory=list)
    taken: Counter[str] = field(default_factory=Counter)

    def has_room(self, unit: Unit) -> bool:
        """Whether its users are below their limit."""
        return all(self.taken[user] < self.user_limit for user in unit.users)

    def add(self, unit: Unit) -> None:
        if len(self.units) == self.size:
            self.later.append(unit)
        elif self.has_room(unit):
            self.units.append(unit)
            self.taken.update(unit.users)
        else:
            self.capped.append(unit)


def choose(waiting: Sequence[WaitingScore], policy: Policy, *, newest_step: int, now: float) -> Chosen:
    """The next batch: the oldest units, of each user at most the policy's share of a batch. If these have one reward, the oldest unit
    with another reward is among them; without one, the batch has only units that texts teach, and the others wait. Scores of names
    that the policy does not have wait, and so do texts that teach nothing."""
    expired: dict[str, list[int]] = {}
    usable: list[WaitingScore] = []
    for score in waiting:
        reason = why_expired(score, policy, newest_step=newest_step, now=now)
        if reason is not None:
            expired.setdefault(reason, []).append(score.number)
        elif score.name in policy.names:
            usable.append(score)
    units: list[Unit] = []
    for unit in units_of(usable):
        unit.is_taught = unit.has_teachers(policy)
        if unit.has_value or unit.is_taught:
            units.append(unit)
    batch = fill(units, policy)
    rewards = {reward_of(unit.all_scores, policy) for unit in batch.units if unit.has_value}
    if len(rewards) == 1:
        others = (unit for unit in batch.later if unit.has_value and batch.has_room(unit))
        other = next((unit for unit in others if reward_of(unit.all_scores, policy) not in rewards), None)
        if other is not None:
            spare = [unit for unit in batch.units if not unit.has_value] or batch.units
            batch.units.remove(spare[-1])
            batch.units.append(other)
            rewards.add(reward_of(other.all_scores, policy))
    if len(rewards) > 1:
        return Chosen(batch.units, expired, batch.capped, has_signal=True)
    taught = fill((unit for unit in units if unit.is_taught), policy)
    if not taught.units:
        return Chosen(batch.units, expired, batch.capped, has_signal=False)
    num_equal = sum(not unit.is_taught for unit in units)
    return Chosen(taught.units, expired, taught.capped, has_signal=True, num_equal=num_equal)


def fill(units: Iterable[Unit], policy: Policy) -> Filling:
    """A batch of the oldest units."""
    batch = Filling(policy.batch, max(1, math.floor(policy.user_share * policy.batch)))
    for unit in units:
        batch.add(unit)
    return batch


def why_expired(score: WaitingScore, policy: Policy, *, newest_step: int, now: float) -> str | None:
    """Why no batch may take a score any more; None: one may."""
    if now - score.answered_at > policy.max_age_days * DAY:
        return TOO_OLD
    most = policy.config.max_staleness
    if most is not None and score.step is not None and newest_step - score.step > most:
        return TOO_STALE
    return None


def units_of(scores: Sequence[WaitingScore]) -> list[Unit]:
    """The units of scores, in the order of their oldest scores. A scored answer of a scored session belongs to the session."""
    session_of = {
        choice: score.target for score in scores if score.target.startswith("session ") for choice in score.choices
    }
    units: dict[str, Unit] = {}
    for score in scores:
        if score.target.startswith("session "):
            units.setdefault(score.target, Unit()).scores.append(score)
            continue
        (choice,) = score.choices
        target = session_of.get(choice)
        if target is None:
            units.setdefault(score.target, Unit()).scores.append(score)
        else:
            units.setdefault(target, Unit()).turn_scores.setdefault(choice, []).append(score)
    return [*units.values()]


@dataclass(frozen=True, slots=True)
class OpenUnit:
    """A unit of a batch, with the choices that no job has taken."""

    unit: Unit
    histories: Sequence[HistoryBody]
    records: Mapping[str, Record]
    """Of the open choices, by their ids."""

    @property
    def numbers(self) -> list[int]:
        """The numbers of its scores."""
        return [score.number for score in self.unit.all_scores]

    @property
    def has_outcome(self) -> bool:
        """Whether a value judges it as a whole."""
        return any(score.value is not None for score in self.unit.scores)


def open_unit(unit: Unit, kept: Pinned, open_choices: Set[str]) -> OpenUnit:
    """A unit of whose pinned choices these are open. The others become messages."""
    histories = [open_history(HistoryBody.model_validate(history), open_choices) for history in kept.histories]
    records = {record.choice_id: record for record in kept.records if record.choice_id in open_choices}
    return OpenUnit(unit, histories, records)


def open_history(history: HistoryBody, open_choices: Set[str]) -> HistoryBody:
    entries: list[dict[str, Any]] = []
    for entry in history.messages_and_choices:
        is_taken = is_choice(entry) and entry["art"]["id"] not in open_choices
        entries.append(entry["message"] if is_taken else entry)
    return HistoryBody(messages_and_choices=entries, tools=history.tools)


def teachers_in(opened: OpenUnit, policy: Policy) -> dict[str, list[WaitingScore]]:
    """For each open choice that a text teaches, the scores with these texts: its own, or else the session's."""
    of_unit = teachers_of(opened.unit.scores, policy)
    teachers: dict[str, list[WaitingScore]] = {}
    for choice, record in opened.records.items():
        own = teachers_of(opened.unit.turn_scores.get(choice, ()), policy)
        if (own or of_unit) and has_messages(record):
            teachers[choice] = own or of_unit
    return teachers


def lessons_of(
    opened: OpenUnit, teachers: Mapping[str, Sequence[WaitingScore]], texts: Mapping[int, Mapping[str, Any]]
) -> list[Lesson]:
    """What the teacher is asked about a unit. `texts` are the texts of scores, by their numbers."""
    lessons: dict[str, Lesson] = {}
    for history in opened.histories:
        messages: list[dict[str, Any]] = []
        for entry in history.messages_and_choices:
            if not is_choice(entry):
                messages.append(entry)
                continue
            choice: str = entry["art"]["id"]
            if choice in teachers:
                lessons[choice] = lesson_of(opened.records[choice], messages, history.tools, teachers[choice], texts)
            messages.append(entry["message"])
    return [*lessons.values()]


def lesson_of(
    record: Record,
    messages: Sequence[dict[str, Any]],
    tools: list[dict[str, Any]] | None,
    scores: Sequence[WaitingScore],
    texts: Mapping[int, Mapping[str, Any]],
) -> Lesson:
    """What the teacher is asked about one answer: all comments, and the newest correction."""
    comments = [texts.get(score.number, {}).get("comment", "") for score in scores if score.teaches == "comment"]
    corrections = [
        texts.get(score.number, {}).get("correction", "") for score in scores if score.teaches == "correction"
    ]
    correction = corrections[-1] if corrections else None
    return Lesson(record, [*messages], tools, feedback="\n\n".join(comments), correction=correction)


def group_of(
    opened: OpenUnit, policy: Policy, reward: float, taught: Mapping[str, Sequence[float]]
) -> TrajectoryGroupBody:
    """A unit as a group of one trajectory. `taught` are the advantages of tokens, by choice id."""
    turn_rewards = {
        choice: reward_of(scores, policy)
        for choice, scores in opened.unit.turn_scores.items()
        if any(score.value is not None for score in scores)
    }
    histories = [with_signals(history, turn_rewards, taught) for history in opened.histories]
    main, *others = [history for history in histories if any(map(is_choice, history.messages_and_choices))]
    gaps = [gap for choice in opened.records for gap in taught.get(choice, ())]
    trajectory = TrajectoryBody(
        **main.model_dump(),
        reward=reward,
        additional_histories=others,
        metrics={"teacher_gap": statistics.fmean(gaps)} if gaps else {},
        metadata={"scores": len(opened.numbers)},
    )
    return TrajectoryGroupBody(trajectories=[trajectory])


def with_signals(
    history: HistoryBody, turn_rewards: Mapping[str, float], taught: Mapping[str, Sequence[float]]
) -> HistoryBody:
    """A history with the rewards of single turns, and with the advantages of the tokens of those that are taught."""
    choices = [entry["art"]["id"] for entry in history.messages_and_choices if is_choice(entry)]
    rewards = [turn_rewards.get(choice) for choice in choices]
    advantages: list[float | list[float] | None] = [
        [*taught[choice]] if choice in taught else None for choice in choices
    ]
    return HistoryBody(
        messages_and_choices=history.messages_and_choices,
        tools=history.tools,
        turn_rewards=rewards if any(reward is not None for reward in rewards) else None,
        turn_advantages=advantages if any(advantages) else None,
    )


def rewards_of(units: Sequence[OpenUnit], policy: Policy) -> list[float]:
    """The reward of each unit. A unit that no value judges has the mean of the others: it is neither good nor bad."""
    known = [reward_of(opened.unit.scores, policy) for opened in units if opened.has_outcome]
    mean = statistics.fmean(known) if known else 0.0
    return [reward_of(opened.unit.scores, policy) if opened.has_outcome else mean for opened in units]


def num_silent(units: Sequence[OpenUnit], policy: Policy, texts: Mapping[int, Mapping[str, Any]]) -> int:
    """The number of scores whose texts would teach, if the messages were there and the text were not too long."""
    scores = [score for opened in units for score in opened.unit.all_scores]
    silent = [score for score in scores if score.teaches is None and not is_best(score, policy)]
    known = [texts.get(score.number, {}) for score in silent]
    return sum(bool(of_score.get("comment") or of_score.get("correction")) for of_score in known)
