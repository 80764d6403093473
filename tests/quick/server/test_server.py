"""The parts of a server as the composition root connects them: what each promises, without processes."""

import asyncio
from pathlib import Path
from typing import Any

import pytest

from art_server.errors import Conflict
from art_server.server import Server, build
from art_server.settings import ServerConfig
from tests.fakes import FakeEngine, FakeTrainer

pytestmark = pytest.mark.anyio


def make(folder: Path) -> tuple[Server, FakeEngine]:
    engine, trainer = FakeEngine(), FakeTrainer()
    made: Any = engine, trainer
    config = ServerConfig(path=folder)
    server = build(config, make_engine=lambda *_: made[0], make_trainer=lambda *_: made[1])
    return server, engine


async def activity(server: Server) -> str:
    """What the server does most, by one sample."""
    watching = asyncio.create_task(server.status.watch())
    await asyncio.sleep(0)
    watching.cancel()
    return server.status.activity()["largest"]


async def test_a_folder_has_one_server_at_a_time(tmp_path: Path) -> None:
    server, _ = make(tmp_path)
    with pytest.raises(Conflict):
        make(tmp_path)
    server.close()
    make(tmp_path)[0].close()


async def test_a_server_that_was_stopped_leaves_its_folder_and_no_task(tmp_path: Path) -> None:
    before = asyncio.all_tasks()
    server, engine = make(tmp_path)
    await engine.listen()
    await server.start()
    assert len(asyncio.all_tasks()) > len(before)
    await server.stop()
    assert asyncio.all_tasks() == before
    make(tmp_path)[0].close()


async def test_health_is_that_of_the_parts(tmp_path: Path) -> None:
    server, engine = make(tmp_path)
    assert (server.status.health().engine, server.status.health().waits_for) == ("ready", None)
    server.gate.close("a step of 'p/a'")
    server.background.record_fault("pruning", OSError("no room"))
    health = server.status.health()
    assert health.waits_for == "a step of 'p/a'" and set(health.faults) == {"pruning"}
    engine.base, engine.state = None, "failed"
    assert server.status.health().engine == "failed"
    server.close()


async def test_a_download_of_the_base_model_counts_as_the_engine_s_start(tmp_path: Path) -> None:
    server, engine = make(tmp_path)
    server.base._downloading = "owner/other"
    assert await activity(server) == "idle", "the loaded base model serves"
    server.close()
    server, engine = make(tmp_path)
    server.base._downloading = "owner/other"
    engine.base, engine.state = None, "none"
    assert (await activity(server), server.status.health().engine) == ("starting", "starting")
    server.close()
