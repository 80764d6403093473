"""Tries to leave a box or to cheat its tests: none succeeds."""

import asyncio
import os
import socket
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from art import harbor
from art.harbor.gateway import Gateway
from art.harbor.running import play
from plugins.harbor.tests.boxed import left, needs_bubblewrap, write_task
from plugins.harbor.tests.escapes import CHECK, ESCAPES, SUCCESS, TEST
from tests.fakes.server import Answer, FakeServer, Request
from tests.processes import is_alive

pytestmark = [pytest.mark.anyio, needs_bubblewrap]
SESSION = "/s/mine"


@pytest.fixture
async def server() -> AsyncIterator[FakeServer]:
    """Tells secrets to requests that do not come from the session with its key."""

    def answer(request: Request) -> Answer:
        is_ours = (
            request.path.startswith(f"{SESSION}/v1/")
            and request.headers.get("authorization") == "Bearer secret-key::mine"
        )
        names_another = "other" in str(request.headers)
        return Answer(body={"models": [] if is_ours and not names_another else SUCCESS})

    fake = FakeServer()
    fake.otherwise = answer
    await fake.start()
    yield fake
    await fake.stop()


@pytest.fixture
async def doors() -> AsyncIterator[dict[str, str]]:
    """A port on all the host's addresses and an abstract Unix socket, which tell secrets to everybody."""

    async def tell(_: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(SUCCESS.encode())
        writer.close()

    unix = socket.socket(socket.AF_UNIX)
    name = f"art-harbor-test-{os.getpid()}"
    unix.bind(f"\0{name}")
    async with await asyncio.start_server(tell, "0.0.0.0", 0) as port, await asyncio.start_unix_server(tell, sock=unix):
        with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
            try:
                probe.connect(("192.0.2.1", 9))  # sends nothing: it chooses the host's address
                address = probe.getsockname()[0]
            except OSError:
                address = "127.0.0.2"
        yield {"PORT": str(port.sockets[0].getsockname()[1]), "ABSTRACT": name, "ADDRESS": address}


@pytest.mark.parametrize("name", ESCAPES)
async def test_a_try_fails(
    tmp_path: Path, home: Path, monkeypatch: pytest.MonkeyPatch, server: FakeServer, doors: dict[str, str], name: str
) -> None:
    (home / "secret").write_text(SUCCESS)
    (tmp_path / "agents").mkdir()
    monkeypatch.setenv("HOST_SECRET", SUCCESS)
    folder = write_task(tmp_path / "task", TEST, toml="[agent]\ntimeout_sec = 20.0\n")
    (folder / "tests" / "check.py").write_text(CHECK)
    victim = await asyncio.create_subprocess_exec("sleep", "1000")
    command = ESCAPES[name]
    for word, value in {**doors, "{home}": str(home), "{path}": SESSION, "{victim}": str(victim.pid)}.items():
        command = command.replace(word, value)
    command = command.replace("{{", "{").replace("}}", "}")
    try:
        outcome = await play(
            harbor.tasks(folder)[0],
            command,
            gateway=Gateway(server.url + SESSION, "secret-key::mine"),
            sandbox=harbor.Bubblewrap(mounts={"/opt/agents": tmp_path / "agents"}, disk_mb=64),
        )
        assert outcome.reward == 0.0 and outcome.metrics["agent_timed_out"] is False
        assert SUCCESS not in outcome.agent_output, outcome.agent_output
        assert SUCCESS not in outcome.tests_output, outcome.tests_output
        assert "secret-key" not in outcome.agent_output + outcome.tests_output
        assert is_alive(victim.pid)
    finally:
        victim.kill()
        await victim.wait()
    assert left() == []


async def test_a_success_would_be_seen(tmp_path: Path, home: Path, server: FakeServer) -> None:
    """The same means succeed where nothing forbids them."""
    (home / "secret").write_text(SUCCESS)
    folder = write_task(tmp_path / "task", "echo 0 > /logs/verifier/reward.txt; cat secret")
    request = ESCAPES["ask for the server's routes"].replace("/api/models", f"{SESSION}/v1/models")
    outcome = await play(
        harbor.tasks(folder)[0],
        f"touch x && echo esc''aped; cat /opt/home/secret > secret; {request}",
        gateway=Gateway(server.url + SESSION, "another-key"),
        sandbox=harbor.Bubblewrap(mounts={"/opt/home": home}),
    )
    assert outcome.agent_output.count(SUCCESS) == 2 and SUCCESS in outcome.tests_output
