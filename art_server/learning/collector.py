"""The collector: takes scored answers from the table, and makes a job of them when the policy's batch is full.

A unit is what one advantage is for: an answer, or a session with all of its turns. All scores of a unit make its reward. The rows of a
batch and the job are one transaction (`_store`), so a killed server trains each answer once.
"""

import asyncio
import logging
import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from art_protocol.display import counted
from art_protocol.learning import LearningInfo, Policy
from art_protocol.wire import HistoryBody, TrajectoryBody, TrajectoryGroupBody
from art_server.errors import Conflict, InvalidInput, ServerError
from art_server.jobs.choices import is_choice
from art_server.jobs.runner import JobRunner
from art_server.jobs.train_requests import NewJob, TrainRequests
from art_server.learning import pinned
from art_server.learning.policies import Learning, Policies
from art_server.learning.releasing import Releasing
from art_server.learning.rewards import DAY, HOUR, reward_of
from art_server.learning.scores import ALREADY_TRAINED, TOO_OLD, Scores, WaitingScore
from art_server.ledger.records import Record
from art_server.models.registration import Registration
from art_server.shared.clock import REAL, Clock
from art_server.store.registry import RegisteredModel, Registry

logger = logging.getLogger(__name__)

LOOK_SECONDS = 30.0
"""The collector looks so often without a new score, because scores grow old and hours pass."""
REST = 4
"""After a look the collector rests for so many times as long as the look took. Each new score asks for a look, and a look at 100,000
scores that wait takes half a second of a CPU."""
CAPPED, TOO_STALE = "capped", "too_stale"


@dataclass(slots=True)
class Unit:
    """An answer or a session with its scores."""

    scores: list[WaitingScore] = field(default_factory=list)
    turn_scores: dict[str, list[WaitingScore]] = field(default_factory=dict)
    """Of a session: the scores of single answers in it, by choice id."""

    @property
    def users(self) -> set[str]:
        return {score.user for score in self.all_scores if score.user is not None}

    @property
    def all_scores(self) -> list[WaitingScore]:
        return [*self.scores, *(score for of_turn in self.turn_scores.values() for score in of_turn)]


@dataclass(frozen=True, slots=True)
class Chosen:
    """What the collector decides about the scores that wait."""

    units: list[Unit]
    """The next batch, oldest first; fewer than the policy's batch if fewer wait."""
    expired: Mapping[str, list[int]]
    """The numbers of scores that no batch may take any more, by reason."""
    capped: list[Unit]
    """The units above their users' share, which the batch leaves out for good."""
    has_two_rewards: bool


def choose(waiting: Sequence[WaitingScore], policy: Policy, *, newest_step: int, now: float) -> Chosen:
    """The next batch: the oldest units, of each user at most the policy's share of a batch. If the oldest all have one reward, the
    oldest with another reward is among them. Scores of names that the policy does not have wait."""
    expired: dict[str, list[int]] = {}
    usable: list[WaitingScore] = []
    for score in waiting:
        reason = why_expired(score, policy, newest_step=newest_step, now=now)
        if reason is not None:
            expired.setdefault(reason, []).append(score.number)
        elif score.name in policy.names:
            usable.append(score)
    batch, later, capped = list[Unit](), list[Unit](), list[Unit]()
    limit = max(1, math.floor(policy.user_share * policy.batch))
    taken: Counter[str] = Counter()
    for unit in units_of(usable):
        if len(batch) == policy.batch:
            later.append(unit)
        elif any(taken[user] >= limit for user in unit.users):
            capped.append(unit)
        else:
            batch.append(unit)
            taken.update(unit.users)
    rewards = {reward_of(unit.all_scores, policy) for unit in batch}
    if len(rewards) == 1:
        others = (unit for unit in later if reward_of(unit.all_scores, policy) not in rewards)
        other = next((unit for unit in others if all(taken[user] < limit for user in unit.users)), None)
        if other is not None:
            batch[-1] = other
            rewards.add(reward_of(other.all_scores, policy))
    return Chosen(batch, expired, capped, len(rewards) > 1)


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


