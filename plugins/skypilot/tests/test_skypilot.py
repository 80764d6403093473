"""SkyPilotBackend against a stand-in for SkyPilot's package, and a stand-in for ssh that forwards to a server here."""

import asyncio
import logging
import os
import signal
import sys
import threading
import types
from collections.abc import Callable
from dataclasses import dataclass
from enum import Enum
from pathlib import Path
from typing import Any

import psutil
import pytest

import art
from art.skypilot.task import TASK_FILE, TASK_NAME
from tests.waiting import PATIENCE_SECONDS, until

pytestmark = pytest.mark.anyio

FAKE_SSH = """
import asyncio, os, pathlib, sys

folder, arguments = pathlib.Path(os.environ["FAKE_SSH"]), sys.argv[1:]
with (folder / "ssh.log").open("a") as log:
    print(os.getpid(), *arguments, file=log)
*_, host, command = arguments
if (folder / "refuses").exists():
    sys.exit("Permission denied (publickey)")
if command == "cat art/api-key":
    print("key-of-the-cluster")
if command != "cat":
    sys.exit()
_, port, _, _ = arguments[arguments.index("-L") + 1].split(":")


async def pump(reader, writer):
    while data := await reader.read(65536):
        writer.write(data)
        await writer.drain()
    writer.close()


async def serve(reader, writer):
    try:
        there = await asyncio.open_connection("127.0.0.1", int((folder / "port").read_text()))
    except OSError:
        writer.transport.abort()
        return
    await asyncio.gather(pump(reader, there[1]), pump(there[0], writer), return_exceptions=True)


async def main():
    await asyncio.start_server(serve, "127.0.0.1", int(port))
    await asyncio.to_thread(sys.stdin.read)
    os._exit(0)


asyncio.run(main())
"""

FAKE_CLI = """
import os, pathlib, signal, sys


def cli():
    with (pathlib.Path(os.environ["FAKE_SSH"]) / "cli.log").open("a") as log:
        print(os.getpid(), *sys.argv[1:], file=log)
    if sys.argv[1] == "logs":
        print("a line of the server's log", flush=True)
        signal.pause()
"""


class ClusterDoesNotExist(ValueError):
    pass


class Status(Enum):
    UP = "UP"
    STOPPED = "STOPPED"
    INIT = "INIT"
    SETTING_UP = "SETTING_UP"
    RUNNING = "RUNNING"
    FAILED_SETUP = "FAILED_SETUP"


class FakeSky(types.ModuleType):
    """Put into sys.modules as `sky`."""

    StatusRefreshMode = types.SimpleNamespace(AUTO="AUTO")
    exceptions = types.SimpleNamespace(ClusterDoesNotExist=ClusterDoesNotExist)

    def __init__(self) -> None:
        super().__init__("sky")
        self.calls: list[str] = []
        self.cluster: Status | None = None
        self.jobs: dict[int, str] = {}
        self.job_statuses = [Status.SETTING_UP, Status.RUNNING]
        """One for each time that somebody asks, the last one for good."""
        self.log = "installing\ncompiling\n"
        self.failing: dict[str, Exception] = {}
        self.launch_goes_on = threading.Event()
        self.launch_goes_on.set()
        self.task: types.SimpleNamespace | None = None
        self.Task = types.SimpleNamespace(from_yaml_config=self._make_task)

    def get(self, request: Callable[[], Any]) -> Any:
        return request()

    stream_and_get = get

    def status(self, names: list[str], refresh: str) -> Callable[[], Any]:
        assert refresh == "AUTO"
        return self._request("status", lambda: [{"status": self.cluster}] if self.cluster else [])

    def queue(self, name: str, skip_finished: bool, all_users: bool) -> Callable[[], Any]:
        assert skip_finished and all_users
        jobs = [{"job_id": number, "job_name": job} for number, job in self.jobs.items()]
        return self._request("queue", lambda: jobs)

    def launch(self, task: types.SimpleNamespace, cluster_name: str) -> Callable[[], Any]:
        self._fail("submit")

        def run() -> tuple[int, None]:
            self.cluster = Status.INIT
            assert self.launch_goes_on.wait(PATIENCE_SECONDS)
            self._fail("launch")
            self.cluster, self.task, self.jobs[7] = Status.UP, task, "art-server"
            return 7, None

        return self._request("launch " + cluster_name, run)

    def job_status(self, name: str, jobs: list[int]) -> Callable[[], Any]:
        status = self.job_statuses.pop(0) if len(self.job_statuses) > 1 else self.job_statuses[0]
        return lambda: dict.fromkeys(jobs, status)

    def tail_logs(self, name: str, job: int, follow: bool, tail: int, output_stream: Any) -> None:
        assert not follow and tail > 0
        output_stream.write(self.log)

    def cancel(self, name: str, job_ids: list[int]) -> Callable[[], Any]:
        return self._request(f"cancel {job_ids}", lambda: self.jobs.clear())

    def api_cancel(self, requests: list[Any]) -> Callable[[], Any]:
        return self._request("api_cancel", self.launch_goes_on.set)

    def stop(self, name: str) -> Callable[[], Any]:
        return self._request("stop", lambda: self._become(Status.STOPPED))

    def down(self, name: str) -> Callable[[], Any]:
        def run() -> None:
            if self.cluster is None:
                raise ClusterDoesNotExist(name)
            self._become(None)

        return self._request("down", run)

    def _become(self, status: Status | None) -> None:
        self.cluster = status

    def _request(self, name: str, run: Callable[[], Any]) -> Callable[[], Any]:
        self.calls.append(name)
        return run

    def _fail(self, name: str) -> None:
        if name in self.failing:
            raise self.failing[name]

    def _make_task(self, config: dict[str, Any], secrets_overrides: list[tuple[str, str]]) -> types.SimpleNamespace:
        task = types.SimpleNamespace(config=config, secrets=dict(secrets_overrides), resources=None)

        def set_resources(resources: Any) -> types.SimpleNamespace:
            task.resources = resources
            return task

        task.set_resources = set_resources
        return task


