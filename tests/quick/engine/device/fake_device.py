"""A fake GPU that counts bytes, and fake processes that allocate on it what vLLM and the trainer would. Tests run the real
owner, plan, supervisor, pause gate and job runner on it.

The fakes imitate vLLM 0.32.0 and torch: vLLM does not start when less than utilization x total is free; its KV cache
takes the rest of that share, and is restored as a whole or not at all; loading an adapter into unmapped weights kills
the process; torch keeps freed memory reserved until its cache is emptied.
"""

import asyncio
import contextlib
import itertools
import json
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from aiohttp import web

from art_protocol.log_file import LogFile
from art_server.engine.device.figures import read_figures
from art_server.engine.device.plan import GIB, Card, Demand, MemoryPlan
from art_server.jobs.trainer_process import TrainerDied
from art_server.process.place import Counters, Endpoint, Here, Program
from art_server.process.shared.trainer_messages import Done, LoadTask, Progress, TrainTask
from art_server.process.shared.work_counters import read_work
from art_server.store.base_models import BaseModel
from tests.fake_vllm import FakeVllm


class Full(Exception):
    """The device has not enough free memory."""


@dataclass
class FakeDevice:
    """The bytes that each process holds, and what went wrong."""

    card: Card
    held: dict[tuple[str, str], float] = field(default_factory=dict)
    wrongs: list[str] = field(default_factory=list)
    highest: float = 0.0

    @property
    def used(self) -> float:
        return sum(self.held.values())

    @property
    def free(self) -> float:
        return self.card.total - self.used

    def take(self, who: str, part: str, size: float) -> None:
        if size > self.free + 1:
            self.wrongs.append(
                f"{who} needs {size / GIB:.1f} GiB for {part}, {self.free / GIB:.1f} are free: "
                f"{ {key: round(value / GIB, 1) for key, value in self.held.items()} }"
            )
            raise Full(self.wrongs[-1])
        self.held[who, part] = size
        self.highest = max(self.highest, self.used)

    def give(self, who: str, *parts: str) -> None:
        for key in [key for key in self.held if key[0] == who and (not parts or key[1] in parts)]:
            del self.held[key]


TURNS = 10
"""Turns of the event loop; setting up a connection takes fewer."""


class FakeProcess(FakeVllm):
    """A process of the fake vLLM, and the bytes that it holds: what the supervisor uses of the process."""

    numbers = itertools.count(1000)

    def __init__(self, world: "World", socket: Path, work_file: Path):
        super().__init__()
        self.work_file = work_file
        self.pid = next(self.numbers)
        self.returncode: int | None = None
        self.world, self.device, self.plan = world, world.device, world.plan
        self.name = f"engine {self.pid}"
        self.gave_up: set[str] = set()
        self._ended = asyncio.Event()
        self._go_on = asyncio.Event()
        self._go_on.set()
        self._socket = socket
        self._loop = asyncio.get_running_loop()
        self._listening: asyncio.Server | None = None
        self._starting = asyncio.create_task(self._start())

    # --- life ---

    async def _start(self) -> None:
        lines = {line.what: line.sampling for line in self.plan.lines}
        share = self.plan.utilization * self.device.card.total
        # vLLM takes its graphs from its share. They stay when it sleeps.
        self.graphs = read_figures().graphs_gib * GIB
        self.fixed = sum(lines[f"engine: {part}"] for part in ("weights", "LoRA slots", "largest batch"))
        try:
            context = lines["engine: context, CUDA graphs"] - self.graphs
            self.device.take(self.name, "context", context)
            await self.world.reach("engine starts")
            if self.device.free < share:
                self.device.wrongs.append(
                    f"vLLM is started with {self.device.free / GIB:.1f} GiB free, it needs {share / GIB:.1f}"
                )
                raise Full
            self.device.take(self.name, "weights", self.fixed)
            await self.world.reach("engine loads")
            self.device.take(self.name, "graphs", self.graphs)
            self.device.take(self.name, "kv", share - self.fixed - self.graphs)
        except Full:
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
        return Counters(read_work(self.work_file), 0.0, time.monotonic())

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
        self.device.give(self.name)
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
            go_on = asyncio.create_task(self._go_on.wait())
            await asyncio.wait({go_on, ended}, return_when="FIRST_COMPLETED")
            go_on.cancel()
            await asyncio.sleep(0.001)
            if self._go_on.is_set():
                break
        ended.cancel()
        if self.returncode is not None:
            raise ConnectionResetError
        if self.gave_up:
            self.device.wrongs.append(f"sampled without {self.gave_up}")
        self.world.num_sampled += 1
        self.work_file.write_bytes(self.world.num_sampled.to_bytes(8, "little"))
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
            await self._ended.wait()
            raise ConnectionResetError
        if route in ("pause", "sleep"):
            self.is_paused = True
            self._go_on.clear()
        if route == "sleep":
            self._give_up("weights", "kv")
        if route == "release_kv_cache_memory":
            assert self.is_paused
            self._give_up("kv")
        if route == "wake_up":
            asked = request.query.get("tags")
            parts = [asked.replace("kv_cache", "kv")] if asked else ["weights", "kv"]
            sizes = {
                "weights": self.fixed,
                "kv": self.plan.utilization * self.device.card.total - self.fixed - self.graphs,
            }
            for part in self.gave_up & set(parts):
                try:
                    self.device.take(self.name, part, sizes[part])
                except Full as full:
                    return web.json_response({"message": str(full)}, status=500)
                self.gave_up.discard(part)
        if route == "resume" or (route == "wake_up" and not self.gave_up):
            self.is_paused = False
            self._go_on.set()
        return web.json_response({})

    def _give_up(self, *parts: str) -> None:
        self.gave_up |= set(parts)
        self.device.give(self.name, *parts)


