"""The life of a job: from an acknowledged request to a step that serves.

    accept    resolve tokens, write the job                       (the request is acknowledged here)
    run       close the gate, pause the engine, train in the trainer's process into a temporary folder
    commit    rename the folder to its step                        (the step exists from here on)
    serve     resume the engine, load the adapter, move the alias, open the gate
    finish    history, trajectories, mark the job done

A server killed at any line goes on at the next start: a job whose step exists is finished, any other runs again from
the newest whole step. Jobs run one at a time, for they share the base model's trainer and the device.
"""

import asyncio
import contextlib
import functools
import itertools
import logging
import sqlite3
import time
import zlib
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any

from pydantic import ValidationError

from art.wire import (
    ErrorDetail,
    JobEvent,
    JobInfo,
    JobReport,
    JobState,
    TrainConfig,
    TrainRequest,
)
from art_server import clock
from art_server.device.owner import DeviceOwner
from art_server.engine.engine import AdapterRefused, Engine
from art_server.engine.gate import Gate
from art_server.errors import Conflict, ServerError, Unavailable
from art_server.jobs.metrics import step_metrics, trajectory_metrics
from art_server.jobs.queue import Job, JobQueue, Payload, Waiting
from art_server.jobs.resolve import Limits, Message, Sources, resolve
from art_server.jobs.trainer import Trainer
from art_server.jobs.trainer_process import TrainerDied, TrainerError
from art_server.ledger.ledger import Ledger
from art_server.shared.tasks import Done, GapBars, Progress, TrainTask
from art_server.store.model_folder import CheckpointRecord
from art_server.store.registry import Model, Registry

logger = logging.getLogger(__name__)

ACCEPTING_THREADS = 2
HEARTBEAT_SECONDS = 5.0
"""Between two lines of a job's event stream, at most: a client that hears nothing for a minute reconnects."""
DEATH_PAUSES = (1.0, 5.0, 20.0, 60.0, 120.0)
"""Before a job is tried again under which the trainer's process died: what killed it (another program's memory, an operator)
may pass within minutes. The last try has half the tokens at a time; then the job is given up."""
EVENTS_PER_START = 1_000_000
"""So that the events of a job are numbered on over restarts of the server."""
REST_SECONDS = 5.0
"""Between two looks at jobs of which none can run."""
ADAPTERS_KEPT_LOADED = 2
"""The step that serves and the one before, which requests in flight may still use."""
ENGINE_WAIT_SECONDS = 3600.0
RETRY_SECONDS, LONGEST_RETRY_SECONDS = 5.0, 60.0
"""Before a job is tried again that found the engine, the disk or the device not as it needs them, doubled from try to try."""
EXPECTED_ERRORS = (ServerError, TrainerError, OSError)


@dataclass(frozen=True, slots=True)
class Hold:
    """Why a model's jobs wait, and until when on the monotonic clock."""

    reason: str
    until: float
    tries: int


@dataclass(slots=True)
class Position:
    """Where a running job is, for those who follow it."""

    phase: str = "queued"
    completed: int | None = None
    total: int | None = None
    since: float = field(default_factory=time.monotonic)
    seconds: dict[str, float] = field(default_factory=dict)
    """Of the phases before this one."""
    number: int = 0
    """Of moves so far."""

    def move(self, phase: str, completed: int | None = None, total: int | None = None) -> None:
        """Go on, within the phase or to another."""
        if phase != self.phase:
            now = time.monotonic()
            name = self.phase.partition(" ")[0]  # "train 2 of 3" is training
            self.seconds[name] = self.seconds.get(name, 0.0) + now - self.since
            self.since = now
        self.phase, self.completed, self.total = phase, completed, total
        self.number += 1


