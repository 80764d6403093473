"""The parts of a server as the composition root connects them: what each promises, without processes."""

import asyncio
import json
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import pytest

from art_server.engine.device.detection import Gpu, Machine
from art_server.errors import Conflict, InvalidInput
from art_server.process.place import Here
from art_server.server import Server, build
from art_server.settings import ApiKey, ServerConfig
from tests.fakes.parts import FakeEngine, FakeTrainer

pytestmark = pytest.mark.anyio


def make(folder: Path) -> tuple[Server, FakeEngine]:
    engine, trainer = FakeEngine(), FakeTrainer()
    fakes: Any = engine, trainer
    config = ServerConfig(path=folder)
    server = build(config, make_fleet=lambda **_: fakes[0], make_trainer=lambda **_: fakes[1])
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
    server.gate.close("p/a")
    server.background.record_fault("pruning", OSError("no room"))
    health = server.status.health()
    assert health.waits_for == "a step of 'p/a', which trains" and set(health.faults) == {"pruning"}
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


def test_one_engine_is_a_fleet_of_one_and_needs_no_name_of_its_own(tmp_path: Path) -> None:
    server = build(ServerConfig(path=tmp_path))
    assert [replica.name for replica in server.fleet.replicas] == ["engine"]
    assert server.fleet.log_path == tmp_path / "logs" / "engine.log" and server.status.health().replicas == []
    server.close()


LOADED = """
import json, sys
from pathlib import Path
from art_server.app import make_app
from art_server.server import build
from art_server.settings import ApiKey, ServerConfig
keys = [ApiKey(key="k", scopes=frozenset({scope})) for scope in sys.argv[2:]]
server = build(ServerConfig(path=Path(sys.argv[1]), api_keys=tuple(keys)))
make_app(server, None)
server.close()
print(json.dumps([name for name in sys.modules if name.startswith(("art_server.machines", "art_cluster", "ray"))]))
"""


def test_a_server_loads_the_code_of_hosts_only_if_hosts_may_join(tmp_path: Path) -> None:
    def loaded(*arguments: str) -> list[str]:
        command = [sys.executable, "-c", LOADED, str(tmp_path), *arguments]
        ran = subprocess.run(command, capture_output=True, text=True, check=True)
        return json.loads(ran.stdout)

    assert loaded() == []
    with_hosts = loaded("host")
    assert "art_server.machines.hosts" in with_hosts and not {"art_cluster", "ray"} & {*with_hosts}


def test_several_engines_divide_the_gpus_and_have_their_own_logs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    gpus = tuple(Gpu(index, f"GPU-{index}", "NVIDIA L4", 24 << 30, (8, 9)) for index in range(5))
    monkeypatch.setattr("art_server.server.detect", lambda: Machine("cuda", gpus, 64 << 30))
    server = build(ServerConfig(path=tmp_path, engines=2, serve_devices=(1, 2, 3, 4), train_devices=(0,)))
    locations = [replica.location for replica in server.fleet.replicas]
    visible = [location.variables["CUDA_VISIBLE_DEVICES"] for location in locations if isinstance(location, Here)]
    assert visible == ["GPU-1,GPU-2", "GPU-3,GPU-4"]
    assert [replica.log_path.name for replica in server.fleet.replicas] == ["engine-0.log", "engine-1.log"]
    assert [replica.name for replica in server.status.health().replicas] == ["engine-0", "engine-1"]
    server.close()


def test_a_share_is_for_a_project_that_a_key_or_a_model_names(tmp_path: Path) -> None:
    key = ApiKey(key="k", projects=frozenset({"a"}))
    build(ServerConfig(path=tmp_path / "one", api_keys=(key,), shares={"a": 2.0})).close()
    with pytest.raises(InvalidInput) as refused:
        build(ServerConfig(path=tmp_path / "two", api_keys=(key,), shares={"b": 2.0}))
    assert refused.value.message == (
        "--share b: there is no such project here, only a; register a model in it first, or name it in the line of a key"
    )


def test_the_sockets_of_a_killed_server_are_removed_whatever_its_number_of_engines(tmp_path: Path) -> None:
    own, foreign = (Path(tempfile.mkdtemp(prefix="art-", dir=tmp_path)) for _ in range(2))
    server_dir = tmp_path / "art" / ".server"
    server_dir.mkdir(parents=True)
    (server_dir / "run_dir-engine-1").write_text(f"{own}\n{server_dir.resolve()}")
    (server_dir / "run_dir").write_text(f"{foreign}\n/another/server")
    build(ServerConfig(path=tmp_path / "art")).close()
    assert not own.exists() and foreign.exists(), "the folder is a copy of another server's"
    assert list(server_dir.glob("run_dir*")) == []
