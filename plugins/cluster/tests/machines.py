"""A server that takes hosts, and hosts, all in this process and over real HTTP. Their engines are processes with a fake vLLM,
their ranks the real trainer."""

import asyncio
import contextlib
import sys
from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import uvicorn

import art
from art_cluster import obeying
from art_cluster.host import Host, Refused
from art_cluster.obeying import Offer
from art_server.app import make_app
from art_server.engine import engine as engine_module
from art_server.engine.device.detection import detect
from art_server.process.children import Children
from art_server.server import Server, build
from art_server.settings import ApiKey, ServerConfig
from tests.waiting import until

FAKE_ENGINE = Path(__file__).with_name("fake_engine.py")
KEYS = (ApiKey(key="user"), ApiKey(key="joins", scopes=frozenset({"host"})))


@dataclass
class House:
    """A server and its hosts."""

    url: str
    server: Server
    folder: Path
    tasks: dict[str, asyncio.Task[None]] = field(default_factory=dict)

    def host(self, name: str, *, engines: int = 0, ranks: int = 0, key: str = "joins") -> asyncio.Task[None]:
        """Starts a host; the task ends with the reason why it is refused."""
        folder = self.folder / name
        offer = Offer(name, detect(), ((),) * engines, ((),) * ranks)
        host = Host(self.url, key, offer, folder, Children(folder, folder / "logs"))
        self.tasks[name] = asyncio.create_task(host.run_forever())
        return self.tasks[name]

    async def end(self, name: str) -> None:
        """Ends a host as a signal does."""
        task = self.tasks.pop(name)
        task.cancel()
        await asyncio.wait({task})

    async def refusal(self, name: str, **offered: Any) -> str:
        """Why a host is refused."""
        with pytest.raises(Refused) as caught:
            await self.host(name, **offered)
        return str(caught.value)

    async def ready(self, num: int) -> None:
        """Waits for so many engines that serve, and no others."""

        def states() -> list[str]:
            return [each.state for each in self.server.engine.replicas]

        await until(lambda: states() == ["ready"] * num, lambda: f"{states()}, {self.server.engine.detail}")

    async def joined(self, num_ranks: int) -> None:
        lender = self.server.trainer.lender
        assert lender is not None
        await until(lambda: len(lender.ranks()) == num_ranks)

    @property
    def backend(self) -> art.Backend:
        return art.Backend(self.url, api_key="user")


def fake_command(settings: ServerConfig, base: Any, kind: str, run_dir: Path) -> list[str]:
    return [sys.executable, str(FAKE_ENGINE), str(run_dir / "records.sock")]


@contextlib.asynccontextmanager
async def house(folder: Path, monkeypatch: pytest.MonkeyPatch, **settings: Any) -> AsyncIterator[House]:
    """A server without devices of its own, ready to be joined."""
    monkeypatch.setattr(obeying, "engine_command", fake_command)
    monkeypatch.setattr(engine_module, "HEALTH_SECONDS", 0.05)
    given = {"engines": 0, "ranks": 0, "api_keys": KEYS, "base_model": "art/tiny", "gap_limit": 0.0, **settings}
    server = build(ServerConfig(path=folder / "server", **given))
    async with listening(server) as url:
        here = House(url, server, folder)
        try:
            yield here
        finally:
            for name in list(here.tasks):
                await here.end(name)


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
