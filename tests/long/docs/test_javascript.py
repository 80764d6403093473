"""The programs of docs/howto/javascript.md in Node.js: an agent with OpenAI's own client is trained, and a trainer trains."""

import contextlib
import shutil
import subprocess
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest

import art
from tests.live import Server, run_program
from tests.makers.demo import rows_by_step
from tests.pages import blocks, run

pytestmark = pytest.mark.anyio

QUESTIONS = ["respond with yes, no, maybe", "answer with no, maybe, yes"]
NUM_STEPS = 8


@pytest.fixture
def agent(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The page's agent.mjs beside OpenAI's package, in the working folder."""
    if shutil.which("npm") is None:
        pytest.skip("Node.js is not installed")
    (tmp_path / "agent.mjs").write_text(blocks("javascript.md", "js")[0])
    install = ["npm", "install", "--no-audit", "--no-fund", "--ignore-scripts", "openai"]
    subprocess.run(install, cwd=tmp_path, check=True, capture_output=True)
    monkeypatch.chdir(tmp_path)
    return tmp_path / "agent.mjs"


@contextlib.asynccontextmanager
async def registered(server: Server, name: str) -> AsyncIterator[tuple[art.TrainableModel, dict[str, Any]]]:
    """A new model, and what the page's program defines."""
    names: dict[str, Any] = {}
    await run("javascript.md", 0, names)
    async with art.Backend(server.url) as backend:
        model = art.TrainableModel(name=name, project="howto", base_model="art/tiny")
        await model.register(backend)
        yield model, names


@pytest.mark.usefixtures("agent")
async def test_an_agent_in_javascript_learns(server: Server) -> None:
    async with registered(server, "javascript") as (model, names):
        (trajectory,) = await art.gather_trajectories([names["rollout"](model, QUESTIONS[0])])
        assert [message["role"] for message in trajectory.messages()] == ["user", "assistant"]
        await names["train"](model, QUESTIONS, NUM_STEPS)
    check_learned(server, "javascript")


def check_learned(server: Server, name: str) -> None:
    """The model has made its steps, and the last rewards are above the first."""
    history = server.path / "art" / "howto" / "models" / name / "history.jsonl"
    rows = list(rows_by_step(history).values())
    rewards = [row["train/reward"] for row in rows if "train/reward" in row]
    assert len(rewards) == NUM_STEPS and sum(rewards[-3:]) > sum(rewards[:3]), rewards


@pytest.mark.skipif(shutil.which("node") is None, reason="Node.js is not installed")
def test_a_trainer_in_javascript_trains(server: Server, tmp_path: Path) -> None:
    (text,) = (text for text in blocks("javascript.md", "js") if text.startswith("// train.mjs"))
    (tmp_path / "train.mjs").write_text(text)
    printed = run_program(server, tmp_path, "node", "train.mjs")
    assert [line.split()[0] for line in printed.splitlines()] == [str(step) for step in range(1, NUM_STEPS + 1)]
    check_learned(server, "typescript")


@pytest.fixture
def broken(agent: Path) -> None:
    agent.write_text("process.exit(3)")


@pytest.mark.usefixtures("broken")
async def test_an_agent_that_fails_is_no_reward(server: Server) -> None:
    async with registered(server, "javascript-fails") as (model, names):
        with pytest.raises(RuntimeError, match="ended with 3"):
            await names["rollout"](model, QUESTIONS[0])
