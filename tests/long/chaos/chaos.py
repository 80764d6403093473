"""Kills a server's processes at random times and at named points while two programs train two models on it, then checks
that nothing was lost, done twice or left half done."""

import hashlib
import json
import os
import random
import signal
import sqlite3
import subprocess
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx
import psutil
from safetensors import safe_open

from tests.live import Server
from tests.long.chaos.client import PROJECT
from tests.long.chaos.server import POINTS, VARIABLE

MODELS = ("one", "two")
KINDS = {"trainer": 5, "engine": 2, "server": 1, "point": 2}
"""Weights of the random choice. A killed server or engine takes a minute to restart."""
MODULES = {"trainer": "art_server.trainer.worker", "engine": "art_server.engine.vllm_process.child"}
WORK_SECONDS = 8.0
"""Longest time that a ready server works before the next kill; long enough for some steps of art/tiny."""
STARTING_SHARE = 0.1
"""Share of kills that do not wait until the server is ready."""
MAX_GAP = 1e-3
"""Largest difference of a token's log-probability between sampling and scoring with the complete adapter, float32."""
NUM_RESCORED = 20


@dataclass
class ArmedServer(Server):
    """A server that restarts after each death, as under systemd. Its next process may be armed to die at a point."""

    next_point: str | None = None
    point: str | None = None
    """The point at which the running process will die."""
    is_over: bool = False
    deaths: list[str] = field(default_factory=list)
    """The points at which it died."""

    def command(self) -> list[str]:
        return [sys.executable, "-m", "tests.long.chaos.server"]

    def start(self) -> None:
        os.environ.pop(VARIABLE, None)
        if self.point is not None:
            os.environ[VARIABLE] = self.point
        super().start()
        os.environ.pop(VARIABLE, None)

    def wait_ready(self) -> None:
        """Returns when the server is ready; a server that died is first started again by `keep_alive`."""
        while self.process is not None and self.process.poll() is not None and not self.is_over:
            time.sleep(0.05)
        super().wait_ready()

    def keep_alive(self) -> None:
        """Restarts the server after each death until `is_over` is set. Runs in a thread."""
        while not self.is_over:
            assert self.process is not None
            try:
                self.process.wait(timeout=0.2)
            except subprocess.TimeoutExpired:
                continue
            if self.is_over:
                return
            if self.point is not None:
                self.deaths.append(self.point)
            self.point, self.next_point = self.next_point, None
            try:
                self.start()
            except AssertionError:
                if self.process.poll() != -signal.SIGKILL:
                    raise
                # It was killed before it wrote its address.


