"""`art.finetune` with the real engine: a workflow trains in this process and in others, and Ctrl-C loses nothing."""

import json
import signal
import subprocess
import sys
import uuid
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import art
import art.finetune
from art.finetune import supervised
from art_watch.terminal.cli import make_parser
from tests.live import PROJECT, Server
from tests.makers.finetune_file import PROGRAM, enter, finetune_file
from tests.waiting import wait_until

pytestmark = pytest.mark.anyio

MakeFile = Callable[..., dict[str, Any]]

AGENT = """
import os
import openai

REWARDS = {"yes": 0.5, "no": 0.75, "maybe": 1.0}

async def coroutine(question):
    messages = [{"role": "user", "content": question}]
    async with openai.AsyncOpenAI() as client:
        completion = await client.chat.completions.create(
            model=os.environ["OPENAI_MODEL"], messages=messages, max_tokens=8
        )
    return completion.choices[0].message.content

def score(output):
    return REWARDS.get(output.strip().lower(), 0.0)
"""
WORKFLOWS: dict[str, dict[str, Any]] = {
    "coroutine": {"_type": "agent.py:coroutine"},
    "command": {"_type": "command", "command": [sys.executable, "program.py"]},
}
"""Of this process, and of another. plugins/finetune/tests has all kinds, with a server that samples nothing."""
QUESTIONS = ("respond with yes, no, maybe", "answer with no, maybe, yes")


@pytest.fixture
def make_file(server: Server, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> MakeFile:
    enter(tmp_path, monkeypatch)
    (tmp_path / "agent.py").write_text(AGENT)
    (tmp_path / "program.py").write_text(PROGRAM)
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps({"question": question}) + "\n" for question in QUESTIONS))

    def make(workflow: str, **changes: Any) -> dict[str, Any]:
        return finetune_file(
            {"name": f"f-{uuid.uuid4().hex[:8]}", "project": PROJECT, "url": server.url},
            "rows.jsonl",
            workflow=WORKFLOWS[workflow],
            eval__evaluators__reward___type="agent.py:score",
            trajectory_builders__b__num_generations=4,
            trainer_adapters__a__training={"learning_rate": 1e-3},
            finetuning__validation={"dataset": "rows.jsonl", "interval": 2},
            finetuning__seed=1,
            **changes,
        )

    return make


def start(file: dict[str, Any], folder: Path, *arguments: str) -> subprocess.Popen[str]:
    """The command, as a process."""
    (folder / "file.yml").write_text(json.dumps(file))
    # A process that a shell started in the background ignores Ctrl-C, and so would this one.
    code = "import signal; signal.signal(signal.SIGINT, signal.default_int_handler); "
    code += "import sys; sys.argv[0] = 'art'; from art_watch.terminal.cli import main; main()"
    command = [sys.executable, "-c", code, "finetune", "file.yml", *arguments]
    return subprocess.Popen(command, cwd=folder, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True)


def end(process: subprocess.Popen[str]) -> tuple[int, str]:
    """The exit code, and what it printed on stderr."""
    text = process.communicate()[1]
    assert "Traceback" not in text, text
    return process.returncode, text


@pytest.mark.parametrize("workflow", WORKFLOWS)
async def test_a_workflow_trains(make_file: MakeFile, tmp_path: Path, workflow: str) -> None:
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


async def test_a_model_that_was_trained_before_gets_a_schedule_of_its_own(make_file: MakeFile) -> None:
    file = make_file("coroutine")
    backend = file["trainer_adapters"]["a"]["backend"]
    example: art.Messages = [{"role": "user", "content": QUESTIONS[0]}, {"role": "assistant", "content": "no"}]
    training = {"trainer_adapters.a.training.schedule": "cosine", "trainer_adapters.a.training.warmup_steps": 1}
    async with art.Backend(backend["url"]) as server:
        model = art.TrainableModel(name=backend["name"], project=PROJECT, base_model="art/tiny")
        await model.register(server)
        await model.train_sft([art.Trajectory(messages_and_choices=[*example])], art.TrainSFTConfig(epochs=9))
        await art.finetune.run(file, training)
        _, of_examples, *trained = await model.checkpoints()
    assert of_examples.optimizer_steps == 9 and trained
    # The warm-up is one step, so the second and last step has the highest rate too.
    assert [checkpoint.metrics["loss/learning_rate"] for checkpoint in trained] == pytest.approx([1e-3] * len(trained))
    assert not any(checkpoint.unchanged for checkpoint in trained)


