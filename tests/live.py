"""A real art-server as a child process, and the requests that most tests make."""

import contextlib
import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Self

import httpx
import psutil

from tests.waiting import PATIENCE_SECONDS

READY_SECONDS = PATIENCE_SECONDS
PROJECT = "tests"
ROOT = Path(__file__).parents[1]


@dataclass
class Server:
    """An art-server process on free ports that stay the same over restarts."""

    path: Path
    process: subprocess.Popen[bytes] | None = None
    url: str = ""
    inference_url: str = ""
    arguments: list[str] = field(default_factory=list)
    environment: dict[str, str] = field(default_factory=dict)
    """Variables that are added to those of the tests."""

    def start(self) -> None:
        ports = [self.url.rpartition(":")[2] or "0", self.inference_url.rpartition(":")[2] or "0"]
        command = [*self.command(), "--path", str(self.path / "art")]
        command += ["--port", ports[0], "--inference-port", ports[1], *self.arguments]
        with open(self.path / "server.log", "ab") as log:
            self.process = subprocess.Popen(
                command,
                stdout=log,
                stderr=log,
                start_new_session=True,
                env={**os.environ, **self.environment},
            )
        file = self.path / "art" / ".server" / "address.json"
        deadline = time.monotonic() + PATIENCE_SECONDS
        while not (file.exists() and json.loads(file.read_text())["pid"] == self.process.pid):
            assert self.process.poll() is None, self.log_tail()
            assert time.monotonic() < deadline, self.log_tail()
            time.sleep(0.05)
        content = json.loads(file.read_text())
        self.url, self.inference_url = content["url"], content["inference_url"]

    def command(self) -> list[str]:
        return [sys.executable, "-m", "art_server"]

    def wait_ready(self) -> None:
        deadline = time.monotonic() + READY_SECONDS
        while time.monotonic() < deadline:
            try:
                if httpx.get(f"{self.url}/ready", timeout=5).status_code == 200:
                    return
            except httpx.TransportError:
                pass
            assert self.process is not None and self.process.poll() is None, self.log_tail()
            time.sleep(0.2)
        raise AssertionError(f"not ready in {READY_SECONDS:.0f} s: {self.log_tail()}")

    @contextlib.contextmanager
    def running(self) -> Iterator[Self]:
        """The server, ready, until the block ends."""
        self.start()
        try:
            self.wait_ready()
            yield self
        finally:
            self.stop()

    def kill(self) -> None:
        """Sends SIGKILL, as the out-of-memory killer does."""
        assert self.process is not None
        os.kill(self.process.pid, signal.SIGKILL)
        self.process.wait()

    def stop(self) -> None:
        assert self.process is not None
        self.process.send_signal(signal.SIGTERM)
        try:
            self.process.wait(timeout=PATIENCE_SECONDS)
        except subprocess.TimeoutExpired:
            self.kill()

    def log_tail(self) -> str:
        return (self.path / "server.log").read_text()[-3000:]

    def client(self, **options: Any) -> httpx.Client:
        return httpx.Client(base_url=self.url, timeout=PATIENCE_SECONDS, **options)

    def model_dir(self, name: str) -> Path:
        return self.path / "art" / PROJECT / "models" / name


@contextlib.contextmanager
def joined_host(server: Server, folder: Path, name: str, num_engines: int) -> Iterator[subprocess.Popen[bytes]]:
    """`art-server host` with engines and a rank, in a new folder, with the key `joins`. The host is killed in the end."""
    home = folder / name
    home.mkdir()
    (home / "key").write_text("joins\n")
    command = [sys.executable, "-m", "art_server", "host", "--join", server.url, "--token-file", "key"]
    with open(home / "log", "wb") as log:
        process = subprocess.Popen(
            [*command, "--name", name, "--engines", str(num_engines), "--ranks", "1"],
            cwd=home,
            stdout=log,
            stderr=log,
            env={**os.environ, "PYTHONPATH": str(ROOT)},
        )
    try:
        yield process
    finally:
        process.kill()
        process.wait()


def descendants(pid: int) -> set[int]:
    """The ids of a process and of all its descendants."""
    return {pid, *(child.pid for child in psutil.Process(pid).children(recursive=True))}