class Chaos:
    """One run; `counts` contains the number of kills by kind."""

    def __init__(self, folder: Path, seed: int, say: Callable[[str], None] = print):
        self.folder = folder
        self.random = random.Random(seed)
        self.say = say
        self.counts: Counter[str] = Counter()
        self.server = ArmedServer(folder)
        # All steps are checked at the end.
        self.server.arguments = [*self.server.arguments, "--keep-last", "0"]
        self._programs: list[subprocess.Popen[bytes]] = []

    # --- the run ---

    def run(self, num_kills: int, seconds: float = float("inf")) -> dict[str, Any]:
        """Kills, then checks; returns the figures.

        Raises:
            AssertionError: something was lost, done twice or left half done.
        """
        started = time.monotonic()
        (self.folder / "stop").unlink(missing_ok=True)
        self.server.start()
        keeper = threading.Thread(target=self.server.keep_alive, daemon=True)
        keeper.start()
        try:
            self._programs = [self._start_program(name) for name in MODELS]
            while sum(self.counts.values()) < num_kills and time.monotonic() - started < seconds:
                self._kill_one()
                for program in self._programs:
                    assert program.poll() is None, f"a program ended: {self._program_log()}"
            self.say("no more kills; waiting for the programs to end")
            (self.folder / "stop").touch()
            for program in self._programs:
                assert program.wait(timeout=900) == 0, self._program_log()
            self.server.wait_ready()
            self._check_answers()
        finally:
            self.server.is_over = True
            for program in self._programs:
                program.kill()
                program.wait()
            keeper.join()
            self.server.stop()
        figures = check(self.folder)
        return {
            "kills": sum(self.counts.values()),
            **self.counts,
            "steps": figures,
            "seconds": round(time.monotonic() - started),
        }

    def _start_program(self, name: str) -> "subprocess.Popen[bytes]":
        command = [sys.executable, "-m", "tests.long.chaos.client", self.server.url, name]
        with open(self.folder / f"{name}.log", "ab") as log:
            return subprocess.Popen([*command, str(self.folder)], stdout=log, stderr=log)

    def _program_log(self) -> str:
        return "".join((self.folder / f"{name}.log").read_text()[-2000:] for name in MODELS)

    # --- killing ---

    def _kill_one(self) -> None:
        kind = self.random.choices(list(KINDS), list(KINDS.values()))[0]
        is_early = self.random.random() < STARTING_SHARE
        if not is_early:
            self.server.wait_ready()
        time.sleep(self.random.uniform(0.0, WORK_SECONDS))
        if kind == "point":
            self._die_at_a_point()
            return
        if kind == "server":
            assert self.server.process is not None
            self._kill(self.server.process.pid, "server", is_early)
            return
        pids = self._processes(MODULES[kind])
        if pids:
            self._kill(self.random.choice(pids), kind, is_early)

    def _kill(self, pid: int, kind: str, is_early: bool) -> None:
        try:
            os.kill(pid, signal.SIGKILL)
        except ProcessLookupError:
            return
        while self.server.process is not None and self.server.process.pid == pid:
            time.sleep(0.05)  # until `keep_alive` has started the next one
        self.counts[kind + (" while it starts" if is_early else "")] += 1
        self.say(f"{sum(self.counts.values())}: killed {kind} {pid}")

    def _die_at_a_point(self) -> None:
        """Kills the server, and waits until its next process has died at a random point."""
        assert self.server.process is not None
        point = self.random.choice(list(POINTS))
        self.server.next_point = f"{point}:{self.random.randint(1, 3)}"
        num_deaths = len(self.server.deaths)
        self._kill(self.server.process.pid, "server", False)
        deadline = time.monotonic() + 400
        while len(self.server.deaths) == num_deaths:
            assert time.monotonic() < deadline, f"the server did not reach '{point}'"
            time.sleep(0.1)
        self.counts[f"server, {point}"] += 1
        self.say(f"{sum(self.counts.values())}: died at: {point}")

    def _processes(self, module: str) -> list[int]:
        """The ids of all processes in the session whose leader runs the module."""
        assert self.server.process is not None
        try:
            children = psutil.Process(self.server.process.pid).children(recursive=True)
        except psutil.NoSuchProcess:
            return []
        found: list[int] = []
        for child in children:
            try:
                leader = Path(f"/proc/{os.getsid(child.pid)}/cmdline").read_bytes()
            except OSError:
                continue
            if module.encode() in leader:
                found.append(child.pid)
        return found

    # --- checking ---

    def _check_answers(self) -> None:
        """Scores some sampled tokens again with their step's complete adapter: none came from a half-loaded adapter."""
        for name in MODELS:
            rows = [row for each in read_lines(self.folder / f"{name}.jsonl") for row in each["answers"]]
            rows = [row for row in rows if row["tokens"]]
            for row in self.random.sample(rows, min(NUM_RESCORED, len(rows))):
                body = {
                    "model": f"{PROJECT}/{name}@{row['step']}",
                    "prompt": row["prompt"] + row["tokens"],
                    "max_tokens": 1,
                    "prompt_logprobs": 1,
                }
                answer = httpx.post(f"{self.server.url}/v1/completions", json=body, timeout=120)
                assert answer.status_code == 200, answer.text
                scored = answer.json()["choices"][0]["prompt_logprobs"][len(row["prompt"]) :]
                again = [entry[str(token)]["logprob"] for entry, token in zip(scored, row["tokens"], strict=True)]
                gap = max(abs(a - b) for a, b in zip(again, row["logprobs"], strict=True))
                assert gap < MAX_GAP, f"{name}@{row['step']} was sampled with another adapter: {gap}"


def check(folder: Path) -> int:
    """Checks the files on disk against the steps that the programs saw; returns the number of steps."""
    with sqlite3.connect(folder / "art" / ".server" / "jobs.sqlite") as db:
        jobs = db.execute("SELECT name, state, target_step, last_error FROM jobs ORDER BY number").fetchall()
    db.close()
    total = 0
    for name in MODELS:
        model = folder / "art" / PROJECT / "models" / name
        mine = [job for job in jobs if job[0] == name]
        assert all(job[1] == "done" for job in mine), mine
        seen = [row["step"] for row in read_lines(folder / f"{name}.jsonl")]
        expected = list(range(1, len(seen) + 1))
        assert seen == expected, f"{name}: the program saw {seen}"
        assert [job[2] for job in mine] == expected, f"{name}: jobs made {[job[2] for job in mine]}"
        # A job that was killed while it was recorded has its line twice.
        rows = {(row["step"], row["job_id"]) for row in read_lines(model / "history.jsonl")}
        assert sorted(step for step, _ in rows) == expected, f"{name}: history"
        assert len({job for _, job in rows}) == len(expected)
        kept = sorted(int(entry.name) for entry in (model / "checkpoints").iterdir() if entry.name.isdigit())
        assert kept[-1] == len(expected) and kept == list(range(kept[0], kept[-1] + 1))
        assert not list((model / "checkpoints").glob(".*")), "left over"
        for step in kept:
            check_files(model / "checkpoints" / f"{step:04d}")
        total += len(expected)
    return total


def check_files(checkpoint: Path) -> None:
    record = json.loads((checkpoint / "checkpoint.json").read_text())
    for name, digest in record["files"].items():
        if (checkpoint / name).exists():  # optimizer state is kept for the newest steps only
            assert hashlib.sha256((checkpoint / name).read_bytes()).hexdigest() == digest, checkpoint
    with safe_open(checkpoint / "adapter_model.safetensors", framework="np") as tensors:
        assert tensors.keys()


def read_lines(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]
