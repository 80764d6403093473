"""The life of a job: from its resolved tokens to a step that serves.

    add       write the job with its resolved tokens               (the request is acknowledged here)
    attempt   make its step, or finish it (`attempt.py`)
    after an error: the next attempt, later, or the end (`backoff.py`)

A server that is killed at any line continues at its next start: a job whose step exists is finished, any other job runs
again from the newest complete step. Jobs run one at a time, because they share the base model's trainer and the device.
"""

import asyncio
import functools
import itertools
import logging
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence

from pydantic import ValidationError

from art_protocol.wire import (
    JobEvent,
    JobInfo,
    JobReport,
    JobState,
    TrainConfig,
)
from art_server.engine.device.owner import DeviceOwner
from art_server.engine.fleet import Fleet
from art_server.engine.pause_gate import PauseGate
from art_server.errors import Conflict, NotFound, ServerError
from art_server.jobs.attempt import Attempt, has_committed, is_on_base
from art_server.jobs.backoff import error_detail, pause_after
from art_server.jobs.gang import Gang
from art_server.jobs.job_row import PENDING, JobRow, Payload, WaitingJob
from art_server.jobs.layer_check import LayerCheck
from art_server.jobs.queue import JobQueue
from art_server.jobs.trainer_process import TrainerError
from art_server.shared.clock import REAL, Clock
from art_server.store.registry import RegisteredModel, Registry

logger = logging.getLogger(__name__)

HEARTBEAT_SECONDS = 5.0
"""Longest time between two lines of a job's event stream. A client that gets no line for a minute reconnects."""
REST_SECONDS = 5.0
"""Pause between two checks of the queue while none of its jobs can run."""
EXPECTED_ERRORS = (ServerError, TrainerError, OSError)


