"""`art.finetune` with the real engine: each kind of workflow trains, and each exit code that needs a server."""

import json
import os
import subprocess
import sys
import uuid
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import art
import art.finetune
from tests.live import PROJECT, Server

pytestmark = pytest.mark.anyio

AGENT = """
import os, sys, json
import httpx
import openai
import art.finetune

REWARDS = {"yes": 0.5, "no": 0.75, "maybe": 1.0}

def body(question):
    return {"messages": [{"role": "user", "content": question}], "max_tokens": 8}

async def coroutine(question):
    async with openai.AsyncOpenAI() as client:
        completion = await client.chat.completions.create(model=os.environ["OPENAI_MODEL"], **body(question))
    return completion.choices[0].message.content

def plain(question):
    with openai.OpenAI() as client:
        completion = client.chat.completions.create(model=os.environ["OPENAI_MODEL"], **body(question))
    return completion.choices[0].message.content

async def service(question, rollout):
    asked = body(question) | {"model": rollout.model.get_inference_name()}
    async with httpx.AsyncClient(timeout=600) as http:
        answer = await http.post(rollout.base_url + "/chat/completions", json=asked)
    return answer.json()["choices"][0]["message"]["content"]

def score(output):
    return REWARDS.get(output.strip().lower(), 0.0)

def equal(output):
    return 1.0

def broken(output):
    raise RuntimeError("no score")

if __name__ == "__main__":
    print(plain(json.load(sys.stdin)["question"]))
"""
WORKFLOWS: dict[str, dict[str, Any]] = {
    "coroutine": {"_type": "agent.py:coroutine"},
    "plain": {"_type": "agent.py:plain"},
    "service": {"_type": "agent.py:service"},
    "command": {"_type": "command", "command": [sys.executable, "agent.py"]},
}
QUESTIONS = ("respond with yes, no, maybe", "answer with no, maybe, yes")


@pytest.fixture
def make_file(server: Server, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., dict[str, Any]]:
    monkeypatch.chdir(tmp_path)
    for name in ("OPENAI_BASE_URL", "OPENAI_API_KEY", "OPENAI_MODEL"):
        monkeypatch.setenv(name, "")
        monkeypatch.delenv(name)
    (tmp_path / "agent.py").write_text(AGENT)
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps({"question": each}) + "\n" for each in QUESTIONS))

    def make(workflow: str, reward: str = "score") -> dict[str, Any]:
        backend = {"name": f"f-{uuid.uuid4().hex[:8]}", "project": PROJECT, "base_model": "art/tiny", "url": server.url}
        return {
            "workflow": WORKFLOWS[workflow],
            "eval": {
                "general": {"dataset": {"_type": "jsonl", "file_path": "rows.jsonl"}},
                "evaluators": {"reward": {"_type": f"agent.py:{reward}"}},
            },
            "trajectory_builders": {"b": {"_type": "openpipe_art_traj_builder", "num_generations": 4}},
            "trainer_adapters": {
                "a": {
                    "_type": "openpipe_art_trainer_adapter",
                    "backend": backend,
                    "training": {"learning_rate": 1e-3},
                }
            },
            "trainers": {"t": {"_type": "openpipe_art_trainer"}},
            "finetuning": {
                "enabled": True,
                "trainer": "t",
                "trajectory_builder": "b",
                "trainer_adapter": "a",
                "reward_function": {"name": "reward"},
                "validation": {"dataset": "rows.jsonl", "interval": 2},
                "num_epochs": 2,
                "output_dir": "out",
                "seed": 1,
            },
        }

    return make


def code_of(file: dict[str, Any], folder: Path) -> tuple[int, str]:
    """The exit code of the command, and what it printed on stderr."""
    (folder / "file.yml").write_text(json.dumps(file))
    code = "from art_watch.terminal.cli import main; main(['finetune', 'file.yml'])"
    done = subprocess.run([sys.executable, "-c", code], cwd=folder, capture_output=True, text=True, check=False)
    assert "Traceback" not in done.stderr, done.stderr
    return done.returncode, done.stderr


@pytest.mark.parametrize("workflow", WORKFLOWS)
async def test_each_kind_of_workflow_trains(
    make_file: Callable[..., dict[str, Any]], tmp_path: Path, workflow: str
) -> None:
    file = make_file(workflow)
    statuses = await art.finetune.run(file)
    assert len(statuses) == 2
    rows = [json.loads(line) for line in (tmp_path / "out" / "training_metrics.jsonl").read_text().splitlines()]
    assert [row["num_trajectories"] for row in rows] == [8, 8] and rows[-1]["step"] >= 1
    backend = file["trainer_adapters"]["a"]["backend"]
    async with art.Backend(backend["url"]) as server:
        model = art.TrainableModel(name=backend["name"], project=PROJECT, base_model="art/tiny")
        await model.register(server)
        assert await model.get_step() == rows[-1]["step"]
        kept = {each.step: each.metrics for each in await model.checkpoints()}
    trained = [row for row in rows if row["filtered_groups"]]
    for row in trained:
        assert kept[row["step"]]["train/reward"] == pytest.approx(row["filtered_avg_reward"])
        assert kept[row["step"]]["epoch/reward"] == pytest.approx(row["avg_reward"])
    validations = json.loads((tmp_path / "out" / "validation_history.json").read_text())
    assert [row["epoch"] for row in validations] == [0, 2]
    assert kept[validations[-1]["step"]]["val/reward"] == pytest.approx(validations[-1]["avg_reward"])


async def test_any_step_can_be_evaluated(make_file: Callable[..., dict[str, Any]]) -> None:
    file = make_file("coroutine")
    await art.finetune.run(file)
    found = await art.finetune.evaluate(file, step="best", baseline="base", reps=2)
    assert found.difference is not None and found.baseline is not None and found.baseline.step is None
    again = [await art.finetune.evaluate(file, {"eval.general.max_concurrency": 1}, step="0", reps=2) for _ in range(2)]
    assert again[0].num_failed == again[1].num_failed == 0


def test_exit_codes(make_file: Callable[..., dict[str, Any]], tmp_path: Path) -> None:
    assert code_of(make_file("coroutine"), tmp_path)[0] == 0
    os.rename(tmp_path / "out", tmp_path / "first")
    code, text = code_of(make_file("coroutine", "broken"), tmp_path)
    assert code == 1 and "no score" in text
    os.rename(tmp_path / "out", tmp_path / "second")
    code, text = code_of(make_file("coroutine", "equal"), tmp_path)
    assert code == 3 and "min_reward_diff" in text
    file = make_file("coroutine")
    assert code_of(file, tmp_path)[0] == 2, "the folder has another run"
    file["trainer_adapters"]["a"]["backend"]["url"] = "http://127.0.0.1:9"
    file["finetuning"]["output_dir"] = "new"
    code, text = code_of(file, tmp_path)
    assert code == 4 and "art-server" in text
