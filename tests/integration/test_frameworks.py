"""The examples of examples/frameworks, each as a separate program with the real server."""

import json
import os
import subprocess
from pathlib import Path

import pytest

from tests.integration.live import Server

pytestmark = [pytest.mark.engine, pytest.mark.slow]

ROOT = Path(__file__).parents[2]
EXAMPLES = ["openai", "anthropic", "langgraph", "llama_index", "openai_agents", "google_adk"]


@pytest.fixture(scope="session")
def python() -> Path:
    """The Python interpreter of .venv-frameworks."""
    subprocess.run([ROOT / "scripts" / "setup-frameworks"], check=True)
    return ROOT / ".venv-frameworks" / "bin" / "python"


@pytest.mark.parametrize("example", EXAMPLES)
def test_example_trains_two_steps_on_exact_tokens(
    server: Server, python: Path, example: str
) -> None:
    program = ROOT / "examples" / "frameworks" / f"with_{example}.py"
    environment = {
        "PATH": os.environ["PATH"],
        "HOME": os.environ["HOME"],
        "ART_SERVER_URL": server.url,
        "LITELLM_LOCAL_MODEL_COST_MAP": "True",  # otherwise it downloads prices
    }
    run = subprocess.run(
        [python, program], env=environment, capture_output=True, text=True, timeout=300
    )
    assert run.returncode == 0, run.stderr[-4000:]
    steps = [json.loads(line) for line in run.stdout.splitlines() if line.startswith("{")]
    assert [step["step"] for step in steps] == [1, 2], run.stdout
    for report in (step["report"] for step in steps):
        assert report["turns"].keys() <= {"ids", "ledger"}, report
        # a tool call and an answer, of nearly every rollout
        assert sum(report["turns"].values()) >= 1.5 * report["num_trajectories"], report
        assert report["num_trained_tokens"] > 0, report
        reasons = {dropped["reason"] for dropped in report["dropped"]}
        equal = "all rewards in the group are equal: no signal"
        assert reasons <= {equal, "the rollout failed"}, report
