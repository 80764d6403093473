"""A fake GPU that knows who is on it, and fake processes that enter and leave it as vLLM and the trainer do. Tests run the
real owner, supervisor, pause gate and job runner on it.

As in vLLM 0.32.0, loading an adapter into unmapped weights kills the process.
"""

import asyncio
import contextlib
import itertools
import json
import time
from collections.abc import Awaitable, Callable, Collection
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from aiohttp import web

from art_protocol.log_file import LogFile
from art_server.engine.device.plan import MemoryPlan
from art_server.engine.engine import SLEEP_SECONDS
from art_server.jobs.trainer_process import TrainerDied
from art_server.process.place import Counters, Endpoint, Here, PlaceFailed, Program
from art_server.settings import Handover
from art_server.shared.trainer_messages import Done, LoadTask, Progress, TrainTask
from art_server.shared.work_counters import WorkCounter, read_work
from tests.fakes.clock import FakeClock
from tests.fakes.vllm import FakeVllm


class Clash(Exception):
    """Two processes do not fit the device together."""


@dataclass
class FakeDevice:
    """Which part of which process is on the device, and what went wrong."""

    handover: Handover
    present: set[tuple[str, str]] = field(default_factory=set)
    wrongs: list[str] = field(default_factory=list)

    def enter(self, who: str, part: str) -> None:
        """Adds an engine's "start", "weights" or "kv", or the trainer's "base" or "step"."""
        for other, other_part in sorted(self.present):
            if other != who and self._clash(part, other_part):
                self.wrongs.append(f"{who}'s {part} comes beside {other}'s {other_part}")
                raise Clash(self.wrongs[-1])
        self.present.add((who, part))

    def _clash(self, part: str, other_part: str) -> bool:
        if self.handover == "sleep":
            return True
        # Both fit. While vLLM starts it measures the memory that is free, and counts with a base that is there already.
        return "start" in (part, other_part) and (part, other_part) != ("start", "base")

    def leave(self, who: str, *parts: str) -> None:
        """Removes these parts of a process; without `parts` the whole process."""
        self.present -= {pair for pair in self.present if pair[0] == who and (not parts or pair[1] in parts)}


TURNS = 10
"""Turns of the event loop; setting up a connection takes fewer."""