class JobRunner:
    """Accepts train requests and runs them, in order, in one background task."""

    def __init__(
        self,
        queue: JobQueue,
        registry: Registry,
        ledger: Ledger,
        engine: Engine,
        gate: Gate,
        trainer: Trainer,
        owner: DeviceOwner | None,
        gap_bars: GapBars | None,
        retain: Callable[[Model], Awaitable[None]],
    ):
        self._queue = queue
        self._registry = registry
        self._ledger = ledger
        self._engine = engine
        self._gate = gate
        self._trainer = trainer
        self._owner = owner
        """Of the device that engine and trainer share; None where they take no turns."""
        self._gap_bars = gap_bars
        self._retain = retain
        """Called after each step, to delete old ones."""
        self._positions: dict[str, Position] = {}
        self._holds: dict[str, Hold] = {}
        """By model."""
        self._deaths: dict[str, int] = {}
        """By job: how often the trainer died under it."""
        self._cancelled: set[str] = set()
        self._running: str | None = None
        self._accepting = ThreadPoolExecutor(ACCEPTING_THREADS, "accept")
        self._changed = asyncio.Event()
        self._wake = asyncio.Event()

    # --- accepting ---

    async def accept(
        self,
        model: Model,
        request: TrainRequest,
        owner: str,
        key: str | None,
        body_digest: str,
        limits: Limits,
        notes: Sequence[str] = (),
    ) -> Job:
        """Make a request a job: when this returns, it is on disk with resolved tokens. `notes` go into its report.

        Raises:
            InvalidInput: nothing in it can be trained.
            Conflict: the model is not at `expected_step`, or will not stay there.
            TooMany: the queue is full.
        """
        expected = request.expected_step
        self._check_step(model, expected)
        # Threads of its own: a job may wait here for the engine's tokenizer, and everything else needs threads, too.
        payload, report, metrics = await asyncio.get_running_loop().run_in_executor(
            self._accepting, self._prepare, model, request, self._sources(model), limits
        )
        record = model.record
        job = await asyncio.to_thread(
            self._queue.add,
            owner,
            record.project,
            record.name,
            key,
            body_digest,
            request.config,
            payload,
            report.model_copy(update={"notes": [*report.notes, *notes]}),
            metrics,
            must_be_alone=expected is not None,
        )
        try:
            self._check_step(model, expected)  # a job may have ended since the first look
        except Conflict:
            await asyncio.to_thread(self._queue.set_cancelled, job.job_id, is_running=False)
            raise
        logger.info(
            "job %s accepted: %d trajectories for %s", job.job_id, report.num_trajectories, model.id
        )
        self._wake.set()
        return job

    @staticmethod
    def _prepare(
        model: Model, request: TrainRequest, sources: Sources, limits: Limits
    ) -> tuple[Payload, JobReport, dict[str, float]]:
        """Everything that a job needs of its request."""
        batch, report = resolve(request.groups, request.config, model.id, sources, limits)
        payload = Payload.make(batch, request.groups)
        return payload, report, trajectory_metrics(request.groups, "train")

    @staticmethod
    def _check_step(model: Model, expected: int | None) -> None:
        newest = model.folder.newest_step() or 0
        if expected is not None and expected != newest:
            raise Conflict(
                f"expected_step is {expected}, and model '{model.id}' is at step {newest}: sample with that one, or leave "
                "expected_step out",
                code="step_moved",
                param="expected_step",
            )

    def _sources(self, model: Model) -> Sources:
        """Where a job's tokens are looked for; used from a thread."""
        loop = asyncio.get_running_loop()
        project, name = model.record.project, model.record.name

        def ask_engine(body: dict[str, Any]) -> list[int]:
            asked = asyncio.run_coroutine_threadsafe(self._engine.tokenize(body), loop)
            return asked.result(ENGINE_WAIT_SECONDS)

        def render(messages: list[Message], tools: list[dict[str, Any]] | None) -> list[int]:
            body: dict[str, Any] = {"messages": messages, "add_generation_prompt": True}
            return ask_engine(body | ({"tools": tools} if tools else {}))

        return Sources(
            find_record=self._ledger.find,
            find_text=functools.partial(self._ledger.find_text, project, name),
            render=render,
            tokenize=lambda text: ask_engine({"prompt": text, "add_special_tokens": False}),
            token_text=self._ledger.token_text,
            end_id=self._ledger.end_id,
        )

    async def find(self, model: Model, key: str | None, body_digest: str) -> Job | None:
        """The job that an earlier request with the same key made; without a key there is none. One that failed for a reason
        which may pass runs again."""
        if key is None:
            return None
        record = model.record
        job = await asyncio.to_thread(
            self._queue.find_key, record.project, record.name, key, body_digest
        )
        if job is None or job.state != "failed" or job.error is None or not job.error.retryable:
            return job
        if await asyncio.to_thread(self._queue.revive, job.job_id):
            logger.info("job %s runs again: its request was repeated", job.job_id)
            self._wake.set()
        return await self.get(job.job_id)

    async def get(self, job_id: str) -> Job:
        return await asyncio.to_thread(self._queue.get, job_id)

    async def jobs(
        self, projects: frozenset[str] | None, states: Sequence[JobState], limit: int
    ) -> list[JobInfo]:
        """The jobs that a caller with access to `projects` may see, in the order of the queue."""
        found = await asyncio.to_thread(self._queue.jobs, projects, states, limit)
        waiting = await asyncio.to_thread(self._queue.waiting)
        return [job.info(self._waits_for(job, waiting)) for job in found]

    async def info(self, job_id: str) -> JobInfo:
        """A job as its client sees it."""
        job = await self.get(job_id)
        return job.info(self._waits_for(job, await asyncio.to_thread(self._queue.waiting)))

    async def move(self, job_id: str, before: str | None) -> None:
        """Put a queued job before another one, or at the end."""
        await asyncio.to_thread(self._queue.move, job_id, before)
        self._notify()

    async def cancel(self, job_id: str) -> None:
        """Take a job out of the queue, or stop its training before the next micro-batch.

        Raises:
            Conflict: it has ended, or its step is written already.
        """
        if not await asyncio.to_thread(self._queue.set_cancelled, job_id, is_running=False):
            await self._cancel_running(await self.get(job_id))
        logger.info("job %s cancelled", job_id)
        self._notify()

    async def _cancel_running(self, job: Job) -> None:
        self._cancelled.add(job.job_id)
        self._trainer.cancel()
        while self._running == job.job_id:
            await self._changed.wait()
        self._cancelled.discard(job.job_id)
        job = await self.get(job.job_id)
        if job.state == "running" and not self._has_committed(job):  # it waits for another try
            await asyncio.to_thread(self._queue.set_cancelled, job.job_id, is_running=True)
        elif job.state != "cancelled":
            raise Conflict(
                f"job '{job.job_id}' cannot be cancelled any more: it is {job.state}",
                code="job_ended",
                param="job_id",
            )

    async def follow(self, job_id: str, after: int = -1) -> AsyncIterator[JobEvent]:
        """A job's events, from now to its end; anyone may follow, any number of times. `after` is the number of the last
        event that is known already: what it told is not told again."""
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
        """What keeps a job from going on, as its client reads it."""
        if job.state == "running" and self._engine.state == "starting":
            return f"the engine, which starts. {self._engine.detail or ''}".rstrip()
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
        models = ", ".join(sorted({each.model_id for each in ahead}))
        jobs = "job" if len(ahead) == 1 else "jobs"
        return f"{len(ahead)} earlier {jobs}, of {models}" if ahead else None

    # --- running ---

    async def run_forever(self) -> None:
        """Run jobs as they come. Interrupted ones of an earlier server come first."""
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
                self._deaths.pop(job.job_id, None)
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
                await asyncio.to_thread(self._queue.set_failed, waiting.job_id, unreadable)
                continue
            model = self._registry.find(job.project, job.name)
            if model is None or self._is_on_base(model) or self._has_committed(job):
                return job
            passed.add(waiting.model_id)
        return None

    async def _rest(self) -> None:
        """Until a job comes, or one that waits may be tried again."""
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
            await self._train(model, job, step, config)
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
        """
        Raises:
            Unavailable: it was given up.
        """
        while self._engine.state == "starting":
            self._stop_if_cancelled(job)
            self._move(job, "engine")
            with contextlib.suppress(Unavailable):
                await self._engine.wait_ready(HEARTBEAT_SECONDS)
        await self._engine.wait_ready(HEARTBEAT_SECONDS)

    def _stop_if_cancelled(self, job: Job) -> None:
        if job.job_id in self._cancelled:
            raise TrainerError("cancelled", "the job was cancelled", retryable=True)

    async def _train(self, model: Model, job: Job, step: int, config: TrainConfig) -> None:
        batch = await asyncio.to_thread(self._queue.batch, job.job_id)
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
                seed=zlib.crc32(model.adapter_name(step).encode()),
                gap_bars=self._gap_bars,
                budget_divisor=2 if self._deaths.get(job.job_id, 0) == len(DEATH_PAUSES) else 1,
            )
            done = await self._run_trainer(job, task, batch)
            metrics = done.metrics | {"time/step_backend_train_s": time.monotonic() - started}
            record = CheckpointRecord(
                step=step,
                job_id=job.job_id,
                metrics=metrics,
                unchanged=done.unchanged,
                notes=done.notes,
                created_at=clock.now(),
            )
            await asyncio.to_thread(model.folder.commit_checkpoint, temporary, record)
            if self._owner is not None:
                self._move(job, "load")
                await self._engine.wake_weights()
                await self._engine.load_adapter(
                    model.adapter_name(step),
                    model.folder.checkpoint_dir(step),
                    ENGINE_WAIT_SECONDS,
                    holds_device=True,
                )
        await asyncio.to_thread(model.folder.clear_temporary)

    @contextlib.asynccontextmanager
    async def _turn(self, model: Model, job: Job) -> AsyncIterator[None]:
        """The trainer's turn on a device that the engine uses too: nobody samples meanwhile."""
        if self._owner is None:
            yield
            return
        self._gate.close(f"a step of '{model.id}', which trains")
        async with self._owner.held_by("trainer"):
            self._move(job, "pause")
            await self._engine.pause()
            try:
                yield
            finally:
                # Frozen requests go on whatever happens to the job.
                await self._engine.resume()

    async def _run_trainer(self, job: Job, task: TrainTask, batch: bytes) -> Done:
        waking: asyncio.Task[None] | None = None

        def on_progress(progress: Progress) -> None:
            nonlocal waking
            self._move(job, progress.phase, progress.completed, progress.total)
            if progress.phase == "save" and waking is None:
                # The trainer has left the device: the engine takes its weights back while the step is written.
                waking = asyncio.create_task(self._engine.wake_weights())

        try:
            return await self._trainer.run(task, on_progress, batch)
        finally:
            if waking is not None:
                await waking

    async def _serve(self, model: Model, job: Job, step: int) -> list[str]:
        """Load the new step, then move the alias: in this order, so that nobody sees half of it. Returns what the client
        should know: a step that the engine cannot load is trained all the same."""
        self._move(job, "load")
        name = model.adapter_name(step)
        notes: list[str] = []
        try:
            await self._engine.load_adapter(
                name, model.folder.checkpoint_dir(step), ENGINE_WAIT_SECONDS
            )
        except AdapterRefused as error:
            notes = [
                f"step {step} is saved and does not serve: {error.message}. Step {model.step} answers"
            ]
        except Unavailable as error:
            notes = [f"step {step} is saved and will serve when the engine runs: {error.message}"]
            model.step = step
        else:
            model.step = step
        self._gate.open()
        self._move(job, "finish")
        for note in notes:
            logger.error("%s: %s", model.id, note)
        if not notes:
            logger.info("%s serves", name)
            await self._unload_old(model, step)
        return notes

    async def _unload_old(self, model: Model, step: int) -> None:
        kept = {model.adapter_name(step - back) for back in range(ADAPTERS_KEPT_LOADED)}
        for loaded in self._engine.loaded_adapters():
            is_old = loaded.rpartition("@")[0] == model.id and loaded not in kept
            if is_old and not self._gate.uses(loaded):
                await self._engine.unload_adapter(loaded)

    async def _finish(self, model: Model, job: Job, step: int, notes: Sequence[str]) -> None:
        lines = await asyncio.to_thread(self._queue.trajectories, job.job_id)
        record = model.folder.read_checkpoint(step)
        metrics = record.metrics | job.metrics | step_metrics(job.report.sampled_steps)
        metrics |= {
            f"time/job_{phase}_s": seconds
            for phase, seconds in self._positions.get(job.job_id, Position()).seconds.items()
            if phase != "queued"
        }
        told = [*job.report.notes, *record.notes, *notes]
        report = job.report.model_copy(update={"notes": told})
        await asyncio.to_thread(model.folder.write_lines, "train", step, lines)
        await asyncio.to_thread(model.folder.add_history, step, metrics, job.job_id)
        await asyncio.to_thread(self._queue.set_done, job.job_id, metrics, report)
        self._notify()
        await self._retain(model)

    # --- after an error ---

    async def _after_error(self, job: Job, error: Exception) -> None:
        """Have a job wait for another try, or end it. One whose step exists has happened already: it is always tried again."""
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
            else:
                self._hold(model_id, detail.message, pause)
                await asyncio.to_thread(self._queue.set_waiting, job.job_id, detail)
        except Exception as second:  # the queue's disk may be the reason
            logger.error("job %s stays as it is: %s", job.job_id, second)
            self._hold(model_id, str(second))

    def _pause(self, job: Job, error: Exception) -> float | None:
        """Seconds until a job is tried again; None if it is the job's own fault, or was tried often enough."""
        if is_environment(error):
            return 0.0
        if isinstance(error, TrainerError) and not isinstance(error, TrainerDied):
            return None
        if isinstance(error, ServerError | ValidationError):
            return None
        self._deaths[job.job_id] = deaths = self._deaths.get(job.job_id, 0) + 1
        return DEATH_PAUSES[deaths - 1] if deaths <= len(DEATH_PAUSES) else None

    def _hold(self, model_id: str, reason: str, pause: float = 0.0) -> None:
        """Have a model's jobs wait; others go on."""
        last = self._holds.get(model_id)
        tries = last.tries + 1 if last is not None else 1
        pause = max(pause, min(RETRY_SECONDS * 2 ** (tries - 1), LONGEST_RETRY_SECONDS))
        self._holds[model_id] = Hold(reason, time.monotonic() + pause, tries)

    def _move(
        self, job: Job, phase: str, completed: int | None = None, total: int | None = None
    ) -> None:
        self._positions.setdefault(job.job_id, Position()).move(phase, completed, total)
        self._notify()

    def _notify(self) -> None:
        """Wake all who follow a job."""
        changed, self._changed = self._changed, asyncio.Event()
        changed.set()


def is_environment(error: Exception) -> bool:
    """Whether a job failed for a reason that lies outside of it and may pass: engine, disk, database, device."""
    if isinstance(error, TrainerDied):
        return False
    if isinstance(error, ServerError | TrainerError):
        return error.retryable
    return isinstance(error, OSError | sqlite3.Error)


def error_detail(error: Exception) -> ErrorDetail:
    """A job's error as its client reads it."""
    if isinstance(error, ServerError | TrainerError):
        return ErrorDetail(
            message=error.message, code=error.code, type="server_error", retryable=error.retryable
        )
    return ErrorDetail(
        message=f"{type(error).__name__}: {error}", code="internal_error", type="server_error"
    )
