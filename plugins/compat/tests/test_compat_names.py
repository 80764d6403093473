"""Names and import paths of ART's releases, each called for its effect."""

import asyncio
import logging
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
from pydantic import BaseModel

import art
from art.serverless import ServerlessBackend
from art.utils import limit_concurrency, strip_logprobs
from art.utils.get_model_step import get_model_step
from art.utils.get_repo_root_path import get_repo_root_path
from art.utils.get_trajectory_messages import get_trajectory_messages
from art.utils.litellm import convert_litellm_choice_to_openai
from art.utils.output_dirs import get_model_dir, get_step_checkpoint_dir, get_trajectories_split_dir

pytestmark = pytest.mark.anyio

MODEL: dict[str, Any] = {"name": "agent", "project": "demo", "base_model": "art/tiny"}


# --- art.utils --------------------------------------------------------------------------------------------------------


async def test_calls_are_limited_for_each_key() -> None:
    running: dict[str, int] = {}
    most: dict[str, int] = {}

    @limit_concurrency(n=2, derive_key=lambda key, *_: key)
    async def call(key: str, number: int) -> int:
        running[key] = running.get(key, 0) + 1
        most[key] = max(most.get(key, 0), running[key])
        await asyncio.sleep(0.005)
        running[key] -= 1
        if number == 3:
            raise ValueError(number)
        return number

    calls = [call(key, number) for number in range(5) for key in ("a", "b")]
    results = await asyncio.gather(*calls, return_exceptions=True)
    assert most == {"a": 2, "b": 2}
    assert [result for result in results if not isinstance(result, ValueError)] == [
        0,
        0,
        1,
        1,
        2,
        2,
        4,
        4,
    ]
    with pytest.raises(ValueError, match="n "):
        limit_concurrency(0)


def test_logprobs_are_left_out_of_a_copy() -> None:
    choice = SimpleNamespace(logprobs=[1.0], message=SimpleNamespace(content="hi", logprobs=2))
    value = {"logprobs": 1, "choices": [choice, {"logprobs": None, "x": 1}], "pair": (1, [2])}
    stripped = strip_logprobs(value)
    assert stripped["choices"][1] == {"x": 1} and "logprobs" not in stripped
    assert stripped["choices"][0].logprobs is None
    assert stripped["choices"][0].message.logprobs is None
    assert stripped["pair"] == (1, [2])
    assert choice.logprobs == [1.0] and value["logprobs"] == 1, "the original is as it was"


def test_what_cannot_be_copied_is_returned(caplog: pytest.LogCaptureFixture) -> None:
    value = {"logprobs": 1, "lock": (entry for entry in ())}
    assert strip_logprobs(value) is value
    assert "Failed to deepcopy object in strip_logprobs (dict)" in caplog.text


