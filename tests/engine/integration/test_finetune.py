"""`art.finetune` with the real engine: each kind of workflow trains, and each exit code that needs a server."""

import json
import signal
import subprocess
import sys
import uuid
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import art
import art.finetune
from tests.finetune_file import enter, finetune_file
from tests.live import PROJECT, Server
from tests.waiting import wait_until

pytestmark = pytest.mark.anyio

MakeFile = Callable[..., dict[str, Any]]

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
def make_file(server: Server, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> MakeFile:
    enter(tmp_path, monkeypatch)
    (tmp_path / "agent.py").write_text(AGENT)
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps({"question": question}) + "\n" for question in QUESTIONS))

    def make(workflow: str, reward: str = "score", **changes: Any) -> dict[str, Any]:
        return finetune_file(
            {"name": f"f-{uuid.uuid4().hex[:8]}", "project": PROJECT, "url": server.url},
            "rows.jsonl",
            workflow=WORKFLOWS[workflow],
            eval__evaluators__reward___type=f"agent.py:{reward}",
            trajectory_builders__b__num_generations=4,
            trainer_adapters__a__training={"learning_rate": 1e-3},
            finetuning__validation={"dataset": "rows.jsonl", "interval": 2},
            finetuning__seed=1,
            **changes,
        )

    return make


def start(file: dict[str, Any], folder: Path) -> subprocess.Popen[str]:
    """The command, as a process."""
    (folder / "file.yml").write_text(json.dumps(file))
    # A process that a shell started in the background ignores Ctrl-C, and so would this one.
    code = "import signal; signal.signal(signal.SIGINT, signal.default_int_handler); "
    code += "import sys; sys.argv[0] = 'art'; from art_watch.terminal.cli import main; main()"
    command = [sys.executable, "-c", code, "finetune", "file.yml"]
    return subprocess.Popen(command, cwd=folder, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True)


def end(process: subprocess.Popen[str]) -> tuple[int, str]:
    """The exit code, and what it printed on stderr."""
    text = process.communicate()[1]
    assert "Traceback" not in text, text
    return process.returncode, text


@pytest.mark.parametrize("workflow", WORKFLOWS)
async def test_each_kind_of_workflow_trains(make_file: MakeFile, tmp_path: Path, workflow: str) -> None:
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
        kept = {checkpoint.step: checkpoint.metrics for checkpoint in await model.checkpoints()}
    trained = [row for row in rows if row["filtered_groups"]]
    for row in trained:
        if row["filtered_groups"] == row["num_groups"]:  # the server's mean is over all groups that it was sent
            assert kept[row["step"]]["train/reward"] == pytest.approx(row["filtered_avg_reward"])
        assert kept[row["step"]]["epoch/reward"] == pytest.approx(row["avg_reward"])
    validations = json.loads((tmp_path / "out" / "validation_history.json").read_text())
    assert [row["epoch"] for row in validations] == [0, 2]
    assert kept[validations[-1]["step"]]["val/reward"] == pytest.approx(validations[-1]["avg_reward"])


async def test_any_step_can_be_evaluated(make_file: MakeFile) -> None:
    file = make_file("coroutine")
    await art.finetune.run(file)
    evaluation = await art.finetune.evaluate(file, step="best", baseline="base", reps=2)
    assert evaluation.difference is not None and evaluation.baseline is not None and evaluation.baseline.step is None
    alone = {"eval.general.max_concurrency": 1, "finetuning.seed": 3, "finetuning.validation": {}}
    again = [await art.finetune.evaluate(file, alone, step="0", reps=2) for _ in range(2)]
    assert again[0].num_failed == 0 and again[0].num_rollouts == again[1].num_rollouts
    assert again[0].scenario_rewards == again[1].scenario_rewards


def test_exit_codes(make_file: MakeFile, tmp_path: Path) -> None:
    def run(reward: str, output_dir: str, **changes: Any) -> tuple[int, str]:
        return end(start(make_file("coroutine", reward, finetuning__output_dir=output_dir, **changes), tmp_path))

    assert run("score", "out")[0] == 0
    code, text = run("broken", "second")
    assert code == 1 and "no score" in text
    assert run("score", "out")[0] == 2, "the folder has another run"
    code, text = run("equal", "third")
    assert code == 3 and "min_reward_diff" in text
    code, text = run("score", "fourth", trainer_adapters__a__backend__url="http://127.0.0.1:9")
    assert code == 4 and "art-server" in text


def test_ctrl_c_keeps_finished_rollouts_and_names_the_command_that_continues(
    make_file: MakeFile, tmp_path: Path
) -> None:
    file = make_file("coroutine", eval__general__max_concurrency=1)
    process, rollouts = start(file, tmp_path), tmp_path / "out" / "rollouts.jsonl"
    wait_until(
        lambda: process.poll() is not None or (rollouts.exists() and rollouts.stat().st_size), lambda: process.args
    )
    process.send_signal(signal.SIGINT)
    code, text = end(process)
    assert code == 130 and text.splitlines()[-1].endswith("art finetune file.yml"), text
    kept = rollouts.read_bytes()
    assert kept.count(b"\n") < 16, "it did not run to its end"
    assert end(start(file, tmp_path))[0] == 0
    whole = rollouts.read_bytes()
    assert whole.startswith(kept)
    assert [whole.count(b'"split":"%s"' % split) for split in (b"train", b"val")] == [16, 4], "none was sampled twice"
    assert (tmp_path / "out" / "training_metrics.jsonl").read_text().count("\n") == 2
