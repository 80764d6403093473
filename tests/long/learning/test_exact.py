"""A real server with --exact that learns from scores and is killed at named points makes the same steps, to the bit, as one that is
not killed; and each step is made again from its record.

    ART_TEST_FULL=1 .venv/bin/pytest tests/long/learning/test_exact.py        a kill at each point

The users wait for one another, and for the release of each step, and give each request a seed. Users at the same time meet in the
engine's batches at random, which changes the last bits of log-probabilities, killed or not.
"""

import os
import signal
import sys
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx
import pytest

from art_server.store.model_folder import content_digests
from scripts import replay
from tests.live import PROJECT, Server, register
from tests.long.chaos.server import VARIABLE
from tests.waiting import wait_until

pytestmark = pytest.mark.timeout(3600)

POINTS = [
    *("a score comes", "a step is renamed", "the guard ends", "a score is written", "a batch is chosen"),
    *(
        "a batch is being queued",
        "a release is being opened",
        "a batch is queued",
        "a job ends",
        "scores are being trained",
    ),
    *("a job is done", "the guard begins", "a step has passed", "before a promotion", "promoted"),
]
"""All between score, job, step and release; those of a canary are in test_kills.py."""
KILLS = POINTS if os.environ.get("ART_TEST_FULL") else POINTS[:3]
BATCH, NUM_STEPS = 8, 4
NAME = "exact"
ROUTES = f"/api/models/{PROJECT}/{NAME}"
POLICY = {
    "batch": BATCH,
    "user_share": 1,
    "config": {"baseline": "none", "scaling": "batch_std", "normalisation": "trajectory", "learning_rate": 1e-3},
}


class KilledServer(Server):
    def command(self) -> list[str]:
        return [sys.executable, "-m", "tests.long.learning.killed_server"]


@dataclass
class Users:
    """The users of a server that dies at points, one after the other. They repeat what was not acknowledged."""

    server: Server
    points: list[str] = field(default_factory=list)
    """Where the server is still to die."""
    num_kills: int = 0

    def start(self) -> None:
        """The next server, which dies at the next point. Some points come before it is ready."""
        while True:
            self.server.environment = {VARIABLE: f"{self.points.pop(0)}:1"} if self.points else {}
            try:
                self.server.start()
                self.server.wait_ready()
                return
            except AssertionError:
                self.note_death()

    def note_death(self) -> None:
        process = self.server.process
        assert process is not None
        wait_until(lambda: process.poll() is not None, self.server.log_tail)
        assert process.returncode == -signal.SIGKILL, self.server.log_tail()
        self.num_kills += 1

    def repeat(self, call: Callable[[httpx.Client], httpx.Response]) -> Any:
        """The reply to a request, on the next server if this one dies."""
        while True:
            try:
                with self.server.client() as client:
                    reply = call(client)
                assert reply.is_success, reply.text
                return reply.json()
            except httpx.TransportError:
                self.note_death()
                self.start()

    def learn(self, num_steps: int) -> None:
        """Answers and scores, until a step serves and no point is left."""
        self.start()
        register(self.server, NAME)
        with self.server.client() as client:
            assert client.put(f"{ROUTES}/learning", json=POLICY).status_code == 200
        for step in range(1, num_steps + 1):
            for number in range(BATCH * (step - 1), BATCH * step):
                self.talk(number)
            wait_until(lambda step=step: self.is_decided(step), self.server.log_tail)

    def talk(self, number: int) -> None:
        messages = [{"role": "user", "content": f"yes, no or maybe {number}"}]
        asked = {"model": f"{PROJECT}/{NAME}", "messages": messages, "max_tokens": 8, "seed": number}
        answer = self.repeat(lambda client: client.post("/v1/chat/completions", json=asked))["id"]
        score = {"answer": answer, "value": number % 2, "user": f"u{number}", "id": f"score-{number}"}
        self.repeat(lambda client: client.post(f"{ROUTES}/feedback", json=score))

    def is_decided(self, step: int) -> bool:
        info = self.repeat(lambda client: client.get(f"{ROUTES}/learning"))
        return info["serving_step"] == step and info["counts"] == {"trained": BATCH * step}


def run(folder: Path, points: list[str], num_steps: int = max(NUM_STEPS, len(KILLS))) -> Users:
    folder.mkdir()
    server = KilledServer(folder, arguments=["--base-model", "art/tiny", "--exact", "--max-seq-length", "1024"])
    users = Users(server, list(points))
    try:
        users.learn(num_steps)
    finally:
        server.stop()
    return users


def weights(users: Users, step: int) -> dict[str, str]:
    """The digests of a step's adapter, and of its optimizer state if the step is one of the newest."""
    digests = content_digests(users.server.model_dir(NAME) / "checkpoints" / f"{step:04d}")
    return {file: digest for file, digest in digests.items() if file in replay.COMPARED}


def test_a_killed_server_makes_the_same_steps_to_the_bit(tmp_path: Path) -> None:
    killed, quiet = run(tmp_path / "killed", KILLS), run(tmp_path / "quiet", [])
    assert (killed.num_kills, quiet.num_kills) == (len(KILLS), 0)
    steps = range(1, max(NUM_STEPS, len(KILLS)) + 1)
    for step in steps:
        assert weights(killed, step) and weights(killed, step) == weights(quiet, step), f"step {step}"
    for step in steps[-10:]:
        record = f"{PROJECT}/{NAME}@{step}"
        assert replay.main([record, "--path", str(killed.server.path / "art")]) == 0
    print(
        f"{killed.num_kills} kills, {len(steps)} steps: all weights equal, the newest ten made again from their records"
    )