def find_process(server: Server, module: str) -> int:
    """The id of the server's process that runs a module."""
    assert server.process is not None
    for pid in descendants(server.process.pid):
        with contextlib.suppress(OSError):  # it has ended meanwhile
            if module.encode() in Path(f"/proc/{pid}/cmdline").read_bytes():
                return pid
    raise AssertionError(f"no process runs {module}")


def register(server: Server, name: str, **more: Any) -> dict[str, Any]:
    with server.client() as client:
        body = {"name": name, "project": PROJECT, "base_model": "art/tiny", **more}
        response = client.post("/api/models", json=body)
    assert response.status_code == 200, response.text
    return response.json()


def chat(client: httpx.Client, model: str, **more: Any) -> dict[str, Any]:
    body = {
        "model": model,
        "messages": [{"role": "user", "content": "respond with yes, no, maybe"}],
        "max_tokens": 8,
        **more,
    }
    response = client.post("/v1/chat/completions", json=body)
    assert response.status_code == 200, response.text
    return response.json()


def sampled_group(client: httpx.Client, model: str, size: int = 4, **more: Any) -> dict[str, Any]:
    """A group of fresh samples with a reward for each text. There are at least two texts if size > 1. Equal texts have equal rewards:
    different ones can cancel out, so that a step changes nothing."""
    body, texts = dict[str, Any](), list[str]()
    for _ in range(20 if size > 1 else 1):
        body = chat(client, model, n=size, **more)
        texts = [json.dumps(choice["message"]) for choice in body["choices"]]
        if len(set(texts)) > 1:
            break
    message = {"role": "user", "content": "respond with yes, no, maybe"}
    return {
        "trajectories": [
            {"messages_and_choices": [message, choice], "reward": float(texts.index(text))}
            for choice, text in zip(body["choices"], texts, strict=True)
        ]
    }


def train(
    client: httpx.Client,
    name: str,
    groups: list[dict[str, Any]],
    key: str | None = None,
    learning_rate: float = 1e-3,
) -> list[dict[str, Any]]:
    """The events of a train request."""
    headers = {"idempotency-key": key} if key else {}
    body = {"groups": groups, "config": {"learning_rate": learning_rate}}
    response = client.post(f"/api/models/{PROJECT}/{name}/train", json=body, headers=headers)
    assert response.status_code == 200, response.text
    return [json.loads(line) for line in response.text.splitlines()]


def train_one_step(server: Server, name: str, **more: Any) -> dict[str, Any]:
    """Sample and train once; returns the last event."""
    with server.client() as client:
        group = sampled_group(client, f"{PROJECT}/{name}")
        return train(client, name, [group], **more)[-1]


# --- programs that compare before and after ---

BEFORE_AND_AFTER = re.compile(
    r"^Evaluation\((\S+)@(\d+): reward (\S+) \(95% .*@(\d+): reward (\S+) \(95% .*; difference ",
    re.MULTILINE,
)


def done_jobs(server: Server, project: str, name: str = "art-tiny") -> list[dict[str, Any]]:
    """The jobs of a model, oldest first."""
    with server.client() as client:
        jobs = client.get("/api/jobs", params={"state": "done"}).json()["jobs"]
    return [job for job in reversed(jobs) if (job["project"], job["name"]) == (project, name)]


def check_jobs(jobs: list[dict[str, Any]], steps: list[int]) -> None:
    """The jobs made these steps from tokens that the server sampled, and some of them had a gradient."""
    assert [job["step"] for job in jobs] == steps
    reports = [job["report"] for job in jobs]
    assert all(report["turns"].keys() <= {"ids", "ledger"} for report in reports), reports
    assert sum(report["num_trained_tokens"] for report in reports) > 0, reports
    assert not any(report["num_failed_rollouts"] for report in reports), reports


# --- programs of other environments ---


def run_program(server: Server, folder: Path, *command: str | Path, **more: str) -> str:
    """What a program prints, with its own folder as working directory."""
    environment = {
        "PATH": os.environ["PATH"],
        "HOME": os.environ["HOME"],
        "ART_SERVER_URL": server.url,
        "LITELLM_LOCAL_MODEL_COST_MAP": "True",  # otherwise it downloads prices
        **more,
    }
    ran = subprocess.run(
        command,
        env=environment,
        cwd=folder,
        capture_output=True,
        text=True,
        timeout=PATIENCE_SECONDS,
        check=False,
    )
    assert ran.returncode == 0, ran.stderr[-4000:]
    return ran.stdout
