"""The collector: takes scored answers from the table, and makes a job of them when the policy's batch is full.

The rows of a batch and the job with the teacher's advantages are one transaction (`take`): a killed server trains each answer once, and a
job that is tried again trains the same numbers. What a teacher has said before is lost with the server, and asked again.
"""

import asyncio
import logging
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

from art_protocol.display import counted
from art_protocol.learning import LearningInfo, Policy
from art_server.engine.engine import AdapterRefused
from art_server.errors import Conflict, InvalidInput, ServerError
from art_server.jobs.runner import JobRunner
from art_server.jobs.token_sources import Limits
from art_server.jobs.train_requests import NewJob, TrainRequests
from art_server.learning import batches, pinned
from art_server.learning.answerer import EngineEnded
from art_server.learning.batches import Chosen, OpenUnit, Unit, choose
from art_server.learning.policies import Learning, Policies
from art_server.learning.releasing import Releasing
from art_server.learning.rewards import HOUR
from art_server.learning.scores import ALREADY_TRAINED, Scores, WaitingScore
from art_server.learning.teacher import Teacher
from art_server.models.registration import Registration
from art_server.shared.clock import REAL, Clock
from art_server.store.registry import RegisteredModel, Registry

logger = logging.getLogger(__name__)

LOOK_SECONDS = 30.0
"""The collector looks so often without a new score, because scores grow old and hours pass."""
CAPPED = "capped"
MAX_TRIES = 3
"""After so many batches in a row whose teacher did not answer, learning pauses: a text may be what ends the engine."""
REST = 4
"""After a look the collector rests for so many times as long as the look took. Each new score asks for a look, and a look at 100,000
scores that wait takes half a second of a CPU."""


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
        teacher: Teacher,
        clock: Clock = REAL,
    ):
        self._releasing = releasing
        self._teacher = teacher
        self._num_failed: Counter[int] = Counter()
        """Batches in a row whose teacher did not answer, by the model's number."""
        self._chosen: dict[int, tuple[object, Chosen]] = {}
        """The last choice by the model's number, and what the choice was made of. Reading 100,000 scores takes half a second."""
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
            rest = REST * (self._clock.monotonic() - started)
            await self._clock.sleep(min(rest, LOOK_SECONDS))  # a teacher that was asked takes longer than a look
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
        return await self._make_job(model, learning, chosen, is_asked=is_asked)

    async def _pending_job(self, model: RegisteredModel) -> str | None:
        """The job of scores that has not ended."""
        return await asyncio.to_thread(self._scores.queued_job, model.number)

    def _choose(self, model: RegisteredModel, policy: Policy) -> Chosen:
        """The next batch (blocking). It is chosen anew when other scores wait, the policy or the newest step is another, or an hour
        has passed."""
        now, newest_step = self._clock.now(), model.folder.newest_step() or 0
        mark = (self._scores.open_mark(model.number), policy, newest_step, now // HOUR)
        known = self._chosen.get(model.number)
        if known is None or known[0] != mark:
            known = mark, choose(self._scores.waiting(model.number), policy, newest_step=newest_step, now=now)
            self._chosen[model.number] = known
        return known[1]

    async def _make_job(
        self, model: RegisteredModel, learning: Learning, chosen: Chosen, *, is_asked: bool
    ) -> str | None:
        policy = learning.policy
        await self._registry.prepare(model)
        limits = self._registration.limits(model)
        units = await asyncio.to_thread(self._open, chosen.units)
        if not units:
            return None
        texts = await asyncio.to_thread(self._scores.texts, [number for opened in units for number in opened.numbers])
        taught = await self._ask_teacher(model, policy, units, texts, limits)
        if taught is None:
            return await self._collect(model, is_asked=is_asked)
        if taught and await asyncio.to_thread(self._policies.of, model.number) != learning:
            self.wake()  # the teacher may take minutes: somebody has paused or changed the learning, or has asked for a batch
            return None
        groups = [
            batches.group_of(opened, policy, reward, taught)
            for opened, reward in zip(units, batches.rewards_of(units, policy), strict=True)
        ]
        scores = [number for opened in units for number in opened.numbers]
        records = {choice: record for opened in units for choice, record in opened.records.items()}
        new: NewJob = self._requests.begin(model, policy.config, limits, pinned=records)

        def take(job_id: str) -> None:
            self._scores.drop([score.number for unit in chosen.capped for score in unit.all_scores], CAPPED)
            self._policies.note_batch(model.number)
            self._releasing.begin(model)
            if not self._scores.queue(scores, records, job_id):
                raise Conflict("a score of the batch was replaced or retracted", code="scores_changed")

        notes = [*note_users(chosen, policy), *note_texts(units, policy, taught, texts)]
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
            self._policies.set_state(model, "paused", f"the policy's configuration is refused: {error}")
        else:
            self._scores.drop(scores, error.code)

    def _open(self, units: Sequence[Unit]) -> list[OpenUnit]:
        """The units of a batch with their tokens (blocking). What a job has taken before is left out, and its scores are dropped."""
        opened: list[OpenUnit] = []
        in_batch: set[str] = set()
        for unit in units:
            number = unit.pinned_by.number
            packed = self._scores.pinned([number]).get(number)
            if packed is None:
                continue  # replaced meanwhile
            kept = pinned.unpack(packed)
            open_choices = self._scores.untaken([record.choice_id for record in kept.records]) - in_batch
            if open_choices:
                opened.append(batches.open_unit(unit, kept, open_choices))
                in_batch |= open_choices
            else:
                self._scores.drop([score.number for score in unit.all_scores], ALREADY_TRAINED)
        return opened

    async def _ask_teacher(
        self,
        model: RegisteredModel,
        policy: Policy,
        units: Sequence[OpenUnit],
        texts: Mapping[int, Mapping[str, Any]],
        limits: Limits,
    ) -> dict[str, list[float]] | None:
        """The advantages of the tokens that texts teach, by choice; None if a text cannot teach, which its row says from here on, so that
        another batch is to be chosen.

        Raises:
            ServerError: the teacher did not answer: the batch waits.
        """
        teachers: dict[str, list[WaitingScore]] = {}
        for opened in units:
            teachers |= batches.teachers_in(opened, policy)
        lessons = [lesson for opened in units for lesson in batches.lessons_of(opened, teachers, texts)]
        try:
            answers = await self._teacher.advantages(model, lessons, limits.max_seq_length)
        except (EngineEnded, AdapterRefused) as error:
            await asyncio.to_thread(self._note_failure, model, error)
            raise
        del self._num_failed[model.number]
        taught = {choice: answer for choice, answer in answers.items() if not isinstance(answer, str)}
        teaching = {score.number for choice in taught for score in teachers[choice]}
        is_silenced = False
        for choice, answer in answers.items():
            silent = [score.number for score in teachers[choice] if score.number not in teaching]
            if isinstance(answer, str) and silent:
                await asyncio.to_thread(self._scores.silence, silent, answer)
                self._chosen.pop(model.number, None)
                is_silenced = True
        return None if is_silenced else taught

    def _note_failure(self, model: RegisteredModel, error: ServerError) -> None:
        """Counts a batch whose teacher did not answer. After several in a row, learning pauses."""
        self._num_failed[model.number] += 1
        if self._num_failed[model.number] == MAX_TRIES:
            del self._num_failed[model.number]
            why = f"{MAX_TRIES} times in a row the teacher of a batch with texts did not answer; the last: {error}"
            if self._policies.of(model.number).state == "on":
                self._policies.set_state(model, "paused", why)

    async def info(self, model: RegisteredModel) -> LearningInfo:
        """How a model learns at this moment."""
        learning = await asyncio.to_thread(self._policies.of, model.number)
        counts = await asyncio.to_thread(self._scores.counts, model.number)
        release = await asyncio.to_thread(
            self._releasing.info, model
        )  # before the steps: a release ends, and then its step serves
        return LearningInfo(
            state=learning.state,
            policy=learning.policy,
            reason=await self._reason(model, learning),
            counts=counts,
            serving_step=model.step,
            newest_step=model.folder.newest_step() or 0,
            release=release,
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
            why = learning.reason or "somebody paused it"
            return f"learning is paused: {why}. It goes on with `art learn {model.id} --resume`"
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
    if not chosen.has_signal:
        return False
    hours = (now - learning.since) / HOUR
    return (
        count >= policy.batch or is_asked or (hours >= policy.every_hours and count >= min(policy.least, policy.batch))
    )


def waits_for(chosen: Chosen, learning: Learning, now: float) -> str:
    """What a model's learning waits for, in a sentence with numbers."""
    policy, count = learning.policy, len(chosen.units)
    waiting = f"{count} of {policy.batch} scored answers wait (a scored session with its answers counts as one)"
    if count and not chosen.has_signal:
        return f"{waiting}, and all have the same reward: nothing can be learned before a score differs"
    if chosen.num_equal:
        waiting += f"; {chosen.num_equal} more have the same reward and no text, and wait for a score that differs"
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


def note_texts(
    units: Sequence[OpenUnit],
    policy: Policy,
    taught: Mapping[str, Sequence[float]],
    texts: Mapping[int, Mapping[str, Any]],
) -> list[str]:
    """What a job's report says about the texts of its scores."""
    notes: list[str] = []
    num_taught = sum(not taught.keys().isdisjoint(opened.records) for opened in units)
    if num_taught:
        notes.append(f"{num_taught} of {len(units)} scored answers are taught by the texts of their scores")
    num_silent = batches.num_silent(units, policy, texts)
    if num_silent and policy.text == "teach":
        notes.append(
            f"{num_silent} scores have a text that teaches nothing: the messages before the answer were not kept, because learning was "
            "off when the request came, or the text is too long for the context"
        )
    return notes
