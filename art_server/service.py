"""The server without HTTP: its parts put together, and a verb for everything that a client can ask for."""

import asyncio
import logging
import os
import shutil
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence

from art.wire import (
    Health,
    LogReply,
    LogRequest,
    LoRAConfig,
    ModelInfo,
    RegisterRequest,
    SessionReply,
    TrainRequest,
)
from art_server import __version__, base_models
from art_server.background import Background, LoopWatch
from art_server.base_loader import BaseLoader
from art_server.checkpoints.manage import Checkpoints
from art_server.checkpoints.uploads import Uploads
from art_server.children import Children
from art_server.device.assignment import check_devices, device_environment
from art_server.device.owner import DeviceOwner
from art_server.device.probe import probe
from art_server.engine.engine import Engine
from art_server.engine.gate import Gate
from art_server.errors import Conflict, InvalidInput, Unavailable
from art_server.jobs.gap_bars import gap_bars
from art_server.jobs.metrics import trajectory_metrics
from art_server.jobs.queue import Job, JobQueue
from art_server.jobs.resolve import Limits
from art_server.jobs.runner import JobRunner
from art_server.jobs.trainer import Trainer
from art_server.jobs.trainer_process import TrainerError
from art_server.ledger.intake import Intake
from art_server.ledger.ledger import Ledger, Retention
from art_server.ledger.sessions import session_trajectory
from art_server.relay import Relay
from art_server.settings import Device, ServerConfig
from art_server.shared.tasks import InitTask
from art_server.store import files
from art_server.store.model_folder import CheckpointRecord, ModelRecord
from art_server.store.registry import Model, Registry, merge_lora

logger = logging.getLogger(__name__)

PRUNE_SECONDS = 60.0
"""Between two looks at what the ledger and the queue need not keep."""