async def test_examples_of_a_file_train_until_validations_rise(
    server: Server, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    enter(tmp_path, monkeypatch)
    monkeypatch.setenv("ART_SERVER_URL", server.url)
    rows = [{"messages": [{"role": "user", "content": QUESTIONS[0]}, {"role": "assistant", "content": "maybe"}]}] * 4
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (tmp_path / "held_out.csv").write_text(f'question,answer\n"{QUESTIONS[1]}",maybe\n')
    name = f"{PROJECT}/sft-{uuid.uuid4().hex[:8]}"
    words = ["sft", "rows.jsonl", "--model", name, "--base_model", "art/tiny", "--validation_dataset", "held_out.csv"]
    words += ["--learning_rate", "2e-3", "--batch_size", "2", "--num_epochs", "2", "--eval_steps", "1"]
    for _ in range(2):
        await supervised.train(supervised.settings_of(make_parser().parse_args(words)))
        lines = capfd.readouterr().err.splitlines()
        told = [line for line in lines if "validation loss" in line and line.startswith("epoch ")]
        async with art.Backend(server.url) as backend:
            model = art.TrainableModel(name=name.split("/")[1], project=PROJECT, base_model="art/tiny")
            await model.register(backend)
            _, *steps = await model.checkpoints()
        losses = [step.metrics["val/loss"] for step in steps]
        assert len(told) == len(steps) == 4 and losses[-1] < losses[0]
        assert not any("train/reward" in step.metrics for step in steps)
        (best,) = [step.step for step in steps if step.is_best]
        assert losses[best - 1] == min(losses)
        assert (
            lines[-1]
            == f"the best step is {best} (validation loss {min(losses):.4f}), kept as {name}@{best} and {name}@best"
        )


async def test_any_step_can_be_evaluated(make_file: MakeFile) -> None:
    file = make_file("coroutine")
    await art.finetune.run(file)
    evaluation = await art.finetune.evaluate(file, step="best", baseline="base", reps=2)
    assert evaluation.difference is not None and evaluation.baseline is not None and evaluation.baseline.step is None
    alone = {"eval.general.max_concurrency": 1, "finetuning.seed": 3, "finetuning.validation": {}}
    again = [await art.finetune.evaluate(file, alone, step="0", reps=2) for _ in range(2)]
    assert again[0].num_failed == 0 and again[0].num_rollouts == again[1].num_rollouts
    assert again[0].scenario_rewards == again[1].scenario_rewards


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


ROWS = [
    f"{verb} with {order}"
    for verb in ("respond", "answer")
    for order in ("yes, no, maybe", "no, maybe, yes", "maybe, no, yes")
]


def read_rows(folder: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (folder / "out" / "training_metrics.jsonl").read_text().splitlines()]


def test_a_run_with_rows_per_step_that_is_killed_trains_each_row_once_an_epoch(
    make_file: MakeFile, server: Server, tmp_path: Path
) -> None:
    file = make_file("coroutine", eval__general__max_concurrency=1, finetuning__rows_per_step=4)
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps({"question": question}) + "\n" for question in ROWS))
    process, rollouts = start(file, tmp_path), tmp_path / "out" / "rollouts.jsonl"

    def num_trained() -> int:
        return rollouts.read_bytes().count(b'"split":"train"') if rollouts.exists() else 0

    wait_until(lambda: process.poll() is not None or num_trained() >= 20, lambda: process.args)  # of 16 and 8 an epoch
    process.kill()
    process.communicate()
    assert num_trained() < 24, "it was killed in its second step"
    code, text = end(start(file, tmp_path))
    assert code == 0, text
    played = [json.loads(line) for line in rollouts.read_text().splitlines()]
    trained = Counter((row["epoch"], row["row"], row["generation"]) for row in played if row["split"] == "train")
    assert len(trained) == 2 * 6 * 4 and set(trained.values()) == {1}
    rows = read_rows(tmp_path)
    assert [(row["epoch"], row["batch"], row["num_groups"]) for row in rows] == [
        (0, 0, 4),
        (0, 1, 2),
        (1, 2, 4),
        (1, 3, 2),
    ]
    steps = [row["step"] for row in rows if row["filtered_groups"]]
    assert steps == list(range(1, len(steps) + 1)) and steps, "each step is trained once"
    history = server.model_dir(file["trainer_adapters"]["a"]["backend"]["name"]) / "history.jsonl"
    assert history.read_text().count('"job_id"') == len(steps)


