"""Agents of libraries that no example shows, each as a separate program with the real server."""

import shutil
import subprocess
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from tests.live import BEFORE_AND_AFTER, Server, done_jobs, run_program

ROOT = Path(__file__).parents[3]
AGENTS = Path(__file__).with_name("agents")
FOLDERS = f"{ROOT / 'examples' / 'frameworks'}:{AGENTS}"
SHORT = ["--steps", "2", "--groups", "8", "--held-out", "4"]
PYTHON = ["ag2", "agent_framework", "agentscope", "agno", "autogen", "code_agent", "create_agent", "crewai"]
PYTHON += ["dspy", "haystack", "instructor", "litellm", "strands"]
JAVASCRIPT = ["openai", "vercel", "langchain"]
SINGLE = {"dspy", "instructor"}
"""Programs whose rollouts are one turn."""


@pytest.fixture(scope="session", autouse=True)
def environments() -> None:
    subprocess.run([ROOT / "scripts" / "setup-agents"], check=True)


def train(server: Server, folder: Path, name: str, *arguments: str) -> list[dict[str, Any]]:
    """The reports of a program's jobs."""
    python = ROOT / (".venv-crewai" if name == "crewai" else ".venv-agents") / "bin" / "python"
    command = [python, AGENTS / f"with_{name}.py", *arguments, *SHORT]
    printed = run_program(server, folder, *command, PYTHONPATH=FOLDERS, CREWAI_DISABLE_TELEMETRY="true")
    ((_, after, _, before, _),) = BEFORE_AND_AFTER.findall(printed)
    assert (after, before) == ("2", "0")
    project = "-".join([name.replace("_", "-"), *arguments])
    jobs = done_jobs(server, project)
    assert [job["step"] for job in jobs] == [1, 2]
    return [job["report"] for job in jobs]


def assert_joined(reports: list[dict[str, Any]], turns: float) -> None:
    """Rollouts have so many turns and more, which are the ledger's and continue each other."""
    sources, continuations = Counter[str](), Counter[str]()
    for report in reports:
        sources.update(report["turns"])
        continuations.update(report["continuations"])
    assert sources.keys() <= {"ids", "ledger"}
    assert sources.total() >= turns * sum(report["num_trajectories"] for report in reports)
    # art/tiny thinks now and then, and its template drops what a user's message follows.
    assert turns == 1 or continuations["joined"] >= 0.8 * continuations.total() > 0, continuations


@pytest.mark.parametrize("agent", PYTHON)
def test_an_agent_trains_unmodified_and_its_turns_join(server: Server, tmp_path: Path, agent: str) -> None:
    assert_joined(train(server, tmp_path, agent), turns=1 if agent in SINGLE else 1.3)


@pytest.mark.skipif(shutil.which("npm") is None, reason="needs Node.js")
@pytest.mark.parametrize("client", JAVASCRIPT)
def test_an_agent_of_a_javascript_client_does_too(server: Server, tmp_path: Path, client: str) -> None:
    assert_joined(train(server, tmp_path, "javascript", client), turns=1.3)