class Service:
    """One server: a base model, its engine and trainer, and the models on it."""

    def __init__(self, config: ServerConfig):
        self._config = config
        self._lock_file = files.lock_folder(config.server_dir)
        machine = probe()
        check_devices(config, machine)
        self.device: Device = machine.kind
        owner = DeviceOwner()
        self._background = Background()
        self._loop_watch = LoopWatch()
        children = Children(config.server_dir, config.log_dir)
        left = children.reap()
        if left:
            logger.warning("killed what an earlier server left running: %s", left)
        self._gate = Gate()
        retention = Retention(
            config.ledger_max_age_days * 86400.0, int(config.ledger_max_gb * 2**30)
        )
        self._ledger = Ledger(config.server_dir / "ledger.sqlite", retention, config.splicing)
        self._registry = Registry(config.path)
        self._queue = JobQueue(config.server_dir / "jobs.sqlite", config.max_queued_jobs)
        self._engine = Engine(
            config,
            machine.kind,
            device_environment(config.serve_devices, machine),
            owner,
            children,
            Intake(self._ledger, self._background).receiver(),
            lambda: self._gate.is_busy,
            self._background,
        )
        kept_to = device_environment(config.train_devices, machine)
        self._trainer = Trainer(config, machine.kind, kept_to, children)
        self._base = BaseLoader(
            config, machine, owner, self._engine, self._trainer, self._ledger, self._queue
        )
        self._making = asyncio.Lock()
        """Held while a model is made or deleted."""
        incoming = config.server_dir / "incoming"
        shutil.rmtree(incoming, ignore_errors=True)
        self._checkpoints = checkpoints = Checkpoints(
            self._registry,
            self._queue,
            self._gate,
            self._engine,
            self._making,
            incoming,
            config.keep_last,
        )
        self._uploads = uploads = Uploads(
            self._registry,
            self._engine,
            self._trainer,
            self._making,
            incoming,
            config.max_lora_rank,
            self._base.load,
        )
        self._runner = JobRunner(
            self._queue,
            self._registry,
            self._ledger,
            self._engine,
            self._gate,
            self._trainer,
            owner if config.takes_turns else None,
            gap_bars(config.number_types(machine.kind), config.exact, config.gap_limit),
            checkpoints.retain,
        )
        relay = Relay(
            self._registry,
            self._ledger,
            self._engine,
            self._gate,
            self._base,
            config.wait_limit_seconds,
        )
        # Verbs that one part answers alone.
        self.resolve, self.relay = relay.resolve, relay.answer
        self.was_engine_killed = relay.was_engine_killed
        self.models, self.model = self._registry.all, self._registry.get
        self.job, self.jobs, self.job_info = self._runner.get, self._runner.jobs, self._runner.info
        self.follow, self.move_job, self.cancel_job = (
            self._runner.follow,
            self._runner.move,
            self._runner.cancel,
        )
        self.checkpoints, self.delete_checkpoints = checkpoints.overview, checkpoints.delete
        self.fork, self.roll_back = checkpoints.fork, checkpoints.roll_back
        self.delete_model = checkpoints.delete_model
        self.upload_part, self.receive_upload, self.take_in_upload = (
            uploads.part,
            uploads.receive,
            uploads.take_in,
        )

    # --- life ---

    async def start(self) -> None:
        """Load the base model that the command line names, else the one that served last; then run what is queued.

        Raises:
            InvalidInput: `--base-model` cannot be found; of a hub's model `fatal` says so later.
        """
        await self._base.start()
        self._background.start("job runner", self._runner.run_forever)
        self._background.start("pruning", self._prune)
        self._background.start("loop watch", self._loop_watch.run)

    @property
    def fatal(self) -> BaseException | None:
        """Why the server cannot do what its command line asks; whoever runs it ends it."""
        return self._base.fatal

    async def stop(self) -> None:
        await self._background.stop("job runner")
        await self._base.stop()
        await self._trainer.stop()
        await self._engine.stop()
        await self._background.stop()
        self._ledger.close()
        self._queue.close()
        os.close(self._lock_file)

    async def _prune(self) -> None:
        while True:
            await asyncio.to_thread(self._ledger.prune)
            await asyncio.to_thread(self._queue.prune)
            await asyncio.sleep(PRUNE_SECONDS)

    def health(self) -> Health:
        """What works, what does not, and what requests wait for."""
        base, download = self._engine.base, self._base.download
        if base is None and download is not None:
            return Health(
                engine="starting", version=__version__, detail=download, waits_for=download
            )
        return Health(
            engine=self._engine.state,
            base_model=base.name if base is not None else None,
            version=__version__,
            detail=self._engine.detail,
            waits_for=self._gate.waits_for or self._engine.start_waited_for,
            longest_stall_seconds=self._loop_watch.longest_stall_seconds,
            faults=self._background.faults,
        )

    async def wait_ready(self) -> None:
        """Return when the engine serves.

        Raises:
            Unavailable: not within `--wait-limit`.
        """
        await self._engine.wait_ready(self._config.wait_limit_seconds)

    # --- models ---

    async def register(
        self,
        request: RegisterRequest,
        requested: Mapping[str, str] | None = None,
        *,
        always_logprobs: bool = False,
    ) -> ModelInfo:
        """Make a model known, with its step 0 on disk; one that is known goes on where it is.

        `requested` engine arguments count if this starts the engine. `always_logprobs` is as in `ModelRecord`, and stays once set.

        Raises:
            InvalidInput: unknown base model, rank above the engine's.
            Conflict: another base model or adapter shape than before.
        """
        folder = self._registry.folder(request.project, request.name)
        rank = (request.lora or LoRAConfig()).rank
        if rank > self._config.max_lora_rank:
            raise InvalidInput(
                f"lora.rank {rank} is above the engine's maximum of {self._config.max_lora_rank}: register with a lower "
                "rank, or start the server with a larger --max-lora-rank",
                code="rank_too_high",
                param="lora.rank",
            )
        model = self._registry.find(request.project, request.name)
        if model is not None:
            merge_lora(model.record.lora, request.lora, model.id)
            if self._engine.base is None and model.record.base_model != request.base_model:
                raise self._other_base(model)
        base = await self._base.load(request.base_model, requested)
        if model is not None and not self._is_on_base(model):
            raise self._other_base(model)
        async with self._making:
            model = self._registry.find(request.project, request.name)
            if model is None:
                record = ModelRecord(
                    name=request.name,
                    project=request.project,
                    base_model=base.name,
                    lora=request.lora or LoRAConfig(),
                )
                await self._write_first_step(record)
                with files.disk_errors("the model"):
                    await asyncio.to_thread(folder.create, record, self._engine.log_path)
                model = self._registry.add(folder, record)
                logger.info("registered %s on %s", model.id, record.base_model)
            if always_logprobs and not model.record.always_logprobs:
                model.record = model.record.model_copy(update={"always_logprobs": True})
                await asyncio.to_thread(folder.create, model.record, self._engine.log_path)
        return self.info(model)

    def _other_base(self, model: Model) -> Conflict:
        loaded = f"'{self._engine.base.name}'" if self._engine.base is not None else "none"
        return Conflict(
            f"model '{model.id}' adapts base model '{model.record.base_model}'; this server has {loaded} loaded: use "
            f"base_model='{model.record.base_model}' on a server of its own, or another model name",
            code="base_model_differs",
            param="base_model",
        )

    async def _write_first_step(self, record: ModelRecord) -> None:
        folder = self._registry.folder(record.project, record.name)
        if folder.newest_step() is not None:
            return
        temporary = await asyncio.to_thread(folder.new_checkpoint_dir)
        try:
            await self._trainer.run(InitTask(lora=record.lora, out_dir=str(temporary)))
            first = CheckpointRecord(step=0, created_at=time.time())
            await asyncio.to_thread(folder.commit_checkpoint, temporary, first)
        except TrainerError as error:
            if error.retryable:
                raise Unavailable(error.message, code=error.code) from error
            raise InvalidInput(
                f"no adapter of this shape can be made for '{record.base_model}': {error.message}",
                code=error.code,
                param="lora",
            ) from error
        finally:
            folder.clear_temporary()

    def info(self, model: Model) -> ModelInfo:
        return ModelInfo(
            name=model.record.name,
            project=model.record.project,
            base_model=model.record.base_model,
            step=model.step,
            inference_name=model.id,
            lora=model.record.lora,
            max_seq_length=self._engine.max_seq_length,
        )

    def ignored_args(self, requested: Mapping[str, str]) -> list[str]:
        """One sentence for each requested engine argument that is not in effect."""
        return self._engine.ignored_args(requested)

    @property
    def base_name(self) -> str | None:
        """The loaded base model."""
        base = self._engine.base
        return base.name if base is not None else None

    @property
    def max_seq_length(self) -> int | None:
        """Tokens of prompt plus completion, None before a base model is loaded."""
        return self._engine.max_seq_length

    def served_models(self, projects: frozenset[str] | None, only: str | None) -> list[Model]:
        """Those on the loaded base model that a caller may ask."""
        return [model for model in self.models(projects, only) if self._is_on_base(model)]

    def _is_on_base(self, model: Model) -> bool:
        return model.record.base_model == self.base_name

    # --- training ---

    async def submit(
        self,
        model: Model,
        owner: str,
        key: str | None,
        body_digest: str,
        read: Callable[[Callable[[TrainRequest], Awaitable[Job]]], Awaitable[Job]],
        notes: Sequence[str] = (),
    ) -> Job:
        """The job of a train request: on disk when this returns. `read` parses the request and hands it on; it is not called
        where an earlier request with the same key made the job.

        Raises:
            InvalidInput: nothing in it can be trained.
            Conflict: another base model is loaded; the model is not at `expected_step`; the key was used for another body.
            TooMany: the queue is full.
        """
        limits = self._limits(model)
        job = await self._runner.find(model, key, body_digest)
        if job is not None:
            return job
        return await read(
            lambda request: self._runner.accept(
                model, request, owner, key, body_digest, limits, notes
            )
        )

    def _limits(self, model: Model) -> Limits:
        """What the model can train on.

        Raises:
            Conflict: its base model is not the one that is loaded.
        """
        base = self._engine.base
        if base is None or not self._is_on_base(model):
            raise self._other_base(model)
        length = self._engine.max_seq_length
        assert length is not None, "known with the base"
        return Limits(vocab_size=base_models.vocab_size(base.path), max_seq_length=length)

    # --- logs ---

    async def log(self, model: Model, request: LogRequest) -> LogReply:
        """Write trajectories and metrics into the row of a step.

        Raises:
            InvalidInput: the step does not exist yet.
        """
        step = model.step if request.step is None else request.step
        if step > model.step:
            raise InvalidInput(
                f"model '{model.id}' has no step {step} yet: its newest is {model.step}; log for that one, or leave `step` out",
                code="step_beyond_newest",
                param="step",
            )
        metrics = trajectory_metrics(request.groups, request.split)
        metrics |= {
            key if "/" in key else f"{request.split}/{key}": value
            for key, value in request.metrics.items()
        }
        if request.groups:
            await asyncio.to_thread(
                model.folder.write_trajectories, request.split, step, request.groups
            )
        await asyncio.to_thread(model.folder.add_history, step, metrics)
        return LogReply(step=step, metrics=metrics)

    def session(self, project: str, name: str, session: str) -> SessionReply:
        """What a model said in one of its project's sessions (blocking: reads the ledger)."""
        return session_trajectory(self._ledger.find_session(project, name, session))
