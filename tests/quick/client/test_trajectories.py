import asyncio
import copy
import itertools
import json
import math
from datetime import datetime, tzinfo
from typing import Any, cast

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from openai.types.chat import ChatCompletion, ChatCompletionMessage
from openai.types.chat.chat_completion import Choice

import art
from art.bodies import build_train_request
from art_protocol import wire
from art_protocol.wire import TrainConfig
from tests.waiting import until

CHOICE: Any = {  # Any: a choice in JSON, which the declared types leave out
    "finish_reason": "stop",
    "index": 0,
    "logprobs": {"content": [{"token": "ok", "bytes": [111], "logprob": -0.25, "top_logprobs": []}]},
    "message": {"role": "assistant", "content": "ok", "reasoning": "easy"},
    "token_ids": [5, 6],
    "prompt_token_ids": [1, 2, 3],
    "art": {"id": "abc", "step": 4},
}
TOOL_CALL = {"id": "c1", "type": "function", "function": {"name": "look", "arguments": "{}"}}
TOOL: art.types.Tool = {
    "type": "function",
    "function": {"name": "look", "parameters": {"type": "object"}},
}

pytestmark = pytest.mark.anyio


async def rollout(reward: float) -> art.Trajectory:
    await asyncio.sleep(0)
    if reward < 0:
        raise ValueError(f"bad reward {reward}")
    return art.Trajectory(reward=reward)


def rewards(group: art.TrajectoryGroup) -> list[float]:
    return [trajectory.reward for trajectory in group]


# --- trajectories ---


def test_choice_in_json_becomes_an_openai_choice_with_its_extra_fields():
    trajectory = art.Trajectory.model_validate({"messages_and_choices": [CHOICE]})
    choice = trajectory.messages_and_choices[0]
    assert isinstance(choice, Choice)
    assert isinstance(choice.message, ChatCompletionMessage)
    sampled = cast(Any, choice)  # Any: the extra fields have no types
    assert sampled.token_ids == [5, 6] and sampled.art == {"id": "abc", "step": 4}


@pytest.mark.parametrize("finish_reason", ["stop", "abort"])
def test_choice_is_dumped_as_the_server_sent_it(finish_reason: str):
    sent = {**CHOICE, "finish_reason": finish_reason}
    trajectory = art.Trajectory()
    trajectory.messages_and_choices.append(Choice.model_construct(**sent))
    dumped = trajectory.model_dump(mode="json")
    assert dumped["messages_and_choices"] == [sent]
    assert trajectory.model_dump()["messages_and_choices"] == [sent]


json_values = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**50), 2**50) | st.text(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner, max_size=3),
    max_leaves=5,
)
messages = st.fixed_dictionaries(
    {"role": st.sampled_from(["system", "user", "tool"]), "content": st.none() | st.text()}
)
choices = st.builds(
    lambda ids, text, extra: {**CHOICE, "token_ids": ids, "message": {"role": "assistant", "content": text}, "x": extra},
    st.lists(st.integers(0, 200_000), max_size=4),
    st.text(),
    json_values,
)  # fmt: skip
entries = st.lists(messages | choices, max_size=4)
histories = st.fixed_dictionaries({"messages_and_choices": entries, "tools": st.none() | st.just([TOOL])})
trajectories = st.fixed_dictionaries(
    {
        "messages_and_choices": entries,
        "tools": st.none() | st.just([TOOL]),
        "additional_histories": st.lists(histories, max_size=2),
        "reward": st.floats(allow_nan=False, allow_infinity=False),
        "initial_policy_version": st.none() | st.integers(0, 100),
        "final_policy_version": st.none() | st.integers(0, 100),
        "metrics": st.dictionaries(st.text(), st.booleans() | st.integers(0, 9) | st.floats(0, 1), max_size=3),
        "metadata": st.dictionaries(st.text(), json_values, max_size=3),
        "logs": st.lists(st.text(), max_size=2),
    }
)


