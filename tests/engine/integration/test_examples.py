"""The README's programs are those of the repository, and they run."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.live import Server

ROOT = Path(__file__).parents[3]


def run(arguments: list[str], folder: Path, **environment: str) -> str:
    """Runs a program, which must succeed, without the caller's ART variables; returns its output."""
    known = {key: value for key, value in os.environ.items() if not key.startswith("ART_")}
    result = subprocess.run(
        [sys.executable, *arguments],
        cwd=folder,
        env=known | environment,
        capture_output=True,
        text=True,
        timeout=500,
        check=False,
    )
    assert result.returncode == 0, result.stdout[-2000:] + result.stderr[-4000:]
    return result.stdout


def test_yes_no_maybe_trains_and_plots(server: Server, tmp_path: Path) -> None:
    arguments = [str(ROOT / "examples" / "yes_no_maybe.py"), "--server", server.url, "--steps", "2"]
    printed = run(arguments, tmp_path)
    assert re.search(r"step +2 +mean reward 0\.\d+", printed)
    assert printed.count("before: ") == printed.count("after:  ") == 1
    assert (tmp_path / "reward.png").read_bytes().startswith(b"\x89PNG")


@pytest.mark.parametrize(
    ("program", "sides"),
    [
        (["tic_tac_toe.py"], ["both sides"]),
        (["tic_tac_toe.py", "--self-play"], ["x", "o"]),
        (["2048.py"], ["2048"]),
    ],
    ids=["tic_tac_toe", "self_play", "2048"],
)
def test_a_game_trains_plots_and_goes_on_where_it_stood(
    server: Server, tmp_path: Path, program: list[str], sides: list[str]
) -> None:
    arguments = [str(ROOT / "examples" / program[0]), *program[1:], "--server", server.url]
    arguments += ["--groups", "4", "--group-size", "4"]
    for step in (1, 2):
        printed = run([*arguments, "--steps", str(step)], tmp_path)
        told = re.findall(r"step +(\d+) +(.+): +reward (0\.\d+)", printed)
        assert [(line[0], line[1]) for line in told] == [(str(step), side) for side in sides]
        assert all(float(line[2]) > 0 for line in told)
    assert (tmp_path / "reward.png").read_bytes().startswith(b"\x89PNG")