class Collector:
    """Makes jobs of scores, for all models that learn."""

    def __init__(
        self,
        *,
        scores: Scores,
        policies: Policies,
        registry: Registry,
        registration: Registration,
        requests: TrainRequests,
        runner: JobRunner,
        releasing: Releasing,
        clock: Clock = REAL,
    ):
        self._releasing = releasing
        self._scores = scores
        self._policies = policies
        self._registry = registry
        self._registration = registration
        self._requests = requests
        self._runner = runner
        self._clock = clock
        self._changed = asyncio.Event()

    def wake(self) -> None:
        """Has the collector look at once: a score came, or a policy has changed."""
        self._changed.set()
        self._releasing.wake()

    async def run_forever(self) -> None:
        while True:
            self._changed.clear()
            started = self._clock.monotonic()
            for number in await asyncio.to_thread(self._policies.learners):
                model = self._registry.of_number(number)
                if model is None:
                    continue
                try:
                    await self._collect(model)
                except (ServerError, OSError) as error:  # a full disk, a full queue: the next look tries again
                    logger.error("scores of %s wait: %s", model.id, error)
            await self._clock.sleep(REST * (self._clock.monotonic() - started))
            async with self._clock.at_most(LOOK_SECONDS):
                await self._changed.wait()

    async def collect_now(self, model: RegisteredModel) -> str:
        """Makes a job of the scores that wait, also if they are fewer than a batch. Returns the job's id.

        Raises:
            Conflict: too few scores wait, or a job of scores has not ended.
        """
        job_id = await self._collect(model, is_asked=True)
        if job_id is None:
            raise Conflict((await self.info(model)).reason, code="nothing_to_learn", param="name")
        return job_id

    async def _collect(self, model: RegisteredModel, *, is_asked: bool = False) -> str | None:
        """The job of the next batch; None if there is no batch yet."""
        learning = await asyncio.to_thread(self._policies.of, model.number)
        if await self._pending_job(model) is not None or not self._registration.is_on_base(model):
            return None
        if await asyncio.to_thread(self._releasing.why_waiting, model) is not None:
            return None
        chosen = await asyncio.to_thread(self._choose, model, learning.policy)
        for reason, numbers in chosen.expired.items():
            await asyncio.to_thread(self._scores.drop, numbers, reason)
        if not is_due(chosen, learning, self._clock.now(), is_asked=is_asked):
            return None
        return await self._make_job(model, learning.policy, chosen)

    async def _pending_job(self, model: RegisteredModel) -> str | None:
        """The job of scores that has not ended."""
        return await asyncio.to_thread(self._scores.queued_job, model.number)

    def _choose(self, model: RegisteredModel, policy: Policy) -> Chosen:
        waiting = self._scores.waiting(model.number)
        return choose(waiting, policy, newest_step=model.folder.newest_step() or 0, now=self._clock.now())

    async def _make_job(self, model: RegisteredModel, policy: Policy, chosen: Chosen) -> str | None:
        await self._registry.prepare(model)
        groups, records, scores = await asyncio.to_thread(self._groups, policy, chosen.units)
        if not groups:
            return None
        new: NewJob = self._requests.begin(model, policy.config, self._registration.limits(model), pinned=records)

        def take(job_id: str) -> None:
            self._scores.drop([score.number for unit in chosen.capped for score in unit.all_scores], CAPPED)
            self._policies.note_batch(model.number)
            self._releasing.begin(model)
            if not self._scores.queue(scores, records, job_id):
                raise Conflict("a score of the batch was replaced or retracted", code="scores_changed")

        notes = note_users(chosen, policy)
        try:
            for group in groups:
                await new.resolve_turns(group)
            job = await new.store_job(None, "scores", notes=notes, on_insert=take)
        except InvalidInput as error:
            await asyncio.to_thread(self._refuse, model, scores, error)
            return None
        except Conflict as error:
            if error.code != "scores_changed":
                raise
            self.wake()
            return None
        logger.info("job %s of %s: %s", job.job_id, model.id, counted(len(groups), "scored answer"))
        return job.job_id

    def _refuse(self, model: RegisteredModel, scores: Sequence[int], error: InvalidInput) -> None:
        """Follows a batch that no later try would train: its scores are dropped, or, if the policy is at fault, learning pauses."""
        logger.warning("a batch of scores of %s is refused: %s", model.id, error)
        if error.param is not None and error.param.startswith("config"):
            self._policies.set_state(model.number, "paused", f"the policy's configuration is refused: {error}")
        else:
            self._scores.drop(scores, error.code)

    def _groups(
        self, policy: Policy, units: Sequence[Unit]
    ) -> tuple[list[TrajectoryGroupBody], dict[str, Record], list[int]]:
        """The groups of a batch, the records of their choices, and the numbers of their scores. What a job has taken before is left
        out, and its scores are dropped."""
        groups: list[TrajectoryGroupBody] = []
        records: dict[str, Record] = {}
        numbers: list[int] = []
        for unit in units:
            of_unit = [score.number for score in unit.all_scores]
            newest = (unit.scores or unit.all_scores)[-1]
            packed = self._scores.pinned([newest.number]).get(newest.number)
            if packed is None:
                continue  # replaced meanwhile
            kept = pinned.unpack(packed)
            of_choices = {record.choice_id: record for record in kept.records}
            open_choices = self._scores.untaken([*of_choices]) - records.keys()
            if not open_choices:
                self._scores.drop(of_unit, ALREADY_TRAINED)
                continue
            turn_rewards = {choice: reward_of(scores, policy) for choice, scores in unit.turn_scores.items()}
            histories = [
                read_history(HistoryBody.model_validate(history), open_choices, turn_rewards)
                for history in kept.histories
            ]
            reward = reward_of(unit.scores, policy)
            main, *others = [history for history in histories if any(map(is_choice, history.messages_and_choices))]
            trajectory = TrajectoryBody(
                **main.model_dump(), reward=reward, additional_histories=others, metadata={"scores": len(of_unit)}
            )
            groups.append(TrajectoryGroupBody(trajectories=[trajectory]))
            records |= {choice: record for choice, record in of_choices.items() if choice in open_choices}
            numbers += of_unit
        return groups, records, numbers

    async def info(self, model: RegisteredModel) -> LearningInfo:
        """How a model learns at this moment."""
        learning = await asyncio.to_thread(self._policies.of, model.number)
        counts = await asyncio.to_thread(self._scores.counts, model.number)
        return LearningInfo(
            state=learning.state,
            policy=learning.policy,
            reason=await self._reason(model, learning),
            counts=counts,
            serving_step=model.step,
            newest_step=model.folder.newest_step() or 0,
            release=await asyncio.to_thread(self._releasing.info, model),
        )

    async def learners(
        self, projects: frozenset[str] | None = None, only: str | None = None
    ) -> dict[str, LearningInfo]:
        """How the models of these projects learn (None: of all), or the model `only`, by id. Models whose learning is off are not
        there."""
        numbers = {*await asyncio.to_thread(self._policies.not_off)}
        models = [model for model in self._registry.all(projects, only) if model.number in numbers]
        return {model.id: await self.info(model) for model in models}

    async def _reason(self, model: RegisteredModel, learning: Learning) -> str:
        if learning.state == "off":
            return "learning is off: `art learn` or PUT .../learning turns it on"
        if learning.state == "paused":
            return f"learning is paused: {learning.reason or 'somebody paused it'}"
        if not self._registration.is_on_base(model):
            return f"the server has not loaded the base model '{model.record.base_model}'"
        job_id = await self._pending_job(model)
        if job_id is not None:
            return f"job {job_id} trains a batch of scores"
        waiting = await asyncio.to_thread(self._releasing.why_waiting, model)
        if waiting is not None:
            return waiting
        chosen = await asyncio.to_thread(self._choose, model, learning.policy)
        return waits_for(chosen, learning, self._clock.now())


