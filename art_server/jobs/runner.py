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
import logging
import time
import zlib
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass, field
from typing import Any

from art.wire import ErrorDetail, JobEvent, TrainRequest
from art_server.device.owner import DeviceOwner
from art_server.engine.engine import Engine
from art_server.engine.gate import Gate
from art_server.errors import Conflict, ServerError
from art_server.jobs.metrics import step_metrics, trajectory_metrics
from art_server.jobs.queue import Job, JobQueue, Payload
from art_server.ledger.ledger import Ledger
from art_server.ledger.resolve import Limits, Message, Sources, resolve
from art_server.store.model_folder import CheckpointRecord
from art_server.store.registry import Model, Registry
from art_server.training.process import TrainerDied, TrainerError
from art_server.training.task import Done, GapBars, Progress, TrainTask
from art_server.training.trainer import Trainer

logger = logging.getLogger(__name__)

HEARTBEAT_SECONDS = 5.0
"""Between two lines of a job's event stream, at most: a client that hears nothing for a minute reconnects."""
MAX_TRAINER_DEATHS = 2
"""How often a job may take the trainer's process down before it is given up."""
ADAPTERS_KEPT_LOADED = 2
"""The step that serves and the one before, which requests in flight may still use."""
ENGINE_WAIT_SECONDS = 3600.0
RETRY_SECONDS = 5.0
"""Before a finished step is tried again that could not be loaded, or written into the history."""
EXPECTED_ERRORS = (ServerError, TrainerError, OSError)


