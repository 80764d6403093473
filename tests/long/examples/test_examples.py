"""The README's programs are those of the repository, and they run."""

import re
from pathlib import Path
from typing import Any

import nbformat
import pytest
from nbclient import NotebookClient

from tests.example_programs import ROOT, check_game, run
from tests.live import BEFORE_AND_AFTER, Server, check_jobs, done_jobs
from tests.waiting import PATIENCE_SECONDS

SHORT = ["--steps", "2", "--groups", "3", "--group-size", "6", "--held-out", "8"]


FEWER = ["--groups", "2", "--group-size", "4", "--held-out", "4"]
"""For games of three rounds, whose rewards nearly always differ."""


OF_PROGRAM = {"rock_paper_scissors": FEWER}


@pytest.mark.parametrize(
    "program",
    ["rock_paper_scissors", "mail_search", "mcp_tools", "temporal_clue", "judged", "reasoning"],
)
def test_a_learner_trains_exact_tokens_and_compares_before_and_after(
    server: Server, tmp_path: Path, program: str
) -> None:
    arguments = [str(ROOT / "examples" / f"{program}.py"), "--server", server.url, *SHORT]
    arguments += OF_PROGRAM.get(program, [])
    printed = run([*arguments, "--plot", "curve.png"], tmp_path)
    assert re.findall(r"^step +(\d+) .* reward [01]\.\d+", printed, re.MULTILINE) == ["1", "2"]
    ((_, after, _, before, _),) = BEFORE_AND_AFTER.findall(printed)
    assert (after, before) == ("2", "0")
    check_jobs(done_jobs(server, program.replace("_", "-")), [1, 2])
    assert (tmp_path / "curve.png").read_bytes().startswith(b"\x89PNG")


def test_a_warm_start_is_compared_before_it_after_it_and_at_the_end(server: Server, tmp_path: Path) -> None:
    arguments = [str(ROOT / "examples" / "warm_start.py"), "--server", server.url, *SHORT]
    printed = run(arguments, tmp_path)
    compared = [(match[1], match[3]) for match in BEFORE_AND_AFTER.findall(printed)]
    assert compared == [("1", "0"), ("2", "1")]
    warm, *sampled = done_jobs(server, "warm-start")
    assert warm["report"]["turns"] == {"recomputed": 3 * 16}, "three turns of each demonstration"
    check_jobs(sampled, [2])


def test_a_student_is_distilled_from_the_teacher_that_the_program_trained(server: Server, tmp_path: Path) -> None:
    arguments = [str(ROOT / "examples" / "distillation.py"), "--server", server.url, *SHORT]
    printed = run([*arguments, *FEWER, "--teacher-steps", "1"], tmp_path)
    compared = [(match[0], match[1]) for match in BEFORE_AND_AFTER.findall(printed)]
    assert [(name.rpartition("-")[2], step) for name, step in compared] == [
        ("teacher", "1"),
        ("student", "2"),
    ]
    assert len(re.findall(r"student: .* teacher_gap -?\d\.\d+", printed)) == 2
    check_jobs(done_jobs(server, "distillation", "art-tiny-student"), [1, 2])


def test_a_model_learns_from_what_its_checker_says(server: Server, tmp_path: Path) -> None:
    arguments = [str(ROOT / "examples" / "learn_from_errors.py"), "--server", server.url]
    printed = run([*arguments, "--steps", "2", "--groups", "3", "--seed", "7"], tmp_path)
    assert re.findall(r"^step +(\d+)  reward [01]\.\d+  groups of zeros [0-3] of 3", printed, re.MULTILINE) == [
        "1",
        "2",
    ]
    check_jobs(done_jobs(server, "learn-from-errors", "art-tiny-text-7"), [1, 2])
    assert (tmp_path / "reward.png").read_bytes().startswith(b"\x89PNG")


def test_the_notebook_runs_from_its_first_cell_to_its_last(server: Server, tmp_path: Path) -> None:
    notebook: Any = nbformat.read(ROOT / "examples" / "temporal_clue.ipynb", as_version=4)
    assert all(cell.cell_type == "markdown" or not cell.outputs for cell in notebook.cells)
    changes = {
        "art.LocalBackend()": f"art.Backend({server.url!r})",
        "= 20, 8, 8, 2e-3": "= 2, 2, 6, 2e-3",
        "range(64)": "range(8)",
        '"reward.png"': repr(str(tmp_path / "curve.png")),
    }
    for old, new in changes.items():
        assert any(old in cell.source for cell in notebook.cells), old
        for cell in notebook.cells:
            cell.source = cell.source.replace(old, new)
    folder = {"metadata": {"path": str(ROOT / "examples")}}
    NotebookClient(notebook, kernel_name="python3", timeout=PATIENCE_SECONDS, resources=folder).execute()
    shown = [str(cell.get("outputs", "")) for cell in notebook.cells]
    assert "@2: reward" in shown[-2] and "@0: reward" in shown[-2]
    assert "image/png" in "".join(shown)
    check_jobs(done_jobs(server, "temporal-clue", "notebook"), [1, 2])


def test_the_example_of_the_readme_runs_with_a_server_of_its_own(tmp_path: Path) -> None:
    printed = run([str(ROOT / "examples" / "minimal.py")], tmp_path)
    steps = [re.match(r"step (\d+): mean reward [01]\.\d\d$", line) for line in printed.splitlines()]
    assert [match and int(match[1]) for match in steps] == list(range(1, 13))
    checkpoints = tmp_path / ".art" / "minimal" / "models" / "agent-001" / "checkpoints"
    assert sorted(p.name for p in checkpoints.iterdir()) == [f"{n:04d}" for n in range(13)]


@pytest.mark.parametrize(
    ("program", "sides"),
    [(["tic_tac_toe.py", "--self-play"], ["x", "o"]), (["2048.py"], ["2048"])],
    ids=["self_play", "2048"],
)
def test_a_game_trains_plots_and_continues_at_its_step(
    server: Server, tmp_path: Path, program: list[str], sides: list[str]
) -> None:
    check_game(server, tmp_path, program, sides)