def test_a_run_that_learns_nothing_more_stops_early_and_keeps_its_best_step(
    make_file: MakeFile, tmp_path: Path
) -> None:
    """A reward of validations that falls with each step: the first validation stays the best."""
    code = "import itertools\nnumbers = itertools.count()\ndef falls(output):\n    return -next(numbers)\n"
    (tmp_path / "falling.py").write_text(code)
    file = make_file("coroutine", finetuning__num_epochs=9)
    file["eval"]["evaluators"]["falls"] = {"_type": "falling.py:falls"}
    file["finetuning"]["validation"] |= {"interval": 1, "patience": 2, "reward": {"name": "falls"}}
    file["trainer_adapters"]["a"]["backend"]["delete_old_checkpoints"] = True
    code, text = end(start(file, tmp_path))
    name = f"{PROJECT}/{file['trainer_adapters']['a']['backend']['name']}"
    assert code == 0 and "the last 2 validations were not better than an earlier one: the run ends" in text
    assert f"the best step is 0 (validation -0.5000), kept as {name}@0 and {name}@best" in text
    assert len(read_rows(tmp_path)) == 2
    evaluated = art_eval(tmp_path, "--step", "best")
    assert f"{name}@0: reward" in evaluated


def art_eval(folder: Path, *arguments: str) -> str:
    code = "from art_watch.terminal.cli import main; main()"
    command = [sys.executable, "-c", code, "eval", "file.yml", *arguments]
    return subprocess.run(command, cwd=folder, check=True, capture_output=True, text=True).stdout


def test_a_sweep_trains_its_values_side_by_side(make_file: MakeFile, server: Server, tmp_path: Path) -> None:
    file = make_file("coroutine")
    code, text = end(start(file, tmp_path, "--sweep", "learning_rate=1e-4,1e-3"))
    assert code == 0, text
    assert "learning_rate=1e-4: epoch 2/2: reward" in text and "learning_rate=1e-3: epoch 2/2: reward" in text
    name = file["trainer_adapters"]["a"]["backend"]["name"]
    for rate in ("1e-4", "1e-3"):
        assert (server.model_dir(f"{name}-learning_rate-{rate}") / "history.jsonl").exists()
        assert (tmp_path / "out" / f"learning_rate-{rate}" / "reward_plot.png").exists()
    table = (tmp_path / "out" / "sweep.md").read_text().splitlines()
    assert len(table) == 5 and table[2].startswith("| base |")
    assert all("| 2 epochs |" in line for line in table[3:])
    assert (tmp_path / "out" / "sweep.png").read_bytes().startswith(b"\x89PNG")


async def test_the_lora_and_the_schedule_are_those_of_the_command(make_file: MakeFile) -> None:
    adapter = "trainer_adapters.a"
    file = make_file("coroutine", finetuning__rows_per_step=1)
    lora: dict[str, Any] = {"rank": 4, "alpha": 4, "target_modules": ["q_proj"]}
    overrides = {f"{adapter}.backend.lora.{name}": value for name, value in lora.items()}
    await art.finetune.run(file, {**overrides, f"{adapter}.training.schedule": "cosine"})
    backend = file["trainer_adapters"]["a"]["backend"]
    async with art.Backend(backend["url"]) as server:
        names = {"name": backend["name"], "project": PROJECT, "base_model": "art/tiny"}
        model = art.TrainableModel(**names, lora=art.LoRAConfig(**lora))
        await model.register(server)  # another LoRA would be refused
        kept = [checkpoint.metrics for checkpoint in await model.checkpoints()]
    rates = [metrics["loss/learning_rate"] for metrics in kept if "loss/learning_rate" in metrics]
    assert rates == sorted(rates, reverse=True) and len(set(rates)) == len(rates) > 1
    file["trainer_adapters"]["a"]["backend"]["name"] += "-wide"
    with pytest.raises(
        art.finetune.FinetuneError, match=r"lora\.rank 512 is above the engine's maximum.*--max-lora-rank"
    ):
        await art.finetune.run(file, {f"{adapter}.backend.lora.rank": 512}, fresh=True)
