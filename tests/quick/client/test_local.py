"""LocalBackend against a script that behaves as art-server does when it starts and stops."""

import asyncio
import json
import subprocess
import sys
from pathlib import Path

import psutil
import pytest

import art
from art.local import LocalBackend
from tests.waiting import PATIENCE_SECONDS

pytestmark = pytest.mark.anyio

FAKE_SERVER = """
import http.server, json, os, pathlib, signal, sys

args = sys.argv[1:]
path = pathlib.Path(args[args.index("--path") + 1])
print("flags", *args, flush=True)
if "--fail" in args:
    print("\\n".join(f"line {i}" for i in range(30)))
    print("ModuleNotFoundError: No module named 'vllm'", file=sys.stderr)
    sys.exit(3)
if "--hang" in args:
    signal.pause()

INFO = {"name": "a", "project": "p", "base_model": "b", "step": 0, "inference_name": "p/a", "lora": {}}


class Handler(http.server.BaseHTTPRequestHandler):
    def do_GET(self):
        self.rfile.read(int(self.headers.get("content-length", 0)))
        if self.path == "/api/models/p/a":
            os._exit(1)
        body = json.dumps(INFO).encode()
        self.send_response(200)
        self.send_header("content-length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    do_POST = do_GET


def stop(*_):
    print("stopped", flush=True)
    os._exit(0)


signal.signal(signal.SIGTERM, stop)
server = http.server.HTTPServer(("127.0.0.1", 0), Handler)
folder = path / ".server"
folder.mkdir(parents=True, exist_ok=True)
url = f"http://127.0.0.1:{server.server_port}"
(folder / "new").write_text(json.dumps({"pid": os.getpid(), "url": url, "started_at": 0.0}))
(folder / "new").rename(folder / "address.json")
server.serve_forever()
"""


@pytest.fixture
def script(tmp_path: Path) -> Path:
    path = tmp_path / "fake_art_server.py"
    path.write_text(FAKE_SERVER)
    return path


def make_backend(script: Path, *server_args: str, timeout: float = PATIENCE_SECONDS) -> LocalBackend:
    class FakeLocalBackend(LocalBackend):
        def _command(self) -> list[str]:
            return [sys.executable, str(script)]

    path = script.parent / "art"
    return FakeLocalBackend(path=path, server_args=server_args, start_timeout_seconds=timeout)


def make_model() -> art.TrainableModel:
    return art.TrainableModel(name="a", project="p", base_model="b")


def server_pid(script: Path) -> int:
    return json.loads((script.parent / "art/.server/address.json").read_text())["pid"]


async def test_server_starts_with_the_first_model_and_stops_with_close(script: Path):
    backend = make_backend(script, "--port", "7623")
    first, second = make_model(), make_model()
    await asyncio.gather(first.register(backend), second.register(backend))
    pid = server_pid(script)
    assert psutil.pid_exists(pid) and first.inference_base_url == second.inference_base_url
    await backend.close()
    assert not psutil.pid_exists(pid)
    log = (script.parent / "art/logs/server.log").read_text()
    flags = f"--host 127.0.0.1 --port 0 --inference-port 0 --path {script.parent / 'art'}"
    assert log.startswith(f"flags {flags} --exit-with-parent --port 7623\n")
    assert log.endswith("stopped\n")


async def test_async_with_starts_and_stops_and_it_can_start_again(script: Path):
    backend = make_backend(script)
    for _ in range(2):
        async with backend:
            pid = server_pid(script)
            assert psutil.pid_exists(pid)
        assert not psutil.pid_exists(pid)
    assert (script.parent / "art/logs/server.log").read_text().count("stopped") == 2


async def test_server_that_ends_at_once_shows_the_end_of_its_log(script: Path):
    log = script.parent / "art/logs/server.log"
    log.parent.mkdir(parents=True)
    log.write_text("of an earlier run\n")
    with pytest.raises(art.ArtError, match="3") as caught:
        await make_model().register(make_backend(script, "--fail"))
    message = str(caught.value)
    assert "line 29" in message and "line 5\n" not in message and "earlier" not in message


async def test_server_that_never_gets_ready_is_given_up_and_stopped(script: Path):
    with pytest.raises(art.ArtError):
        await make_backend(script, "--hang", timeout=0.4).start()


async def test_server_that_dies_is_reported_instead_of_waited_for_and_can_be_started_again(
    script: Path,
):
    async with make_backend(script) as backend:
        model = make_model()
        await model.register(backend)
        with pytest.raises(art.ArtError):
            await model.get_step()
        await model.register(backend)
        assert psutil.pid_exists(server_pid(script))


async def test_closed_backend_says_that_its_server_is_not_running(script: Path):
    backend = make_backend(script)
    model = make_model()
    await model.register(backend)
    await backend.close()
    with pytest.raises(art.ArtError, match="register"):
        await model.get_step()


PROGRAM = """
import asyncio, sys
from pathlib import Path
from art.local import LocalBackend

class FakeLocalBackend(LocalBackend):
    def _command(self):
        return [sys.executable, sys.argv[1]]

asyncio.run(FakeLocalBackend(path=Path(sys.argv[1]).parent / "art").start())
"""


def test_server_stops_with_a_program_that_never_closed_it(script: Path):
    subprocess.run([sys.executable, "-c", PROGRAM, str(script)], check=True)
    assert not psutil.pid_exists(server_pid(script))
    assert "stopped" in (script.parent / "art/logs/server.log").read_text()


def test_command_runs_the_server_of_this_environment():
    command = LocalBackend()._command()
    assert command[0] == sys.executable and command[-2:] == ["-m", "art_server"]
    assert "LocalBackend" in repr(art.LocalBackend())
