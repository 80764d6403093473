"""ART's names and keywords for rollouts, each called for its effect: trajectories, groups, gathering, captures."""

import asyncio
import copy
from collections.abc import Iterator
from datetime import UTC, datetime
from typing import Any

import pytest
from openai.types.chat import ChatCompletion

import art
from art import types
from art.gather import (
    GatherContext,
    get_gather_context,
    set_gather_context,
    wrap_group_awaitable,
    wrap_trajectories_awaitable,
)
from art.guided_completion import (  # type: ignore[import]  # an alias
    freeze_tool_schema,
    get_guided_completion_params,
)
from art.trajectories import (
    History,
    LegacyHistory,
    MetadataValue,
    PydanticException,
    get_messages,
)

pytestmark = pytest.mark.anyio

MESSAGES: art.Messages = [{"role": "user", "content": "hi"}]
TOOLS: art.Tools = [{"type": "function", "function": {"name": "f", "parameters": {}}}]


def choice(text: str) -> Any:
    fields = {
        "index": 0,
        "finish_reason": "stop",
        "message": {"role": "assistant", "content": text},
    }
    return types.Choice.model_validate(fields)


# --- trajectories and groups ------------------------------------------------------------------------------------------


async def test_every_field_of_a_trajectory() -> None:
    entries: art.MessagesAndChoices = [*MESSAGES, choice("yes")]
    other = History(messages_and_choices=list(MESSAGES), tools=TOOLS)
    trajectory = art.Trajectory(
        messages_and_choices=entries,
        tools=TOOLS,
        additional_histories=[other],
        reward=0.5,
        initial_policy_version=3,
        final_policy_version=4,
        metrics={"won": True},
        metadata={"task": 7},
        logs=["began"],
        start_time=datetime(2026, 1, 1, tzinfo=UTC),
    )
    trajectory.log(message="ended")
    async with trajectory.track_duration(metric_name="judge"):
        pass
    finished = trajectory.finish()
    assert finished is trajectory and trajectory.metrics["duration"] > 3600, "since its start_time"
    assert "judge_duration" in trajectory.metrics
    assert trajectory.messages() == [*MESSAGES, {"role": "assistant", "content": "yes"}]
    again = art.Trajectory.model_validate(trajectory.model_dump(mode="json"))
    assert again.reward == 0.5 and again.tools == TOOLS and again.logs == ["began", "ended"]
    assert (again.initial_policy_version, again.final_policy_version) == (3, 4)
    assert again.additional_histories[0].messages() == other.messages() == MESSAGES
    assert again.additional_histories[0].tools == TOOLS and again.metadata == {"task": 7}
    shown = trajectory.for_logging()
    assert [message["trainable"] for message in shown["messages"]] == [False, True]


def test_every_field_of_a_group() -> None:
    failure = PydanticException(type="ValueError", message="no", traceback="line 1")
    group = art.TrajectoryGroup(
        trajectories=[art.Trajectory(reward=1.0), ValueError("lost")],
        exceptions=[failure],
        metadata={"task": 7},
        metrics={"spread": 0.5},
        logs=["began"],
    )
    group.log(message="ended")
    assert len(group) == 1 and [trajectory.reward for trajectory in group.trajectories] == [1.0]
    first, second = group.exceptions
    assert (first.type, first.message, first.traceback) == ("ValueError", "no", "line 1")
    assert (second.type, second.message) == ("ValueError", "lost")
    assert group.metadata == {"task": 7} and group.metrics == {"spread": 0.5}
    assert group.logs == ["began", "ended"] and len(copy.deepcopy(group)) == 1