class FakeProcess(FakeVllm):
    """A process of the fake vLLM on the fake device: what the supervisor uses of a process."""

    numbers = itertools.count(1000)

    def __init__(self, world: "World", socket: Path, work_file: Path):
        super().__init__()
        self.work_file = work_file
        self.pid = next(self.numbers)
        self.returncode: int | None = None
        self.world, self.device = world, world.device
        self.name = f"engine {self.pid}"
        self.gave_up: set[str] = set()
        self._ended = asyncio.Event()
        self.computes = asyncio.Event()
        """Set while the engine samples."""
        self.computes.set()
        self._socket = socket
        self._loop = asyncio.get_running_loop()
        self._listening: asyncio.Server | None = None
        self._starting = asyncio.create_task(self._start())

    # --- life ---

    async def _start(self) -> None:
        try:
            await self.world.reach("engine starts")
            self.device.enter(self.name, "start")
            self.device.enter(self.name, "weights")
            await self.world.reach("engine loads")
            self.device.enter(self.name, "kv")
            self.device.leave(self.name, "start")
        except Clash:
            self.kill(1)
            return
        app = web.Application(middlewares=[self._while_it_lives])
        app.add_routes(self.routes())
        self._site = web.AppRunner(app, access_log=None, shutdown_timeout=0.01)
        await self._site.setup()
        assert self._site.server is not None
        self._listening = await self._loop.create_unix_server(self._site.server, self._socket)

    @property
    def endpoint(self) -> Endpoint:
        return Endpoint("http://engine", self._socket)

    def counters(self) -> Counters:
        return Counters(self.world.read_work(self.work_file), 0.0, self.world.seconds())

    async def end(self) -> None:
        self.kill()
        await self.wait()

    def kill(self, status: int = -9) -> None:
        """Ends the process; may be called from any thread."""
        self._loop.call_soon_threadsafe(self._end, status)

    def _end(self, status: int) -> None:
        if self.returncode is not None:
            return
        self.returncode = status
        self.device.leave(self.name)
        self._starting.cancel()
        self._socket.unlink(missing_ok=True)
        self._abort_connections()
        self._ended.set()
        self.world.background(self._close())

    def _abort_connections(self) -> None:
        """Aborts all connections at once, as an operating system does."""
        if self._site is not None and self._site.server is not None:
            for connection in self._site.server.connections:
                if connection.transport is not None:
                    connection.transport.abort()

    @web.middleware
    async def _while_it_lives(self, request: web.Request, handler: Any) -> web.StreamResponse:
        """Aborts requests after the process has ended: a connection may be accepted while it ends."""
        if self.returncode is None:
            return await handler(request)
        if request.transport is not None:
            request.transport.abort()
        raise ConnectionResetError

    async def _close(self) -> None:
        with contextlib.suppress(asyncio.CancelledError):
            await self._starting
        if self._listening is not None and self._site is not None:
            # When a server closes, asyncio never closes connections that it has accepted but not yet set up.
            for _ in range(TURNS):
                await asyncio.sleep(0)
            self._abort_connections()
            self._listening.close()
            await self._site.cleanup()

    async def wait(self) -> int:
        await self._ended.wait()
        assert self.returncode is not None
        return self.returncode

    # --- HTTP ---

    async def _reach(self, phase: str) -> str:
        event = await self.world.reach(phase)
        if self.returncode is not None:
            raise ConnectionResetError
        return event

    async def _complete(self, request: web.Request) -> web.Response:
        ended = asyncio.create_task(self._ended.wait())
        while self.returncode is None:  # a step of the engine; repeated after a pause
            go_on = asyncio.create_task(self.computes.wait())
            await asyncio.wait({go_on, ended}, return_when="FIRST_COMPLETED")
            go_on.cancel()
            await asyncio.sleep(0.001)
            if self.computes.is_set():
                break
        ended.cancel()
        if self.returncode is not None:
            raise ConnectionResetError
        if self.gave_up:
            self.device.wrongs.append(f"sampled without {self.gave_up}")
        if ("trainer", "step") in self.device.present:
            self.device.wrongs.append("sampled beside a step")
        self.world.num_sampled += 1
        WorkCounter(self.work_file, 0).add(1)
        return await super()._complete(request)

    async def _load(self, request: web.Request) -> web.Response:
        await self._reach("adapter loads")
        if "weights" in self.gave_up:
            self.device.wrongs.append("illegal memory access: an adapter is loaded into unmapped weights")
            self.kill(-11)
            await self.wait()
        return await super()._load(request)

    async def _control(self, request: web.Request) -> web.Response:
        route = request.path.strip("/")
        failure = await self._reach(route)
        if failure == "refuse":
            return web.json_response({"message": "CUDA error"}, status=500)
        if failure == "hang":
            self.world.clock.advance(SLEEP_SECONDS)  # the longest of the limits
            await self._ended.wait()
            raise ConnectionResetError
        if route in ("pause", "sleep"):
            self.is_paused = True
            self.computes.clear()
        if route == "sleep":
            self._give_up("weights", "kv")
        if route == "wake_up":
            asked = request.query.get("tags")
            parts = [asked.replace("kv_cache", "kv")] if asked else ["weights", "kv"]
            for part in self.gave_up & set(parts):
                try:
                    self.device.enter(self.name, part)
                except Clash as clash:
                    return web.json_response({"message": str(clash)}, status=500)
                self.gave_up.discard(part)
        if route == "resume" or (route == "wake_up" and not self.gave_up):
            self.is_paused = False
            self.computes.set()
        return web.json_response({})

    def _give_up(self, *parts: str) -> None:
        self.gave_up |= set(parts)
        self.device.leave(self.name, *parts)


