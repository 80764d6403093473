"""What `--cluster` refuses before anything starts, the key that it makes, and what fits on Ray's machines."""

import importlib.util
import socket
from pathlib import Path
from typing import Any

import httpx
import pytest

from art_server.app import make_app
from art_server.engine.device.assignment import check_flags
from art_server.errors import UsageError
from art_server.flags import parse
from art_server.machines import placing as placing_module
from art_server.machines.placing import RayProcess, check_answers
from art_server.process.children import Children
from art_server.server import build
from art_server.settings import ApiKey, ServerConfig

pytestmark = pytest.mark.anyio


def config(folder: Path, **more: Any) -> ServerConfig:
    return ServerConfig(path=folder, **{"cluster": "auto", "engines": 2, "ranks": 3, **more})


@pytest.fixture(autouse=True)
def installed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: object())
    monkeypatch.delenv(placing_module.ADDRESS_VARIABLE, raising=False)


def test_without_ray_it_names_the_extra(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(UsageError, match=r"'ray' is not installed: pip install '\.\[cluster\]'"):
        build(config(tmp_path))


@pytest.mark.parametrize("address", ["ray://head:10001", "head", "head:", ":6379", "head:port", "http://head:6379"])
def test_what_is_no_address_is_refused(address: str) -> None:
    with pytest.raises(UsageError, match="write 'auto', or the address of Ray's head"):
        check_answers(address)


def test_an_address_that_does_not_answer_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with socket.create_server(("127.0.0.1", 0)) as listening:
        address = f"127.0.0.1:{listening.getsockname()[1]}"
        check_answers(address)
    for cluster, variable in ((address, None), ("auto", address)):
        if variable is not None:
            monkeypatch.setenv(placing_module.ADDRESS_VARIABLE, variable)
        with pytest.raises(UsageError, match=f"--cluster {address}: nothing answers there"):
            build(config(tmp_path / cluster.replace(":", "-"), cluster=cluster))


@pytest.mark.parametrize(
    "flags", [["--serve-devices", "0", "--train-devices", "1"], ["--trainer", "unsloth"]], ids=["devices", "unsloth"]
)
def test_devices_are_rays_choice(flags: list[str]) -> None:
    with pytest.raises(UsageError, match="--cluster: Ray chooses the devices"):
        check_flags(parse(["--cluster", "auto", *flags]))


async def test_the_server_has_no_devices_and_a_key_for_hosts_only(tmp_path: Path) -> None:
    """Programs of its machine need no key if none was configured; hosts do."""
    server = build(config(tmp_path))
    try:
        assert (server.config.engines, server.config.ranks) == (0, 0)
        assert server.hosts is not None
        (key,) = server.hosts.keys
        assert key.scopes == {"host"} and len(key.key) > 40 and key.key not in repr(server.config) + repr(key)
        transport = httpx.ASGITransport(make_app(server, None))
        async with httpx.AsyncClient(transport=transport, base_url="http://127.0.0.1") as client:
            path = "/api/hosts/files/00"
            assert (await client.get("/api/jobs")).status_code == 200
            assert (await client.get(path)).status_code == 401
            assert (await client.get(path, headers={"authorization": f"Bearer {key.key}"})).status_code == 404
    finally:
        server.close()


async def test_with_keys_the_made_one_opens_nothing_else(tmp_path: Path) -> None:
    server = build(config(tmp_path, api_keys=(ApiKey(key="user"),)))
    try:
        assert server.hosts is not None
        headers = {"authorization": f"Bearer {server.hosts.keys[0].key}"}
        transport = httpx.ASGITransport(make_app(server, None))
        async with httpx.AsyncClient(transport=transport, base_url="http://127.0.0.1") as client:
            assert (await client.get("/api/jobs")).status_code == 401
            assert (await client.get("/api/jobs", headers=headers)).status_code == 403
            assert (await client.get("/v1/models", headers=headers)).status_code == 403
    finally:
        server.close()


async def test_a_process_that_cannot_place_ends_the_server_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Later its sentence is a fault that `/health` shows."""
    settings = config(tmp_path)
    settings.server_dir.mkdir(parents=True)
    (settings.server_dir / "address.json").write_text('{"url": "http://127.0.0.1:7623"}')
    fake = tmp_path / "python"
    fake.write_text("#!/bin/sh\ncat > given\nenv > variables\necho there is no room\nexit 2\n")
    fake.chmod(0o700)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    monkeypatch.setattr(placing_module.sys, "executable", str(fake))
    ray = RayProcess(settings, Children(settings.server_dir, settings.log_dir))
    await ray.run()
    assert str(ray.fatal) == "there is no room"
    placing = placing_module.Placing.model_validate_json((tmp_path / "given").read_text())
    assert (placing.address, placing.engines, placing.ranks, placing.key) == (None, 2, 3, ray.key.key)
    variables = (tmp_path / "variables").read_text()
    assert "OMP_NUM_THREADS" not in variables and ray.key.key not in variables
    assert (settings.server_dir / "ray_token").stat().st_mode & 0o777 == 0o600
    with pytest.raises(placing_module.RayEnded, match="there is no room"):
        await ray.run()
