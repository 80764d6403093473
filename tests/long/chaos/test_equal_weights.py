"""A run that was killed and restarted makes the same steps as an uninterrupted run, bit for bit."""

import os
import random
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from tests.long.chaos.server import POINTS, VARIABLE
from tests.makers.demo import rows_by_step
from tests.waiting import PATIENCE_SECONDS

pytestmark = pytest.mark.timeout(3600)

NUM_KILLS = 20 if os.environ.get("ART_TEST_FULL") else 1
NUM_JOBS = max(2, NUM_KILLS)
WITHOUT_ENGINE = [point for point in POINTS if not point.startswith(("engine", "adapter", "job written"))]
MEASURED = ("time/", "throughput/", "recorded_at", "job_id", "data/step_tree_gap", "data/step_peak")
"""Beginnings of the keys of a history row that trajectories and weights do not determine. The tree gap is one because
each trainer process compares prefix trees with single sequences on its first batch only."""


def start(folder: Path, num_jobs: int, point: str | None = None) -> "subprocess.Popen[bytes]":
    environment = dict(os.environ) | ({VARIABLE: point} if point else {})
    command = [sys.executable, "-m", "tests.long.chaos.steps", str(folder), str(num_jobs)]
    with open(folder / "log", "ab") as log:
        return subprocess.Popen(command, env=environment, stdout=log, stderr=log)


def finish(folder: Path, num_jobs: int) -> None:
    assert start(folder, num_jobs).wait(timeout=PATIENCE_SECONDS) == 0, (folder / "log").read_text()[-3000:]


def weights_and_history(folder: Path, num_jobs: int) -> tuple[dict[str, bytes], list[dict[str, Any]]]:
    """Weights and optimizer states by file, and the history."""
    model = folder / "p" / "models" / "a"
    weights = {
        str(file.relative_to(model)): file.read_bytes() for file in sorted(model.glob("checkpoints/*/*.safetensors"))
    }
    rows = list(rows_by_step(model / "history.jsonl").values())
    assert [row["step"] for row in rows] == list(range(1, num_jobs + 1))
    return weights, [{key: value for key, value in row.items() if not key.startswith(MEASURED)} for row in rows]


def test_weights_of_a_run_that_was_killed_equal_those_of_one_that_was_not(tmp_path: Path) -> None:
    num_jobs, chance = NUM_JOBS, random.Random(0)
    quiet, killed = tmp_path / "quiet", tmp_path / "killed"
    quiet.mkdir()
    killed.mkdir()
    finish(quiet, num_jobs)
    num_kills = 0
    while num_kills < NUM_KILLS:
        at_point = NUM_KILLS == 1 or chance.random() < 0.7
        process = start(killed, num_jobs, f"{chance.choice(WITHOUT_ENGINE)}:1" if at_point else None)
        try:
            process.wait(timeout=PATIENCE_SECONDS if at_point else chance.uniform(3.0, 20.0))
        except subprocess.TimeoutExpired:
            process.send_signal(signal.SIGKILL)
            process.wait()
        if process.returncode == 0:  # all jobs had ended before
            break
        assert process.returncode == -signal.SIGKILL, (killed / "log").read_text()[-3000:]
        num_kills += 1
        time.sleep(0.1)
    assert num_kills
    finish(killed, num_jobs)
    weights, history = weights_and_history(killed, num_jobs)
    expected_weights, expected_history = weights_and_history(quiet, num_jobs)
    assert history == expected_history
    assert weights.keys() == expected_weights.keys()
    assert [name for name, content in weights.items() if content != expected_weights[name]] == []
