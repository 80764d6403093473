"""Loads the base model: finds or downloads it, plans the memory of the device, starts engine and trainer."""

import asyncio
import contextlib
import json
import logging
from collections.abc import Mapping
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

from art_server.engine.command import check_seq_length
from art_server.engine.device.assignment import engine_devices
from art_server.engine.device.computing import ComputingDevices
from art_server.engine.device.detection import Machine
from art_server.engine.device.model_size import read_model_size
from art_server.engine.device.owner import DeviceOwner
from art_server.engine.device.plan import Card, Demand, MemoryPlan, make_memory_plan
from art_server.engine.fleet import Fleet
from art_server.errors import Conflict, InvalidInput, StorageFull, Unavailable
from art_server.jobs.queue import JobQueue
from art_server.jobs.trainer import ServerTrainer
from art_server.jobs.trainer_process import TrainerError
from art_server.ledger.ledger import Ledger
from art_server.process.children import Children
from art_server.process.conversion import find_converted
from art_server.settings import ServerConfig
from art_server.shared.clock import REAL, Clock
from art_server.shared.trainer_messages import LoadTask
from art_server.store import base_models, files
from art_server.store.base_models import BaseModel, find_base_model

logger = logging.getLogger(__name__)

START_SECONDS = 2.0
"""The longest that `start` waits. A base model on the disk is found sooner, so the first request can use it; a download or a
conversion takes longer."""

YEAR_SECONDS = 365 * 86400.0

DOWNLOAD_LOG_SECONDS = 5.0
"""Interval of progress lines during a download."""


