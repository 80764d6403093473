"""verifiers' tasksets train through the real package, in its own environment, against the real server."""

import json
import subprocess
from pathlib import Path
from typing import Any

import pytest

from tests.live import Server, run_program

ROOT = Path(__file__).parents[3]


@pytest.fixture(scope="module")
def python() -> Path:
    """The Python interpreter of .venv-verifiers."""
    subprocess.run([ROOT / "scripts" / "setup-verifiers"], check=True)
    return ROOT / ".venv-verifiers" / "bin" / "python"


def run(server: Server, python: Path, program: Path, *flags: str) -> list[dict[str, Any]]:
    """The lines of JSON that a program prints."""
    folder = program.parent
    printed = run_program(server, folder, python, program, *flags, PYTHONPATH=str(folder))
    return [json.loads(line) for line in printed.splitlines() if line.startswith("{")]


def test_a_taskset_with_tools_trains(server: Server, python: Path) -> None:
    program = ROOT / "examples" / "tasksets" / "train.py"
    lines = run(server, python, program, "--steps", "4", "--held-out", "8")
    before, *steps, after = lines
    assert 0.0 <= before["held_out"] <= 1.0 and 0.0 <= after["held_out"] <= 1.0
    for report in (step["report"] for step in steps):
        assert report["turns"].keys() <= {"ids", "ledger"}, "exact tokens"
        assert report["num_trajectories"] == 48
        # The tool's server answers: a call and an answer in most rollouts.
        assert sum(report["turns"].values()) >= 1.5 * report["num_trajectories"], report
    # In one of eight steps all rewards are equal in every group.
    assert any(step["report"]["num_trained_tokens"] > 0 for step in steps)


def test_several_agents_and_episodes_that_fail(server: Server, python: Path) -> None:
    program = Path(__file__).with_name("verifiers_program.py")
    (outcome,) = run(server, python, program)
    by_task: dict[str, list[str]] = {}
    for group in outcome["groups"]:
        assert len(group["rewards"]) in (0, 4)
        if group["rewards"]:
            (task,) = group["tasks"]
            by_task.setdefault(task, []).append(group["agent"])
            assert set(group["rewards"]) <= {0.0, 0.5}, "the weight of the reward"
            assert group["turns"] == [{"first": 1, "second": 2}[group["agent"]]] * 4
            assert {"length", "reward/says_it", "num_turns"} <= set(group["metrics"])
    assert by_task == {"no": ["first", "second"], "maybe": ["first", "second"]}
    assert len(outcome["failures"]) == 4 and all("no score today" in f for f in outcome["failures"])
    report = outcome["report"]
    assert report["turns"].keys() <= {"ids", "ledger"}
    # Without a baseline all groups train, unless each reward in them happens to be 0.
    has_reward = any(any(group["rewards"]) for group in outcome["groups"])
    assert (report["num_trained_tokens"] > 0) == has_reward
    assert sum(report["turns"].values()) == 2 * 4 * (1 + 2)
    errors = outcome["errors"]
    assert "give tasks() a count" in errors["infinite"]
    assert "2 were trained (first, second): call gather()" in errors["several"]
    assert "no score today" in errors["failed"]
