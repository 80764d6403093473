"""`art eval` with the real engine: the commands of docs/finetune.md, exit codes, results, the page of differences, a judge, and
the policy's sampling in each kind of workflow."""

import asyncio
import json
import os
import re
import shlex
import subprocess
import sys
import uuid
from pathlib import Path
from typing import Any

import pytest

import art
import art.finetune
from tests.fakes.server import Answer, FakeServer, Request
from tests.live import PROJECT, ROOT, Server
from tests.makers.finetune_file import PROGRAM, enter, finetune_file

pytestmark = pytest.mark.anyio

AGENT = """
import os
import openai

REWARDS = {"yes": 0.5, "no": 0.75, "maybe": 1.0}

async def ask(question, model, **address):
    messages = [{"role": "user", "content": question}]
    async with openai.AsyncOpenAI(**address) as client:
        completion = await client.chat.completions.create(
            model=model, messages=messages, max_tokens=8, temperature=1.0
        )
    return completion.choices[0].message.content

async def answer(question):
    return await ask(question, os.environ["OPENAI_MODEL"])

async def at_its_address(question, rollout):
    return await ask(question, rollout.model.get_inference_name(), base_url=rollout.base_url)

def score(row, output):
    return {"score": REWARDS.get(output.strip().lower(), 0.0), "reason": f"it said {output}"}
"""
QUESTIONS = ("respond with yes, no, maybe", "answer with no, maybe, yes")
COMMANDS = (ROOT / "docs" / "finetune.md").read_text().partition("## Evaluations\n\n```bash\n")[2].partition("```")[0]


