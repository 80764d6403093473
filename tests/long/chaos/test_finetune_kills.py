"""`art finetune`, killed at random moments: the files that it leaves equal those of a run that nobody killed."""

import gzip
import json
import os
import random
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.live import PROJECT, Server
from tests.makers.finetune_file import finetune_file

AGENT = """
import os
from openai import AsyncOpenAI

REWARDS = {"yes": 0.5, "no": 0.75, "maybe": 1.0}

async def answer(question, seed):
    with open("asked", "a") as file:
        file.write(".")
    messages = [{"role": "user", "content": question}]
    async with AsyncOpenAI() as client:
        completion = await client.chat.completions.create(
            model=os.environ["OPENAI_MODEL"], messages=messages, max_tokens=8, seed=seed
        )
    return completion.choices[0].message.content

def score(output):
    return REWARDS.get(output.strip().lower(), 0.0)
"""
FILES = ("training_metrics.jsonl", "reward_history.json", "validation_history.json", "curriculum_state.json")
EPOCHS, KILLS = 6, 20
ORDERS = ("yes, no, maybe", "no, maybe, yes", "maybe, yes, no", "no, yes, maybe")


def prepare(folder: Path, server: Server, name: str, rows_per_step: int | None) -> None:
    folder.mkdir()
    (folder / "agent.py").write_text(AGENT)
    rows = [{"id": order, "question": f"respond with {order}"} for order in ORDERS]
    (folder / "rows.json").write_text(json.dumps(rows))
    tree = finetune_file(
        {"url": server.url, "name": name, "project": PROJECT},
        eval__general__max_concurrency=1,
        trajectory_builders__b__num_generations=4,
        trainer_adapters__a__training={"learning_rate": 1e-3},
        finetuning__rows_per_step=rows_per_step,
        finetuning__validation={"dataset": "rows.json", "interval": 1.5 if rows_per_step else 2},
        finetuning__curriculum_learning={"enabled": True, "initial_percentile": 0.5, "expansion_interval": 2},
        finetuning__num_epochs=EPOCHS,
        finetuning__seed=7,
    )
    (folder / "file.yml").write_text(json.dumps(tree))


def start(folder: Path) -> subprocess.Popen[bytes]:
    code = "from art_watch.terminal.cli import main; main(['finetune', 'file.yml'])"
    with open(folder / "log", "ab") as log:
        return subprocess.Popen(
            [sys.executable, "-c", code], cwd=folder, stdout=log, stderr=log, start_new_session=True
        )


def num_asked(folder: Path) -> int:
    file = folder / "asked"
    return file.stat().st_size if file.exists() else 0


def figures(folder: Path) -> list[Any]:
    """What the files have, except times and the run's name."""

    def without_times(value: Any) -> Any:
        if isinstance(value, list):
            return [without_times(entry) for entry in value]
        if isinstance(value, dict):
            return {name: without_times(entry) for name, entry in value.items() if name not in ("timestamp", "run_id")}
        return value

    contents: list[Any] = []
    for name in FILES:
        text = (folder / "out" / name).read_text()
        rows = [json.loads(line) for line in text.splitlines()] if name.endswith("l") else json.loads(text)
        contents.append(without_times(rows))
    return contents


def left_out(server: Server, name: str) -> dict[str, int]:
    """How many groups of each step the server has as left out."""
    files = (server.model_dir(name) / "trajectories" / "left_out").iterdir()
    return {file.name: gzip.decompress(file.read_bytes()).count(b"\n") for file in files}


@pytest.fixture
def exact(tmp_path: Path) -> Server:
    server = Server(tmp_path / "server")
    server.path.mkdir()
    server.arguments = ["--base-model", "art/tiny", "--exact"]
    return server


@pytest.mark.parametrize("rows_per_step", [None, 3])
def test_a_run_that_is_killed_twenty_times_ends_like_one_that_is_not(
    exact: Server, tmp_path: Path, rows_per_step: int | None
) -> None:
    with exact.running():
        whole, killed = tmp_path / "whole", tmp_path / "killed"
        prepare(whole, exact, "whole", rows_per_step)
        assert start(whole).wait() == 0, (whole / "log").read_text()
        prepare(killed, exact, "killed", rows_per_step)
        rng = random.Random(3)
        num_kills, total = 0, num_asked(whole)
        while True:
            process = start(killed)
            more = rng.randint(0, int(1.6 * total / KILLS))
            enough = num_asked(killed) + more
            while process.poll() is None and num_asked(killed) < enough:
                time.sleep(0.005)
            time.sleep(rng.random() * 0.3)
            if num_kills == KILLS or process.poll() is not None:
                break
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()
            num_kills += 1
        assert process.wait() == 0, (killed / "log").read_text()
        print(f"{num_kills} kills, {num_asked(killed)} answers, {total} without kills")
        assert num_kills >= KILLS // 2
        assert figures(killed) == figures(whole)
        assert num_asked(killed) <= total + num_kills
        assert left_out(exact, "killed") == left_out(exact, "whole")
        models = httpx.get(f"{exact.url}/api/models").json()["models"]
        steps = {model["name"]: model["step"] for model in models}
        assert steps["whole"] == steps["killed"] >= EPOCHS
        assert len(figures(killed)[0]) == EPOCHS * (2 if rows_per_step else 1)
