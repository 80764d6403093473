"""An engine and a rank of the trainer that run on a machine that has joined."""

import asyncio
import contextlib
import secrets
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any, NoReturn

import aiohttp

from art_cluster.joined import HostLost, JoinedHost, OrderFailed, RemoteChild
from art_server.engine.engine import TIMEOUT, Engine
from art_server.jobs.trainer_process import TrainerDied, TrainerError, TrainerProcess
from art_server.process.shared.switches import SECRET_HEADER
from art_server.process.shared.trainer_messages import Done, LayersTask, Progress, Task, TrainTask, WorkerConfig
from art_server.settings import ServerConfig
from art_server.store.base_models import BaseModel


class EngineOnHost(Engine):
    """vLLM on another machine. The server supervises it as one of its own; its files, records and counters pass through the
    machine's connection, its requests go to a port of its own."""

    def __init__(self, host: JoinedHost, slot: int, **of_engine: Any):
        super().__init__(**of_engine)
        self._host = host
        self._slot = slot
        self._delivered: dict[Path, str] = {}
        """The numbers of the folders that its machine keeps."""

    @property
    def pid(self) -> int | None:
        return None  # it is no process of this machine

    async def _open(self, run_dir: Path) -> None:
        """Nothing lasts longer than a process."""

    async def _launch(self, base: BaseModel, run_dir: Path) -> RemoteChild:
        del run_dir
        secret = secrets.token_hex(16)
        try:
            child, port = await self._host.start_engine(self._slot, base, self._config, self._log, secret)
        except OrderFailed as error:
            self._host.dismiss(str(error))
            return await wait_for_removal()
        except HostLost:
            return await wait_for_removal()
        if self._http is not None:
            await self._http.close()
        address = self._host.greeting.address
        shown = f"[{address}]" if ":" in address else address
        self._http = aiohttp.ClientSession(
            f"http://{shown}:{port}",
            connector=aiohttp.TCPConnector(limit=0),
            timeout=TIMEOUT,
            headers={SECRET_HEADER: secret},
        )
        return child

    async def _kill(self, process: Any) -> None:
        await self._host.end(process)

    async def _deliver(self, folder: Path) -> str:
        try:
            self._delivered[folder], path = await self._host.put(folder)
        except (OrderFailed, HostLost) as error:
            raise TimeoutError(str(error)) from error
        return path

    async def _forget(self, folder: Path) -> None:
        if (number := self._delivered.pop(folder, None)) is not None:
            await self._host.drop(number)

    def _read_work(self) -> bytes:
        assert isinstance(self._process, RemoteChild)
        return self._process.work


async def wait_for_removal() -> NoReturn:
    """Never returns: the fleet removes the engines of a lost machine."""
    await asyncio.Event().wait()
    raise AssertionError("nobody sets it")


class RankOnHost(TrainerProcess):
    """A rank of the trainer on another machine."""

    def __init__(
        self, host: JoinedHost, slot: int, log_path: Path, config: ServerConfig, base: Callable[[], BaseModel | None]
    ) -> None:
        super().__init__((), log_path)
        self.machine = f"host {host.name}"
        self.device = host.greeting.device
        self.host = host
        self._slot = slot
        self._given = config
        self._base = base
        self._worker: WorkerConfig | None = None

    def use(self, config: WorkerConfig) -> None:
        dtype = self._given.number_types(self.host.greeting.device)[1]
        # Its card is its own: the base leaves between steps only where an engine of the server shares the card.
        update = {"dtype": dtype, "between_steps": "stay", "machine": self.machine}
        self._worker = config.model_copy(update=update)

    @property
    def pid(self) -> int | None:
        return None  # it is no process of this machine

    @property
    def cpu_seconds(self) -> float:
        return self._process.cpu_seconds if isinstance(self._process, RemoteChild) else 0.0

    async def _launch(self) -> RemoteChild:
        base = self._base()
        assert base is not None and self._worker is not None, "a base model is loaded before it is trained"
        return await self.host.start_rank(self._slot, base, self._worker, self._log)

    async def _kill(self, process: Any) -> None:
        await self.host.end(process)

    async def run(
        self,
        task: Task,
        on_progress: Callable[[Progress], Awaitable[None]] | None = None,
        batch: bytes | None = None,
    ) -> Done:
        try:
            if not isinstance(task, TrainTask | LayersTask):
                return await super().run(task, on_progress, batch)
            return await self._run_with_files(task, on_progress, batch)
        except HostLost as error:
            raise TrainerDied(str(error)) from error
        except OrderFailed as error:
            raise TrainerError("host_failed", str(error), retryable=True) from error

    async def _run_with_files(
        self,
        task: TrainTask | LayersTask,
        on_progress: Callable[[Progress], Awaitable[None]] | None,
        batch: bytes | None,
    ) -> Done:
        async with contextlib.AsyncExitStack() as stack:
            number, path = await self.host.put()
            stack.push_async_callback(self.host.drop, number)
            there = {"out_dir": path}
            if isinstance(task, TrainTask):
                start, there["in_dir"] = await self.host.put(Path(task.in_dir))
                stack.push_async_callback(self.host.drop, start)
            done = await super().run(task.model_copy(update=there), on_progress, batch)
            if self._worker is not None and self._worker.rank == 0:
                await self.host.fetch(number, Path(task.out_dir))
            return done