@settings(max_examples=40)
@given(trajectories)
def test_trajectory_round_trips_through_json_and_fits_the_wire(body: dict):
    trajectory = art.Trajectory.model_validate(body)
    dumped = trajectory.model_dump(mode="json")
    assert dumped == body
    again = art.Trajectory.model_validate_json(trajectory.model_dump_json())
    assert again.model_dump(mode="json") == body
    assert wire.TrajectoryBody.model_validate(body).model_dump(mode="json") == body


def test_messages_are_plain_and_ready_to_send():
    answer = {"role": "assistant", "content": None, "tool_calls": [TOOL_CALL], "refusal": None}
    sampled = cast(Any, CHOICE | {"message": answer})  # Any: as CHOICE
    trajectory = art.Trajectory(
        messages_and_choices=[
            {"role": "user", "content": "hi"},
            {"role": "assistant", "content": None},
            sampled,
            {"role": "tool", "tool_call_id": "c1", "content": "seen"},
        ]
    )
    assert trajectory.messages() == [
        {"role": "user", "content": "hi"},
        {"role": "assistant", "content": ""},
        {"role": "assistant", "content": "", "tool_calls": [TOOL_CALL]},
        {"role": "tool", "tool_call_id": "c1", "content": "seen"},
    ]


def test_message_objects_and_nested_tool_calls_are_dumped():
    sampled = Choice.model_construct(**{**CHOICE, "message": {"role": "assistant", "tool_calls": [TOOL_CALL]}})
    trajectory = art.Trajectory()
    trajectory.messages_and_choices += [
        sampled.message,
        {"role": "assistant", "content": "", "tool_calls": sampled.message.tool_calls},
    ]
    first, second = trajectory.model_dump(mode="json")["messages_and_choices"]
    assert first == {"role": "assistant", "tool_calls": [TOOL_CALL]}
    assert second == {"role": "assistant", "content": "", "tool_calls": [TOOL_CALL]}


def test_a_completion_in_place_of_its_choice_is_named():
    completion = ChatCompletion.model_construct(id="x", choices=[])
    trajectory = art.Trajectory()
    trajectory.messages_and_choices.append(completion)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match=r"choices\[0\]"):
        trajectory.model_dump(mode="json")


def test_a_misspelt_field_is_refused_with_the_one_that_was_meant():
    with pytest.raises(ValueError, match="no field 'rewards': did you mean 'reward'"):
        art.Trajectory(rewards=1.0)  # type: ignore[call-arg]


def test_number_like_rewards_and_metrics_are_dumped_as_numbers():
    class Scalar:
        def __float__(self) -> float:
            return 0.5

    trajectory = art.Trajectory(reward=1)
    trajectory.reward = Scalar()  # type: ignore[assignment]  # as numpy's and torch's
    trajectory.metrics["score"] = Scalar()  # type: ignore[assignment]
    trajectory.metrics["won"] = True
    dumped = trajectory.model_dump(mode="json")
    assert dumped["reward"] == 0.5
    assert dumped["metrics"] == {"score": 0.5, "won": True}


@pytest.mark.parametrize(
    ("value", "plain"),
    [
        (np.float32(0.5), 0.5),
        (np.float64(0.5), 0.5),
        (np.int64(3), 3),
        (np.bool_(True), True),
        (np.array(0.5), 0.5),
        (torch.tensor(0.5), 0.5),
        (torch.tensor([2]), 2),
    ],
    ids=repr,
)
def test_scalars_of_other_libraries_are_taken_wherever_a_program_sets_numbers(value: Any, plain: float):
    trajectory = art.Trajectory(additional_histories=[art.History()])
    for history in (trajectory, *trajectory.additional_histories):
        history.turn_rewards = [value, None]
        history.turn_advantages = [value, [value, 1.0], None]
    trajectory.reward = value
    trajectory.metrics["m"] = value
    nested = {"a": value, "b": [value, {"c": (value, "text")}], "d": None}
    trajectory.metadata = nested
    group = art.TrajectoryGroup([trajectory], metadata=nested, metrics={"m": value})
    config = TrainConfig()
    sent = json.loads(build_train_request([group], config).split(b"\n")[1])
    (row,) = sent["trajectories"]
    for history in (row, *row["additional_histories"]):
        assert history["turn_rewards"] == [plain, None]
        assert history["turn_advantages"] == [plain, [plain, 1.0], None]
    expected = {"a": plain, "b": [plain, {"c": [plain, "text"]}], "d": None}
    assert row["metadata"] == sent["metadata"] == expected
    assert row["reward"] == row["metrics"]["m"] == sent["metrics"]["m"] == plain
    assert type(row["metadata"]["a"]) is type(plain), "a flag stays a flag"
    assert json.loads(trajectory.model_dump_json())["metadata"] == expected


