"""A pipeline on a real vLLM, whose program is killed: no group twice, none too old, each token with its step."""

import itertools
import json
import math
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

import art
from tests.live import PROJECT, Server, done_jobs
from tests.pipeline_program import check_steps, roll_group
from tests.refusals import refused
from tests.waiting import wait_until

ROOT = Path(__file__).parents[3]


def run(server: Server, name: str, config: dict[str, Any], folder: Path, killed_after: float = math.inf) -> int:
    """The exit status of a program, which gets SIGKILL as soon as so many of the model's jobs are done."""
    command = [sys.executable, "-m", "tests.pipeline_program", server.url, name, json.dumps(config)]
    with open(folder / "program.log", "ab") as log:
        environment = {**os.environ, "PYTHONPATH": str(ROOT)}
        process = subprocess.Popen(command, cwd=folder, env=environment, stdout=log, stderr=log)
    try:
        wait_until(lambda: process.poll() is not None or len(done_jobs(server, PROJECT, name)) >= killed_after)
    finally:
        process.kill()
    return process.wait()


def test_a_killed_pipeline_goes_on_within_its_bound(server: Server, tmp_path: Path) -> None:
    config = {"steps": 8, "groups": 2, "bound": 2, "slow": True}
    name, log = "pipelined", tmp_path / "program.log"
    assert run(server, name, config, tmp_path, killed_after=3) == -signal.SIGKILL, log.read_text()
    assert run(server, name, config, tmp_path) == 0, log.read_text()
    jobs = done_jobs(server, PROJECT, name)
    numbers = check_steps(jobs, server.model_dir(name), config)
    assert numbers != [[2 * step, 2 * step + 1] for step in range(config["steps"])], "slow groups were overtaken"
    assert any(len(job["report"]["sampled_steps"]) > 1 for job in jobs), (
        "tokens of one job were sampled by several steps"
    )
    assert all(job["report"]["turns"].keys() <= {"ledger"} for job in jobs)


@pytest.mark.anyio
async def test_a_program_that_was_mended_trains_at_its_next_start(
    server: Server, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """It had the message in place of the choice, and its other finished group has, too."""

    async def broken(model: art.TrainableModel, number: int, config: dict[str, Any]) -> art.TrajectoryGroup:
        group = await roll_group(model, number, config)
        for trajectory in group:
            choice: Any = trajectory.messages_and_choices[-1]
            trajectory.messages_and_choices[-1] = choice.message.model_dump(exclude_none=True)
        return group

    async with art.Backend(server.url) as backend:
        backend._log_dir = tmp_path / "logs"
        model = art.TrainableModel(name="mended", project=PROJECT, base_model="art/tiny")
        await model.register(backend)

        async def start(rollout_fn: Any, num_steps: int) -> None:
            numbers, config = itertools.count(), dict[str, Any]()
            await art.PipelineTrainer(
                model, backend, rollout_fn, numbers, config, groups_per_step=1, max_steps=num_steps
            ).train()

        with refused(art.ArtStatusError, "no_trainable_turn", "groups"):
            await start(broken, 1)
        await start(roll_group, 1)
        await start(roll_group, 2)
        assert await model.get_step() == 2
    assert sum("given up" in record.getMessage() for record in caplog.records) == 1
    check_steps(done_jobs(server, PROJECT, "mended"), server.model_dir("mended"), {"steps": 2, "groups": 1, "bound": 1})
