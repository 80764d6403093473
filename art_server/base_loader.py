"""The base model: found or downloaded, planned onto the device, loaded into engine and trainer."""

import asyncio
import contextlib
import json
import logging
from collections.abc import Mapping
from typing import Any

from art_server import base_models
from art_server.base_models import BaseModel, find_base_model
from art_server.device.figures import read_figures
from art_server.device.model_size import read_model_size
from art_server.device.owner import DeviceOwner
from art_server.device.plan import Card, Demand, Plan, make_plan
from art_server.device.probe import Machine
from art_server.engine.engine import Engine
from art_server.errors import Conflict, InvalidInput, StorageFull
from art_server.jobs.queue import JobQueue
from art_server.jobs.trainer import Trainer
from art_server.jobs.trainer_process import TrainerError
from art_server.ledger.ledger import Ledger
from art_server.settings import ServerConfig
from art_server.shared.tasks import LoadTask
from art_server.store import files

logger = logging.getLogger(__name__)

DOWNLOAD_LOG_SECONDS = 10.0
"""Between two lines of a download."""


class BaseLoader:
    """Loads one base model at a time."""

    def __init__(
        self,
        config: ServerConfig,
        machine: Machine,
        owner: DeviceOwner,
        engine: Engine,
        trainer: Trainer,
        ledger: Ledger,
        queue: JobQueue,
    ):
        self._config = config
        self._machine = machine
        self._owner = owner
        self._engine = engine
        self._trainer = trainer
        self._ledger = ledger
        self._queue = queue
        self._file = config.server_dir / "base.json"
        self._lock = asyncio.Lock()
        self.is_wanted = False
        """True once a client or the command line asked for the loaded base model. Until then a model restored from the last
        run may be replaced."""
        self._warming: asyncio.Task[None] | None = None
        self._fetching: asyncio.Task[BaseModel] | None = None
        self._downloading: str | None = None
        """The hub's model that is fetched right now."""

    async def start(self) -> None:
        """Load the base model that the command line names, else the one that served last.

        Raises:
            InvalidInput: `--base-model` cannot be found; of a hub's model `fatal` says so later.
        """
        name = self._config.base_model
        if name is not None:
            self.is_wanted = True
            if base_models.is_hub_id(name):
                # The port is open while it is fetched.
                self._fetching = asyncio.create_task(self._load(name), name="base model")
            else:
                await self._load(name)
        elif self._file.exists():
            try:
                await self._load(json.loads(self._file.read_text())["base_model"])
            except InvalidInput as error:
                logger.warning("the base model of last time is gone: %s", error.message)

    @property
    def fatal(self) -> BaseException | None:
        """Why the server cannot do what its command line asks; whoever runs it ends it."""
        fetching = self._fetching
        if fetching is None or not fetching.done() or fetching.cancelled():
            return None
        return fetching.exception()

    async def stop(self) -> None:
        """Give up what is still loading."""
        if self.fatal is None:
            await cancel(self._fetching)
        await cancel(self._warming)

    @property
    def download(self) -> str | None:
        """How far the download is, where one runs."""
        return base_models.download_progress(self._downloading) if self._downloading else None

    async def load(self, name: str, requested: Mapping[str, str] | None = None) -> BaseModel:
        """Start engine and trainer with a base model that somebody asked for, or see that it is the one that runs. Returns
        what is loaded. `requested` are engine arguments, which count if this starts the engine.

        Raises:
            InvalidInput: it cannot be found, trained or fitted.
            Conflict: another base model is loaded.
        """
        base = await self._load(name, requested)
        self.is_wanted = True
        return base

    async def _load(self, name: str, requested: Mapping[str, str] | None = None) -> BaseModel:
        async with self._lock:
            if self._engine.state == "failed":
                await self._engine.stop()  # a retry, possibly with other engine arguments
            loaded = self._engine.base
            if loaded is not None and loaded.name == name:
                return loaded
            progress = None
            if base_models.is_hub_id(name):
                self._downloading = name
                progress = asyncio.create_task(self._log_download(name))
            try:
                base = await asyncio.to_thread(find_base_model, name, base_models.CACHE_DIR)
            finally:
                self._downloading = None
                await cancel(progress)
            if loaded is not None and same_weights(loaded, base):
                return loaded
            base_models.check_trainable(base, self._config.trainer)
            plan = await asyncio.to_thread(self._plan, base, requested or {})
            if loaded is not None:
                await self._unload_base(loaded, name)
            self._ledger.use_tokenizer(base.path)
            self._trainer.set_base(base.path, plan)
            self._engine.start(base, requested or {}, plan)
            if plan is None or plan.is_base_resident:
                is_shared = plan is not None and self._config.takes_turns
                self._warming = asyncio.create_task(
                    self._warm_trainer(self._owner.held_by("trainer") if is_shared else None),
                    name="trainer's first load",
                )
            with contextlib.suppress(StorageFull):  # it serves all the same
                await asyncio.to_thread(files.write_json, self._file, {"base_model": name})
            return base

    async def _log_download(self, name: str) -> None:
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
                await self._trainer.run(LoadTask())
            except TrainerError as error:  # the first step tries again, and says it to its client
                logger.warning("the trainer does not load its base model: %s", error)

    def _plan(self, base: BaseModel, requested: Mapping[str, str]) -> Plan | None:
        """How engine and trainer share the GPU; None on a CPU, which they share by turns.

        Raises:
            InvalidInput: the base model does not fit, with the numbers.
        """
        if self._machine.kind == "cpu":
            return None
        size = read_model_size(base.path)
        config = self._config.with_requested(requested, size.max_positions)
        engine, trainer = (4 if each == "float32" else 2 for each in config.number_types("cuda"))
        given = config.engine_args.get("gpu_memory_utilization")
        tensor_parallel = config.engine_args.get("tensor_parallel_size")

        def card_of(index: int) -> Card:
            gpu = self._machine.gpus[index]
            return Card(gpu.name, gpu.total, self._machine.host)

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
        if self.is_wanted or await asyncio.to_thread(self._queue.next) is not None:
            raise Conflict(
                f"base_model '{wanted}' is not the one that this server has loaded ('{loaded.name}'): register with "
                f"base_model='{loaded.name}', or start another art-server, with another --path, for '{wanted}'",
                code="base_model_differs",
                param="base_model",
            )
        logger.info("base model %s, which served last, gives way to %s", loaded.name, wanted)
        await cancel(self._warming)
        await self._trainer.stop()
        await self._engine.stop()


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