@dataclass
class Machine:
    """The machine of a test: its folder, its SkyPilot, and the server to which the fake ssh leads."""

    folder: Path
    sky: FakeSky
    server: Any
    answer: Any

    def lines(self, log: str) -> list[list[str]]:
        file = self.folder / log
        return [line.split() for line in file.read_text().splitlines()] if file.exists() else []

    def tunnels(self) -> list[int]:
        """Processes of the fake ssh and of SkyPilot's command line that still run."""
        started = [int(line[0]) for log in ("ssh.log", "cli.log") for line in self.lines(log)]
        return [pid for pid in started if psutil.pid_exists(pid)]


class QuickBackend(art.SkyPilotBackend):
    _poll_seconds = 0.05


async def launch_quickly(start_timeout_seconds: float = PATIENCE_SECONDS, **options: Any) -> QuickBackend:
    return await QuickBackend.initialize_cluster(start_timeout_seconds=start_timeout_seconds, **options)


def prepare_machine(folder: Path) -> dict[str, str]:
    """Puts the fake ssh and the fake command line of SkyPilot there; returns the environment that finds them."""
    ssh = folder / "bin" / "ssh"
    ssh.parent.mkdir()
    ssh.write_text(f"#!{sys.executable} -S\n{FAKE_SSH}")
    ssh.chmod(0o755)
    package = folder / "modules" / "sky"
    package.mkdir(parents=True)
    (package / "__init__.py").touch()
    (package / "cli.py").write_text(FAKE_CLI)
    return {
        "PATH": f"{ssh.parent}{os.pathsep}{os.environ['PATH']}",
        "FAKE_SSH": str(folder),
        "PYTHONPATH": f"{package.parent}{os.pathsep}{os.environ.get('PYTHONPATH', '')}",
    }


@pytest.fixture
def machine(tmp_path: Path, server: Any, answer: Any, monkeypatch: pytest.MonkeyPatch) -> Machine:
    for name, value in prepare_machine(tmp_path).items():
        monkeypatch.setenv(name, value)
    monkeypatch.delenv("ART_API_KEY", raising=False)
    monkeypatch.setattr("art.skypilot.tunnel.PAUSE_SECONDS", 0.1)
    sky = FakeSky()
    monkeypatch.setitem(sys.modules, "sky", sky)
    (tmp_path / "port").write_text(str(server.port))
    server.on("GET", "/health", answer(body={"status": "ok", "engine": "ready"}))
    return Machine(tmp_path, sky, server, answer)


def make_model() -> art.TrainableModel:
    return art.TrainableModel(name="agent", project="demo", base_model="art/tiny")


def key_at(server: Any) -> str:
    return server.sent("POST", "/api/models")[-1].headers["authorization"].removeprefix("Bearer ")


