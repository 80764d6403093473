"""The life of a job: from its resolved tokens to a step that serves.

    add       write the job with its resolved tokens              (the request is acknowledged here)
    run       close the pause gate, pause the engine, train in the trainer process into a temporary folder
    commit    rename the folder to its step                        (the step exists from here on)
    serve     load the adapter, resume the engine, make the step the model's current one, open the pause gate
    finish    write history and trajectories, mark the job done

A server that is killed at any line continues at its next start: a job whose step exists is finished, any other job runs
again from the newest complete step. Jobs run one at a time, because they share the base model's trainer and the device.
"""

import asyncio
import contextlib
import functools
import itertools
import logging
import sqlite3
import time
import zlib
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from dataclasses import dataclass, field

from pydantic import ValidationError

from art_protocol.wire import (
    ErrorDetail,
    JobEvent,
    JobInfo,
    JobReport,
    JobState,
    TrainConfig,
)
from art_server.device.owner import DeviceOwner
from art_server.engine.engine import AdapterRefused, Engine, PolicyDiffers
from art_server.engine.pause_gate import PauseGate
from art_server.errors import Conflict, ServerError, Unavailable
from art_server.jobs.layer_check import LayerCheck, note_lost
from art_server.jobs.metrics import DoneStep, JobNews, step_metrics
from art_server.jobs.queue import Job, JobQueue, Payload, Waiting
from art_server.jobs.step_record import StepRecord, base_digests, write_record
from art_server.jobs.trainer_process import TrainerDied, TrainerError, TrainerProcess
from art_server.shared.tasks import Done, Progress, TrainTask
from art_server.store.model_folder import CheckpointRecord
from art_server.store.registry import Model, Registry

logger = logging.getLogger(__name__)

HEARTBEAT_SECONDS = 5.0
"""Longest time between two lines of a job's event stream. A client that gets no line for a minute reconnects."""
DEATH_PAUSES = (1.0, 5.0, 20.0, 60.0, 120.0)
"""Pauses before a job's retries after the trainer process died or an unforeseen error: the cause (another program's
memory, an operator) may pass within minutes. After three deaths each retry has half as many tokens per micro-batch as the
one before; then the job fails."""
EVENTS_PER_START = 1_000_000
"""Each start of a job numbers its events from the next multiple of this, so they grow across restarts of the server."""
REST_SECONDS = 5.0
"""Pause between two checks of the queue while none of its jobs can run."""
ADAPTERS_KEPT_LOADED = 2
"""The current step and the one before it, which requests in flight may still use."""
ENGINE_WAIT_SECONDS = 3600.0
RETRY_SECONDS, LONGEST_RETRY_SECONDS = 5.0, 60.0
"""First and longest pause before a retry after an error of engine, disk or device; it doubles with each retry."""
EXPECTED_ERRORS = (ServerError, TrainerError, OSError)


@dataclass(frozen=True, slots=True)
class Hold:
    """Why a model's jobs wait, and until when (monotonic clock)."""

    reason: str
    until: float
    tries: int


@dataclass(slots=True)
class Position:
    """The phase and the progress of a running job, for the clients that follow it."""

    phase: str = "queued"
    completed: int | None = None
    total: int | None = None
    since: float = field(default_factory=time.monotonic)
    seconds: dict[str, float] = field(default_factory=dict)
    """Of completed phases, by name."""
    number: int = 0
    """Number of calls of `move` so far."""

    def move(self, phase: str, completed: int | None = None, total: int | None = None) -> None:
        """Enters a phase, or continues within it."""
        if phase != self.phase:
            now = time.monotonic()
            name = self.phase.partition(" ")[0]  # "train 2 of 3" counts as "train"
            self.seconds[name] = self.seconds.get(name, 0.0) + now - self.since
            self.since = now
        self.phase, self.completed, self.total = phase, completed, total
        self.number += 1


