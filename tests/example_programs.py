"""Programs of examples/, run as a user runs them."""

import os
import re
import subprocess
import sys
from pathlib import Path

from tests.live import Server
from tests.waiting import PATIENCE_SECONDS

ROOT = Path(__file__).parents[1]


def run(arguments: list[str], folder: Path, **environment: str) -> str:
    """Runs a program, which must succeed, without the caller's ART variables; returns its output."""
    known = {key: value for key, value in os.environ.items() if not key.startswith("ART_")}
    result = subprocess.run(
        [sys.executable, *arguments],
        cwd=folder,
        env=known | environment,
        capture_output=True,
        text=True,
        timeout=PATIENCE_SECONDS,
        check=False,
    )
    assert result.returncode == 0, result.stdout[-2000:] + result.stderr[-4000:]
    return result.stdout


def check_game(server: Server, folder: Path, program: list[str], sides: list[str]) -> None:
    """It trains, plots, and goes on where it stood."""
    arguments = [str(ROOT / "examples" / program[0]), *program[1:], "--server", server.url]
    arguments += ["--groups", "4", "--group-size", "4"]
    for step in (1, 2):
        printed = run([*arguments, "--steps", str(step)], folder)
        told = re.findall(r"step +(\d+) +(.+): +reward (0\.\d+)", printed)
        assert [(line[0], line[1]) for line in told] == [(str(step), side) for side in sides]
        assert all(float(line[2]) > 0 for line in told)
    assert (folder / "reward.png").read_bytes().startswith(b"\x89PNG")
