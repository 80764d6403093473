"""One attempt at a job: from the engine's pause to a step that serves.

    train     close the pause gate, pause the engine, train in the trainer process into a temporary folder
    commit    rename the folder to its step                        (the step exists from here on)
    serve     load the adapter, resume the engine, make the step the model's current one, open the pause gate
    finish    write history and trajectories, mark the job as done

After an attempt that is killed at any line, the next attempt finishes the step if the step exists, or else trains again.
"""

import asyncio
import contextlib
import logging
import sqlite3
import time
import zlib
from collections import defaultdict
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence

from art_protocol.wire import TrainConfig
from art_server.engine.device.owner import DeviceOwner
from art_server.engine.engine import AdapterRefused, PolicyDiffers
from art_server.engine.fleet import Fleet
from art_server.engine.pause_gate import PauseGate
from art_server.errors import ServerError, Unavailable
from art_server.jobs.backoff import budget_divisor
from art_server.jobs.gang import Gang
from art_server.jobs.job_row import JobRow
from art_server.jobs.layer_check import LayerCheck, note_lost
from art_server.jobs.queue import JobQueue
from art_server.jobs.replay_record import ReplayRecord, base_digests, write_record
from art_server.jobs.trainer_process import TrainerError
from art_server.shared.trainer_messages import Done, Progress, TrainTask
from art_server.store.model_folder import CheckpointRecord
from art_server.store.registry import RegisteredModel

logger = logging.getLogger(__name__)

ADAPTERS_KEPT_LOADED = 2
"""The current step and the one before it, which requests in flight may still use."""
ENGINE_WAIT_SECONDS = 3600.0
LOOK_SECONDS = 5.0
"""Time between two checks whether a job that waits for the engine's start was cancelled."""


