"""What a new program gets wrong, and the sentence that says what to write instead."""

import asyncio
import json
from collections.abc import Callable
from typing import Any

import pytest

import art
from art.backend import Backend
from tests.quick.client.conftest import Answer, FakeServer
from tests.quick.client.demonstrations import TRAIN

pytestmark = pytest.mark.anyio


async def rollout() -> art.Trajectory:
    return art.Trajectory(reward=1.0)


async def gather() -> list[art.TrajectoryGroup]:
    return await art.gather_trajectory_groups([art.TrajectoryGroup(rollout() for _ in range(2))])


@pytest.mark.parametrize(
    ("make_groups", "said"),
    [
        (gather, "await"),
        (lambda: art.TrajectoryGroup([art.Trajectory()]), r"\[group\]"),
        (lambda: art.TrajectoryGroup([rollout()]), r"\[group\]"),
        (lambda: [art.Trajectory()], r"groups\[0\] is Trajectory.*art.TrajectoryGroup\(trajectories\)"),
    ],
)
async def test_what_is_no_list_of_groups_is_named(
    model: art.TrainableModel, make_groups: Callable[[], Any], said: str
) -> None:
    with pytest.raises(TypeError, match=said):
        await model.train(make_groups())
    with pytest.raises(TypeError, match=said):
        await model.backend().train(model, make_groups())  # type: ignore[attr-defined]


async def test_one_group_is_no_list_to_gather() -> None:
    with pytest.raises(TypeError, match=r"\[group\]"):
        await art.gather_trajectory_groups(art.TrajectoryGroup(rollout() for _ in range(2)))  # type: ignore[arg-type]


def test_copies_are_no_group() -> None:
    with pytest.raises(ValueError, match=r"8 times.*run the rollout once for each"):
        art.TrajectoryGroup([art.Trajectory()] * 8)
    with pytest.raises(ValueError, match="8 times"):
        art.TrajectoryGroup([rollout()] * 8)


def test_a_string_is_no_message() -> None:
    texts: Any = [{"role": "user", "content": "hi"}, "hello"]
    with pytest.raises(ValueError, match=r"entry 1 is a string.*'role'"):
        art.Trajectory(messages_and_choices=texts)


def test_rows_of_sharegpt_are_named_with_the_remedy() -> None:
    row: Any = [{"from": "human", "value": "q"}, {"from": "gpt", "value": "5"}]
    with pytest.raises(ValueError, match=r"entry 0 .*ShareGPT.*'role'"):
        art.Trajectory(messages_and_choices=row)
    with pytest.raises(ValueError, match=r"'conversations'.*messages_and_choices.*OpenAI's form"):
        art.Trajectory(conversations=row)  # type: ignore[call-arg]
    with pytest.raises(ValueError, match=r"'messages'.*messages_and_choices"):
        art.Trajectory(messages=[])  # type: ignore[call-arg]


def test_tools_as_text_are_read() -> None:
    tool = {"type": "function", "function": {"name": "look", "description": None}}
    for tools in ([tool], json.dumps([tool]), [json.dumps(tool)]):
        assert art.Trajectory(tools=tools).tools == [tool]  # type: ignore[arg-type]
    assert art.Trajectory(tools="").tools is None  # type: ignore[arg-type]
    with pytest.raises(ValueError, match=r"tools is a text, but not of JSON"):
        art.Trajectory(tools="look")  # type: ignore[arg-type]
    with pytest.raises(ValueError, match=r"tools\[1\] is a text, but not of JSON"):
        art.Trajectory(tools=[tool, "look"])  # type: ignore[list-item]


async def test_the_step_of_an_accepted_job_is_known(
    server: FakeServer, backend: Backend, model: art.TrainableModel, groups: list[art.TrajectoryGroup]
) -> None:
    """After Ctrl-C the program names it."""
    accepted = {"event": "accepted", "job_id": "j"}
    waiting = {"event": "waiting", "job_id": "j", "waits_for": "another job"}
    is_accepted = asyncio.Event()

    def lines() -> Any:
        yield accepted
        is_accepted.set()
        yield waiting

    server.on("POST", TRAIN, Answer(lines=lines(), hang_up=True))
    server.on("GET", "/api/jobs/j/events", Answer(lines=[waiting], hang_up=True))
    training = asyncio.create_task(model.train(groups))
    await is_accepted.wait()
    while not backend._coming_steps():  # noqa: ASYNC110
        await asyncio.sleep(0.01)
    assert backend._coming_steps() == {"demo/agent": 4}
    training.cancel()
    with pytest.raises(asyncio.CancelledError):
        await training
    done = {"event": "done", "job_id": "j", "step": 4}
    server.on("POST", TRAIN, Answer(lines=[accepted, done]))
    await model.train(groups)
    assert backend._coming_steps() == {}