class OnFakeDevice(Here):
    """This machine with a fake device, for an engine: starts fake processes."""

    def __init__(self, world: "World"):
        super().__init__(device="cuda")
        self._world = world

    async def start(self, program: Program, log: LogFile) -> Any:
        command = await program.prepare()
        assert command.endpoint is not None and command.endpoint.socket is not None and command.work_file is not None
        self._world.process = FakeProcess(self._world, command.endpoint.socket, command.work_file)
        return self._world.process


class TrainerOnDevice:
    """A trainer's process that allocates the bytes of the memory plan."""

    def __init__(self, world: "World", between_steps: str):
        self.world, self.device, self.plan = world, world.trainer_device, world.plan
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
            lines = {line.what: line.training for line in self.plan.lines}
            try:
                self._take("context", lines["trainer: context"])
                if not self.is_loaded:
                    self._take("base", lines["trainer: base weights"])
                    self.is_loaded = True
                if isinstance(task, LoadTask):
                    return Done(metrics={})
                if await self.world.reach("trains") == "die":
                    self.world.num_trainer_deaths += 1
                    raise TrainerDied("killed")
                self._take("adapter", lines["trainer: adapter, gradients, optimizer"])
                self._take("activations", lines["trainer: activations"])
                await self.world.reach("backward")
            except (Full, TrainerDied) as error:
                self._leave("context", "base", "adapter", "activations")
                self.is_loaded = False
                raise TrainerDied(str(error)) from error
            # torch keeps freed memory reserved until its cache is emptied at the end of a step.
            self._leave("adapter", "activations")
            if self.between_steps != "stay":
                self._leave("base")
                self.is_loaded = False
            if on_progress is not None:
                await on_progress(Progress(phase="save", completed=0, total=1))
            await self.world.reach("saves")
            write_adapter(Path(task.out_dir))
            return Done(metrics={"loss/train": 0.0})

    def _take(self, part: str, size: float) -> None:
        if ("trainer", part) not in self.device.held:
            self.device.take("trainer", part, size)

    def _leave(self, *parts: str) -> None:
        self.device.give("trainer", *parts)


def write_adapter(folder: Path) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "adapter_config.json").write_text(json.dumps({}))


@dataclass
class World:
    """A device, the processes on it, and the planned events."""

    card: Card
    demand: Demand
    plan: MemoryPlan
    happens: dict[str, list[str]] = field(default_factory=dict)
    """For each phase, the event at its first, second... time: "", "kill engine", "refuse", "hang", "die", "slow"."""

    def __post_init__(self) -> None:
        self.device = FakeDevice(self.card)
        own = self.plan.training_card
        self.trainer_device = self.device if own is None else FakeDevice(own)
        self.process: FakeProcess | None = None
        self.seen: list[str] = []
        self.num_trainer_deaths = self.num_sampled = 0
        self._tasks: set[asyncio.Task[Any]] = set()

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
