"""Programs of ART's PipelineTrainer."""

import contextlib
from pathlib import Path
from typing import Any

import pytest

import art
from art.pipeline_trainer import PipelineTrainer, make_group_rollout_fn
from tests.fakes.server import FakeArt

pytestmark = pytest.mark.anyio


async def test_a_pipeline_of_single_rollouts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    server = FakeArt()
    await server.start()
    evaluated: list[int] = []

    async def roll(model: art.TrainableModel, scenario: dict[str, Any], config: float) -> art.Trajectory:
        return art.Trajectory(messages_and_choices=[{"role": "user", "content": scenario["text"]}], reward=config)

    async def evaluate(model: art.TrainableModel, step: int, config: float) -> list[art.Trajectory]:
        evaluated.append(step)
        return [art.Trajectory(reward=config)]

    async with contextlib.AsyncExitStack() as at_end:
        at_end.push_async_callback(server.stop)
        backend = await at_end.enter_async_context(art.Backend(server.url))
        model = art.TrainableModel(name="agent", project="demo", base_model="art/tiny")
        await model.register(backend)
        trainer = PipelineTrainer(
            model=model,
            backend=backend,
            rollout_fn=make_group_rollout_fn(single_rollout_fn=roll, n=3),
            scenarios=[{"text": str(number)} for number in range(20)],
            config=0.5,
            eval_fn=evaluate,
            groups_per_step=2,
            max_steps_off_policy=2,
            eval_every_n_steps=2,
            max_steps=3,
        )
        await trainer.train()
    bodies = [request.json() for request in server.sent("POST", "/api/models/demo/agent/train")]
    rewards = [
        [trajectory["reward"] for trajectory in group["trajectories"]] for body in bodies for group in body["groups"]
    ]
    assert (len(bodies), rewards, evaluated) == (3, [[0.5] * 3] * 6, [0, 2])
