"""`art finetune --tasks` and `art eval --tasks`: the agent runs in boxes, and the tests' rewards are trained."""

import asyncio
import json
import shutil
import sys
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from art.finetune import WrongInput
from art_finetune.commands import evaluate_flags
from plugins.finetune.tests.commands import CODE, end, parsed
from plugins.finetune.tests.policy_server import PolicyServer
from plugins.harbor.tests.boxed import TASKS, left, needs_bubblewrap

pytestmark = pytest.mark.anyio

AGENT = """
import json, os, sys, urllib.request
body = {"model": os.environ["OPENAI_MODEL"], "messages": [{"role": "user", "content": sys.argv[1]}]}
headers = {"Authorization": "Bearer " + os.environ["OPENAI_API_KEY"], "Content-Type": "application/json"}
url = os.environ["OPENAI_BASE_URL"] + "/chat/completions"
answer = json.load(urllib.request.urlopen(urllib.request.Request(url, json.dumps(body).encode(), headers)))
open("hello.txt", "w").write(answer["choices"][0]["message"]["content"])
"""


@pytest.fixture
async def policy(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[PolicyServer]:
    """A server whose policy answers "hello" every second time; the current folder has a task and an agent."""
    shutil.copytree(TASKS / "hello-file", tmp_path / "tasks" / "hello-file")
    (tmp_path / "agents").mkdir()
    (tmp_path / "agents" / "agent.py").write_text(AGENT)
    monkeypatch.chdir(tmp_path)
    server = PolicyServer()
    server.answer = lambda question, number: ("hello", "no")[number % 2]
    await server.start()
    monkeypatch.setenv("ART_SERVER_URL", server.url)
    yield server
    await server.stop()


FLAGS = ["--tasks", "tasks", "--agent", "python3 /opt/agents/agent.py {instruction}", "--mount", "agents:/opt/agents"]


@needs_bubblewrap
async def test_the_tests_rewards_are_trained(tmp_path: Path, policy: PolicyServer) -> None:
    words = ["finetune", *FLAGS, "--base_model", "art/tiny", "--num_epochs", "1", "--num_generations", "4"]
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-c", CODE, *words),
        cwd=tmp_path,
        stdout=asyncio.subprocess.DEVNULL,
        stderr=asyncio.subprocess.PIPE,
    )
    code, errors = await end(process)
    assert code == 0, errors
    ((group,),) = [job["groups"] for job in policy.trained]
    trajectories = group["trajectories"]
    assert sorted(trajectory["reward"] for trajectory in trajectories) == [0.0, 0.0, 1.0, 1.0]
    assert all("tests_seconds" in trajectory["metrics"] for trajectory in trajectories)
    assert {asked["messages"][0]["content"].strip() for asked in policy.asked} == {
        "Write the word hello into the file hello.txt."
    }
    assert left() == []


def rewards_in(results: Path) -> list[float]:
    return [json.loads(line)["reward"] for line in results.read_text().splitlines()]


@needs_bubblewrap
async def test_an_evaluation_has_the_tests_rewards(policy: PolicyServer, capsys: pytest.CaptureFixture[str]) -> None:
    policy.num_base_answers = 1
    await evaluate_flags(
        parsed("eval", *FLAGS, "--base_model", "art/tiny", "--reps", "4", "--results", "results.jsonl")
    )
    rewards = rewards_in(Path("results.jsonl"))
    assert sorted(rewards) == [0.0, 0.0, 1.0, 1.0] and "0.5" in capsys.readouterr().out
    assert left() == []


WRONG = {
    "no agent": (["--tasks", "tasks"], "--agent"),
    "no tasks": (["--agent", "true"], "--tasks"),
    "a file": (["file.yml", *FLAGS], "file.yml"),
    "a data set": ([*FLAGS, "--dataset", "rows.jsonl"], "--dataset"),
    "a wrong mount": ([*FLAGS, "--mount", "agents"], "--mount agents"),
    "no base model": (FLAGS, "--base_model"),
    "no target": ([], "art eval FILE"),
    "no such folder": (["--tasks", "nowhere", "--agent", "true", "--base_model", "art/tiny"], "nowhere"),
}


@pytest.mark.parametrize("name", WRONG)
async def test_wrong_flags_are_named(policy: PolicyServer, name: str) -> None:
    words, named = WRONG[name]
    with pytest.raises(WrongInput, match=named):
        await evaluate_flags(parsed("eval", *words))
