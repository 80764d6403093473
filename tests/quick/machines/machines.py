"""A server that takes hosts, and hosts, all in this process and over real HTTP. Their engines are processes with a fake vLLM,
their ranks the real trainer."""

import asyncio
import contextlib
import sys
from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import uvicorn

import art
from art_server.app import make_app
from art_server.engine import command as command_module
from art_server.engine.device.detection import detect
from art_server.machines.host import Host, Refused
from art_server.machines.obeying import HostOffer
from art_server.process import place as place_module
from art_server.process.children import Children
from art_server.server import Server, build
from art_server.settings import ApiKey, ServerConfig
from art_server.shared.trainer_messages import Done, Progress, Task
from tests.fakes import forked
from tests.fakes.clock import FakeClock
from tests.waiting import until

CHUNK_BYTES = 2**16
FAKE_ENGINE = Path(__file__).with_name("fake_engine.py")
KEYS = (ApiKey(key="user"), ApiKey(key="joins", scopes=frozenset({"host"})))


class Relay:
    """The network between a server and its hosts, which can stall: what is sent meanwhile arrives afterwards."""

    def __init__(self, port: int) -> None:
        self.url = ""
        self.num_held = 0
        """Of the pieces that hosts have sent during the stall, and that wait."""
        self._port = port
        self._is_open = asyncio.Event()
        self._is_open.set()
        self._pumps: list[asyncio.Task[None]] = []
        self._writers: list[asyncio.StreamWriter] = []
        self._is_over = False

    async def start(self) -> None:
        self._listening = await asyncio.start_server(self._pass, "127.0.0.1", 0)
        self.url = f"http://127.0.0.1:{self._listening.sockets[0].getsockname()[1]}"

    def stall(self) -> None:
        self._is_open.clear()

    def resume(self) -> None:
        self.num_held = 0
        self._is_open.set()

    async def stop(self) -> None:
        self._is_over = True
        self._listening.close()
        for pump in self._pumps:
            pump.cancel()
        await asyncio.gather(*self._pumps, return_exceptions=True)
        for writer in self._writers:
            writer.transport.abort()
            with contextlib.suppress(ConnectionError):
                await writer.wait_closed()

    async def _pass(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        far_reader, far_writer = await asyncio.open_connection("127.0.0.1", self._port)
        self._writers += [writer, far_writer]
        if self._is_over:
            writer.transport.abort()
            far_writer.transport.abort()
            return
        for pump in (self._pump(reader, far_writer, counts=True), self._pump(far_reader, writer)):
            self._pumps.append(asyncio.create_task(pump))

    async def _pump(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, *, counts: bool = False) -> None:
        arrived: asyncio.Queue[bytes] = asyncio.Queue()

        async def read() -> None:
            with contextlib.suppress(ConnectionError):
                while chunk := await reader.read(CHUNK_BYTES):
                    if counts and not self._is_open.is_set():
                        self.num_held += 1
                    arrived.put_nowait(chunk)
            arrived.put_nowait(b"")

        reading = asyncio.create_task(read())
        try:
            with contextlib.closing(writer), contextlib.suppress(ConnectionError):
                while chunk := await arrived.get():
                    await self._is_open.wait()
                    writer.write(chunk)
        finally:
            reading.cancel()


@dataclass
class House:
    """A server and its hosts."""

    url: str
    server: Server
    folder: Path
    clock: FakeClock
    """The server's clock."""
    hosts_clock: FakeClock = field(default_factory=FakeClock)
    tasks: dict[str, asyncio.Task[None]] = field(default_factory=dict)

    def host(
        self, name: str, *, engines: int = 0, ranks: int = 0, key: str = "joins", through: Relay | None = None
    ) -> asyncio.Task[None]:
        """Starts a host; the task ends with the reason why it is refused."""
        folder = self.folder / name
        offer = HostOffer(name, detect(), ((),) * engines, ((),) * ranks)
        host = Host(
            url=self.url if through is None else through.url,
            token=key,
            offer=offer,
            folder=folder,
            children=Children(folder, folder / "logs"),
            clock=self.hosts_clock,
        )
        self.tasks[name] = asyncio.create_task(host.run_forever())
        return self.tasks[name]

    async def end(self, name: str) -> None:
        """Ends a host as a signal does."""
        task = self.tasks.pop(name)
        task.cancel()
        await asyncio.wait({task})

    @contextlib.asynccontextmanager
    async def relay(self) -> AsyncIterator[Relay]:
        relay = Relay(int(self.url.rpartition(":")[2]))
        await relay.start()
        try:
            yield relay
        finally:
            await relay.stop()

    def when_training(self, action: Callable[[], object]) -> None:
        """Has `action` called when a rank says that the next job is trained."""
        trainer = self.server.trainer
        run = trainer.run

        async def watched(
            task: Task,
            on_progress: Callable[[Progress], Awaitable[None]] | None = None,
            batch: bytes | None = None,
        ) -> Done:
            async def note(progress: Progress) -> None:
                if progress.phase == "train" and trainer.run is watched:
                    trainer.run = run
                    action()
                if on_progress is not None:
                    await on_progress(progress)

            return await run(task, note, batch)

        trainer.run = watched

    async def refusal(self, name: str, **offered: Any) -> str:
        """Why a host is refused."""
        with pytest.raises(Refused) as caught:
            await self.host(name, **offered)
        return str(caught.value)

    async def ready(self, num: int) -> None:
        """Waits for so many engines that serve, and no others."""

        def states() -> list[str]:
            return [replica.state for replica in self.server.fleet.replicas]

        await until(lambda: states() == ["ready"] * num, lambda: f"{states()}, {self.server.fleet.detail}")

    async def joined(self, num_ranks: int) -> None:
        await until(lambda: len(self.server.trainer.joined) == num_ranks)

    @property
    def backend(self) -> art.Backend:
        return art.Backend(self.url, api_key="user")


def fake_command(settings: ServerConfig, base: Any, kind: str, run_dir: Path, plan: None) -> list[str]:
    return [sys.executable, str(FAKE_ENGINE), str(run_dir / "records.sock")]


@contextlib.asynccontextmanager
async def house(folder: Path, monkeypatch: pytest.MonkeyPatch, **settings: Any) -> AsyncIterator[House]:
    """A server without devices of its own, ready to be joined."""
    monkeypatch.setattr(command_module, "engine_command", fake_command)
    monkeypatch.setattr(place_module, "start_child", forked.start_child)
    config = {"engines": 0, "ranks": 0, "api_keys": KEYS, "base_model": "art/tiny", "gap_limit": 0.0, **settings}
    clock = FakeClock()
    server = build(ServerConfig(path=folder / "server", **config), clock=clock)
    async with listening(server) as url:
        here = House(url, server, folder, clock)
        try:
            yield here
        finally:
            for name in list(here.tasks):
                await here.end(name)


@contextlib.asynccontextmanager
async def house_with_an_engine(folder: Path, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[House]:
    """A server that the host "one" has joined with an engine, which serves."""
    async with house(folder, monkeypatch) as here:
        here.host("one", engines=1)
        await here.ready(1)
        yield here


@contextlib.asynccontextmanager
async def listening(server: Server) -> AsyncIterator[str]:
    """The address of a server that runs."""
    serving = uvicorn.Server(uvicorn.Config(make_app(server, None), port=0, log_level="warning"))
    serving.install_signal_handlers = lambda: None  # type: ignore[attr-defined]
    running = asyncio.create_task(serving.serve())
    try:
        await until(lambda: serving.started)
        yield f"http://127.0.0.1:{serving.servers[0].sockets[0].getsockname()[1]}"
    finally:
        serving.should_exit = True
        await running