def test_folders_are_those_of_a_server(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    model = art.TrainableModel(**MODEL)
    folder = get_model_dir(model)
    assert folder == str(tmp_path / ".art" / "demo" / "models" / "agent")
    assert get_model_step(model) == 0
    for step in (2, 11):
        Path(get_step_checkpoint_dir(folder, step)).mkdir(parents=True)
    (Path(folder) / "checkpoints" / ".broken-0099").mkdir()
    assert get_model_step(model) == get_model_step(model, str(tmp_path / ".art")) == 11
    assert get_trajectories_split_dir(folder, "val") == f"{folder}/trajectories/val"
    (tmp_path / "repo" / ".git").mkdir(parents=True)
    (tmp_path / "repo" / "deep").mkdir()
    monkeypatch.chdir(tmp_path / "repo" / "deep")
    assert get_repo_root_path() == str(tmp_path / "repo")


def test_messages_of_a_trajectory() -> None:
    trajectory = art.Trajectory(messages_and_choices=[{"role": "user", "content": "hi"}])
    assert get_trajectory_messages(trajectory) == [{"role": "user", "content": "hi"}]


class LitellmChoice(BaseModel):
    """As LiteLLM dumps its choices."""

    finish_reason: str = "stop"
    index: int = 0
    message: dict[str, Any] = {
        "content": "hi",
        "role": "assistant",
        "tool_calls": None,
        "function_call": None,
        "provider_specific_fields": {"reasoning": "r"},
    }
    token_ids: list[int] = [5, 6]


def test_a_choice_of_litellm_becomes_one_of_openai() -> None:
    choice = convert_litellm_choice_to_openai(LitellmChoice())
    trajectory = art.Trajectory(messages_and_choices=[choice])
    assert trajectory.messages() == [{"role": "assistant", "content": "hi"}]
    assert trajectory.num_sampled_tokens() == 2, "the server's fields stay"
    with pytest.raises(ValueError, match="'user'"):
        convert_litellm_choice_to_openai(LitellmChoice(message={"role": "user", "content": "x"}))


async def test_arguments_for_litellm(model: art.TrainableModel) -> None:
    params = model.litellm_completion_params(3)
    assert params == {
        "model": "hosted_vllm/demo/agent@3",
        "base_url": model.inference_base_url,
        "api_key": model.inference_api_key,
        "temperature": 1,
    }
    judge = art.Model(name="judge", project="demo", inference_model_name="gpt")
    assert judge.litellm_completion_params()["model"] == "gpt"


# --- trajectories -----------------------------------------------------------------------------------------------------


async def test_a_trajectory_is_yielded_from_inside() -> None:
    async def agent(reward: float) -> str:
        await asyncio.sleep(0)
        art.yield_trajectory(art.Trajectory(reward=-1.0))
        art.yield_trajectory(trajectory=art.Trajectory(reward=reward))
        return "an answer"

    trajectories = await asyncio.gather(*(art.capture_yielded_trajectory(coroutine=agent(r)) for r in (1.0, 2.0)))
    assert [trajectory.reward for trajectory in trajectories] == [1.0, 2.0]
    with pytest.raises(RuntimeError, match=r"art\.yield_trajectory"):
        await art.capture_yielded_trajectory(asyncio.sleep(0))
    with pytest.raises(RuntimeError):
        art.yield_trajectory(art.Trajectory())


def groups_of(delays: list[float], fails: tuple[int, ...] = ()) -> list[art.TrajectoryGroup]:
    async def rollout(number: int, delay: float) -> art.Trajectory:
        await asyncio.sleep(delay)
        if number in fails:
            raise ValueError(f"tool {number} is down")
        return art.Trajectory(reward=float(number))

    return [
        art.TrajectoryGroup([rollout(number, delay)], metadata={"n": number}) for number, delay in enumerate(delays)
    ]


async def numbers(batches: Any) -> list[list[Any]]:
    return [[group.metadata["n"] for group in batch] async for batch in batches]


async def test_batches_come_as_their_groups_complete() -> None:
    delays = [0.2, 0.0, 0.0, 0.0, 0.0]
    batches = await numbers(art.trajectory_group_batches(groups_of(delays), batch_size=2))
    assert [len(batch) for batch in batches] == [2, 2, 1] and batches[2] == [0], "the slowest comes last"
    again = art.trajectory_group_batches(groups_of([0.0] * 5), batch_size=2, skip_batches=2)
    assert await numbers(again) == [[4]]


async def test_a_batch_tolerates_some_failures() -> None:
    groups = groups_of([0.0] * 4, fails=(1,))
    batches = art.trajectory_group_batches(groups, batch_size=4, max_batch_exceptions=1)
    assert sorted((await numbers(batches))[0]) == [0, 1, 2, 3]
    groups = groups_of([0.0] * 4, fails=(1, 2))
    with pytest.raises(art.ArtError, match=r"2 (?s:.*)is down"):
        await numbers(art.trajectory_group_batches(groups, batch_size=4, max_batch_exceptions=0.25))


async def test_a_loop_that_ends_early_cancels_what_runs() -> None:
    before = asyncio.all_tasks()
    batches = art.trajectory_group_batches(groups_of([0.0, 9.0, 9.0]), batch_size=1)
    assert [group.metadata["n"] for group in await anext(batches)] == [0]
    running = asyncio.all_tasks() - before
    assert running
    await cast(Any, batches).aclose()
    assert all(task.done() for task in running)


# --- backends ---------------------------------------------------------------------------------------------------------


def test_the_serverless_backend_is_a_server_of_ones_own(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("ART_API_KEY", "own")
    monkeypatch.setenv("ART_SERVER_URL", "http://127.0.0.1:9")
    backend: Any = ServerlessBackend(api_key="vendor", base_url="https://vendor")
    assert type(backend) is art.Backend and backend.base_url == "http://127.0.0.1:9"
    assert backend._connection.api_key == "own", "a vendor's key goes nowhere"
    monkeypatch.delenv("ART_SERVER_URL")
    assert type(art.ServerlessBackend()) is art.LocalBackend
    assert [record.levelno for record in caplog.records] == [logging.WARNING] * 2


async def test_deployment_names_the_way() -> None:
    from art.utils.deployment import deploy_model

    with pytest.raises(NotImplementedError, match="art export"):
        await deploy_model(model=None)