class OnFakeDevice(Here):
    """This machine with a fake device, for an engine: starts fake processes."""

    def __init__(self, world: "World"):
        super().__init__(device="cuda")
        self._world = world
        self.is_full = False
        """The machine cannot take files."""
        self.num_deliveries = 0

    async def deliver(self, folder: Path, names: Collection[str]) -> str:
        self.num_deliveries += 1
        if self.is_full:
            raise PlaceFailed("host h: No space left on device")
        return await super().deliver(folder, names)

    async def start(self, program: Program, log: LogFile) -> Any:
        command = await program.prepare()
        assert command.endpoint is not None and command.endpoint.socket is not None and command.work_file is not None
        self._world.process = FakeProcess(self._world, command.endpoint.socket, command.work_file)
        return self._world.process


class TrainerOnDevice:
    """A trainer's process with its base, and with a step while it trains."""

    def __init__(self, world: "World", between_steps: str):
        self.world, self.device = world, world.trainer_device
        self.between_steps = between_steps
        self.is_loaded = False
        self.lock = asyncio.Lock()

    async def run(
        self,
        task: LoadTask | TrainTask,
        on_progress: Callable[[Progress], Awaitable[None]] | None = None,
        batch: bytes | None = None,
    ) -> Done:
        del batch
        async with self.lock:
            try:
                if not self.is_loaded:
                    self.device.enter("trainer", "base")
                    self.is_loaded = True
                if isinstance(task, LoadTask):
                    return Done(metrics={})
                if await self.world.reach("trains") == "die":
                    self.world.num_trainer_deaths += 1
                    raise TrainerDied("killed")
                self.device.enter("trainer", "step")
                await self.world.reach("backward")
            except (Clash, TrainerDied) as error:
                self.device.leave("trainer")
                self.is_loaded = False
                raise TrainerDied(str(error)) from error
            self.device.leave("trainer", "step")
            if self.between_steps != "stay":
                self.device.leave("trainer", "base")
                self.is_loaded = False
            if on_progress is not None:
                await on_progress(Progress(phase="save", completed=0, total=1))
            await self.world.reach("saves")
            write_adapter(Path(task.out_dir))
            return Done(metrics={"loss/train": 0.0})


def write_adapter(folder: Path) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "adapter_config.json").write_text(json.dumps({}))
    (folder / "adapter_model.safetensors").touch()


@dataclass
class World:
    """A device, the processes on it, and the planned events."""

    plan: MemoryPlan
    happens: dict[str, list[str]] = field(default_factory=dict)
    """For each phase, the event at its first, second... time: "", "kill engine", "refuse", "hang", "die", "slow"."""
    clock: FakeClock = field(default_factory=FakeClock)
    """The server's clock."""

    def __post_init__(self) -> None:
        self.device = FakeDevice(self.plan.handover)
        is_shared = self.plan.training_card is None
        self.trainer_device = self.device if is_shared else FakeDevice("none")
        self.process: FakeProcess | None = None
        self.seen: list[str] = []
        self.num_trainer_deaths = self.num_sampled = 0
        self._tasks: set[asyncio.Task[Any]] = set()

    def seconds(self) -> float:
        """The clock of the device's machine."""
        return time.monotonic()

    def read_work(self, file: Path) -> bytes:
        return read_work(file)

    async def reach(self, phase: str) -> str:
        """Called when a phase begins; runs and returns its planned event."""
        self.seen.append(phase)
        planned = self.happens.get(phase, [])
        event = planned.pop(0) if planned else ""
        await asyncio.sleep(0.02 if event == "slow" else 0.001)
        if event == "kill engine" and self.process is not None:
            self.process.kill()
            await asyncio.sleep(0.001)
        return event

    async def settle(self) -> None:
        """Waits for background tasks that still run at the end of a test."""
        while self._tasks:
            await asyncio.wait(set(self._tasks))

    def background(self, work: Any) -> None:
        task = asyncio.ensure_future(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
