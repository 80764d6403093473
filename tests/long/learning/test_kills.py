"""A server that learns is killed at random moments and at named points while scores stream in. No acknowledged score is lost, each answer
trains once, and no step serves that the guard has not seen.

    ART_TEST_FULL=1 .venv/bin/pytest tests/long/learning/test_kills.py        60 kills
"""

import os
import random
import signal
import sqlite3
import subprocess
import sys
import time
from collections import Counter
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.dockerfiles import free_port
from tests.long.chaos.server import VARIABLE
from tests.long.learning.crowd_server import POINTS
from tests.waiting import PATIENCE_SECONDS

pytestmark = pytest.mark.timeout(3600)

NUM_KILLS = 60 if os.environ.get("ART_TEST_FULL") else 6
NAME = "shop/helper"
POLICY = {
    "batch": 6,
    "least": 2,
    "user_share": 1,
    "release": "canary",
    "steps_per_release": 2,
    "share": 0.5,
    "looks": [16, 32],
}


class Crowd:
    """Users of a server that dies. They repeat what was not acknowledged."""

    def __init__(self, folder: Path, chance: random.Random):
        self.folder, self.chance = folder, chance
        self.port = free_port()
        self.http = httpx.Client(base_url=f"http://127.0.0.1:{self.port}", timeout=PATIENCE_SECONDS)
        self.acknowledged: dict[str, str] = {}
        """The ids of scores by the ids that the users gave them."""
        self.open: dict[str, dict[str, Any]] = {}
        """Scores that were sent and not acknowledged."""
        self.steps: set[int] = set()
        """The steps that have answered."""
        self.process: subprocess.Popen[bytes] | None = None

    def start(self, point: str | None = None) -> None:
        environment = dict(os.environ) | ({VARIABLE: point} if point else {})
        command = [sys.executable, "-m", "tests.long.learning.crowd_server", str(self.folder), str(self.port)]
        with open(self.folder / "log", "ab") as log:
            self.process = subprocess.Popen(command, env=environment, stdout=log, stderr=log)
        while self.is_running:
            try:
                self.http.get("/health")
            except httpx.HTTPError:
                time.sleep(0.05)
            else:
                return

    @property
    def is_running(self) -> bool:
        return self.process is not None and self.process.poll() is None

    def end(self, number: signal.Signals) -> None:
        assert self.process is not None
        self.process.send_signal(number)
        self.process.wait()

    def live(self, seconds: float) -> None:
        """Talks to the server and scores its answers, until the server dies or the time is over."""
        until = time.monotonic() + seconds
        while time.monotonic() < until:
            try:
                self.talk()
            except httpx.TransportError:
                if not self.is_running:
                    return

    def talk(self) -> None:
        for client_id, body in list(self.open.items()):
            self.give(client_id, body)
        user = f"u{self.chance.randrange(1000)}"
        content = {"messages": [{"role": "user", "content": user}], "user": user}
        answer = self.http.post("/v1/chat/completions", json={"model": NAME, **content})
        if answer.status_code != 200:
            return
        self.steps.add(int(answer.headers["x-art-step"]))
        client_id = f"score-{len(self.acknowledged) + len(self.open)}"
        body = {"answer": answer.json()["id"], "value": self.chance.random() < 0.5, "user": user, "id": client_id}
        self.open[client_id] = body
        self.give(client_id, body)
        if self.chance.random() < 0.1 and self.info()["state"] == "paused":  # three broken steps in a row
            self.act("resume")

    def give(self, client_id: str, body: dict[str, Any]) -> None:
        reply = self.http.post(f"/api/models/{NAME}/feedback", json=body)
        assert reply.status_code == 202, reply.text
        self.acknowledged[client_id] = reply.json()["id"]
        del self.open[client_id]

    def act(self, action: str) -> None:
        self.http.post(f"/api/models/{NAME}/learning", json={"action": action})

    def info(self) -> dict[str, Any]:
        return self.http.get(f"/api/models/{NAME}/learning").json()


def check(crowd: Crowd, info: dict[str, Any]) -> Counter[str]:
    """Checks the tables of a server that has ended. Returns the number of scores by state."""
    with sqlite3.connect(crowd.folder / ".server" / "server.sqlite") as database:
        database.row_factory = sqlite3.Row
        scores = database.execute("SELECT * FROM scores").fetchall()
        jobs = database.execute("SELECT * FROM jobs").fetchall()
        taken = database.execute("SELECT * FROM taken_choices").fetchall()
        releases = database.execute("SELECT * FROM releases ORDER BY number").fetchall()
    assert {row["client_id"]: row["score_id"] for row in scores} == crowd.acknowledged
    states = Counter(row["state"] for row in scores)
    assert not states["queued"] and {row["state"] for row in jobs} == {"done"}
    in_jobs = Counter(row["job_id"] for row in scores if row["job_id"] is not None)
    assert in_jobs == Counter(row["job_id"] for row in taken), "an answer has one score here, and trains once"
    assert in_jobs == {row["job_id"]: POLICY["batch"] for row in jobs}
    steps = {row["job_id"]: row["target_step"] for row in jobs}
    for row in scores:
        if row["job_id"] is not None:
            assert row["trained_step"] == steps[row["job_id"]]
            assert (row["state"], row["reason"]) in (("trained", None), ("dropped", "rolled_back"))
    assert sum(row["ended_at"] is None for row in releases) <= 1
    seen = {0} | {row["candidate"] for row in releases}
    assert crowd.steps <= seen, "no step has answered that was no canary"
    promoted = [row["candidate"] for row in releases if row["state"] == "promoted"]
    assert info["serving_step"] == (promoted[-1] if promoted else 0)
    return states


def test_a_killed_server_loses_no_score_and_trains_each_answer_once(tmp_path: Path) -> None:
    chance = random.Random(0)
    crowd = Crowd(tmp_path, chance)
    crowd.start()
    body = {"project": "shop", "name": "helper", "base_model": "base"}
    assert crowd.http.post("/api/models", json=body).status_code == 200
    assert crowd.http.put(f"/api/models/{NAME}/learning", json=POLICY).status_code == 200
    crowd.end(signal.SIGKILL)
    reached: Counter[str] = Counter()
    points = list(POINTS) * NUM_KILLS
    while reached.total() < NUM_KILLS:
        is_named = chance.random() < 0.7
        point = points[reached.total()] if len(POINTS) < NUM_KILLS else chance.choice(points)
        crowd.start(f"{point}:{chance.randint(1, 2)}" if is_named else None)
        crowd.live(40.0 if is_named else chance.uniform(0.1, 8.0))
        if crowd.is_running:
            crowd.end(signal.SIGKILL)
        assert crowd.process is not None and crowd.process.returncode == -signal.SIGKILL, log(tmp_path)
        reached[point if is_named else "any moment"] += 1
    crowd.start()
    crowd.live(10.0)
    crowd.act("pause")
    while (info := crowd.info())["counts"].get("queued"):
        time.sleep(0.1)
    crowd.end(signal.SIGTERM)
    crowd.http.close()
    states = check(crowd, info)
    print(f"{reached.total()} kills at {len(reached)} points: {dict(reached)}; scores: {dict(states)}")


def log(folder: Path) -> str:
    return (folder / "log").read_text()[-3000:]