def is_due(chosen: Chosen, learning: Learning, now: float, *, is_asked: bool = False) -> bool:
    """Whether the chosen scores make a job now."""
    policy, count = learning.policy, len(chosen.units)
    if not chosen.has_two_rewards:
        return False
    hours = (now - learning.since) / HOUR
    return (
        count >= policy.batch or is_asked or (hours >= policy.every_hours and count >= min(policy.least, policy.batch))
    )


def waits_for(chosen: Chosen, learning: Learning, now: float) -> str:
    """What a model's learning waits for, in a sentence with numbers."""
    policy, count = learning.policy, len(chosen.units)
    waiting = f"{count} of {policy.batch} scored answers wait (a scored session with its answers counts as one)"
    if count and not chosen.has_two_rewards:
        return f"{waiting}, and all have the same reward: nothing can be learned before a score differs"
    hours = max(0.0, policy.every_hours - (now - learning.since) / HOUR)
    early = f"; with {policy.least} or more a step begins in {hours:.1f} h"
    capped = ""
    if chosen.capped:
        capped = (
            f"; {len(chosen.capped)} more are above the share of {policy.user_share:.0%} of a batch that one user may have "
            "(policy: user_share)"
        )
    return f"{waiting}{early}{capped}"


def note_users(chosen: Chosen, policy: Policy) -> list[str]:
    """What a job's report says about the users of its scores."""
    notes: list[str] = []
    num_scores = sum(len(unit.all_scores) for unit in chosen.units)
    num_unnamed = sum(score.user is None for unit in chosen.units for score in unit.all_scores)
    if num_unnamed:
        notes.append(
            f"{num_unnamed} of {num_scores} scores name no user: the share of {policy.user_share:.0%} of a batch that one user may "
            "have cannot hold them"
        )
    if len(chosen.capped) > len(chosen.units):
        notes.append(
            f"{len(chosen.capped)} scored answers were left out, more than the batch has, because their users have more than "
            f"{policy.user_share:.0%} of a batch: look who they are, or raise user_share"
        )
    return notes


def read_history(history: HistoryBody, open_choices: set[str], turn_rewards: Mapping[str, float]) -> HistoryBody:
    """A history in which choices that a job has taken are messages, with the rewards of single turns."""
    entries = []
    rewards: list[float | None] = []
    for entry in history.messages_and_choices:
        if not is_choice(entry):
            entries.append(entry)
        elif entry["art"]["id"] in open_choices:
            entries.append(entry)
            rewards.append(turn_rewards.get(entry["art"]["id"]))
        else:
            entries.append(entry["message"])
    has_rewards = any(reward is not None for reward in rewards)
    return HistoryBody(messages_and_choices=entries, tools=history.tools, turn_rewards=rewards if has_rewards else None)