@pytest.fixture
def file(server: Server, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """A file in the current directory, with 24 rows and their labels."""
    enter(tmp_path, monkeypatch)
    monkeypatch.setattr(sys, "path", list(sys.path))
    (tmp_path / "agent.py").write_text(AGENT)
    (tmp_path / "program.py").write_text(PROGRAM)
    rows = [{"id": f"city-{number}", "question": QUESTIONS[number % 2]} for number in range(24)]
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    labels = [("yes", "yes"), ("no", 1), ("nothing", "no"), ("maybe", True)] * 3
    labelled = [{"question": "q", "output": output, "label": label} for output, label in labels]
    (tmp_path / "labels.jsonl").write_text("".join(json.dumps(row) + "\n" for row in labelled))
    return finetune_file(
        {"name": f"e-{uuid.uuid4().hex[:8]}", "project": PROJECT, "url": server.url},
        "rows.jsonl",
        trainer_adapters__a__training={"learning_rate": 1e-3},
        finetuning__num_epochs=1,
        finetuning__seed=1,
    )


async def register(file: dict[str, Any]) -> None:
    """Makes the model of a file."""
    backend = file["trainer_adapters"]["a"]["backend"]
    async with art.Backend(backend["url"]) as opened:
        await art.TrainableModel(**{key: backend[key] for key in ("name", "project", "base_model")}).register(opened)


def write(file: dict[str, Any]) -> None:
    Path("finetune.yml").write_text(json.dumps(file))


async def run(file: dict[str, Any], *arguments: str) -> tuple[int, str]:
    """The exit code of `art`, and what it prints."""
    write(file)
    code = "import sys; sys.argv[0] = 'art'; from art_watch.terminal.cli import main; main()"
    command = [sys.executable, "-c", code, *arguments]
    ended = await asyncio.to_thread(subprocess.run, command, capture_output=True, text=True, env=dict(os.environ))
    assert "Traceback" not in ended.stderr, ended.stderr
    return ended.returncode, ended.stdout + ended.stderr


def text_of(name: str) -> str:
    return Path(name).read_text()


def results(name: str = "out/eval_results.jsonl") -> list[dict[str, Any]]:
    return [json.loads(line) for line in text_of(name).splitlines()]


async def test_each_command_of_the_page_works(file: dict[str, Any]) -> None:
    await art.finetune.run(file)
    lines = [shlex.split(line)[1:] for line in COMMANDS.splitlines()]
    assert len(lines) == 7
    printed: list[str] = []
    for line in lines:
        code, text = await run(file, *line)
        assert code == 0, (line, text)
        printed.append(text)
        if "--limit" in line:
            assert [record["id"] for record in results("out/eval_chosen_results.jsonl")] == [
                f"city-{number}" for number in range(20)
            ]
        if "--id" in line:
            assert [(record["id"], record["repetition"]) for record in results("out/eval_chosen_results.jsonl")] == [
                ("city-7", number) for number in (1, 2, 3, 4)
            ]
    before, after = results("before.jsonl"), results()
    assert {record["model"].rpartition("@")[2] for record in before} == {"0"}
    assert {record["model"].rpartition("@")[2] for record in after} == {"1"}
    assert all(record["reasons"]["reward"] == f"it said {record['output']}" for record in after)
    match = re.search(r"difference (\S+) \(95% .*; rows: (\d+) worse, (\d+) better, (\d+) equal", printed[3])
    assert match is not None and sum(map(int, match.groups()[1:])) == 24, printed[3]
    assert match[0] in printed[4], "the same from the files"
    assert f"{match[2]} worse" in text_of("out/eval.html") or match[2] == "0"
    assert "Agreement(1 (95% 0.7575 to 1, n=12), kappa 1)" in printed[6]


async def test_a_gate_has_its_exit_code(file: dict[str, Any]) -> None:
    await register(file)
    code, text = await run(file, "eval", "finetune.yml", "--at_least", "0.99")
    assert code == 5 and "is below --at_least 0.99" in text.splitlines()[-1], text
    rewards = [record["reward"] for record in results()]
    figures = json.loads(text_of("out/eval.json"))
    assert len(rewards) == 24 and figures["reward"]["mean"] == pytest.approx(sum(rewards) / 24)
    assert figures["reward"]["interval"][0] < 0.99
    code, text = await run(file, "eval", "finetune.yml", "--id", "city-77", "--at_least", "0")
    assert code == 2 and "no row has the id 'city-77'; did you mean" in text


async def test_a_judge_scores_the_answers_of_the_engine(file: dict[str, Any]) -> None:
    def judge(request: Request) -> Answer:
        answer = request.json()["messages"][1]["content"].partition("<answer>\n")[2].partition("\n</answer>")[0]
        score = float(json.loads(answer).strip().lower() == "maybe")
        scores = {"scores": {"1": {"explanation": f"it is {json.loads(answer)}", "score": score}}}
        return Answer(
            body={"choices": [{"message": {"role": "assistant", "content": json.dumps(scores)}}], "usage": {}}
        )

    served = FakeServer()
    served.on("POST", "/v1/chat/completions", judge)
    await served.start()
    try:
        address = {"judge_model": "small", "base_url": f"{served.url}/v1", "timeout_seconds": 60}
        file["eval"]["evaluators"]["reward"] = {"_type": "judge", "rubric": "Only maybe is right.", **address}
        code, text = await run(file, "finetune", "finetune.yml", "--check", "--id", "city-3")
        assert (
            code == 0 and "Only maybe is right." in text and QUESTIONS[1] in text and "reason of reward: it is" in text
        )
        code, text = await run(file, "eval", "finetune.yml")
        assert code == 2 and "no model" in text, "the check has left none"
        await register(file)
        code, text = await run(file, "eval", "finetune.yml")
        assert code == 0, text
    finally:
        await served.stop()
    for record in results():
        assert record["reward"] == float(record["output"].strip().lower() == "maybe")
        assert record["reasons"] == {"reward": f"it is {record['output']}"}


WORKFLOWS: dict[str, dict[str, Any]] = {
    "captured": {"_type": "agent.py:answer"},
    "address": {"_type": "agent.py:at_its_address"},
    "command": {"_type": "command", "command": [sys.executable, "program.py"]},
}


@pytest.mark.parametrize("workflow", WORKFLOWS)
@pytest.mark.parametrize("step", ["0", "base"])
async def test_the_policys_sampling_wins_in_each_workflow(file: dict[str, Any], workflow: str, step: str) -> None:
    """A temperature of 0 gives the same answer to the same question, and one token is a cut answer."""
    file["workflow"] = WORKFLOWS[workflow]
    file["llms"] = {"policy": {"_type": "openai", "model_name": file["trainer_adapters"]["a"]["backend"]["name"]}}
    file["finetuning"]["seed"] = None
    if step != "base":
        await register(file)
    greedy = {"llms.policy.temperature": 0, "llms.policy.max_tokens": 1}
    evaluation = await art.finetune.evaluate(file, greedy, step=step, reps=4, ids=["city-0"])
    assert evaluation.num_rollouts == 4 and evaluation.num_failed == 0
    outputs = {record["output"] for record in results("out/eval_chosen_results.jsonl")}
    assert len(outputs) == 1
    if step == "0":
        sampled = [trajectory.num_sampled_tokens() for trajectory in evaluation.groups[0]]
        assert sampled == [1, 1, 1, 1]
