"""Kills a server's processes at random times and at named points while two programs train two models on it, then checks
that nothing was lost, done twice or left half done."""

import contextlib
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
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx
import psutil
from safetensors import safe_open

from tests.live import ROOT, Server
from tests.long.chaos.client import PROJECT
from tests.long.chaos.server import POINTS, VARIABLE
from tests.waiting import PATIENCE_SECONDS

MODELS = ("one", "two")
KINDS = {"trainer": 5, "engine": 2, "server": 1, "point": 2}
"""Weights of the random choice. A killed server or engine takes a minute to restart."""
OF_SEVERAL = {"trainer stopped": 1, "engine stopped": 1, "program": 1}
"""More of them, with several engines or ranks. Stopped is SIGSTOP: the server finds it, and kills it."""
OF_HOSTS = {"host": 2, "network stalls": 4}
"""More of them, with hosts that were started by hand. Their network is a relay (`network.py`), which is stopped."""
NO_DEATH = {"host", "host stalls", "network stalls"}
"""Which no job may count as a death of its trainer."""
OF_CLUSTER = {"host": 1, "host stalls": 2, "actor": 1, "driver": 1, "gcs": 1, "raylet": 1}
KEY_FILE = Path(__file__).with_name("keys.txt")
USER_KEY = "chaos"
"""The key of programs in it. Without hosts the server knows no keys, and takes any."""
MODULES = {
    "trainer": "art_server.trainer.worker",
    "engine": "art_server.engine.vllm_process.child",
    "host": "art_server host",
    "actor": "ray::HostActor",
    "driver": "art_cluster.ray_process",
    "gcs": "gcs_server",
    "raylet": "raylet/raylet",
}
"""What the command line contains: of trainer and engine, that of the session's leader."""
NETWORK_STALLS = (6.0, 12.0)
"""Seconds for which a network is stopped, and nothing happens."""
STALLS = (10.0, 60.0)
"""Seconds for which a host is stopped. After the shorter ones nothing has happened, after the longer ones it joins anew."""
UNREACHED = {"engine paused", "engine woken"}
"""Points that a server does not come to whose engines and ranks are on other machines."""
WORK_SECONDS = 8.0
"""Longest time that a ready server works before the next kill; long enough for some steps of art/tiny."""
STEP_SECONDS = 120.0
"""Of several processes: the longest wait for a step."""
STARTING_SHARE = 0.1
"""Share of kills that do not wait until the server is ready."""
MAX_GAP = 1e-3
"""Largest difference of a token's log-probability between sampling and scoring with the complete adapter, float32."""
NUM_RESCORED = 20


@dataclass(frozen=True)
class Places:
    """Where a server has its engines and ranks."""

    engines: int = 1
    ranks: int = 1
    cluster: str | None = None
    hosts: int = 0
    """Started by hand, each with an engine and a rank; the server has none of its own."""

    def arguments(self) -> list[str]:
        if self.hosts:
            return ["--engines", "0", "--ranks", "0", "--api-key-file", str(KEY_FILE)]
        several = self != Places()
        flags = ["--engines", str(self.engines), "--ranks", str(self.ranks)] if several else []
        return [*flags, "--cluster", self.cluster] if self.cluster else flags

    def kinds(self) -> dict[str, int]:
        kinds = dict(KINDS)
        if self != Places():
            kinds |= OF_SEVERAL
        if self.cluster:
            kinds |= OF_CLUSTER
        if self.hosts:
            kinds |= OF_HOSTS
        return kinds

    def points(self) -> list[str]:
        has_hosts = self.cluster is not None or self.hosts > 0
        return [point for point in POINTS if not has_hosts or point not in UNREACHED]