async def test_cluster_is_launched_reached_and_given_back(machine: Machine, caplog: Any, capsys: Any):
    caplog.set_level(logging.INFO, "art")
    said: list[str] = []

    def health(_: object) -> Any:
        """The server is ready when a line of its log was printed."""
        said.append(capsys.readouterr().out)
        is_shown = "a line of the server's log" in "".join(said)
        return machine.answer(body={"status": "ok", "engine": "ready" if is_shown else "starting"})

    machine.server.on("GET", "/health", health)
    backend = await launch_quickly(cluster_name="box", gpu="H100")
    assert machine.sky.calls == ["status", "launch box"]
    task = machine.sky.task
    assert task is not None and task.config["resources"]["accelerators"] == "H100"
    assert task.config["workdir"] == str(Path(__file__).parents[3])
    await make_model().register(backend)
    key = task.secrets["ART_API_KEY"]
    assert key_at(machine.server) == key and len(key) >= 32
    await backend.down()
    await until(lambda: not machine.tunnels())
    assert machine.sky.cluster is None and machine.sky.calls[-1] == "down"
    printed = capsys.readouterr()
    said += [caplog.text, printed.out, printed.err, repr(backend)]
    said += [str(machine.lines("ssh.log")), str(machine.lines("cli.log"))]
    assert key not in "".join(said)
    assert ["status", "box"] in [line[1:] for line in machine.lines("cli.log")]


async def test_state_is_reported_while_the_server_gets_ready(machine: Machine, caplog: Any, answer: Any):
    caplog.set_level(logging.INFO, "art")
    states = iter(["starting", "starting"])
    machine.server.on(
        "GET",
        "/health",
        lambda _: answer(body={"status": "ok", "engine": next(states, "none")}),
    )
    machine.sky.job_statuses = [Status.INIT, Status.SETTING_UP, Status.RUNNING]
    (machine.folder / "port").write_text("1")  # nobody listens yet
    launching = asyncio.ensure_future(launch_quickly(tail_logs=False))
    await until(lambda: "RUNNING" in caplog.text)
    (machine.folder / "port").write_text(str(machine.server.port))
    async with await launching:
        told = [r.message.split(": ")[1].split(" (")[0] for r in caplog.records]
        told = [state for state in told if state.isupper() or state.startswith("engine")]
        assert told == ["INIT", "SETTING_UP", "RUNNING", "engine starting", "engine none"]
    assert [line[1] for line in machine.lines("cli.log")] == ["status"]


async def test_close_leaves_the_cluster_and_the_next_program_takes_it_up(machine: Machine):
    async with await launch_quickly() as backend:
        pass
    model = make_model()
    with pytest.raises(art.ArtError, match="'art'"):
        await model.register(backend)
    assert machine.sky.cluster is Status.UP
    async with await launch_quickly(env_path=None) as backend:
        await model.register(backend)
    assert key_at(machine.server) == "key-of-the-cluster"
    assert machine.sky.calls == ["status", "launch art", "status", "queue"]


async def test_earlier_server_that_still_answers_does_not_count(machine: Machine):
    machine.sky.job_statuses = [Status.INIT] * 30 + [Status.RUNNING]
    async with await launch_quickly(tail_logs=False):
        assert machine.sky.job_statuses == [Status.RUNNING]


async def test_force_restart_ends_the_server_that_runs(machine: Machine):
    machine.sky.cluster, machine.sky.jobs = Status.UP, {3: TASK_NAME, 4: "another"}
    async with await launch_quickly(force_restart=True):
        assert machine.sky.calls == ["status", "queue", "cancel [3]", "launch art"]


async def test_cluster_without_a_server_gets_one(machine: Machine):
    machine.sky.cluster, machine.sky.jobs = Status.UP, {4: "another"}
    async with await launch_quickly():
        assert machine.sky.calls == ["status", "queue", "launch art"]


def refuse_submission(machine: Machine) -> None:
    machine.sky.failing["submit"] = RuntimeError("no cloud")


def refuse_launch(machine: Machine) -> None:
    machine.sky.failing["launch"] = RuntimeError("no machine is free")


def refuse_ssh(machine: Machine) -> None:
    (machine.folder / "refuses").touch()


def fail_setup(machine: Machine) -> None:
    machine.sky.job_statuses = [Status.SETTING_UP, Status.FAILED_SETUP]


