"""An engine and a rank of the trainer on a machine that has joined."""

import asyncio
import contextlib
import secrets
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any, NoReturn

import aiohttp

from art_server.machines.joined import HostLost, JoinedHost, OrderFailed, RemoteChild
from art_server.machines.orders import SILENCE_SECONDS
from art_server.engine.engine import LOAD_SECONDS, AdapterRefused, Engine
from art_server.jobs.trainer_process import RankLost, TrainerDied, TrainerError, TrainerProcess, Usage
from art_server.process.shared.switches import SECRET_HEADER
from art_server.process.shared.trainer_messages import Done, LayersTask, Progress, Task, TrainTask, WorkerConfig
from art_server.settings import ServerConfig
from art_server.store.base_models import BaseModel
from art_server.store.model_folder import ADAPTER_FILE, CONFIG_FILE, CONTENT_FILES, DESCRIPTION_FILE

ENGINE_FILES = (CONFIG_FILE, ADAPTER_FILE, DESCRIPTION_FILE)
"""The files of a checkpoint that an engine loads. The other files are two thirds of a checkpoint's bytes, and can appear and
vanish while an engine fetches the checkpoint."""
TIMEOUT_ON_HOST = aiohttp.ClientTimeout(total=None, connect=SILENCE_SECONDS)
"""The limit of a request to another machine, whose network may stall during the connect."""


class EngineOnHost(Engine):
    """vLLM on another machine. The server supervises this engine like a local engine. Files, records and counters pass through the
    machine's connection; requests go to a separate port."""

    silence_seconds = SILENCE_SECONDS

    def __init__(self, host: JoinedHost, slot: int, **of_engine: Any):
        super().__init__(**of_engine)
        self._host = host
        self._slot = slot
        self._delivered: dict[Path, str] = {}
        """By folder, the number of the copy that the machine keeps."""

    @property
    def pid(self) -> int | None:
        return None  # the process runs on another machine

    async def _open(self, run_dir: Path) -> None:
        """Opens nothing: records pass through the machine's connection, and each process has its own HTTP client."""

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
            timeout=TIMEOUT_ON_HOST,
            headers={SECRET_HEADER: secret},
        )
        return child

    async def stop(self) -> None:
        # The engine's requests are not to blame for a lost machine.
        self.was_killed |= bool(self._host.reason)
        await super().stop()
        await self._drop_unused()

    async def _kill(self, process: Any) -> None:
        await self._host.end(process)
        await self._drop_unused()

    async def _deliver(self, folder: Path) -> str:
        try:
            async with asyncio.timeout(LOAD_SECONDS):
                number, path = await self._host.put(folder, ENGINE_FILES)
        except (OSError, OrderFailed, HostLost) as error:
            if not (folder / ADAPTER_FILE).exists():
                raise AdapterRefused(f"the adapter in {folder.name} was deleted while the engine fetched it") from error
            raise TimeoutError(str(error)) from error
        earlier, self._delivered[folder] = self._delivered.get(folder), number
        if earlier is not None:  # the copy of the previous process; the host has linked its files into the next copy
            await self._host.drop(earlier)
        return path

    async def _drop_unused(self) -> None:
        """Drops the copies of adapters that the next process will not load."""
        for folder in self._delivered.keys() - set(self.kept.values()):
            await self._forget(folder)

    async def _forget(self, folder: Path) -> None:
        if (number := self._delivered.pop(folder, None)) is not None:
            await self._host.drop(number)

    def _read_work(self) -> tuple[bytes, float]:
        assert isinstance(self._process, RemoteChild)
        return self._process.work, self._process.read_at


async def wait_for_removal() -> NoReturn:
    """Never returns: the fleet removes the engines of a lost machine."""
    await asyncio.Event().wait()
    raise AssertionError("nobody sets it")


class RankOnHost(TrainerProcess):
    """A rank of the trainer on another machine."""

    silence_seconds = SILENCE_SECONDS

    def __init__(
        self, host: JoinedHost, slot: int, *, log_path: Path, config: ServerConfig, base: Callable[[], BaseModel | None]
    ) -> None:
        super().__init__((), log_path)  # `_launch` needs no command: the host makes one
        self.machine = f"host {host.name}"
        self.device = host.greeting.device
        self.host = host
        self._slot = slot
        self._server_config = config
        self._base = base
        self._worker: WorkerConfig | None = None

    def use(self, config: WorkerConfig) -> None:
        dtype = self._server_config.number_types(self.host.greeting.device)[1]
        # The rank shares its card with no engine, so that the base model never has to leave the card between steps.
        update = {"dtype": dtype, "between_steps": "stay", "machine": self.machine}
        self._worker = config.model_copy(update=update)

    @property
    def pid(self) -> int | None:
        return None  # the process runs on another machine

    def usage(self) -> Usage | None:
        child = self._process
        if not isinstance(child, RemoteChild) or not child.cpu_seconds:
            return None
        return Usage(child.cpu_seconds, child.read_at)

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
            raise RankLost(str(error)) from error
        except TrainerDied as error:
            if not self.host.reason:
                raise
            raise RankLost(f"{self.machine} was lost: {self.host.reason}") from error
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
            paths = {"out_dir": path}
            if isinstance(task, TrainTask):
                start, paths["in_dir"] = await self.host.put(Path(task.in_dir), CONTENT_FILES)
                stack.push_async_callback(self.host.drop, start)
            done = await super().run(task.model_copy(update=paths), on_progress, batch)
            if self._worker is not None and self._worker.rank == 0:  # only rank 0 writes the result
                await self.host.fetch(number, Path(task.out_dir))
            return done