class Attempt:
    """Makes the step of a job, or finishes it."""

    def __init__(
        self,
        job: JobRow,
        model: RegisteredModel,
        *,
        queue: JobQueue,
        fleet: Fleet,
        gate: PauseGate,
        trainer: Gang,
        owner: DeviceOwner | None,
        layers: LayerCheck | None,
        report_change: Callable[[], Awaitable[None]],
    ):
        """`owner` and `layers` are as in `JobRunner`. `report_change` is called after each change of the job's row."""
        self.job = job
        self.model = model
        self._queue = queue
        self._fleet = fleet
        self._gate = gate
        self._trainer = trainer
        self._owner = owner
        self._layers = layers
        self._report_change = report_change
        self.phase = "queued"
        self._seconds: defaultdict[str, float] = defaultdict(float)
        """How long each phase took so far, by the phase's name."""
        self._since = time.monotonic()
        self.is_cancelled = False

    def cancel(self) -> None:
        """Ends the attempt before its next micro-batch."""
        self.is_cancelled = True
        self._trainer.cancel()

    async def run(self) -> None:
        """Returns when the job is done, or has ended before."""
        job, model = self.job, self.model
        step, notes = job.target_step, list[str]()
        if step is None or not has_committed(model, job):
            step = (model.folder.newest_step() or 0) + 1
            if not await asyncio.to_thread(self._queue.set_running, job.job_id, step):
                return
            await self._wait_engine()
            await self._compare_start(step - 1)
            try:
                await self._train(step, await self._find_lost_layers())
            finally:  # a failed attempt's files could fill the disk for the next one
                await asyncio.to_thread(model.folder.clear_temporary)
        if is_on_base(self._fleet, model):
            notes = await self._serve(step)
        else:
            # Only a committed step comes here (`JobRunner._choose`): another base model has been loaded since.
            self._make_current(step)
        await self._finish(step, notes)

    async def _enter(self, phase: str, completed: int | None = None, total: int | None = None) -> None:
        """Begins a phase, or continues within it, and writes it to the job's row."""
        if phase != self.phase:
            now = time.monotonic()
            name = self.phase.partition(" ")[0]  # "train 2 of 3" counts as "train"
            self._seconds[name] += now - self._since
            self.phase, self._since = phase, now
        # An attempt does not fail because its progress cannot be written.
        with contextlib.suppress(ServerError, sqlite3.Error):
            job_id = self.job.job_id
            await asyncio.to_thread(self._queue.set_progress, job_id, phase, completed, total)
            await self._report_change()

    def _stop_if_cancelled(self) -> None:
        if self.is_cancelled:
            raise TrainerError("cancelled", "the job was cancelled", retryable=True)

    async def _wait_engine(self) -> None:
        """Returns when the engine is ready.

        Raises:
            Unavailable: the engine could not be started.
            TrainerError: the job was cancelled.
        """
        while self._fleet.state == "starting":
            self._stop_if_cancelled()
            await self._enter("engine")
            with contextlib.suppress(Unavailable):
                await self._fleet.wait_ready(LOOK_SECONDS)
        await self._fleet.wait_ready(LOOK_SECONDS)

    async def _compare_start(self, step: int) -> None:
        """Has the engine load the step that a job starts from, if its probe has something to compare.

        Raises:
            PolicyDiffers: the engine computes another policy for this step than the trainer.
        """
        record = await asyncio.to_thread(self.model.folder.read_checkpoint, step)
        if record.probe is None or not record.probe.is_of_step:
            return
        try:
            await self._fleet.load_adapter(
                self.model.adapter_name(step),
                self.model.folder.checkpoint_dir(step),
                ENGINE_WAIT_SECONDS,
            )
        # A kind of AdapterRefused, and the only kind that forbids the training.
        except PolicyDiffers:
            raise
        except AdapterRefused:  # training can start from a step that the engine refuses
            pass

    async def _find_lost_layers(self) -> dict[str, str]:
        """The kinds of layers that the engine does not adapt, and why (`layer_check.py`).

        Raises:
            PolicyDiffers: the engine adapts no kind as the trainer does.
        """
        base, limits = self._fleet.base, self._fleet.mismatch_limits
        if self._layers is None or base is None or limits is None:
            return {}
        known = await asyncio.to_thread(self._layers.known, base, limits)
        if known is not None:
            return known
        folder = await asyncio.to_thread(self.model.folder.new_checkpoint_dir)
        async with self._holding_device():
            self._stop_if_cancelled()
            await self._enter("check layers")
            longest = self._fleet.max_seq_length
            kinds = await self._layers.score(self._trainer, self.model.record.lora, limits, longest, folder)
        # Outside the turn: a paused vLLM scores nothing (`Engine.load_paused`).
        return await self._layers.compare(self._fleet, base, limits, folder, kinds, ENGINE_WAIT_SECONDS)

    async def _train(self, step: int, lost: dict[str, str]) -> None:
        config = TrainConfig.model_validate_json(self.job.config)
        batch = await asyncio.to_thread(self._queue.batch, self.job.job_id)
        start = await asyncio.to_thread(self.model.folder.read_checkpoint, step - 1)
        base = self._fleet.base
        template = await asyncio.to_thread(lambda: base.template_text) if base is not None else None
        started = time.monotonic()
        async with self._holding_device():
            self._stop_if_cancelled()
            await self._enter("train")
            temporary = await asyncio.to_thread(self.model.folder.new_checkpoint_dir)
            task = TrainTask(
                lora=self.model.record.lora,
                in_dir=str(self.model.folder.checkpoint_dir(step - 1)),
                out_dir=str(temporary),
                config=config,
                start_step=step - 1,
                optimizer_steps=start.optimizer_steps,
                max_seq_length=self._fleet.max_seq_length,
                seed=seed_of(self.model, step),
                mismatch_limits=self._fleet.mismatch_limits,
                probe=start.probe,
                lost_layers=sorted(lost),
                budget_divisor=budget_divisor(self.job.attempts),
            )
            done = await self._run_trainer(task, batch)
            metrics = done.metrics | {"time/step_backend_train_s": time.monotonic() - started}
            record = CheckpointRecord(
                step=step,
                job_id=self.job.job_id,
                metrics=metrics,
                unchanged=done.unchanged,
                optimizer_steps=done.optimizer_steps,
                notes=[*done.notes, *note_lost(lost)],
                losses=done.losses,
                probe=done.probe,
                environment=done.environment,
                chat_template=template,
            )
            await run_whole(self.model.folder.commit_checkpoint, temporary, record)
            if self._owner is not None:
                await self._enter("load")
                # The slots of vLLM's adapters are in the memory that its sleep released.
                await self._fleet.wake_weights()
                await self._fleet.load_adapter(
                    self.model.adapter_name(step),
                    self.model.folder.checkpoint_dir(step),
                    ENGINE_WAIT_SECONDS,
                    holds_device=True,
                )

    @contextlib.asynccontextmanager
    async def _holding_device(self) -> AsyncIterator[None]:
        """Gives a shared device to the trainer; no request samples meanwhile. Does nothing with separate devices."""
        if self._owner is None:
            yield
            return
        async with self._owner.held():
            # Not before the device is held: one engine of a fleet may start on the device while others answer.
            self._gate.close(self.model.id)
            await self._enter("pause")
            await self._fleet.pause()
            try:
                yield
            finally:
                # Frozen requests continue even if the job fails.
                await self._fleet.resume()

    async def _run_trainer(self, task: TrainTask, batch: bytes) -> Done:
        waking: asyncio.Task[None] | None = None

        async def on_progress(progress: Progress) -> None:
            nonlocal waking
            # The process ignores the signal until it has begun the task (`trainer/worker.py`).
            if self.is_cancelled:
                self._trainer.cancel()
            if progress.phase == "save" and waking is None:
                # The trainer has left the device: the engine loads its weights while the step is written to disk.
                waking = asyncio.create_task(self._fleet.wake_weights())
            await self._enter(progress.phase, progress.completed, progress.total)

        try:
            return await self._trainer.run(task, on_progress, batch)
        finally:
            # `wake_weights` counts as done once it has begun: `resume` would wake the KV cache before the weights.
            if waking is not None:
                await waking

    async def _serve(self, step: int) -> list[str]:
        """Loads the step's adapter and then makes the step current, so that no request gets a step that is not loaded.
        Returns notes for the client: a step that the engine cannot load is trained nevertheless."""
        await self._enter("load")
        name = self.model.adapter_name(step)
        notes: list[str] = []
        try:
            await self._fleet.load_adapter(name, self.model.folder.checkpoint_dir(step), ENGINE_WAIT_SECONDS)
        # Before Unavailable, which is its base class.
        except AdapterRefused as error:
            notes = [f"step {step} is saved but does not serve: {error.message}. Step {self.model.step} still serves"]
        except Unavailable as error:
            notes = [f"step {step} is saved and serves once the engine is ready: {error.message}"]
            # `Fleet.reach` has the engine load it at the first request.
            self._make_current(step)
        else:
            self._make_current(step)
        self._gate.open()
        await self._enter("finish")
        for note in notes:
            logger.error("%s: %s", self.model.id, note)
        if not notes:
            logger.info("%s %s", name, "waits for the decision on its release" if self.model.holds_steps else "serves")
            self._unload_old(step)
        return notes

    def _make_current(self, step: int) -> None:
        if not self.model.holds_steps:
            self.model.step = step

    def _unload_old(self, step: int) -> None:
        kept = {self.model.adapter_name(step - back) for back in range(ADAPTERS_KEPT_LOADED)}
        kept.add(self.model.adapter_name(self.model.step))
        for loaded in self._fleet.loaded_adapters():
            is_old = loaded.rpartition("@")[0] == self.model.id and loaded not in kept
            if is_old and not self._gate.uses(loaded):
                self._fleet.unload_adapter(loaded)

    async def _finish(self, step: int, notes: Sequence[str]) -> None:
        job, model = self.job, self.model
        lines = await asyncio.to_thread(self._queue.trajectories, job.job_id)
        record = model.folder.read_checkpoint(step)
        metrics = record.metrics | job.metrics | step_metrics(job.report.sampled_steps)
        metrics |= {f"time/job_{phase}_s": seconds for phase, seconds in self._seconds.items() if phase != "queued"}
        all_notes = [*job.report.notes, *record.notes, *notes]
        report = job.report.model_copy(update={"notes": all_notes, "losses": record.losses})
        # All of this before `set_done`, which deletes the payload: a server that is killed in between does it again.
        await asyncio.to_thread(model.folder.write_lines, "train", step, lines)
        await asyncio.to_thread(model.folder.keep_tokens, step)
        await asyncio.to_thread(self._write_record, record)
        await asyncio.to_thread(model.history.add, step, metrics, job.job_id)
        # Here, because the row says which earlier step is the best.
        best = await asyncio.to_thread(model.history.best_step)
        await asyncio.to_thread(model.folder.prune_optimizer_state, best)
        await asyncio.to_thread(self._queue.set_done, job.job_id, metrics, report)
        await self._report_change()

    def _write_record(self, checkpoint: CheckpointRecord) -> None:
        """Writes the record from which the step can be made again."""
        if not checkpoint.environment:
            return  # an earlier version made the step
        base = self._fleet.base if is_on_base(self._fleet, self.model) else None
        record = ReplayRecord(
            model=self.model.id,
            step=checkpoint.step,
            start_step=checkpoint.step - 1,
            base_model=self.model.record.base_model,
            base_files=base_digests(base.path) if base is not None else {},
            lora=self.model.record.lora,
            config=TrainConfig.model_validate_json(self.job.config),
            seed=seed_of(self.model, checkpoint.step),
            environment=checkpoint.environment,
        )
        write_record(self.model.folder, record, self._queue.packed_batch(self.job.job_id))


