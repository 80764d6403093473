"""The server without HTTP: its parts put together, and what a client can ask for that is neither inference nor a job."""

import asyncio
import contextlib
import fcntl
import json
import logging
import os
import shutil
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from art.wire import (
    Health,
    LogReply,
    LogRequest,
    LoRAConfig,
    ModelInfo,
    RegisterRequest,
    SessionReply,
)
from art_server import __version__, base_models
from art_server.background import Background, LoopWatch
from art_server.base_models import BaseModel, find_base_model
from art_server.checkpoints import Checkpoints
from art_server.children import Children
from art_server.device.assignment import check_devices, device_environment
from art_server.device.figures import read_figures
from art_server.device.model_size import read_model_size
from art_server.device.owner import DeviceOwner
from art_server.device.plan import Card, Demand, Plan, make_plan
from art_server.device.probe import probe
from art_server.engine.engine import Engine
from art_server.engine.gate import Gate
from art_server.engine.records import REQUEST_ID, RecordReceiver, Sample
from art_server.errors import Conflict, InvalidInput, StorageFull, Unavailable
from art_server.jobs.metrics import trajectory_metrics
from art_server.jobs.queue import JobQueue
from art_server.jobs.runner import JobRunner
from art_server.ledger.ledger import Ledger, Retention
from art_server.ledger.resolve import Limits
from art_server.ledger.sessions import session_trajectory
from art_server.settings import Device, ServerConfig
from art_server.store import files
from art_server.store.model_folder import CheckpointRecord, ModelRecord
from art_server.store.registry import Model, Registry, merge_lora
from art_server.training.gap import gap_bars
from art_server.training.process import TrainerError
from art_server.training.task import InitTask, LoadTask
from art_server.training.trainer import Trainer
from art_server.uploads import Uploads

logger = logging.getLogger(__name__)

PRUNE_SECONDS = 60.0
"""Between two looks at what the ledger and the queue need not keep."""
RECORDS = "records"
"""The name under which `/health` tells of records that are lost."""
DOWNLOAD_LOG_SECONDS = 10.0
"""Between two lines of a download."""


