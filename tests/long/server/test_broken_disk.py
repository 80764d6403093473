"""A disk that fails below the file system's calls, and files of which a crash wrote a part."""

import json
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from art_server.ledger.ledger import Ledger
from art_server.store.model_folder import ModelFolder
from tests.makers.demo import rows_by_step
from tests.quick.jobs.job_runner import House
from tests.waiting import PATIENCE_SECONDS

NUM_REFUSED = 3
"""Calls of each thread that fail, one after another."""


def can_trace() -> bool:
    traced = ["strace", "-qq", "-e", "trace=fsync", "-e", "inject=fsync:error=EIO", "true"]
    return shutil.which("strace") is not None and subprocess.run(traced).returncode == 0


@pytest.mark.skipif(not can_trace(), reason="strace, which makes calls fail, is not in reach")
@pytest.mark.parametrize("first", [1, 2, 5, 9])
@pytest.mark.parametrize("call", ["fsync,fdatasync", "pwrite64", "write,rename"])
def test_calls_that_fail_lose_nothing_acknowledged(tmp_path: Path, call: str, first: int) -> None:
    House(tmp_path).add_model("a")
    Ledger(tmp_path / "ledger.sqlite").close()
    faults = f"inject={call}:error=EIO:when={first}..{first + NUM_REFUSED - 1}"
    strace = ["strace", "-f", "-qq", "-o", str(tmp_path / "calls"), "-e", f"trace={call}", "-e", faults]
    program = [sys.executable, "-m", "tests.long.server.broken_disk", str(tmp_path)]
    ran = subprocess.run([*strace, *program], capture_output=True, text=True, timeout=PATIENCE_SECONDS)
    assert ran.returncode == 0, ran.stderr
    acknowledged = json.loads(ran.stdout)
    assert "INJECTED" in (tmp_path / "calls").read_text()
    house = House(tmp_path)
    assert {house.state(job) for job in acknowledged["jobs"]} <= {"done"}
    folder = ModelFolder(tmp_path, "p", "a")
    newest = folder.newest_step()
    assert newest is not None
    steps = range(1, newest + 1)
    assert len(steps) >= len(acknowledged["jobs"])
    assert sorted(rows_by_step(folder.history_file)) == list(steps)
    assert all(folder.fault(step) is None for step in folder.steps())
    assert not list(folder.checkpoints_dir.glob(".*"))
    ledger = Ledger(tmp_path / "ledger.sqlite")
    assert all(ledger.find(choice) is not None for choice in acknowledged["choices"])