class Machine:
    """A host that was started by hand, as under systemd: it is started again after each end. Its network is a relay."""

    def __init__(self, folder: Path, number: int) -> None:
        self.name = f"host-{number}"
        self._home = folder / self.name
        self._home.mkdir()
        (self._home / "key").write_text("joins\n")
        self._port = 0
        self.relay: subprocess.Popen[bytes] | None = None
        self.host: subprocess.Popen[bytes] | None = None

    def start(self, url: str) -> None:
        """Starts the relay to the server, at first, and the host."""
        if self.relay is None:
            command = [sys.executable, "-m", "tests.long.chaos.network", url.rpartition(":")[2]]
            self.relay = subprocess.Popen(command, stdout=subprocess.PIPE, start_new_session=True)
            assert self.relay.stdout is not None
            self._port = int(self.relay.stdout.readline())
        command = [sys.executable, "-m", "art_server", "host", "--join", f"http://127.0.0.1:{self._port}"]
        command += ["--token-file", "key", "--name", self.name, "--engines", "1", "--ranks", "1"]
        environment = {**os.environ, "PYTHONPATH": str(ROOT)}
        with open(self._home / "log", "ab") as log:
            self.host = subprocess.Popen(command, cwd=self._home, stdout=log, stderr=log, env=environment)

    def keep_alive(self, url: str) -> None:
        if self.host is None or self.host.poll() is not None:
            self.start(url)

    def stop(self) -> None:
        for process in (self.host, self.relay):
            if process is not None:
                process.send_signal(signal.SIGCONT)
                process.terminate()
                process.wait()


