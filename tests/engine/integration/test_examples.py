"""The README's programs are those of the repository, and they run."""

import re
import shutil
from pathlib import Path

import pytest

from tests.example_programs import ROOT, check_game, run
from tests.live import Server


def test_yes_no_maybe_trains_and_plots(server: Server, tmp_path: Path) -> None:
    arguments = [str(ROOT / "examples" / "yes_no_maybe.py"), "--server", server.url, "--steps", "2"]
    printed = run(arguments, tmp_path)
    assert re.search(r"step +2 +mean reward 0\.\d+", printed)
    assert printed.count("before: ") == printed.count("after:  ") == 1
    assert (tmp_path / "reward.png").read_bytes().startswith(b"\x89PNG")


def test_a_game_trains_plots_and_continues_at_its_step(server: Server, tmp_path: Path) -> None:
    check_game(server, tmp_path, ["tic_tac_toe.py"], ["both sides"])


def test_an_agent_in_use_learns_from_its_scores(server: Server, tmp_path: Path) -> None:
    arguments = [str(ROOT / "examples" / "serve_and_learn.py"), "--server", server.url, "--steps", "1"]
    printed = run(arguments, tmp_path)
    assert re.search(r"round +\d+ +expected thumbs up 0\.\d+ +answered by step 1", printed)
    assert (tmp_path / "reward.png").read_bytes().startswith(b"\x89PNG")


@pytest.mark.skipif(shutil.which("bwrap") is None, reason="bubblewrap is not installed")
def test_a_coding_agent_learns_in_a_sandbox(server: Server, tmp_path: Path) -> None:
    arguments = [str(ROOT / "examples" / "coding_agent.py"), "--server", server.url, "--steps", "1", "--groups", "2"]
    printed = run(arguments, tmp_path)
    assert re.search(r"step +1 +mean reward [01]\.\d+", printed)
    assert (tmp_path / "reward.png").read_bytes().startswith(b"\x89PNG")