class JobRunner:
    """Queues jobs and runs them, in order, in one background task: one at a time, or as many of different models as there are
    gangs."""

    def __init__(
        self,
        *,
        queue: JobQueue,
        registry: Registry,
        fleet: Fleet,
        gate: PauseGate,
        trainer: Gang,
        owner: DeviceOwner | None,
        retain: Callable[[RegisteredModel], Awaitable[None]],
        layers: LayerCheck | None = None,
        report: Callable[[JobRow, RegisteredModel | None], None] = lambda job, model: None,
        more_trainers: Sequence[Gang] = (),
        clock: Clock = REAL,
    ):
        """`owner` is the owner of the device that engine and trainer share; None if they have separate devices. `retain` is
        called after each job, to delete old steps. `layers` None: every layer of an adapter is trained. `report` is called with
        each change of a job, and must not wait. `more_trainers` are gangs beside `trainer`, which train at the same time."""
        self._queue = queue
        self._registry = registry
        self._fleet = fleet
        self._gate = gate
        self._trainer = trainer
        self._owner = owner
        self._retain = retain
        self._layers = layers
        self._report = report
        self._more_trainers = more_trainers
        self._clock = clock
        self._attempts: list[Attempt] = []
        """The attempts that run."""
        self._busy: set[int] = set()
        """The numbers of models with a job that runs."""
        self._lock = asyncio.Lock()
        """Held while a job is chosen."""
        self._changed = asyncio.Event()
        """Set at the next change of any job."""

    # --- queueing ---

    async def add_job(
        self,
        model: RegisteredModel,
        key: str | None,
        body_digest: str,
        config: TrainConfig,
        payload: Payload,
        report: JobReport,
        metrics: dict[str, float],
        expected_step: int | None = None,
        on_insert: Callable[[str], None] = lambda job_id: None,
    ) -> JobRow:
        """Writes a job to disk and queues it. Of two requests with the same key the second gets the job of the first. `on_insert` is
        as in `JobQueue.insert`.

        Raises:
            Conflict: the model is not at `expected_step`, or has a job that will change its step; or the key was used
                for a request with another body.
            TooMany: the queue is full.
        """
        job = await asyncio.to_thread(
            self._queue.insert,
            model.number,
            key,
            body_digest,
            config,
            payload,
            report,
            metrics,
            expected_step=expected_step,
            newest_step=functools.partial(self._newest_step, model.number),
            on_insert=on_insert,
        )
        logger.info("job %s accepted: %d trajectories for %s", job.job_id, report.num_trajectories, model.id)
        self._report(job, model)
        self._wake()
        return job

    def _newest_step(self, number: int) -> int | None:
        """The newest step of a model, which may have been renamed since its request came; None if the model is deleted."""
        model = self._registry.of_number(number)
        return None if model is None else model.folder.newest_step()

    async def is_repeated(self, model: RegisteredModel, key: str) -> bool:
        """Whether an earlier request with this idempotency key made a job."""
        return await asyncio.to_thread(self._queue.has_key, model.number, key)

    async def find_repeated(self, model: RegisteredModel, key: str | None, body_digest: str) -> JobRow | None:
        """The job that an earlier request with the same idempotency key made, or None. A job that failed with a
        retryable error is queued again, if a new request would be accepted.

        Raises:
            Conflict, TooMany: as `add_job`.
        """
        if key is None:
            return None
        job = await asyncio.to_thread(self._queue.find_key, model.number, key, body_digest)
        error = None if job is None else job.last_error
        if job is None or job.state != "failed" or error is None or not error.retryable:
            return job
        newest_step = functools.partial(self._newest_step, model.number)
        revived = await asyncio.to_thread(self._queue.revive, model.number, key, newest_step)
        if revived is None:  # another request was faster, or the key was forgotten
            return await asyncio.to_thread(self._queue.find_key, model.number, key, body_digest)
        logger.info("job %s is queued again: its request was repeated", revived.job_id)
        await self._report_change(revived.job_id)
        return revived

    async def get(self, job_id: str) -> JobRow:
        return await asyncio.to_thread(self._queue.get, job_id)

    async def jobs(self, projects: frozenset[str] | None, states: Sequence[JobState], limit: int) -> list[JobInfo]:
        """Up to `limit` jobs of these projects (None: all), in the order of `JobQueue.jobs`."""
        jobs = await asyncio.to_thread(self._queue.jobs, projects, states, limit)
        waiting, rate = await asyncio.to_thread(self._look)
        order = {waiting_job.job_id: index for index, waiting_job in enumerate(waiting)}
        jobs.sort(key=lambda job: order.get(job.job_id, len(order)))  # ended jobs stay as they are
        return [job.info(self._waits_for(job, waiting, rate)) for job in jobs]

    async def info(self, job_id: str) -> JobInfo:
        """A job as clients receive it."""
        job = await self.get(job_id)
        return job.info(await self._find_reason(job))

    async def move(self, job_id: str, before: str | None) -> None:
        """Moves a queued job before another one of its project, or behind all of them."""
        await asyncio.to_thread(self._queue.move, job_id, before)
        self._wake()

    async def cancel(self, job_id: str) -> None:
        """Removes a job from the queue, or stops its training before the next micro-batch.

        Raises:
            Conflict: the job has ended, or its step is on disk.
        """
        if await asyncio.to_thread(self._queue.set_cancelled, job_id, is_running=False):
            await self._report_change(job_id)
        else:
            await self._cancel_running(job_id)
        logger.info("job %s cancelled", job_id)

    async def _cancel_running(self, job_id: str) -> None:
        attempts = [attempt for attempt in self._attempts if attempt.job.job_id == job_id]
        for attempt in attempts:
            attempt.cancel()
            while attempt in self._attempts:
                await self._changed.wait()
        job = await self.get(job_id)
        if job.state == "running" and not self._may_have_committed(job):  # an earlier server ran it
            await asyncio.to_thread(self._queue.set_cancelled, job_id, is_running=True)
            await self._report_change(job_id)
        elif job.state != "cancelled":
            raise Conflict(
                f"job '{job_id}' cannot be cancelled any more: it is {job.state}",
                code="job_ended",
                param="job_id",
            )

    async def follow(self, job_id: str, after: int = -1) -> AsyncIterator[JobEvent]:
        """A job's events from now to its end; several clients may follow one job. `after` is the number of the last
        event that the client has: if nothing has changed since, the event is not sent again."""
        job = await self.get(job_id)
        if after < 0:
            yield JobEvent(event="accepted", job_id=job_id, report=job.report)
        while True:
            changed = self._changed  # before the row is read, as in `_run_with`
            job = await self.get(job_id)
            if job.state not in PENDING:
                break
            if job.changes != after:
                yield job.event(await self._find_reason(job))
            after = -1
            async with self._clock.at_most(HEARTBEAT_SECONDS):
                await changed.wait()
        yield job.event()

    async def _find_reason(self, job: JobRow) -> str | None:
        if job.state != "queued":  # the reason does not depend on the queue
            return self._waits_for(job, (), None)
        return self._waits_for(job, *await asyncio.to_thread(self._look))

    def _look(self) -> tuple[list[WaitingJob], float | None]:
        return self._queue.waiting(), self._queue.tokens_per_second()

    def _waits_for(self, job: JobRow, waiting: Sequence[WaitingJob], rate: float | None) -> str | None:
        """What a job waits for, as clients print it; None if it waits for nothing. `rate` is in tokens per second."""
        if job.state not in PENDING:
            return None
        if job.next_attempt_at and job.last_error is not None:
            seconds = max(0.0, job.next_attempt_at - self._clock.now())
            return f"another try in {seconds:.0f} s, because {job.last_error.message}"
        model = self._registry.of_number(job.model)
        if job.state == "running":
            if model is None or job.target_step is None:
                return self._fleet.start_waited_for
            adapter = model.adapter_name(job.target_step)
            return self._fleet.start_waited_for or self._fleet.load_waited_for(adapter)
        if model is not None and not is_on_base(self._fleet, model):
            return f"base model '{model.record.base_model}', which this server has not loaded"
        ahead = list(itertools.takewhile(lambda earlier: earlier.job_id != job.job_id, waiting))
        if not ahead:
            return None
        names: set[str] = set()
        for earlier in ahead:
            # A key may see its own project only.
            is_own = earlier.model_id.startswith(f"{job.project}/")
            names.add(earlier.model_id if is_own else "other projects")
        jobs = "job" if len(ahead) == 1 else "jobs"
        seconds = f", about {sum(earlier.num_tokens for earlier in ahead) / rate:.0f} s" if rate else ""
        return f"{len(ahead)} earlier {jobs}, of {', '.join(sorted(names))}{seconds}"

    # --- running ---

    @property
    def phase(self) -> str | None:
        """The phase of the running job; if several run, the phase of the first; None if no job runs."""
        return self._attempts[0].phase if self._attempts else None

    async def run_forever(self) -> None:
        """Runs jobs as they arrive. Jobs that an earlier server did not finish come first."""
        if not self._more_trainers:
            # It never returns. A TaskGroup would wrap an error in an ExceptionGroup, and `/health` shows the error's name.
            await self._run_with(self._trainer)
        async with asyncio.TaskGroup() as gangs:
            for trainer in (self._trainer, *self._more_trainers):
                gangs.create_task(self._run_with(trainer))

    async def _run_with(self, trainer: Gang) -> None:
        while True:
            # Before the queue is read: a change during the reading sets this event, and `_wake` puts another one in its place.
            changed = self._changed
            async with self._lock:
                job = await self._choose()
                if job is not None:
                    self._busy.add(job.model)
            if job is None:
                async with self._clock.at_most(REST_SECONDS):
                    await changed.wait()
                continue
            try:
                await self._run(job, trainer)
            finally:
                self._busy.discard(job.model)
                self._wake()

    async def _run(self, job: JobRow, trainer: Gang) -> None:
        attempt = None
        try:
            model = self._registry.of_number(job.model)
            if model is None:
                reason = f"the job's model, '{job.model_id}', was deleted, or no step of it can be read"
                raise NotFound(reason, code="unknown_model", param="name")
            await self._registry.prepare(model)
            attempt = Attempt(
                job,
                model,
                queue=self._queue,
                fleet=self._fleet,
                gate=self._gate,
                trainer=trainer,
                owner=self._owner,
                layers=self._layers,
                report_change=functools.partial(self._report_change, job.job_id),
            )
            self._attempts.append(attempt)
            await attempt.run()
            await self._retain(model)
        except Exception as error:  # one bad job must not stop the others
            is_cancelled = attempt is not None and attempt.is_cancelled
            await self._after_error(job.job_id, error, is_cancelled)
        finally:
            self._gate.open()
            if attempt in self._attempts:
                self._attempts.remove(attempt)
            self._wake()

    async def _choose(self) -> JobRow | None:
        """The first job that can be run now. The jobs of a model keep their order, and run one at a time."""
        now, passed = self._clock.now(), set(self._busy)
        for waiting in await asyncio.to_thread(self._queue.waiting):
            if waiting.next_attempt_at > now:
                passed.add(waiting.model)
            if waiting.model in passed:
                continue
            try:
                job = await self.get(waiting.job_id)
            except ValidationError as error:  # written by another version
                fail = functools.partial(self._queue.set_failed, is_unreadable=True)
                await asyncio.to_thread(fail, waiting.job_id, error_detail(error))
                continue
            model = self._registry.of_number(job.model)
            if model is None or is_on_base(self._fleet, model) or self._may_have_committed(job):
                return job
            passed.add(waiting.model)
        return None

    # --- after an error ---

    async def _after_error(self, job_id: str, error: Exception, is_cancelled: bool) -> None:
        """Decides what becomes of a job. A job whose step is on disk is retried until it is finished."""
        logger.error("job %s: %s", job_id, error, exc_info=not isinstance(error, EXPECTED_ERRORS))
        job, detail = await self.get(job_id), error_detail(error)
        attempts = job.attempts + Counter([detail.code])
        is_committed = self._may_have_committed(job)
        pause = pause_after(detail, attempts, is_committed=is_committed)
        if is_cancelled and not is_committed:
            change = functools.partial(self._queue.set_cancelled, job_id, is_running=True)
        elif pause is None:
            change = functools.partial(self._queue.set_failed, job_id, detail)
        else:
            change = functools.partial(
                self._queue.set_waiting,
                *(job_id, detail, attempts, self._clock.now() + pause),
                is_committed=is_committed,
            )
        if await asyncio.to_thread(change):  # not if the job has ended, and only deleting old steps failed
            await self._report_change(job_id)

    def _may_have_committed(self, job: JobRow) -> bool:
        """Whether the job's step is on disk. A step that cannot be read may be the job's, and is not trained again."""
        try:
            return has_committed(self._registry.of_number(job.model), job)
        except (ServerError, OSError, ValueError):
            return True

    async def _report_change(self, job_id: str) -> None:
        """Reports the row of a job that has changed."""
        job = await self.get(job_id)
        self._report(job, self._registry.of_number(job.model))
        self._wake()

    def _wake(self) -> None:
        """Wakes everything that waits for a change of any job."""
        changed, self._changed = self._changed, asyncio.Event()
        changed.set()