@dataclass
class ArmedServer(Server):
    """A server that restarts after each death, as under systemd. Its next process may be armed to die at a point."""

    machines: Sequence[Machine] = ()
    """Hosts that join it, and are kept alive with it."""
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
            for machine in self.machines:
                machine.keep_alive(self.url)
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

    def __init__(
        self, folder: Path, seed: int, say: Callable[[str], None] = print, places: Places | None = None
    ) -> None:
        self.folder = folder
        self.places = places or Places()
        self.random = random.Random(seed)
        self.say = say
        self.counts: Counter[str] = Counter()
        self.server = ArmedServer(folder)
        # All steps are checked at the end.
        self.server.arguments = [*self.server.arguments, "--keep-last", "0", *self.places.arguments()]
        self.server.environment = {"PYTHONPATH": str(ROOT)}
        self.server.machines = [Machine(folder, number) for number in range(self.places.hosts)]
        self._programs: dict[str, subprocess.Popen[bytes]] = {}
        self._killed_programs: Counter[str] = Counter()

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
            self._programs = {name: self._start_program(name) for name in MODELS}
            while sum(self.counts.values()) < num_kills and time.monotonic() - started < seconds:
                self._kill_one()
                for program in self._programs.values():
                    assert program.poll() is None, f"a program ended: {self._program_log()}"
            self.say("no more kills; waiting for the programs to end")
            (self.folder / "stop").touch()
            for program in self._programs.values():
                assert program.wait(timeout=PATIENCE_SECONDS) == 0, self._program_log()
            self.server.wait_ready()
            self._check_answers()
        finally:
            self.server.is_over = True
            for program in self._programs.values():
                program.kill()
                program.wait()
            keeper.join()
            family = self._family()
            self.server.stop()
            for machine in self.server.machines:
                machine.stop()
        left = [
            f"{process.pid} {command_of(process)}" for process in psutil.wait_procs(family, timeout=PATIENCE_SECONDS)[1]
        ]
        assert not left, f"left running: {left}"
        figures = check(self.folder, self._killed_programs)
        num_deaths = count_deaths(self.folder)
        assert num_deaths <= sum(self.counts[kind] for kind in self.counts if kind.startswith("trainer")), num_deaths
        return {
            "kills": sum(self.counts.values()),
            **self.counts,
            "steps": figures,
            "seconds": round(time.monotonic() - started),
        }

    def _start_program(self, name: str) -> "subprocess.Popen[bytes]":
        command = [sys.executable, "-m", "tests.long.chaos.client", self.server.url, name]
        environment = {**os.environ, "ART_API_KEY": USER_KEY}
        with open(self.folder / f"{name}.log", "ab") as log:
            return subprocess.Popen([*command, str(self.folder)], stdout=log, stderr=log, env=environment)

    def _program_log(self) -> str:
        return "".join((self.folder / f"{name}.log").read_text()[-2000:] for name in MODELS)

    # --- killing ---

    def _kill_one(self) -> None:
        kinds = self.places.kinds()
        kind = self.random.choices(list(kinds), list(kinds.values()))[0]
        is_early = self.random.random() < STARTING_SHARE and kind not in NO_DEATH
        # A program that registers needs a server that is there.
        is_early = is_early and all(self._num_steps(name) for name in MODELS)
        if not is_early:
            self.server.wait_ready()
            if self.places != Places():
                self._wait_for_a_step()
        time.sleep(self.random.uniform(0.0, WORK_SECONDS))
        if kind == "point":
            self._die_at_a_point()
            return
        if kind == "server":
            assert self.server.process is not None
            self._kill(self.server.process.pid, "server", is_early)
            return
        if kind == "program":
            self._kill_program()
            return
        what, _, how = kind.partition(" ")
        pids = self._processes(what)
        num_deaths = count_deaths(self.folder)
        if pids:
            self._kill(self.random.choice(pids), kind, is_early, signal.SIGSTOP if how else signal.SIGKILL)
        if kind in NO_DEATH:
            self._wait_for_a_step()
            assert count_deaths(self.folder) == num_deaths, f"{kind} counted as a death of the trainer"

    def _wait_for_a_step(self, *names: str) -> None:
        """Returns when one of the programs has made one, or after a while: with several processes a start takes longer than the
        work that a kill is to hit."""
        deadline, before = time.monotonic() + STEP_SECONDS, self._num_steps(*names)
        while self._num_steps(*names) == before and time.monotonic() < deadline:
            time.sleep(0.2)

    def _num_steps(self, *names: str) -> int:
        files = [self.folder / f"{name}.jsonl" for name in names or MODELS]
        return sum(file.read_text().count("\n") for file in files if file.exists())

    def _kill_program(self) -> None:
        """It is started again, and goes on from the step that the server has."""
        name = self.random.choice(MODELS)
        self._programs[name].kill()
        self._programs[name].wait()
        self._killed_programs[name] += 1
        self._programs[name] = self._start_program(name)
        self.counts["program"] += 1
        self._wait_for_a_step(name)  # a program that registers needs a server that is there
        self.say(f"{sum(self.counts.values())}: killed program {name}")

    def _kill(self, pid: int, kind: str, is_early: bool, how: signal.Signals = signal.SIGKILL) -> None:
        try:
            os.kill(pid, how)
        except ProcessLookupError:
            return
        if kind.endswith(" stalls"):
            time.sleep(self.random.choice(NETWORK_STALLS if kind == "network stalls" else STALLS))
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGCONT)
        while self.server.process is not None and self.server.process.pid == pid:
            time.sleep(0.05)  # until `keep_alive` has started the next one
        self.counts[kind + (" while it starts" if is_early else "")] += 1
        self.say(f"{sum(self.counts.values())}: killed {kind} {pid}")

    def _die_at_a_point(self) -> None:
        """Kills the server, and waits until its next process has died at a random point."""
        assert self.server.process is not None
        point = self.random.choice(self.places.points())
        self.server.next_point = f"{point}:{self.random.randint(1, 3)}"
        num_deaths = len(self.server.deaths)
        self._kill(self.server.process.pid, "server", False)
        deadline = time.monotonic() + PATIENCE_SECONDS
        while len(self.server.deaths) == num_deaths:
            assert time.monotonic() < deadline, f"the server did not reach '{point}'"
            time.sleep(0.1)
        self.counts[f"server, {point}"] += 1
        self.say(f"{sum(self.counts.values())}: died at: {point}")

    def _family(self) -> list[psutil.Process]:
        """The processes below the server, and the hosts that were started by hand with theirs."""
        family: list[psutil.Process] = []
        hosts = [machine.host for machine in self.server.machines]
        for parent in (self.server.process, *hosts):
            with contextlib.suppress(psutil.NoSuchProcess):
                if parent is not None:
                    process = psutil.Process(parent.pid)
                    if parent in hosts:
                        family.append(process)
                    family += process.children(recursive=True)
        return family

    def _processes(self, what: str) -> list[int]:
        """The ids of the server's processes of this kind."""
        if what == "network":
            return [machine.relay.pid for machine in self.server.machines if machine.relay is not None]
        pids: list[int] = []
        for child in self._family():
            with contextlib.suppress(OSError, psutil.Error):
                leader = os.getsid(child.pid) if what in ("trainer", "engine") else child.pid
                if MODULES[what] in command_of(psutil.Process(leader)):
                    pids.append(child.pid)
        return pids

    # --- checking ---

    def _check_answers(self) -> None:
        """Scores some sampled tokens again with their step's complete adapter: none came from a half-loaded adapter."""
        for name in MODELS:
            rows = [row for line in read_lines(self.folder / f"{name}.jsonl") for row in line["answers"]]
            rows = [row for row in rows if row["tokens"]]
            for row in self.random.sample(rows, min(NUM_RESCORED, len(rows))):
                body = {
                    "model": f"{PROJECT}/{name}@{row['step']}",
                    "prompt": row["prompt"] + row["tokens"],
                    "max_tokens": 1,
                    "prompt_logprobs": 1,
                }
                headers = {"authorization": f"Bearer {USER_KEY}"}
                answer = httpx.post(
                    f"{self.server.url}/v1/completions", json=body, timeout=PATIENCE_SECONDS, headers=headers
                )
                assert answer.status_code == 200, answer.text
                scored = answer.json()["choices"][0]["prompt_logprobs"][len(row["prompt"]) :]
                again = [entry[str(token)]["logprob"] for entry, token in zip(scored, row["tokens"], strict=True)]
                gap = max(abs(a - b) for a, b in zip(again, row["logprobs"], strict=True))
                assert gap < MAX_GAP, f"{name}@{row['step']} was sampled with another adapter: {gap}"


