"""Small programs in the style of each generation of ART's API, each for two steps on one server.

Only the addresses are ours: where a program says `backend`, ART's said `LocalBackend()` or a remote one.
"""

from collections.abc import AsyncIterator
from typing import Any

import openai
import pytest

import art
from tests.live import PROJECT, Server
from tests.makers.demo import rows_by_step

pytestmark = pytest.mark.anyio

PROMPT = "respond with yes, no, maybe"
STEPS, SIZE = 2, 4


@pytest.fixture
async def backend(server: Server) -> AsyncIterator[art.Backend]:
    async with art.Backend(server.url) as backend:
        yield backend


def score(text: str | None) -> float:
    return len(text or "") / 10


def history(server: Server, name: str) -> list[dict[str, Any]]:
    return list(rows_by_step(server.model_dir(name) / "history.jsonl").values())


async def rollout(model: art.TrainableModel) -> art.Trajectory:
    messages: art.Messages = [{"role": "user", "content": PROMPT}]
    client = model.openai_client()
    completion = await client.chat.completions.create(messages=messages, model=model.name, max_tokens=8)
    choice = completion.choices[0]
    return art.Trajectory(messages_and_choices=[*messages, choice], reward=score(choice.message.content))


async def test_model_train_logs_by_itself(server: Server, backend: art.Backend) -> None:
    """0.3 to 0.5.7: the train call writes the history."""
    model = art.TrainableModel(name="style-a", project=PROJECT, base_model="art/tiny")
    model._internal_config = art.dev.InternalModelConfig(
        init_args=art.dev.InitArgs(max_seq_length=1024), trainer_args=art.dev.TrainerArgs(learning_rate=1e-4)
    )
    await model.register(backend)
    for _step in range(await model.get_step(), STEPS):
        groups = await art.gather_trajectory_groups(
            (art.TrajectoryGroup(rollout(model) for _ in range(SIZE)) for _ in range(2)),
            pbar_desc="gather",
            max_exceptions=1,
        )
        await model.delete_checkpoints()
        await model.train(groups, config=art.TrainConfig(learning_rate=1e-4, beta=0.01), _config={})
    await model.log(await art.gather_trajectories(rollout(model) for _ in range(2)), split="val")
    rows = history(server, "style-a")
    assert [row["step"] for row in rows if "train/reward" in row] == [1, 2]
    assert "val/reward" in rows[-1] and await model.get_step() == 2


async def test_backend_train_and_model_log(server: Server, backend: art.Backend) -> None:
    """0.5.11 to 0.5.18: the backend trains, the program logs."""
    model = art.TrainableModel(name="style-b", project=PROJECT, base_model="art/tiny")
    await model.register(backend)
    for step in range(1, STEPS + 1):
        groups = await art.gather_trajectory_groups(
            art.TrajectoryGroup(rollout(model) for _ in range(SIZE)) for _ in range(2)
        )
        result = await backend.train(model, groups, learning_rate=1e-4, loss_fn="cispo")
        await model.log(groups, split="train", metrics=result.metrics, step=result.step)
        assert result.step == step
        assert result.report.config["clip"] == "cispo"
    rows = history(server, "style-b")
    assert [row["step"] for row in rows] == [1, 2]
    assert all(row["sampled_step"] == row["step"] - 1 for row in rows)


async def test_a_run_has_a_name_of_its_own(server: Server, backend: art.Backend) -> None:
    """0.5.20 and later: `run_name` names what is stored, `get_inference_name` what is asked."""
    model = art.TrainableModel(name="style-d", run_name="style-d-1", project=PROJECT, base_model="art/tiny")
    await model.register(backend)

    async def rollout_by_step(step: int) -> art.Trajectory:
        messages: art.Messages = [{"role": "user", "content": PROMPT}]
        completion = await model.openai_client().chat.completions.create(
            messages=messages, model=model.get_inference_name(step), max_tokens=8
        )
        choice = completion.choices[0]
        reward = score(choice.message.content)
        return art.Trajectory(messages_and_choices=[*messages, choice], reward=reward)

    for _ in range(STEPS):
        step = await model.get_step()
        group = await art.trajectory_group(rollout_by_step(step) for _ in range(SIZE))
        result = await backend.train(model, [group], learning_rate=1e-4)
        assert result.step == step + 1
    assert server.model_dir("style-d-1").exists() and not server.model_dir("style-d").exists()


async def test_capture_auto_trajectory(server: Server, backend: art.Backend) -> None:
    """0.4 to 0.5.18: any client's requests in a coroutine become its trajectory."""
    model = art.TrainableModel(name="style-capture", project=PROJECT, base_model="art/tiny")
    await model.register(backend)
    client = openai.AsyncOpenAI(base_url=model.inference_base_url, api_key=model.inference_api_key or "default")

    async def agent() -> None:
        completion = await client.chat.completions.create(
            model=model.name, messages=[{"role": "user", "content": PROMPT}], max_tokens=8
        )
        trajectory = art.auto_trajectory(required=True)
        trajectory.reward = score(completion.choices[0].message.content)

    for step in range(1, STEPS + 1):
        groups = await art.gather_trajectory_groups(
            art.TrajectoryGroup(art.capture_auto_trajectory(agent()) for _ in range(SIZE)) for _ in range(2)
        )
        result = await model.train(groups, config=art.TrainConfig(learning_rate=1e-4))
        assert result.step == step and sum(result.report.turns.values()) == 2 * SIZE
    await client.close()


async def test_trajectory_and_trajectory_group(server: Server, backend: art.Backend) -> None:
    """0.5.20 and later: `art.trajectory` and `art.trajectory_group`."""
    model = art.TrainableModel(name="style-trajectory", project=PROJECT, base_model="art/tiny")
    await model.register(backend)

    async def agent() -> None:
        completion = await model.openai_client().chat.completions.create(
            model=model.get_inference_name(), messages=[{"role": "user", "content": PROMPT}], max_tokens=8
        )
        trajectory = art.current_trajectory(require=True)
        trajectory.reward = score(completion.choices[0].message.content)

    for step in range(1, STEPS + 1):
        group = await art.trajectory_group(
            (art.trajectory(agent()) for _ in range(SIZE)), metadata={"scenario_id": "one"}
        )
        result = await backend.train(model, [group], learning_rate=1e-4, loss_fn="ppo")
        assert result.step == step