def has_committed(model: RegisteredModel | None, job: JobRow) -> bool:
    """Whether the job's step is on disk."""
    step = job.target_step
    if model is None or step is None or step not in model.folder.steps():
        return False
    # A failed job that is queued again keeps its step's number, which another job may have used since.
    return model.folder.read_checkpoint(step).job_id == job.job_id


def is_on_base(fleet: Fleet, model: RegisteredModel) -> bool:
    """Whether the engine serves the model's base model."""
    return fleet.base is not None and fleet.base.name == model.record.base_model


def step_metrics(tokens_of_steps: Mapping[int, int]) -> dict[str, float]:
    """The first and the last step that sampled tokens of a batch, and the step that sampled most of them. Empty if no
    token's step is known."""
    if not tokens_of_steps:
        return {}
    most = max(tokens_of_steps, key=lambda step: (tokens_of_steps[step], step))
    return {
        "sampled_step": float(most),
        "sampled_step_min": float(min(tokens_of_steps)),
        "sampled_step_max": float(max(tokens_of_steps)),
    }


async def run_whole(change: Callable[..., object], *arguments: object) -> None:
    """Runs a change of files in a thread. A cancelled caller waits for the end of the change, so that no clean-up runs
    meanwhile."""
    running = asyncio.ensure_future(asyncio.to_thread(change, *arguments))
    try:
        await asyncio.shield(running)
    except asyncio.CancelledError:
        await asyncio.wait([running])
        raise


def seed_of(model: RegisteredModel, step: int) -> int:
    """The seed of the job that makes the step."""
    # Not `hash`, which Python seeds anew in each process: the job may be tried again after a restart.
    return zlib.crc32(model.adapter_name(step).encode())