def fail_engine(machine: Machine) -> None:
    """The cause is for callers with a key."""

    def health(request: Any) -> Any:
        detail = "no such model" if "authorization" in request.headers else None
        return machine.answer(body={"status": "ok", "engine": "failed", "detail": detail})

    machine.server.on("GET", "/health", health)


def never_listen(machine: Machine) -> None:
    (machine.folder / "port").write_text("1")


FAILURES = [
    (refuse_submission, "no cloud"),
    (refuse_launch, "no machine is free"),
    (refuse_ssh, "Permission denied"),
    (fail_setup, "FAILED_SETUP(?s:.*)installing\ncompiling"),
    (fail_engine, "no such model"),
    (never_listen, "start_timeout_seconds.*RUNNING"),
]
IDS = [fail.__name__ for fail, _ in FAILURES]


@pytest.mark.parametrize(("fail", "message"), FAILURES, ids=IDS)
async def test_failed_launch_leaves_nothing_running(
    machine: Machine, fail: Callable[[Machine], None], message: str, caplog: Any
):
    fail(machine)
    with pytest.raises(Exception, match=message) as caught:
        await launch_quickly(start_timeout_seconds=1 if fail is never_listen else PATIENCE_SECONDS)
    assert machine.sky.cluster is None
    await until(lambda: not machine.tunnels())
    assert "was given back" in caught.value.__notes__[0]
    assert "if that fails, run: sky down art" in caplog.text


async def test_woken_cluster_is_stopped_again_and_a_running_one_left(machine: Machine):
    fail_setup(machine)
    machine.sky.cluster = Status.STOPPED
    with pytest.raises(art.ArtError, match="FAILED_SETUP") as caught:
        await launch_quickly()
    assert machine.sky.cluster is Status.STOPPED
    assert "was stopped again" in caught.value.__notes__[0]
    machine.sky.cluster = Status.UP
    with pytest.raises(art.ArtError, match="FAILED_SETUP") as caught:
        await launch_quickly()
    assert machine.sky.cluster is Status.UP
    assert "`sky down art`" in caught.value.__notes__[0]
    assert "down" not in machine.sky.calls
    await until(lambda: not machine.tunnels())


async def test_failed_restart_says_that_the_server_was_ended(machine: Machine):
    fail_engine(machine)
    machine.sky.cluster, machine.sky.jobs = Status.UP, {3: TASK_NAME}
    with pytest.raises(art.ArtError, match="'art'") as caught:
        await launch_quickly()
    assert "was not changed" in caught.value.__notes__[0]
    with pytest.raises(art.ArtError, match="no such model") as caught:
        await launch_quickly(force_restart=True)
    assert "lost its earlier server" in caught.value.__notes__[0]


async def test_failure_to_give_back_is_said(machine: Machine, caplog: Any):
    fail_setup(machine)
    machine.sky.down = lambda name: fail_down
    with pytest.raises(RuntimeError, match="the cloud does not answer") as caught:
        await launch_quickly()
    assert "if that fails, run: sky down art" in caplog.text
    assert "FAILED_SETUP" in str(caught.value.__context__)


def fail_down() -> None:
    raise RuntimeError("the cloud does not answer")


@pytest.mark.parametrize("phase", ["launch", "wait"])
async def test_cancelled_launch_leaves_nothing_running(machine: Machine, phase: str):
    if phase == "launch":
        machine.sky.launch_goes_on.clear()
    else:
        never_listen(machine)
    making = asyncio.ensure_future(launch_quickly())
    reached = {
        "launch": lambda: machine.sky.cluster is Status.INIT,
        "wait": lambda: any("-L" in line for line in machine.lines("ssh.log")),
    }
    await until(reached[phase])
    making.cancel()
    with pytest.raises(asyncio.CancelledError):
        await making
    assert ("api_cancel" in machine.sky.calls) == (phase == "launch")
    assert machine.sky.calls[-1] == "down"
    await until(lambda: not machine.tunnels())


async def test_broken_tunnel_is_opened_again_on_its_port(machine: Machine):
    async with await launch_quickly(tail_logs=False) as backend:
        [tunnel] = machine.tunnels()
        os.kill(tunnel, signal.SIGKILL)
        await until(lambda: tunnel not in machine.tunnels() and bool(machine.tunnels()))
        await until(lambda: len(machine.tunnels()) == 1)
        model = make_model()
        async with asyncio.timeout(PATIENCE_SECONDS):
            while True:
                try:
                    await model.register(backend)
                    break
                except art.ArtConnectionError:
                    await asyncio.sleep(0.05)
    await until(lambda: not machine.tunnels())