def test_older_names_of_types() -> None:
    history = LegacyHistory(messages_and_choices=[*MESSAGES, choice("yes")], tools=TOOLS)
    assert history.messages() == get_messages(history.messages_and_choices)
    assert history.tools == TOOLS and isinstance(history, art.History)
    assert get_messages(messages_and_choices=[*MESSAGES]) == MESSAGES
    assert isinstance("text", MetadataValue) and not isinstance([], MetadataValue)
    message: types.Message = MESSAGES[0]
    entry: types.MessageOrChoice = choice("yes")
    assert art.Trajectory(messages_and_choices=[message, entry]).messages()[0] == message
    assert art.LocalTrainResult is art.TrainResult
    result = art.TrainResult(step=3, metrics={"loss/train": 0.5})
    assert (result.step, result.metrics) == (3, {"loss/train": 0.5})


# --- gathering --------------------------------------------------------------------------------------------------------


async def rollout(reward: float) -> art.Trajectory:
    await asyncio.sleep(0)
    if reward < 0:
        raise ValueError(f"tool {reward} is down")
    return art.Trajectory(reward=reward, metrics={"turns": 2, "tokens": 9})


async def test_every_keyword_of_a_gather(capsys: pytest.CaptureFixture[str]) -> None:
    async def double(group: art.TrajectoryGroup) -> list[art.TrajectoryGroup]:
        return [group, group]

    groups = await art.gather_trajectory_groups(
        groups=[art.TrajectoryGroup(rollout(reward) for reward in (0.0, 1.0, -1.0))],
        pbar_desc="both",
        pbar_total_completion_tokens=True,
        max_exceptions=1,
        max_metrics=1,
        after_each=double,
    )
    assert groups[0] is groups[1] and [trajectory.reward for trajectory in groups[0]] == [0.0, 1.0]
    shown = capsys.readouterr().err
    assert "both" in shown and "turns=2" in shown and "tokens=9" not in shown
    assert "exceptions=1" in shown
    one, failed = await art.gather_trajectories(
        trajectories=[rollout(1.0), rollout(-1.0)],
        pbar_desc=None,
        pbar_total_completion_tokens=False,
        max_exceptions=1,
    )
    assert isinstance(one, art.Trajectory) and isinstance(failed, ValueError)
    assert capsys.readouterr().err == ""


async def test_every_keyword_of_batches(capsys: pytest.CaptureFixture[str]) -> None:
    running = most = 0

    async def counted(reward: float) -> art.Trajectory:
        nonlocal running, most
        running += 1
        most = max(most, running)
        await asyncio.sleep(0.005)
        running -= 1
        return await rollout(reward)

    batches = art.trajectory_group_batches(
        groups=[art.TrajectoryGroup([counted(reward)]) for reward in (9.0, 1.0, -1.0, 2.0)],
        batch_size=1,
        max_batch_exceptions=1,
        max_concurrent_batches=1,
        skip_batches=1,
        pbar_desc="steps",
        pbar_total_completion_tokens=True,
    )
    rewards = [[trajectory.reward for group in batch for trajectory in group] async for batch in batches]
    assert rewards == [[1.0], [], [2.0]] and most == 1, "the first batch is skipped"
    assert "steps" in capsys.readouterr().err


async def test_a_gather_of_ones_own(capsys: pytest.CaptureFixture[str]) -> None:
    """As the self-play example of ART gathers: awaitables of tuples, and a bar that is set while they run."""
    from tqdm.auto import tqdm

    async def play(reward: float) -> tuple[art.Trajectory, ...]:
        return await rollout(reward), await rollout(reward + 1)

    context = GatherContext(pbar=None, max_metrics=1, pbar_total_completion_tokens=False, max_exceptions=1)
    assert context.pbar is None and context.max_exceptions == 1
    with set_gather_context(context=context):
        assert get_gather_context() is context
        future = asyncio.gather(
            *(wrap_group_awaitable(awaitable=play(reward)) for reward in (0.0, 2.0, -2.0)),
            wrap_trajectories_awaitable(awaitable=rollout(5.0)),
            wrap_group_awaitable(art.TrajectoryGroup([rollout(6.0)])),
        )
        context.pbar = tqdm(desc="own", total=3)
        first, second, failed, single, group = await future
    assert first is not None and second is not None and failed is None
    pairs: Any = (*first, *second)
    assert [trajectory.reward for trajectory in pairs] == [0.0, 1.0, 2.0, 3.0]
    assert isinstance(single, art.Trajectory) and isinstance(group, art.TrajectoryGroup)
    assert "own: 100%" in capsys.readouterr().err
    with set_gather_context(GatherContext(max_exceptions=2)):
        one_by_one = [await wrap_group_awaitable(play(reward)) for reward in (0.0, -1.0, -2.0)]
    assert [result is None for result in one_by_one] == [False, True, True]
    with (
        pytest.raises(ValueError, match="is down"),
        set_gather_context(GatherContext(max_exceptions=0)),
    ):
        await wrap_group_awaitable(play(-1.0))