def count_deaths(folder: Path) -> int:
    """How many deaths of the trainer the jobs have counted."""
    with contextlib.closing(sqlite3.connect(folder / "art" / ".server" / "server.sqlite", timeout=60.0)) as db:
        return sum(
            json.loads(attempts).get("trainer_died", 0) for (attempts,) in db.execute("SELECT attempts FROM jobs")
        )


def command_of(process: psutil.Process) -> str:
    try:
        return " ".join(process.cmdline())
    except psutil.Error:
        return ""


def check(folder: Path, killed_programs: Mapping[str, int]) -> int:
    """Checks the files on disk against the steps that the programs saw; returns the number of steps. A program that is killed
    misses at most the step that it waited for."""
    with sqlite3.connect(folder / "art" / ".server" / "server.sqlite") as db:
        query = "SELECT name, state, target_step, last_error FROM jobs JOIN models USING (model) ORDER BY number"
        jobs = db.execute(query).fetchall()
    db.close()
    total = 0
    for name in MODELS:
        model = folder / "art" / PROJECT / "models" / name
        mine = [job for job in jobs if job[0] == name]
        assert all(job[1] == "done" for job in mine), mine
        seen = [row["step"] for row in read_lines(folder / f"{name}.jsonl")]
        expected = list(range(1, len(mine) + 1))
        assert seen == sorted(set(seen) & set(expected)), f"{name}: the program saw {seen}"
        assert len(expected) - len(seen) <= killed_programs.get(name, 0), f"{name}: the program saw {seen}"
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