async def test_tunnel_ends_with_a_program_that_is_killed(tmp_path: Path):
    environment = {**os.environ, **prepare_machine(tmp_path)}
    code = "from art.skypilot.tunnel import Tunnel; import signal; t = Tunnel('box', 7623); signal.pause()"
    program = await asyncio.create_subprocess_exec(sys.executable, "-c", code, env=environment)
    machine = Machine(tmp_path, FakeSky(), None, None)
    await until(lambda: bool(machine.tunnels()))
    children = psutil.Process(program.pid).children()
    program.kill()
    await program.wait()
    await until(lambda: not machine.tunnels())
    assert not psutil.wait_procs(children, timeout=PATIENCE_SECONDS)[1]


async def test_tunnel_to_a_machine_that_has_gone_ends_with_its_program(tmp_path: Path):
    environment = {**os.environ, **prepare_machine(tmp_path)}
    (tmp_path / "bin" / "ssh").write_text("#!/bin/sh\nexit 255\n")
    code = "from art.skypilot.tunnel import Tunnel; import signal; t = Tunnel('box', 7623); signal.pause()"
    program = await asyncio.create_subprocess_exec(sys.executable, "-c", code, env=environment)
    await until(lambda: bool(psutil.Process(program.pid).children()))
    children = psutil.Process(program.pid).children(recursive=True)
    program.kill()
    await program.wait()
    assert not psutil.wait_procs(children, timeout=PATIENCE_SECONDS)[1]


async def test_variables_of_the_file_are_secrets_of_the_task(machine: Machine):
    file = machine.folder / ".env"
    file.write_text("ART_API_KEY=mine\nHF_TOKEN='hf token'\nWANDB_API_KEY=\n# comment\n")
    async with await launch_quickly(env_path=file) as backend:
        await make_model().register(backend)
    assert machine.sky.task is not None
    assert machine.sky.task.secrets == {"ART_API_KEY": "mine", "HF_TOKEN": "hf token"}
    assert key_at(machine.server) == "mine"
    with pytest.raises(FileNotFoundError):
        await launch_quickly(env_path=machine.folder / "absent")
    assert machine.sky.calls.count("status") == 1


async def test_resources_replace_what_the_task_asks_for(machine: Machine):
    with pytest.raises(ValueError, match="resources"):
        await launch_quickly(gpu="H100", resources="anything")
    assert machine.sky.calls == []
    async with await launch_quickly(resources="sky.Resources(...)"):
        assert machine.sky.task is not None
        assert machine.sky.task.resources == "sky.Resources(...)"


async def test_version_that_is_no_checkout_is_reported_once(machine: Machine, caplog: Any):
    async with await launch_quickly(art_version="0.5.17") as backend:
        assert machine.sky.task is not None
        assert machine.sky.task.config["workdir"] == str(TASK_FILE.parents[4])
    assert [r.message for r in caplog.records if "0.5.17" in r.message] == [
        "art_version='0.5.17' is not a checkout of agent-reinforcement-trainer and is ignored: the server gets this "
        "client's version"
    ]
    await backend.down()
    caplog.clear()
    other = machine.folder / "checkout"
    (other / "scripts").mkdir(parents=True)
    (other / "scripts" / "setup").touch()
    (other / "art_server").mkdir()
    async with await launch_quickly(art_version=str(other)):
        assert machine.sky.task.config["workdir"] == str(other)
    assert not [r for r in caplog.records if "is ignored" in r.message]


def test_without_skypilot_the_error_names_the_command(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setitem(sys.modules, "sky", None)
    with pytest.raises(ImportError, match=r"pip install '\.\[sky\]'") as caught:
        asyncio.run(art.SkyPilotBackend.initialize_cluster())
    assert "\n" not in str(caught.value)


async def test_backend_that_was_not_launched_says_so(machine: Machine):
    with pytest.raises(art.ArtError, match="SkyPilotBackend"):
        await make_model().register(art.SkyPilotBackend())
    on_an_instance = QuickBackend().initialize_cluster  # as ART's programs write it
    async with await on_an_instance() as backend:
        assert isinstance(backend, art.SkyPilotBackend)
