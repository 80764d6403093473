"""The agents of tests/long/integration/agents: libraries that no example shows, each as a program of its own."""

import re
import subprocess
from collections import Counter
from dataclasses import dataclass
from pathlib import Path

from tests.live import Server, done_jobs, run_program

ROOT = Path(__file__).parents[1]
FOLDER = ROOT / "tests" / "long" / "integration" / "agents"
PYTHON = ["ag2", "agent-framework", "agentscope", "agno", "autogen", "code-agent", "create-agent", "crewai", "dspy"]
PYTHON += ["haystack", "instructor", "litellm", "strands"]
JAVASCRIPT = ["javascript-openai", "javascript-vercel", "javascript-vercel-responses", "javascript-mastra"]
JAVASCRIPT += ["javascript-langchain", "javascript-agents"]
ONE_TURN = {"dspy", "instructor"}
"""Those that end with their first answer."""

MEASURED = re.compile(
    r"^Evaluation\(\S+@(?P<steps>\d+): reward (?P<after>[^;]+); \S+@0: reward (?P<before>[^;]+); difference (?P<difference>.+)\)$",
    re.MULTILINE,
)


@dataclass
class Trained:
    """What an agent's program printed and the server counted. Rewards have their 95% intervals."""

    steps: int
    before: str
    after: str
    difference: str
    rollouts: int
    failed: int
    """Rollouts in which the library raised an exception. They are not among the others."""
    sources: Counter[str]
    """Trained turns by where their tokens come from."""
    continuations: Counter[str]
    """Later turns by how they continue earlier ones."""


def make_environments() -> None:
    subprocess.run([ROOT / "scripts" / "setup-agents"], check=True)


def train(server: Server, folder: Path, agent: str, *flags: str) -> Trained:
    """Trains an agent with the flags of the examples. The server has no jobs of it yet."""
    python = ROOT / (".venv-crewai" if agent == "crewai" else ".venv-agents") / "bin" / "python"
    program = [FOLDER / "train.py", agent]
    if agent in JAVASCRIPT:
        program = [FOLDER / "with_javascript.py", agent.removeprefix("javascript-")]
    frame = str(ROOT / "examples" / "frameworks")
    printed = run_program(server, folder, python, *program, *flags, PYTHONPATH=frame, CREWAI_DISABLE_TELEMETRY="true")
    match = MEASURED.search(printed)
    assert match, printed
    sources, continuations = Counter[str](), Counter[str]()
    reports = [job["report"] for job in done_jobs(server, agent)]
    for report in reports:
        sources.update(report["turns"])
        continuations.update(report["continuations"])
    return Trained(
        steps=int(match["steps"]),
        before=match["before"],
        after=match["after"],
        difference=match["difference"],
        rollouts=sum(report["num_trajectories"] for report in reports),
        failed=sum(report["num_failed_rollouts"] for report in reports),
        sources=sources,
        continuations=continuations,
    )