@dataclass(eq=False)
class JobRunner:
    """Queues jobs and runs them, in order, in one background task."""

    _queue: JobQueue
    _registry: Registry
    _engine: Engine
    _gate: PauseGate
    _trainer: TrainerProcess
    _owner: DeviceOwner | None
    """Of the device that engine and trainer share; None if they have separate devices."""
    _retain: Callable[[Model], Awaitable[None]]
    """Called after each job, to delete old steps."""
    _layers: LayerCheck | None = None
    """None: every layer of an adapter is trained."""
    _report: Callable[[JobNews], None] = lambda _: None
    """Called with each change of a job; must not wait."""
    _positions: dict[str, Position] = field(init=False, default_factory=dict)
    _holds: dict[str, Hold] = field(init=False, default_factory=dict)
    """By model id."""
    _tries: Counter[str] = field(init=False, default_factory=Counter)
    _deaths: Counter[str] = field(init=False, default_factory=Counter)
    """By job: unexpected errors, and how many of them were deaths of the trainer."""
    _cancelled: set[str] = field(init=False, default_factory=set)
    _running: str | None = field(init=False, default=None)
    _changed: asyncio.Event = field(init=False, default_factory=asyncio.Event)
    _wake: asyncio.Event = field(init=False, default_factory=asyncio.Event)

    # --- queueing ---

    async def add(
        self,
        model: Model,
        key: str | None,
        body_digest: str,
        config: TrainConfig,
        payload: Payload,
        report: JobReport,
        metrics: dict[str, float],
        expected_step: int | None = None,
    ) -> Job:
        """Writes a job to disk and queues it. Of two requests with the same key the second gets the job of the first.

        Raises:
            Conflict: the model is not at `expected_step`, or has a job that will change its step; or the key was used
                for a request with another body.
            TooMany: the queue is full.
        """
        check_alone = None
        if expected_step is not None:
            check_alone = functools.partial(self._check_step, model, expected_step)
        job = await asyncio.to_thread(
            self._queue.add,
            model.record.project,
            model.record.name,
            key,
            body_digest,
            config,
            payload,
            report,
            metrics,
            check_alone=check_alone,
        )
        logger.info(
            "job %s accepted: %d trajectories for %s", job.job_id, report.num_trajectories, model.id
        )
        self._report(JobNews(job, "accepted", key=key))
        self._wake.set()
        return job

    @staticmethod
    def _check_step(model: Model, expected: int) -> None:
        newest = model.folder.newest_step() or 0
        if expected != newest:
            raise Conflict(
                f"expected_step is {expected}, but model '{model.id}' is at step {newest}: sample with that step, or "
                "leave out expected_step",
                code="step_moved",
                param="expected_step",
            )

    async def has_key(self, model: Model, key: str) -> bool:
        """Whether an earlier request with this idempotency key made a job."""
        record = model.record
        return await asyncio.to_thread(self._queue.has_key, record.project, record.name, key)

    async def find(self, model: Model, key: str | None, body_digest: str) -> Job | None:
        """The job that an earlier request with the same idempotency key made, or None. A job that failed with a
        retryable error is queued again."""
        if key is None:
            return None
        record = model.record
        job = await asyncio.to_thread(
            self._queue.find_key, record.project, record.name, key, body_digest
        )
        if job is None or job.state != "failed" or job.error is None or not job.error.retryable:
            return job
        if await asyncio.to_thread(self._queue.revive, job.job_id):
            self._forget_errors(job)
            logger.info("job %s is queued again: its request was repeated", job.job_id)
            self._report(JobNews(job, "accepted", key=key))
            self._wake.set()
        return await self.get(job.job_id)

    async def get(self, job_id: str) -> Job:
        return await asyncio.to_thread(self._queue.get, job_id)

    async def jobs(
        self, projects: frozenset[str] | None, states: Sequence[JobState], limit: int
    ) -> list[JobInfo]:
        """Up to `limit` jobs of these projects (None: all), in the order of `JobQueue.jobs`."""
        found = await asyncio.to_thread(self._queue.jobs, projects, states, limit)
        waiting = await asyncio.to_thread(self._queue.waiting)
        return [job.info(self._waits_for(job, waiting)) for job in found]

    async def info(self, job_id: str) -> JobInfo:
        """A job as clients receive it."""
        job = await self.get(job_id)
        return job.info(self._waits_for(job, await asyncio.to_thread(self._queue.waiting)))

    async def move(self, job_id: str, before: str | None) -> None:
        """Moves a queued job before another one, or to the end of the queue."""
        await asyncio.to_thread(self._queue.move, job_id, before)
        self._notify()

    async def cancel(self, job_id: str) -> None:
        """Removes a job from the queue, or stops its training before the next micro-batch.

        Raises:
            Conflict: the job has ended, or its step is on disk.
        """
        if not await asyncio.to_thread(self._queue.set_cancelled, job_id, is_running=False):
            await self._cancel_running(await self.get(job_id))
        self._report(JobNews(await self.get(job_id), "cancelled"))
        logger.info("job %s cancelled", job_id)
        self._notify()

    async def _cancel_running(self, job: Job) -> None:
        self._cancelled.add(job.job_id)
        if self._running == job.job_id:
            self._trainer.cancel()
        while self._running == job.job_id:
            await self._changed.wait()
        self._cancelled.discard(job.job_id)
        job = await self.get(job.job_id)
        if job.state == "running" and not self._has_committed(job):  # it waits for a retry
            await asyncio.to_thread(self._queue.set_cancelled, job.job_id, is_running=True)
        elif job.state != "cancelled":
            raise Conflict(
                f"job '{job.job_id}' cannot be cancelled any more: it is {job.state}",
                code="job_ended",
                param="job_id",
            )

    async def follow(self, job_id: str, after: int = -1) -> AsyncIterator[JobEvent]:
        """A job's events from now to its end; several clients may follow one job. `after` is the number of the last
        event that the client has: if nothing has changed since, it is not sent again."""
        job = await self.get(job_id)
        if after < 0:
            yield JobEvent(event="accepted", job_id=job_id, report=job.report)
        while job.state in ("queued", "running"):
            position = self._positions.get(job_id, Position())
            number = job.starts * EVENTS_PER_START + position.number
            waiting = await asyncio.to_thread(self._queue.waiting)
            if number != after:
                yield JobEvent(
                    event="progress" if job.state == "running" else "waiting",
                    job_id=job_id,
                    number=number,
                    phase=position.phase,
                    completed=position.completed,
                    total=position.total,
                    waits_for=self._waits_for(job, waiting),
                )
            after = -1
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(HEARTBEAT_SECONDS):
                    await self._changed.wait()
            job = await self.get(job_id)
        if job.state == "done":
            yield JobEvent(
                event="done",
                job_id=job_id,
                step=job.target_step,
                metrics=job.metrics,
                report=job.report,
            )
        else:
            cancelled = ErrorDetail(message=f"job {job_id} was cancelled", code="cancelled")
            error = cancelled if job.state == "cancelled" else job.error
            yield JobEvent(event="error", job_id=job_id, error=error, report=job.report)

    def _waits_for(self, job: Job, waiting: Sequence[Waiting]) -> str | None:
        """What a job waits for, as clients print it; None if it waits for nothing."""
        if job.state == "running" and (reason := self._engine.start_waited_for) is not None:
            return reason
        if job.state != "queued":
            return None
        model = self._registry.find(job.project, job.name)
        if model is not None and not self._is_on_base(model):
            return f"base model '{model.record.base_model}', which this server has not loaded"
        model_id = f"{job.project}/{job.name}"
        hold = self._holds.get(model_id)
        if hold is not None:
            seconds = max(0.0, hold.until - time.monotonic())
            return f"another try in {seconds:.0f} s, because {hold.reason}"
        ahead = list(itertools.takewhile(lambda each: each.job_id != job.job_id, waiting))
        # A key may see its own project only.
        own, others = f"{job.project}/", "other projects"
        known = (each.model_id for each in ahead)
        models = ", ".join(sorted({each if each.startswith(own) else others for each in known}))
        jobs = "job" if len(ahead) == 1 else "jobs"
        return f"{len(ahead)} earlier {jobs}, of {models}" if ahead else None

    # --- running ---

    @property
    def phase(self) -> str | None:
        """The phase of the running job; None if no job runs."""
        position = None if self._running is None else self._positions.get(self._running)
        return None if position is None else position.phase

    async def run_forever(self) -> None:
        """Runs jobs as they arrive. Jobs that an earlier server did not finish come first."""
        while True:
            self._wake.clear()
            job = await self._choose()
            if job is None:
                await self._rest()
                continue
            self._running = job.job_id
            try:
                await self._run(job)
                self._holds.pop(f"{job.project}/{job.name}", None)
                self._forget_errors(job)
            except Exception as error:  # one bad job must not stop the others
                await self._after_error(job, error)
            finally:
                self._gate.open()
                self._running = None
                self._positions.pop(job.job_id, None)
                self._notify()

    async def _choose(self) -> Job | None:
        """The first job that can be run now. The jobs of a model keep their order."""
        now = time.monotonic()
        passed = {model for model, hold in self._holds.items() if hold.until > now}
        for waiting in await asyncio.to_thread(self._queue.waiting):
            if waiting.model_id in passed:
                continue
            try:
                job = await self.get(waiting.job_id)
            except ValueError as error:  # written by another version
                unreadable = ErrorDetail(
                    message=f"the job cannot be read: {error}", code="unreadable_job"
                )
                await asyncio.to_thread(
                    self._queue.set_failed, waiting.job_id, unreadable, is_unreadable=True
                )
                continue
            model = self._registry.find(job.project, job.name)
            if model is None or self._is_on_base(model) or self._has_committed(job):
                return job
            passed.add(waiting.model_id)
        return None

    async def _rest(self) -> None:
        """Waits for a job to arrive, at most until it is time to check the queue again."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(REST_SECONDS):
                await self._wake.wait()

    def _is_on_base(self, model: Model) -> bool:
        base = self._engine.base
        return base is not None and base.name == model.record.base_model

    async def _run(self, job: Job) -> None:
        model = self._registry.get(job.project, job.name)
        step, notes = job.target_step, list[str]()
        if step is None or not self._has_committed(job):
            config = TrainConfig.model_validate_json(job.config)
            step = (model.folder.newest_step() or 0) + 1
            if not await asyncio.to_thread(self._queue.set_running, job.job_id, step):
                return  # cancelled meanwhile
            job = await self.get(job.job_id)
            await self._wait_engine(job)
            await self._compare_start(model, step - 1)
            try:
                lost = await self._find_lost_layers(model, job)
                await self._train(model, job, step, config, lost)
            finally:  # a failed attempt's files could fill the disk for the next one
                await asyncio.to_thread(model.folder.clear_temporary)
        if self._is_on_base(model):
            notes = await self._serve(model, job, step)
        else:
            model.step = step
        await self._finish(model, job, step, notes)

    def _has_committed(self, job: Job) -> bool:
        """Whether the job's step is on disk."""
        model = self._registry.find(job.project, job.name)
        step = job.target_step
        if model is None or step is None or step not in model.folder.steps():
            return False
        return model.folder.read_checkpoint(step).job_id == job.job_id

    async def _wait_engine(self, job: Job) -> None:
        """Returns when the engine is ready.

        Raises:
            Unavailable: the engine could not be started.
            TrainerError: the job was cancelled.
        """
        while self._engine.state == "starting":
            self._stop_if_cancelled(job)
            self._move(job, "engine")
            with contextlib.suppress(Unavailable):
                await self._engine.wait_ready(HEARTBEAT_SECONDS)
        await self._engine.wait_ready(HEARTBEAT_SECONDS)

    async def _compare_start(self, model: Model, step: int) -> None:
        """Has the engine load the step that a job starts from, if its probe has something to compare.

        Raises:
            PolicyDiffers: the engine computes another policy for it than the trainer.
        """
        record = await asyncio.to_thread(model.folder.read_checkpoint, step)
        if record.probe is None or not record.probe.is_of_step:
            return
        try:
            await self._engine.load_adapter(
                model.adapter_name(step), model.folder.checkpoint_dir(step), ENGINE_WAIT_SECONDS
            )
        except PolicyDiffers:
            raise
        except AdapterRefused:  # a step that the engine does not take can be trained on
            pass

    def _stop_if_cancelled(self, job: Job) -> None:
        if job.job_id in self._cancelled:
            raise TrainerError("cancelled", "the job was cancelled", retryable=True)

    async def _find_lost_layers(self, model: Model, job: Job) -> dict[str, str]:
        """The kinds of layers that the engine does not adapt, and why (`layer_check.py`).

        Raises:
            PolicyDiffers: it adapts none as the trainer does.
        """
        base, bars = self._engine.base, self._engine.gap_bars
        if self._layers is None or base is None or bars is None:
            return {}
        known = await asyncio.to_thread(self._layers.known, base, bars)
        if known is not None:
            return known
        folder = await asyncio.to_thread(model.folder.new_checkpoint_dir)
        async with self._turn(model, job):
            self._stop_if_cancelled(job)
            self._move(job, "check layers")
            longest = self._engine.max_seq_length
            kinds = await self._layers.score(
                self._trainer, model.record.lora, bars, longest, folder
            )
        return await self._layers.compare(
            self._engine, base, bars, folder, kinds, ENGINE_WAIT_SECONDS
        )

    async def _train(
        self, model: Model, job: Job, step: int, config: TrainConfig, lost: dict[str, str]
    ) -> None:
        batch = await asyncio.to_thread(self._queue.batch, job.job_id)
        start = await asyncio.to_thread(model.folder.read_checkpoint, step - 1)
        started = time.monotonic()
        async with self._turn(model, job):
            self._stop_if_cancelled(job)
            self._move(job, "train")
            temporary = await asyncio.to_thread(model.folder.new_checkpoint_dir)
            task = TrainTask(
                lora=model.record.lora,
                in_dir=str(model.folder.checkpoint_dir(step - 1)),
                out_dir=str(temporary),
                config=config,
                start_step=step - 1,
                optimizer_steps=start.optimizer_steps,
                max_seq_length=self._engine.max_seq_length,
                seed=seed_of(model, step),
                gap_bars=self._engine.gap_bars,
                probe=start.probe,
                lost_layers=sorted(lost),
                # The kernel kills a process that takes too much memory. Two deaths may have another reason.
                budget_divisor=2 ** max(0, self._deaths[job.job_id] - 2),
            )
            done = await self._run_trainer(job, task, batch)
            metrics = done.metrics | {"time/step_backend_train_s": time.monotonic() - started}
            record = CheckpointRecord(
                step=step,
                job_id=job.job_id,
                metrics=metrics,
                unchanged=done.unchanged,
                optimizer_steps=done.optimizer_steps,
                notes=[*done.notes, *note_lost(lost)],
                probe=done.probe,
                environment=done.environment,
            )
            await run_whole(model.folder.commit_checkpoint, temporary, record)
            if self._owner is not None:
                self._move(job, "load")
                await self._engine.wake_weights()
                await self._engine.load_adapter(
                    model.adapter_name(step),
                    model.folder.checkpoint_dir(step),
                    ENGINE_WAIT_SECONDS,
                    holds_device=True,
                )

    @contextlib.asynccontextmanager
    async def _turn(self, model: Model, job: Job) -> AsyncIterator[None]:
        """Gives a shared device to the trainer; no request samples meanwhile. Does nothing with separate devices."""
        if self._owner is None:
            yield
            return
        self._gate.close(f"a step of '{model.id}', which trains")
        async with self._owner.held():
            self._move(job, "pause")
            await self._engine.pause()
            try:
                yield
            finally:
                # Frozen requests continue even if the job fails.
                await self._engine.resume()

    async def _run_trainer(self, job: Job, task: TrainTask, batch: bytes) -> Done:
        waking: asyncio.Task[None] | None = None

        def on_progress(progress: Progress) -> None:
            nonlocal waking
            self._move(job, progress.phase, progress.completed, progress.total)
            if job.job_id in self._cancelled:
                self._trainer.cancel()
            if progress.phase == "save" and waking is None:
                # The trainer has left the device: the engine loads its weights while the step is written to disk.
                waking = asyncio.create_task(self._engine.wake_weights())

        try:
            return await self._trainer.run(task, on_progress, batch)
        finally:
            if waking is not None:
                await waking

    async def _serve(self, model: Model, job: Job, step: int) -> list[str]:
        """Loads the step's adapter and then makes the step current, so that no request gets a step that is not loaded.
        Returns notes for the client: a step that the engine cannot load is trained nevertheless."""
        self._move(job, "load")
        name = model.adapter_name(step)
        notes: list[str] = []
        try:
            await self._engine.load_adapter(
                name, model.folder.checkpoint_dir(step), ENGINE_WAIT_SECONDS
            )
        except AdapterRefused as error:
            notes = [
                f"step {step} is saved but does not serve: {error.message}. Step {model.step} still serves"
            ]
        except Unavailable as error:
            notes = [f"step {step} is saved and serves once the engine is ready: {error.message}"]
            model.step = step
        else:
            model.step = step
        self._gate.open()
        self._move(job, "finish")
        for note in notes:
            logger.error("%s: %s", model.id, note)
        if not notes:
            logger.info("%s serves", name)
            self._unload_old(model, step)
        return notes

    def _unload_old(self, model: Model, step: int) -> None:
        kept = {model.adapter_name(step - back) for back in range(ADAPTERS_KEPT_LOADED)}
        for loaded in self._engine.loaded_adapters():
            is_old = loaded.rpartition("@")[0] == model.id and loaded not in kept
            if is_old and not self._gate.uses(loaded):
                self._engine.unload_adapter(loaded)

    async def _finish(self, model: Model, job: Job, step: int, notes: Sequence[str]) -> None:
        lines = await asyncio.to_thread(self._queue.trajectories, job.job_id)
        record = model.folder.read_checkpoint(step)
        metrics = record.metrics | job.metrics | step_metrics(job.report.sampled_steps)
        metrics |= {
            f"time/job_{phase}_s": seconds
            for phase, seconds in self._positions.get(job.job_id, Position()).seconds.items()
            if phase != "queued"
        }
        all_notes = [*job.report.notes, *record.notes, *notes]
        report = job.report.model_copy(update={"notes": all_notes})
        await asyncio.to_thread(model.folder.write_lines, "train", step, lines)
        await asyncio.to_thread(model.folder.keep_tokens, step)
        await asyncio.to_thread(self._write_record, model, job, record)
        await asyncio.to_thread(model.history.add, step, metrics, job.job_id)
        # Here, because the row says which earlier step is the best.
        best = await asyncio.to_thread(model.history.best_step)
        await asyncio.to_thread(model.folder.prune_optimizer_state, best)
        await asyncio.to_thread(self._queue.set_done, job.job_id, metrics, report)
        self._report(JobNews(job, "done", done=DoneStep(model, step, metrics, report)))
        self._notify()
        await self._retain(model)

    def _write_record(self, model: Model, job: Job, made: CheckpointRecord) -> None:
        """Writes the record from which the step can be made again."""
        if not made.environment:
            return  # an earlier version made the step
        base = self._engine.base if self._is_on_base(model) else None
        record = StepRecord(
            model=model.id,
            step=made.step,
            start_step=made.step - 1,
            base_model=model.record.base_model,
            base_files=base_digests(base.path) if base is not None else {},
            lora=model.record.lora,
            config=TrainConfig.model_validate_json(job.config),
            seed=seed_of(model, made.step),
            environment=made.environment,
        )
        write_record(model.folder, record, self._queue.packed_batch(job.job_id))

    # --- after an error ---

    async def _after_error(self, job: Job, error: Exception) -> None:
        """Schedules a job's retry, or ends the job. A job whose step is on disk is retried until it is finished."""
        logger.error(
            "job %s: %s", job.job_id, error, exc_info=not isinstance(error, EXPECTED_ERRORS)
        )
        model_id = f"{job.project}/{job.name}"
        detail = error_detail(error)
        try:
            if self._has_committed(await self.get(job.job_id)):
                self._hold(model_id, detail.message)
            elif job.job_id in self._cancelled:
                await asyncio.to_thread(self._queue.set_cancelled, job.job_id, is_running=True)
            elif (pause := self._pause(job, error)) is None:
                await asyncio.to_thread(self._queue.set_failed, job.job_id, detail)
                self._report(JobNews(job, "failed", error=detail.code))
            else:
                self._hold(model_id, detail.message, pause)
                await asyncio.to_thread(self._queue.set_waiting, job.job_id, detail)
                self._report(JobNews(job, "waiting", error=detail.code))
        except Exception as second:  # the disk that holds the queue may be the cause
            logger.error("the state of job %s could not be updated: %s", job.job_id, second)
            self._hold(model_id, str(second))

    def _pause(self, job: Job, error: Exception) -> float | None:
        """Least seconds until a job is retried; None if the job itself is at fault, or has used up its retries."""
        if is_environment(error):
            return 0.0
        if isinstance(error, TrainerError) and not isinstance(error, TrainerDied):
            return None
        if isinstance(error, ServerError | ValidationError):
            return None
        self._tries[job.job_id] += 1
        self._deaths[job.job_id] += isinstance(error, TrainerDied)
        return dict(enumerate(DEATH_PAUSES, 1)).get(self._tries[job.job_id])

    def _forget_errors(self, job: Job) -> None:
        del self._tries[job.job_id], self._deaths[job.job_id]

    def _hold(self, model_id: str, reason: str, pause: float = 0.0) -> None:
        """Makes a model's jobs wait; those of other models run."""
        last = self._holds.get(model_id)
        tries = last.tries + 1 if last is not None else 1
        pause = max(pause, min(RETRY_SECONDS * 2 ** (tries - 1), LONGEST_RETRY_SECONDS))
        self._holds[model_id] = Hold(reason, time.monotonic() + pause, tries)

    def _move(
        self, job: Job, phase: str, completed: int | None = None, total: int | None = None
    ) -> None:
        self._positions.setdefault(job.job_id, Position()).move(phase, completed, total)
        self._report(JobNews(job, "phase", phase=phase))
        self._notify()

    def _notify(self) -> None:
        """Wakes everything that waits for a change of any job."""
        changed, self._changed = self._changed, asyncio.Event()
        changed.set()


async def run_whole(change: Callable[..., object], *arguments: object) -> None:
    """Runs a change of files in a thread. A cancelled caller waits for its end, so that nobody cleans up under it."""
    running = asyncio.ensure_future(asyncio.to_thread(change, *arguments))
    try:
        await asyncio.shield(running)
    except asyncio.CancelledError:
        await asyncio.wait([running])
        raise


def seed_of(model: Model, step: int) -> int:
    """The seed of the job that makes the step."""
    return zlib.crc32(model.adapter_name(step).encode())


def is_environment(error: Exception) -> bool:
    """Whether a job failed for a temporary reason outside the job: engine, disk, database or device."""
    if isinstance(error, TrainerDied):
        return False
    if isinstance(error, ServerError | TrainerError):
        return error.retryable
    return isinstance(error, OSError | sqlite3.Error)


def error_detail(error: Exception) -> ErrorDetail:
    """A job's error as clients receive it."""
    if isinstance(error, ServerError | TrainerError):
        return ErrorDetail(
            message=error.message, code=error.code, type="server_error", retryable=error.retryable
        )
    return ErrorDetail(
        message=f"{type(error).__name__}: {error}", code="internal_error", type="server_error"
    )