@dataclass(slots=True)
class Position:
    """Where a running job is, for those who follow it."""

    phase: str = "queued"
    completed: int | None = None
    total: int | None = None
    since: float = field(default_factory=time.monotonic)
    seconds: dict[str, float] = field(default_factory=dict)
    """Of the phases before this one."""

    def move(self, phase: str, completed: int | None = None, total: int | None = None) -> None:
        """Go on, within the phase or to another."""
        if phase != self.phase:
            now = time.monotonic()
            name = self.phase.partition(" ")[0]  # "train 2 of 3" is training
            self.seconds[name] = self.seconds.get(name, 0.0) + now - self.since
            self.since = now
        self.phase, self.completed, self.total = phase, completed, total


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
        self._positions: dict[str, Position] = {}
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
        """
        batch, report = await asyncio.to_thread(
            resolve, request.groups, request.config, model.id, self._sources(model), limits
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
            Payload(batch, request.groups),
            report.model_copy(update={"notes": [*report.notes, *notes]}),
        )
        logger.info(
            "job %s accepted: %d trajectories for %s", job.job_id, report.num_trajectories, model.id
        )
        self._wake.set()
        return job

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

    async def find(self, owner: str, model: Model, key: str | None, body_digest: str) -> Job | None:
        """The job that an earlier request with the same key made; without a key there is none."""
        if key is None:
            return None
        record = model.record
        return await asyncio.to_thread(
            self._queue.find_key, owner, record.project, record.name, key, body_digest
        )

    async def get(self, job_id: str) -> Job:
        return await asyncio.to_thread(self._queue.get, job_id)

    async def follow(self, job_id: str) -> AsyncIterator[JobEvent]:
        """A job's events, from now to its end; anyone may follow, any number of times."""
        job = await asyncio.to_thread(self._queue.get, job_id)
        yield JobEvent(event="accepted", job_id=job_id, report=job.report)
        while job.state in ("queued", "running"):
            position = self._positions.get(job_id, Position())
            yield JobEvent(
                event="progress" if job.state == "running" else "waiting",
                job_id=job_id,
                phase=position.phase,
                completed=position.completed,
                total=position.total,
            )
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(HEARTBEAT_SECONDS):
                    await self._changed.wait()
            job = await asyncio.to_thread(self._queue.get, job_id)
        if job.state == "done":
            yield JobEvent(
                event="done",
                job_id=job_id,
                step=job.target_step,
                metrics=job.metrics,
                report=job.report,
            )
        else:
            yield JobEvent(event="error", job_id=job_id, error=job.error, report=job.report)

    # --- running ---

    async def run_forever(self) -> None:
        """Run jobs as they come. Interrupted ones of an earlier server come first."""
        while True:
            self._wake.clear()
            job = await asyncio.to_thread(self._queue.next)
            if job is None:
                await self._wake.wait()
                continue
            try:
                await self._run(job)
            except (
                Exception
            ) as error:  # the outermost handler of a job: one bad job must not stop the others
                await self._after_error(job.job_id, error)
            finally:
                self._gate.open()
                self._positions.pop(job.job_id, None)
                self._notify()

    async def _run(self, job: Job) -> None:
        model = self._registry.get(job.project, job.name)
        base = self._engine.base
        if base is None or base.name != model.record.base_model:
            raise Conflict(
                f"model '{model.id}' adapts base model '{model.record.base_model}', which is not loaded: start the "
                "server with it and send the trajectories again",
                code="base_model_differs",
            )
        step = job.target_step
        if step is None or not self._has_committed(model, step, job):
            step = (model.folder.newest_step() or 0) + 1
            await asyncio.to_thread(self._queue.set_running, job.job_id, step)
            await self._engine.wait_ready(ENGINE_WAIT_SECONDS)
            await self._train(model, job, step)
        await self._serve(model, job, step)
        await self._finish(model, job, step)

    @staticmethod
    def _has_committed(model: Model, step: int, job: Job) -> bool:
        return (
            step in model.folder.steps() and model.folder.read_checkpoint(step).job_id == job.job_id
        )

    async def _train(self, model: Model, job: Job, step: int) -> None:
        payload = await asyncio.to_thread(self._queue.payload, job.job_id)
        started = time.monotonic()
        async with self._turn(job):
            self._move(job, "train")
            temporary = await asyncio.to_thread(model.folder.new_checkpoint_dir)
            task = TrainTask(
                lora=model.record.lora,
                in_dir=str(model.folder.checkpoint_dir(step - 1)),
                out_dir=str(temporary),
                config=job.config,
                batch=payload.batch,
                start_step=step - 1,
                seed=zlib.crc32(model.adapter_name(step).encode()),
                gap_bars=self._gap_bars,
            )
            done = await self._run_trainer(job, task)
            metrics = done.metrics | {"time/step_backend_train_s": time.monotonic() - started}
            record = CheckpointRecord(
                step=step,
                job_id=job.job_id,
                metrics=metrics,
                unchanged=done.unchanged,
                notes=done.notes,
                created_at=time.time(),
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
    async def _turn(self, job: Job) -> AsyncIterator[None]:
        """The trainer's turn on a device that the engine uses too: nobody samples meanwhile."""
        if self._owner is None:
            yield
            return
        self._gate.close()
        async with self._owner.held_by("trainer"):
            self._move(job, "pause")
            await self._engine.pause()
            try:
                yield
            finally:
                # Frozen requests go on whatever happens to the job.
                await self._engine.resume()

    async def _run_trainer(self, job: Job, task: TrainTask) -> Done:
        waking: asyncio.Task[None] | None = None

        def on_progress(progress: Progress) -> None:
            nonlocal waking
            self._move(job, progress.phase, progress.completed, progress.total)
            if progress.phase == "save" and waking is None:
                # The trainer has left the device: the engine takes its weights back while the step is written.
                waking = asyncio.create_task(self._engine.wake_weights())

        try:
            for attempt in range(1, MAX_TRAINER_DEATHS + 1):
                try:
                    return await self._trainer.run(task, on_progress)
                except TrainerDied as error:
                    logger.error(
                        "the trainer died under job %s (%d): %s", job.job_id, attempt, error
                    )
                    if attempt == MAX_TRAINER_DEATHS:
                        raise
            raise AssertionError("unreachable")
        finally:
            if waking is not None:
                await waking

    async def _serve(self, model: Model, job: Job, step: int) -> None:
        """Load the new step, then move the alias: in this order, so that nobody sees half of it."""
        self._move(job, "load")
        name = model.adapter_name(step)
        await self._engine.load_adapter(
            name, model.folder.checkpoint_dir(step), ENGINE_WAIT_SECONDS
        )
        model.step = step
        self._gate.open()
        self._move(job, "finish")
        logger.info("%s serves", name)
        kept = {model.adapter_name(step - back) for back in range(ADAPTERS_KEPT_LOADED)}
        for loaded in self._engine.loaded_adapters():
            is_old = loaded.rpartition("@")[0] == model.id and loaded not in kept
            if is_old and not self._gate.uses(loaded):
                await self._engine.unload_adapter(loaded)

    async def _finish(self, model: Model, job: Job, step: int) -> None:
        payload = await asyncio.to_thread(self._queue.payload, job.job_id)
        record = model.folder.read_checkpoint(step)
        metrics = record.metrics | trajectory_metrics(payload.groups, "train")
        metrics |= step_metrics(job.report.sampled_steps)
        metrics |= {
            f"time/job_{phase}_s": seconds
            for phase, seconds in self._positions[job.job_id].seconds.items()
            if phase != "queued"
        }
        report = job.report.model_copy(update={"notes": [*job.report.notes, *record.notes]})
        await asyncio.to_thread(model.folder.write_trajectories, "train", step, payload.groups)
        await asyncio.to_thread(model.folder.add_history, step, metrics, job.job_id)
        await asyncio.to_thread(self._queue.set_done, job.job_id, metrics, report)

    async def _after_error(self, job_id: str, error: Exception) -> None:
        """End a job that cannot be trained. One whose step exists is tried again: it has happened already."""
        logger.error("job %s: %s", job_id, error, exc_info=not isinstance(error, EXPECTED_ERRORS))
        try:
            job = await asyncio.to_thread(self._queue.get, job_id)
            model = self._registry.find(job.project, job.name)
            step = job.target_step
            if model is None or step is None or not self._has_committed(model, step, job):
                await asyncio.to_thread(self._queue.set_failed, job_id, error_detail(error))
                return
        except (ServerError, OSError) as second:
            logger.error("job %s stays as it is: %s", job_id, second)
        await asyncio.sleep(RETRY_SECONDS)

    def _move(
        self, job: Job, phase: str, completed: int | None = None, total: int | None = None
    ) -> None:
        self._positions.setdefault(job.job_id, Position()).move(phase, completed, total)
        self._notify()

    def _notify(self) -> None:
        """Wake all who follow a job."""
        changed, self._changed = self._changed, asyncio.Event()
        changed.set()


def error_detail(error: Exception) -> ErrorDetail:
    """A job's error as its client reads it."""
    if isinstance(error, ServerError | TrainerError):
        return ErrorDetail(
            message=error.message, code=error.code, type="server_error", retryable=error.retryable
        )
    return ErrorDetail(
        message=f"{type(error).__name__}: {error}", code="internal_error", type="server_error"
    )