class Service:
    """One server: a base model, its engine and trainer, and the models on it."""

    def __init__(self, config: ServerConfig):
        self.config = config
        self._lock_file = lock_path(config)
        self.machine = probe()
        self.device: Device = self.machine.kind
        check_devices(config, self.machine)
        self.owner = DeviceOwner()
        self.background = Background()
        self.loop_watch = LoopWatch()
        children = Children(config.server_dir, config.log_dir)
        left = children.reap()
        if left:
            logger.warning("killed what an earlier server left running: %s", left)
        self.gate = Gate()
        retention = Retention(
            config.ledger_max_age_days * 86400.0, int(config.ledger_max_gb * 2**30)
        )
        self.ledger = Ledger(config.server_dir / "ledger.sqlite", retention, config.splicing)
        self.registry = Registry(config.path)
        self.queue = JobQueue(config.server_dir / "jobs.sqlite", config.max_queued_jobs)
        self.engine = Engine(
            config,
            self.device,
            device_environment(config.serve_devices, self.machine),
            self.owner,
            children,
            RecordReceiver(self._on_prompt, self._on_samples, self._on_lost),
            lambda: self.gate.is_busy,
            self.background,
        )
        kept_to = device_environment(config.train_devices, self.machine)
        self.trainer = Trainer(config, self.device, kept_to, children)
        bars = gap_bars(config.number_types(self.device), config.exact, config.gap_limit)
        self._register_lock = asyncio.Lock()
        incoming = config.server_dir / "incoming"
        shutil.rmtree(incoming, ignore_errors=True)
        self.checkpoints = Checkpoints(
            self.registry,
            self.queue,
            self.gate,
            self.engine,
            self._register_lock,
            incoming,
            config.keep_last,
        )
        self.runner = JobRunner(
            self.queue,
            self.registry,
            self.ledger,
            self.engine,
            self.gate,
            self.trainer,
            self.owner if config.takes_turns else None,
            bars,
            self.checkpoints.retain,
        )
        self._base_lock = asyncio.Lock()
        self.is_base_wanted = False
        """Whether anybody asked for the base model that is loaded; one that merely served last may give way."""
        self.uploads = Uploads(
            self.registry,
            self.engine,
            self.trainer,
            self._register_lock,
            incoming,
            config.max_lora_rank,
            self._load_wanted_base,
        )
        self._warming: asyncio.Task[None] | None = None
        self._fetching: asyncio.Task[BaseModel] | None = None
        self._downloading: str | None = None
        """The hub's model that is fetched right now."""

    # --- life ---

    async def start(self) -> None:
        """Load the base model that the command line names, else the one that served last; then run what is queued.

        Raises:
            InvalidInput: `--base-model` cannot be found; of a hub's model `fatal` says so later.
        """
        remembered = self._base_file
        if self.config.base_model is not None:
            self.is_base_wanted = True
            if base_models.is_hub_id(self.config.base_model):
                # The port is open while it is fetched.
                self._fetching = asyncio.create_task(
                    self._load_base(self.config.base_model), name="base model"
                )
            else:
                await self._load_base(self.config.base_model)
        elif remembered.exists():
            name = json.loads(remembered.read_text())["base_model"]
            try:
                await self._load_base(name)
            except InvalidInput as error:
                logger.warning("the base model of last time is gone: %s", error.message)
        self.background.start("job runner", self.runner.run_forever)
        self.background.start("pruning", self._prune)
        self.background.start("loop watch", self.loop_watch.run)

    @property
    def fatal(self) -> BaseException | None:
        """Why the server cannot do what its command line asks; whoever runs it ends it."""
        fetching = self._fetching
        if fetching is None or not fetching.done() or fetching.cancelled():
            return None
        return fetching.exception()

    async def stop(self) -> None:
        if self.fatal is None:
            await cancel(self._fetching)
        await self.background.stop("job runner")
        await cancel(self._warming)
        await self.trainer.stop()
        await self.engine.stop()
        await self.background.stop()
        self.ledger.close()
        self.queue.close()
        os.close(self._lock_file)

    async def _prune(self) -> None:
        while True:
            await asyncio.to_thread(self.ledger.prune)
            await asyncio.to_thread(self.queue.prune)
            await asyncio.sleep(PRUNE_SECONDS)

    @property
    def _base_file(self) -> Path:
        return self.config.server_dir / "base.json"

    async def _load_base(self, name: str, wishes: Mapping[str, str] | None = None) -> BaseModel:
        """Start engine and trainer with a base model, or see that it is the one that runs. Returns what is loaded.

        Raises:
            Conflict: another base model is loaded.
        """
        async with self._base_lock:
            if self.engine.state == "failed":
                await (
                    self.engine.stop()
                )  # to register again is another try, perhaps with better wishes
            loaded = self.engine.base
            if loaded is not None and loaded.name == name:
                return loaded
            telling = None
            if base_models.is_hub_id(name):
                self._downloading = name
                telling = asyncio.create_task(self._tell_download(name))
            try:
                base = await asyncio.to_thread(find_base_model, name, base_models.CACHE_DIR)
            finally:
                self._downloading = None
                await cancel(telling)
            if loaded is not None and same_weights(loaded, base):
                return loaded
            base_models.check_trainable(base, self.config.trainer)
            plan = await asyncio.to_thread(self._plan, base, wishes or {})
            if loaded is not None:
                await self._unload_base(loaded, name)
            self.ledger.use_tokenizer(base.path)
            self.trainer.set_base(base.path, plan)
            self.engine.start(base, wishes or {}, plan)
            if plan is None or plan.is_base_resident:
                is_shared = plan is not None and self.config.takes_turns
                self._warming = asyncio.create_task(
                    self._warm_trainer(self.owner.held_by("trainer") if is_shared else None),
                    name="trainer's first load",
                )
            with contextlib.suppress(StorageFull):  # it serves all the same
                await asyncio.to_thread(files.write_json, self._base_file, {"base_model": name})
            return base

    async def _load_wanted_base(
        self, name: str, wishes: Mapping[str, str] | None = None
    ) -> BaseModel:
        """The same for somebody who asked for it."""
        base = await self._load_base(name, wishes)
        self.is_base_wanted = True
        return base

    async def _tell_download(self, name: str) -> None:
        while True:
            await asyncio.sleep(DOWNLOAD_LOG_SECONDS)
            logger.info("%s", await asyncio.to_thread(base_models.download_progress, name))

    async def _warm_trainer(
        self, hold: contextlib.AbstractAsyncContextManager[None] | None
    ) -> None:
        """Load the trainer's base before the first step asks for it: on a GPU behind the engine's start, which measures
        what is free."""
        async with hold or contextlib.nullcontext():
            try:
                await self.trainer.run(LoadTask())
            except TrainerError as error:  # the first step tries again, and says it to its client
                logger.warning("the trainer does not load its base model: %s", error)

    def _plan(self, base: BaseModel, wishes: Mapping[str, str]) -> Plan | None:
        """How engine and trainer share the GPU; None on a CPU, which they share by turns.

        Raises:
            InvalidInput: the base model does not fit, with the numbers.
        """
        if self.device == "cpu":
            return None
        size = read_model_size(base.path)
        config = self.config.with_wishes(wishes, size.max_positions)
        engine, trainer = (4 if each == "float32" else 2 for each in config.number_types("cuda"))
        given = config.engine_args.get("gpu_memory_utilization")
        tensor_parallel = config.engine_args.get("tensor_parallel_size")

        def card_of(index: int) -> Card:
            gpu = self.machine.gpus[index]
            return Card(gpu.name, gpu.total, self.machine.host)

        card = card_of(next(iter(config.serve_devices), 0))
        own = card_of(config.train_devices[0]) if config.train_devices else None
        demand = Demand(
            base_model=base.name,
            size=size,
            engine_itemsize=engine,
            trainer_itemsize=trainer,
            lora_rank=config.max_lora_rank,
            max_loras=config.max_loras,
            max_seq_length=config.max_seq_length,
            utilization=float(given) if given is not None else None,
            handover=None if config.handover == "auto" else config.handover,
            num_serving=int(tensor_parallel or len(config.serve_devices) or 1),
            training_card=own,
        )
        plan = make_plan(card, demand, read_figures())
        logger.info("%s", plan.table(card))
        return plan

    async def _unload_base(self, loaded: BaseModel, wanted: str) -> None:
        """Give up a base model that was only loaded because it served last, and that nobody has asked for since.

        Raises:
            Conflict: it is in use, or was asked for on the command line.
        """
        if self.is_base_wanted or await asyncio.to_thread(self.queue.next) is not None:
            raise Conflict(
                f"base_model '{wanted}' is not the one that this server has loaded ('{loaded.name}'): register with "
                f"base_model='{loaded.name}', or start another art-server, with another --path, for '{wanted}'",
                code="base_model_differs",
                param="base_model",
            )
        logger.info("base model %s, which served last, gives way to %s", loaded.name, wanted)
        await cancel(self._warming)
        await self.trainer.stop()
        await self.engine.stop()

    def _on_prompt(self, engine_request_id: str, rendered: list[int]) -> list[int] | None:
        found = REQUEST_ID.search(engine_request_id)
        if found is None:
            return None
        return self.ledger.take_prompt(found[1], int(found[2] or 0), rendered)

    def _on_samples(self, samples: Sequence[Sample]) -> None:
        taken: list[tuple[str, int, int, Sample]] = []
        for sample in samples:
            found = REQUEST_ID.search(sample.request_id)
            if found is not None:
                position = int(found[2] or 0)
                index = position * sample.sampling["n"] + sample.index
                taken.append((found[1], index, position, sample))
        self.ledger.take_samples(taken)
        self.background.is_well(RECORDS)

    def _on_lost(self, engine_request_id: str, index: int, num: int, error: Exception) -> None:
        self.background.is_faulty(RECORDS, error)
        if found := REQUEST_ID.search(engine_request_id):
            self.ledger.lose(found[1], int(found[2] or 0) * num + index, str(error))

    # --- models ---

    async def register(
        self,
        request: RegisterRequest,
        wishes: Mapping[str, str] | None = None,
        *,
        always_logprobs: bool = False,
    ) -> ModelInfo:
        """Make a model known, with its step 0 on disk; one that is known goes on where it is.

        `wishes` for the engine count if this starts it. `always_logprobs` is as in `ModelRecord`, and stays once set.

        Raises:
            InvalidInput: unknown base model, rank above the engine's.
            Conflict: another base model or adapter shape than before.
        """
        folder = self.registry.folder(request.project, request.name)
        rank = (request.lora or LoRAConfig()).rank
        if rank > self.config.max_lora_rank:
            raise InvalidInput(
                f"lora.rank {rank} is above the engine's maximum of {self.config.max_lora_rank}: register with a lower "
                "rank, or start the server with a larger --max-lora-rank",
                code="rank_too_high",
                param="lora.rank",
            )
        model = self.registry.find(request.project, request.name)
        if model is not None:
            merge_lora(model.record.lora, request.lora, model.id)
            if self.engine.base is None and model.record.base_model != request.base_model:
                raise self._other_base(model)
        base = await self._load_wanted_base(request.base_model, wishes)
        if model is not None and not self.is_on_base(model):
            raise self._other_base(model)
        async with self._register_lock:
            model = self.registry.find(request.project, request.name)
            if model is None:
                record = ModelRecord(
                    name=request.name,
                    project=request.project,
                    base_model=base.name,
                    lora=request.lora or LoRAConfig(),
                )
                await self._write_first_step(record)
                with files.disk_errors("the model"):
                    await asyncio.to_thread(folder.create, record, self.engine.log_path)
                model = self.registry.add(folder, record)
                logger.info("registered %s on %s", model.id, record.base_model)
            if always_logprobs and not model.record.always_logprobs:
                model.record = model.record.model_copy(update={"always_logprobs": True})
                await asyncio.to_thread(folder.create, model.record, self.engine.log_path)
        return self.info(model)

    def _other_base(self, model: Model) -> Conflict:
        loaded = f"'{self.engine.base.name}'" if self.engine.base is not None else "none"
        return Conflict(
            f"model '{model.id}' adapts base model '{model.record.base_model}'; this server has {loaded} loaded: use "
            f"base_model='{model.record.base_model}' on a server of its own, or another model name",
            code="base_model_differs",
            param="base_model",
        )

    async def _write_first_step(self, record: ModelRecord) -> None:
        folder = self.registry.folder(record.project, record.name)
        if folder.newest_step() is not None:
            return
        temporary = await asyncio.to_thread(folder.new_checkpoint_dir)
        try:
            await self.trainer.run(InitTask(lora=record.lora, out_dir=str(temporary)))
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
            max_seq_length=self.engine.max_seq_length,
        )

    def limits(self, model: Model) -> Limits:
        """What the model can train on.

        Raises:
            Conflict: its base model is not the one that is loaded.
        """
        base = self.engine.base
        if base is None or not self.is_on_base(model):
            raise self._other_base(model)
        length = self.engine.max_seq_length
        assert length is not None, "known with the base"
        return Limits(vocab_size=base_models.vocab_size(base.path), max_seq_length=length)

    def is_on_base(self, model: Model) -> bool:
        """Whether the loaded base model is the one that `model` adapts."""
        base = self.engine.base
        return base is not None and base.name == model.record.base_model

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
        return session_trajectory(self.ledger.find_session(project, name, session))

    def health(self) -> Health:
        base = self.engine.base
        if base is None and self._downloading is not None:
            detail = base_models.download_progress(self._downloading)
            return Health(engine="starting", version=__version__, detail=detail, waits_for=detail)
        return Health(
            engine=self.engine.state,
            base_model=base.name if base is not None else None,
            version=__version__,
            detail=self.engine.detail,
            waits_for=self.gate.waits_for or self._start_waited_for(),
            longest_stall_seconds=self.loop_watch.longest_stall_seconds,
            faults=self.background.faults,
        )

    def _start_waited_for(self) -> str | None:
        if self.engine.state != "starting":
            return None
        return f"the engine, which starts. {self.engine.detail or ''}".rstrip()


async def cancel(task: asyncio.Task[Any] | None) -> None:
    """End a task of ours, if there is one."""
    if task is not None:
        task.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await task


def same_weights(one: BaseModel, other: BaseModel) -> bool:
    return one.path == other.path or base_models.fingerprint(one.path) == base_models.fingerprint(
        other.path
    )


def lock_path(config: ServerConfig) -> int:
    """Hold the server's folder: two servers on one would spoil each other's jobs. Returns the lock's descriptor.

    Raises:
        Conflict: another server holds it.
    """
    config.server_dir.mkdir(parents=True, exist_ok=True)
    descriptor = os.open(config.server_dir / "lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError as error:
        os.close(descriptor)
        raise Conflict(
            f"another art-server works in {config.path.resolve()}: stop it, or give this one another --path",
            code="path_in_use",
            param="path",
        ) from error
    return descriptor
