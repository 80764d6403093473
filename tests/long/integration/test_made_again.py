"""A step is made again from its record."""

import subprocess
import sys

from scripts.import_graph import ROOT
from tests.live import PROJECT, Server, register, train_one_step
from tests.waiting import PATIENCE_SECONDS


def test_a_step_is_made_again_bit_for_bit(server: Server) -> None:
    register(server, "replayed")
    for _ in range(2):
        assert train_one_step(server, "replayed", learning_rate=3e-3)["event"] == "done"
    root = server.model_dir("replayed").parents[2]
    ran = subprocess.run(
        [sys.executable, ROOT / "scripts" / "replay.py", f"{PROJECT}/replayed@2", "--path", root],
        capture_output=True,
        text=True,
        check=False,
        timeout=PATIENCE_SECONDS,
    )
    assert ran.returncode == 0, ran.stdout + ran.stderr
    assert "step 2: bit-equal (adapter and optimizer state)" in ran.stdout