# --- captures ---------------------------------------------------------------------------------------------------------


@pytest.fixture
def captured(server: Any, answer: Any, model: art.TrainableModel) -> Iterator[None]:
    """The server answers chat requests, and has one conversation for each session."""
    body = {"id": "c", "model": "m", "choices": [choice("yes").model_dump()]}
    history = {"messages_and_choices": [*MESSAGES, *body["choices"]]}
    server.on("POST", "/v1/chat/completions", answer(body=body))
    server.otherwise = lambda _: answer(body={"histories": [history], "num_choices": 1})
    yield


async def ask(model: art.TrainableModel, reward: float) -> None:
    await model.openai_client().chat.completions.create(model="demo/agent", messages=MESSAGES)
    inside = art.current_trajectory(require=True)
    assert inside is art.auto_trajectory(required=True)
    with art.no_capture():
        assert art.current_trajectory() is None
    inside.reward = reward


async def test_captures_by_all_their_names(captured: None, model: art.TrainableModel) -> None:
    for name in (art.trajectory, art.capture_auto_trajectory):
        trajectory = await name(coroutine=ask(model, 0.5))
        assert trajectory.reward == 0.5 and [message["role"] for message in trajectory.messages()] == [
            "user",
            "assistant",
        ]
    group = await art.trajectory_group(
        trajectories=[art.trajectory(ask(model, 1.0)), rollout(-1.0)],
        exceptions=[KeyError("earlier")],
        metadata={"task": 7},
        metrics={"spread": 0.5},
        logs=["began"],
        return_exceptions=True,
    )
    assert [trajectory.reward for trajectory in group] == [1.0] and len(group.exceptions) == 2
    assert (group.metadata, group.metrics, group.logs) == ({"task": 7}, {"spread": 0.5}, ["began"])


# --- guided completions -----------------------------------------------------------------------------------------------


def answer_of(message: dict[str, Any]) -> ChatCompletion:
    one = {
        "index": 0,
        "finish_reason": "stop",
        "message": {"role": "assistant", "content": None, **message},
    }
    fields = {"id": "c", "created": 1, "model": "m", "object": "chat.completion", "choices": [one]}
    return ChatCompletion.model_validate(fields)


def test_a_teacher_s_answer_guides_the_student() -> None:
    tool = {"type": "function", "function": {"name": "move", "parameters": {"type": "object"}}}
    frozen = freeze_tool_schema(tool=tool, fixed_args={"to": "b4"})
    assert frozen["function"]["parameters"] == {
        "type": "object",
        "properties": {"to": {"enum": ["b4"]}},
        "required": ["to"],
        "additionalProperties": False,
    }
    assert tool["function"]["parameters"] == {"type": "object"}, "the tool itself stays as it is"
    call = {
        "id": "1",
        "type": "function",
        "function": {"name": "move", "arguments": '{"to": "b4"}'},
    }
    by_tool = answer_of({"tool_calls": [call]})
    assert get_guided_completion_params(completion=by_tool, base_tools=[tool]) == (
        None,
        {"type": "function", "function": {"name": "move"}},
        [frozen],
    )
    assert get_guided_completion_params(answer_of({"content": "b4"})) == (["b4"], None, None)
    with pytest.raises(ValueError, match="base_tools"):
        get_guided_completion_params(by_tool)