class BaseLoader:
    """Loads one base model at a time."""

    def __init__(
        self,
        *,
        config: ServerConfig,
        machine: Machine,
        devices: ComputingDevices,
        owner: DeviceOwner,
        fleet: Fleet,
        trainer: ServerTrainer,
        ledger: Ledger,
        queue: JobQueue,
        children: Children,
        clock: Clock = REAL,
    ):
        self._config = config
        self._machine = machine
        """The server's own machine, whose memory is planned."""
        self._devices = devices
        self._owner = owner
        self._fleet = fleet
        self._trainer = trainer
        self._ledger = ledger
        self._queue = queue
        self._children = children
        self._clock = clock
        self._progress = fleet.progress
        self._file = config.server_dir / "base.json"
        self._lock = asyncio.Lock()
        self.is_wanted = False
        """True once a client or the command line asked for the loaded base model. Until then a model restored from the
        last run may be replaced."""
        self._warming: asyncio.Task[None] | None = None
        self._fetching: asyncio.Task[BaseModel | None] | None = None
        self._trained: Path | None = None
        """The folder of the trainer's base model."""
        self._downloading: str | None = None
        """The hub id of the model that is being downloaded."""
        self._converting: str | None = None
        """The part of the running conversion of a model."""

    async def start(self) -> None:
        """Begins to load the base model that the command line names, else the model that served last. Returns after
        `START_SECONDS` at the latest, so that the port opens."""
        name = self._config.base_model
        self.is_wanted = name is not None
        if name is not None:
            self._fetching = asyncio.create_task(self._load(name), name="base model")
        elif self._file.exists():
            self._fetching = asyncio.create_task(self._restore(), name="base model")
        if self._fetching is not None:
            async with self._clock.at_most(START_SECONDS):
                await asyncio.wait({self._fetching})

    async def wait_found(self) -> None:
        """Returns when the base model that `start` began to load is found, or cannot be loaded.

        Raises:
            Unavailable: the search takes longer than `--wait-limit`.
        """
        limit_seconds = self._config.wait_limit_seconds
        if self._fetching is None or self._fetching.done():
            return
        try:
            async with self._clock.timeout(limit_seconds):
                await asyncio.wait({self._fetching})
        except TimeoutError as error:
            raise Unavailable(
                f"the base model was not found within {limit_seconds:.0f} s: repeat the request, or start the server with "
                "a larger --wait-limit",
                code="engine_not_ready",
            ) from error

    async def _restore(self) -> None:
        try:
            last = json.loads(self._file.read_text())
            await self._load(last["base_model"], last.get("engine_args"))
        except InvalidInput as error:
            logger.warning("cannot load the base model that served last: %s", error.message)
        except Exception:  # any error, such as a damaged file: clients can still register
            logger.exception("cannot load the base model that served last")

    @property
    def fatal(self) -> BaseException | None:
        """Why the command line's base model cannot be loaded; `cli.py` then ends the server."""
        fetching = self._fetching
        if fetching is None or not fetching.done() or fetching.cancelled():
            return None
        return fetching.exception()

    async def stop(self) -> None:
        """Cancels the load that `start` began and the trainer's first load, if they still run."""
        if self.fatal is None:
            await cancel(self._fetching)
        await cancel(self._warming)

    @property
    def fetch_progress(self) -> str | None:
        """The progress of the running download or conversion; None if there is none."""
        return base_models.download_progress(self._downloading) if self._downloading else self._converting

    async def load(self, name: str, requested: Mapping[str, str] | None = None) -> BaseModel:
        """Starts engine and trainer with a requested base model, if it is not loaded. Returns the loaded base model.
        `requested` engine arguments apply if this call starts the engine.

        Raises:
            InvalidInput: the base model cannot be found or trained, or does not fit.
            Conflict: another base model is loaded.
        """
        base = self._fleet.base
        if base is None or base.name != name or self._fleet.state == "failed":
            base = await self._load(name, requested)
        self.is_wanted = True
        return base

    async def _load(self, name: str, requested: Mapping[str, str] | None = None) -> BaseModel:
        async with self._lock:
            if self._fleet.state == "failed":
                await self._fleet.stop()  # a retry, possibly with other engine arguments
            loaded = self._fleet.base
            if loaded is not None and loaded.name == name:
                return loaded
            with self._progress.unless_refused():
                try:
                    base = await self._find_files(name)
                except InvalidInput as error:
                    if loaded is not None:
                        error.message += f" This server has '{loaded.name}' loaded."
                    raise
                if loaded is not None and loaded.path.resolve() == base.path.resolve():
                    return loaded
                plan = await asyncio.to_thread(self._plan, base, requested or {})
                if loaded is not None:
                    await self._unload_base(loaded, name)
            if loaded is None and self._trained not in (None, base.path):
                await self._stop_trainer()  # the trainer has another base model, whose engine failed
            await self._note_facts(base)
            await asyncio.to_thread(self._ledger.use_tokenizer, base.path, base.facts)
            # The plan is for ranks on the server's own cards.
            self._trainer.set_base(base.path, plan if plan is not None and plan.trains else None)
            self._trained = base.path
            self._fleet.start(base, requested or {}, plan)
            if self._config.ranks != 0 and (plan is None or plan.is_base_resident):
                is_shared = plan is not None and self._config.takes_turns
                self._warming = asyncio.create_task(
                    self._warm_trainer(after_engine=is_shared), name="trainer's first load"
                )
            with contextlib.suppress(StorageFull):  # the model serves without this file
                last = {"base_model": name, "engine_args": dict(requested or {})}
                await asyncio.to_thread(files.write_json, self._file, last)
            return base

    async def _find_files(self, name: str) -> BaseModel:
        """The base model with its weights, which may have to be downloaded or converted. Reports the progress."""
        self._progress.begin(f"base model {name}: looking for its files")
        progress = None
        if base_models.is_hub_id(name):
            self._downloading = name
            progress = asyncio.create_task(self._log_download(name))
        try:
            return await find_converted(
                partial(self._find, name),
                children=self._children,
                log_dir=self._config.log_dir,
                report=partial(self._note_conversion, name),
            )
        finally:
            self._downloading = self._converting = None
            await cancel(progress)

    def _note_conversion(self, name: str, part: str) -> None:
        self._converting = f"base model {name}: {part}"
        self._progress.note(self._converting)

    async def _note_facts(self, base: BaseModel) -> None:
        size = await asyncio.to_thread(base_models.weight_bytes, base.path)
        for note in (f"{size / 1e9:.2g} GB of weights", *base.facts.notes):
            self._progress.note(f"base model {base.name}: {note}")

    def _find(self, name: str) -> BaseModel:
        """The base model with its weights. A model that cannot be trained is refused before its weights are downloaded."""
        template = self._config.chat_template
        small = find_base_model(name, base_models.CACHE_DIR, needs_weights=False)
        small = replace(small, template=template)
        base_models.check_trainable(small, self._config.trainer)
        self._devices.check(small)
        check_seq_length(self._config, small)
        return replace(find_base_model(name, base_models.CACHE_DIR), template=template)

    async def _log_download(self, name: str) -> None:
        while True:
            await self._clock.sleep(DOWNLOAD_LOG_SECONDS)
            self._progress.note(await asyncio.to_thread(base_models.download_progress, name))

    async def _warm_trainer(self, *, after_engine: bool) -> None:
        """Loads the trainer's base model before the first step needs it. On a shared GPU this waits until the
        engine has started, because vLLM measures the free memory while it starts."""
        if after_engine:
            with contextlib.suppress(Unavailable):  # the engine was given up, so its memory is free
                await self._fleet.wait_ready(YEAR_SECONDS)
        async with self._owner.held() if after_engine else contextlib.nullcontext():
            self._progress.note("trainer: starts and loads the base model")
            try:
                loaded = await self._trainer.run(LoadTask())
                millions = loaded.metrics.get("num_parameters", 0.0) / 1e6
                self._progress.note(f"trainer: the base model is loaded, {millions:,.1f} million parameters")
            except (TrainerError, OSError) as error:
                # The first step tries again, and its job gets the error.
                logger.warning("the trainer cannot load its base model: %s", error)

    def _plan(self, base: BaseModel, requested: Mapping[str, str]) -> MemoryPlan | None:
        """The memory plan for the GPU; None on a CPU.

        Raises:
            InvalidInput: the base model does not fit; the message contains the numbers.
        """
        if self._machine.kind == "cpu" or not self._config.engines:
            return None
        size = read_model_size(base.path, base.facts)
        config = self._config.with_requested(requested, size.max_positions)
        engine_itemsize, trainer_itemsize = (
            4 if number_type == "float32" else 2 for number_type in config.number_types("cuda")
        )
        utilization = config.engine_args.get("gpu_memory_utilization")
        tensor_parallel = config.engine_args.get("tensor_parallel_size")

        def card_of(index: int) -> Card:
            gpu = self._machine.gpus[index]
            return Card(gpu.name, gpu.total, self._machine.host)

        devices = engine_devices(config, self._machine)[0]
        card = card_of(next(iter(devices), 0))
        own = card_of(config.train_devices[0]) if config.train_devices else None
        demand = Demand(
            base_model=base.name,
            size=size,
            engine_itemsize=engine_itemsize,
            trainer_itemsize=trainer_itemsize,
            lora_rank=config.max_lora_rank,
            max_loras=config.max_loras,
            max_seq_length=config.max_seq_length,
            utilization=float(utilization) if utilization is not None else None,
            handover=None if config.handover == "auto" else config.handover,
            num_serving=int(tensor_parallel or len(devices) or 1),
            num_engines=config.engines,
            training_card=own,
            num_ranks=config.num_ranks("cuda"),
            shard=config.shard,
        )
        plan = make_memory_plan(card, demand)
        logger.info("%s", plan.summary(card))
        return plan

    async def _unload_base(self, loaded: BaseModel, wanted: str) -> None:
        """Unloads a base model that was restored from the last run and that nobody has used since.

        Raises:
            Conflict: a client or the command line has named it, or a job is queued.
        """
        if self.is_wanted or await asyncio.to_thread(self._queue.waiting):
            raise Conflict(
                f"base_model '{wanted}' is not the one that this server has loaded ('{loaded.name}'): register with "
                f"base_model='{loaded.name}', or start another art-server, with another --path, for '{wanted}'",
                code="base_model_differs",
                param="base_model",
            )
        logger.info("unloading base model %s, which served last, to load %s", loaded.name, wanted)
        await self._stop_trainer()
        await self._fleet.stop()

    async def _stop_trainer(self) -> None:
        await cancel(self._warming)
        await self._trainer.stop()


async def cancel(task: asyncio.Task[Any] | None) -> None:
    """Cancels a task, if there is one, and waits until the task has ended, with an error or without."""
    if task is not None:
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