class Clock:
    """It is a second later at each look."""

    def __init__(self) -> None:
        self._seconds = itertools.count()

    def now(self, zone: tzinfo) -> datetime:
        return datetime.fromtimestamp(next(self._seconds), zone)


async def test_durations_add_up_in_the_metrics(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("art.trajectories.datetime", Clock())
    trajectory = art.Trajectory()
    for _ in range(2):
        async with trajectory.track_duration("tool"):
            pass
    assert trajectory.finish() is trajectory
    assert trajectory.metrics == {"tool_duration": 2.0, "duration": 5.0}
    assert "start_time" not in trajectory.model_dump()


def test_for_logging_marks_what_was_sampled():
    trajectory = art.Trajectory(
        messages_and_choices=[{"role": "user", "content": "hi"}, CHOICE], reward=2.0, tools=[TOOL]
    )
    trajectory.log("a line")
    record = trajectory.for_logging()
    assert record["messages"] == [
        {"role": "user", "content": "hi", "trainable": False},
        {"role": "assistant", "content": "ok", "trainable": True},
    ]
    assert (record["reward"], record["tools"], record["logs"]) == (2.0, [TOOL], ["a line"])
    json.dumps(record)
    assert str(trajectory) == "Trajectory(reward=2.0, metrics={}, metadata={})"


def test_sampled_tokens_are_counted_over_all_histories():
    # Any: as CHOICE
    without_ids = cast(Any, {key: CHOICE[key] for key in CHOICE if key != "token_ids"})
    trajectory = art.Trajectory(
        messages_and_choices=[{"role": "user", "content": "hi"}, CHOICE],
        additional_histories=[art.History(messages_and_choices=[without_ids])],
    )
    assert trajectory.num_sampled_tokens() == 3


# --- groups ---


def test_group_holds_the_trajectories_of_a_list_or_a_generator():
    for entries in (
        [art.Trajectory(reward=i) for i in range(3)],
        (art.Trajectory(reward=i) for i in range(3)),
    ):
        group = art.TrajectoryGroup(entries, metadata={"scenario": 1}, metrics={"m": 0.5}, logs=["l"])
        assert len(group) == 3 and rewards(group) == [0, 1, 2]
        assert (group.metadata, group.metrics, group.logs) == ({"scenario": 1}, {"m": 0.5}, ["l"])
    group.log("more")
    assert group.logs == ["l", "more"]
    assert art.TrajectoryGroup(trajectories=group.trajectories).trajectories == group.trajectories


def test_group_keeps_the_trajectory_objects():
    trajectory = art.Trajectory()
    group = art.TrajectoryGroup([trajectory])
    trajectory.reward = 3.0
    assert rewards(group) == [3.0]


async def test_group_of_coroutines_runs_when_awaited_and_keeps_their_order():
    async def slow_first(index: int) -> art.Trajectory:
        await asyncio.sleep(0.03 - index * 0.01)
        return art.Trajectory(reward=index)

    group = art.TrajectoryGroup(slow_first(i) for i in range(3))
    assert await group is group
    assert rewards(group) == [0, 1, 2]
    assert await group is group


async def test_group_of_a_mixture_keeps_order_and_records_failures():
    mixture = [art.Trajectory(reward=9), KeyError("gone"), rollout(1), rollout(-1), rollout(2)]
    group = await art.TrajectoryGroup(mixture, exceptions=[OSError("before")])
    assert rewards(group) == [9, 1, 2]
    assert [failure.type for failure in group.exceptions] == ["OSError", "KeyError", "ValueError"]
    assert group.exceptions[2].message == "bad reward -1"
    assert "in rollout" in group.exceptions[2].traceback


async def test_rollout_that_returns_no_trajectory_is_a_failure():
    async def forgets_to_return() -> None:
        pass

    async def returns_its_error() -> BaseException:
        return RuntimeError("returned")

    group = await art.TrajectoryGroup([forgets_to_return(), returns_its_error()])  # type: ignore[list-item]
    assert rewards(group) == []
    assert [failure.message for failure in group.exceptions] == [
        "a rollout returned NoneType, not art.Trajectory: end it with `return art.Trajectory(...)`",
        "returned",
    ]


async def test_group_that_was_not_awaited_says_so_instead_of_looking_empty():
    group = art.TrajectoryGroup(rollout(1) for _ in range(2))
    uses = [
        len,
        list,
        lambda g: g.trajectories,
        lambda g: g.model_dump(),
        lambda g: g.model_dump_json(),
    ]
    for use in uses:
        with pytest.raises((RuntimeError, ValueError), match="await"):
            use(group)
    assert rewards(await group) == [1, 1]


async def test_group_is_not_awaited_twice_at_once():
    group = art.TrajectoryGroup([rollout(1)])
    first = asyncio.ensure_future(group)
    await asyncio.sleep(0)
    with pytest.raises(RuntimeError):
        await group
    assert rewards(await first) == [1]


async def test_cancelling_an_awaited_group_cancels_its_rollouts():
    started, cancelled = [], []

    async def waits() -> art.Trajectory:
        started.append(1)
        try:
            await asyncio.Event().wait()
        except asyncio.CancelledError:
            cancelled.append(1)
            raise
        return art.Trajectory()

    task = asyncio.ensure_future(art.TrajectoryGroup([waits(), waits()]))
    await until(lambda: started == [1, 1])
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert cancelled == [1, 1]


async def test_a_rollout_that_is_cancelled_from_within_is_a_failed_rollout():
    async def cancels_itself() -> art.Trajectory:
        raise asyncio.CancelledError

    group = await art.TrajectoryGroup([cancels_itself(), rollout(1)])
    assert [trajectory.reward for trajectory in group] == [1]
    (failure,) = group.exceptions
    assert "cancelled, but not by its gather" in failure.message


@settings(max_examples=40)
@given(st.lists(trajectories, max_size=2), st.dictionaries(st.text(), json_values, max_size=2))
def test_group_round_trips_through_json_in_the_shape_of_the_wire(bodies: list, metadata: dict):
    group = art.TrajectoryGroup(
        [art.Trajectory.model_validate(body) for body in bodies],
        exceptions=[ValueError("no")],
        metadata=metadata,
    )
    dumped = group.model_dump(mode="json")
    assert wire.TrajectoryGroupBody.model_validate(dumped).model_dump(mode="json") == dumped
    again = art.TrajectoryGroup.model_validate_json(group.model_dump_json())
    assert again.model_dump(mode="json") == dumped


def test_group_can_be_copied():
    group = art.TrajectoryGroup([art.Trajectory(reward=1)], metadata={"a": [1]})
    shallow, deep = copy.copy(group), copy.deepcopy(group)
    assert shallow.trajectories[0] is group.trajectories[0]
    assert deep.trajectories[0] is not group.trajectories[0]
    assert deep.model_dump() == group.model_dump()


def test_nan_reward_survives_construction_for_train_to_name():
    assert math.isnan(art.Trajectory(reward=math.nan).reward)
