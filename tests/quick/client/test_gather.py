import asyncio
import gc
import math
import subprocess
import sys
import traceback
import warnings
from collections.abc import Awaitable, Callable
from pathlib import Path

import numpy as np
import openai
import pytest

import art
from art.pool import current_pool
from art.trajectories import is_informative
from art_protocol.wire import TeacherTop
from tests.waiting import PATIENCE_SECONDS

pytestmark = pytest.mark.anyio


class BadReward(Exception):
    pass


class NoScenario(Exception):
    pass


async def rollout(reward: float = 1.0, seconds: float = 0.0) -> art.Trajectory:
    await asyncio.sleep(seconds)
    if reward < 0:
        raise BadReward(f"bad reward {reward}")
    return art.Trajectory(reward=reward, metrics={"won": reward > 0.5})


def rewards(groups: list[art.TrajectoryGroup]) -> list[list[float]]:
    return [[trajectory.reward for trajectory in group] for group in groups]


def failures(group: art.TrajectoryGroup) -> list[str]:
    return [failure.message for failure in group.exceptions]


class Running:
    """Counts how many of its rollouts run at once, and in which order they start."""

    def __init__(self) -> None:
        self.now = self.most = 0
        self.started: list[int] = []

    async def rollout(self, index: int) -> art.Trajectory:
        self.now += 1
        self.most = max(self.most, self.now)
        self.started.append(index)
        await asyncio.sleep(0.002)
        self.now -= 1
        return art.Trajectory(reward=index)


async def test_generators_of_groups_of_coroutines_come_out_full():
    groups = await art.gather_trajectory_groups(art.TrajectoryGroup(rollout(s + i) for i in range(3)) for s in range(2))
    assert rewards(groups) == [[0, 1, 2], [1, 2, 3]]


async def test_complete_groups_and_coroutines_of_groups_are_taken_too():
    async def make_group() -> art.TrajectoryGroup:
        return await art.TrajectoryGroup(rollout(i) for i in range(2))

    ready = art.TrajectoryGroup([art.Trajectory(reward=7)])
    groups = await art.gather_trajectory_groups([ready, make_group()])
    assert rewards(groups) == [[7], [0, 1]]
    assert groups[0] is ready


async def test_nothing_to_gather_gives_an_empty_list():
    assert await art.gather_trajectory_groups([]) == []
    assert await art.gather_trajectories([]) == []


async def test_rollouts_are_bounded_over_all_groups_and_start_in_order():
    running = Running()

    async def own_group(first: int) -> art.TrajectoryGroup:
        return await art.TrajectoryGroup(running.rollout(first + i) for i in range(4))

    groups = [art.TrajectoryGroup(running.rollout(4 * s + i) for i in range(4)) for s in range(5)]
    await art.gather_trajectory_groups(groups, max_concurrent_rollouts=3)
    assert running.most == 3
    assert running.started == list(range(20))

    await art.gather_trajectory_groups(map(own_group, [20, 24]), max_concurrent_rollouts=3)
    assert running.most == 3


async def test_single_trajectories_are_bounded_and_stay_in_order():
    running = Running()
    trajectories = await art.gather_trajectories((running.rollout(i) for i in range(10)), max_concurrent_rollouts=4)
    assert running.most == 4
    assert [trajectory.reward for trajectory in trajectories] == list(range(10))


async def test_group_inside_a_rollout_does_not_wait_for_the_rollouts_own_place():
    async def nested() -> art.Trajectory:
        inner = await art.TrajectoryGroup(rollout(i) for i in range(2))
        return art.Trajectory(reward=len(inner))

    async with asyncio.timeout(PATIENCE_SECONDS):
        groups = await art.gather_trajectory_groups([art.TrajectoryGroup([nested()])], max_concurrent_rollouts=1)
    assert rewards(groups) == [[2]]
    assert current_pool.get() is None


async def test_first_failure_above_the_limit_is_raised_and_cancels_the_rest():
    cancelled = []

    async def waits() -> art.Trajectory:
        try:
            await asyncio.Event().wait()
        except asyncio.CancelledError:
            cancelled.append(1)
            raise
        return art.Trajectory()

    groups = [art.TrajectoryGroup([waits(), rollout(-1, 0.01)]), art.TrajectoryGroup([waits()])]
    with pytest.raises(BadReward) as caught:
        await art.gather_trajectory_groups(groups)
    assert caught.value.__notes__ == [
        "1 of 3 rollouts failed (BadReward 1); max_exceptions=0.1 allows no more (share of the rollouts)"
    ]
    assert cancelled == [1, 1]


@pytest.mark.parametrize(("num_failing", "is_raised"), [(0, False), (2, False), (3, True)])
async def test_groups_tolerate_a_tenth_by_default_with_one_warning(
    num_failing: int, is_raised: bool, caplog: pytest.LogCaptureFixture
):
    values = [-1] * num_failing + [1] * (20 - num_failing)
    groups = [art.TrajectoryGroup(map(rollout, values[first::4])) for first in range(4)]
    if is_raised:
        with pytest.raises(BadReward):
            await art.gather_trajectory_groups(groups)
        return
    gathered = await art.gather_trajectory_groups(groups)
    assert sum(len(group.exceptions) for group in gathered) == num_failing
    warning = (
        "2 of 20 rollouts failed (BadReward 2); the first: BadReward('bad reward -1'). They have no reward and are not trained. "
        "The exceptions in the result show where they failed; max_exceptions=0 raises the first"
    )
    assert caplog.messages == ([warning] if num_failing else [])


@pytest.mark.parametrize("size", [1, 3, 30])
async def test_a_gather_in_which_all_rollouts_fail_is_raised_by_default(size: int):
    with pytest.raises(BadReward):
        await art.gather_trajectory_groups([art.TrajectoryGroup(map(rollout, [-1] * size))])


async def test_single_trajectories_raise_the_first_failure_by_default():
    with pytest.raises(BadReward):
        await art.gather_trajectories(map(rollout, [1] * 29 + [-1]))


async def test_abandoned_rollouts_leave_no_warning_behind():
    with warnings.catch_warnings(record=True) as seen:
        warnings.simplefilter("always")
        with pytest.raises(BadReward):
            await art.gather_trajectory_groups(
                (art.TrajectoryGroup(rollout(-1) for _ in range(3)) for _ in range(3)), max_concurrent_rollouts=1
            )
        with pytest.raises(BadReward):
            await art.gather_trajectories((rollout(-1) for _ in range(3)), max_concurrent_rollouts=1)
        gc.collect()
    assert [str(warning.message) for warning in seen] == []


async def test_tasks_that_waited_for_their_turn_are_cancelled_too():
    async def late() -> art.Trajectory:
        await asyncio.Event().wait()
        return art.Trajectory()

    tasks = [asyncio.create_task(awaitable) for awaitable in (rollout(-1), late(), late())]
    with pytest.raises(BadReward):
        await art.gather_trajectories(tasks, max_concurrent_rollouts=1)
    await asyncio.sleep(0)
    assert [task.cancelled() for task in tasks] == [False, True, True]


async def test_allowed_failures_are_recorded_on_their_group():
    groups = await art.gather_trajectory_groups(
        [
            art.TrajectoryGroup([rollout(1), rollout(-1)], metadata={"s": 1}),
            art.TrajectoryGroup([rollout(-2), rollout(-3)], metadata={"s": 2}),
        ],
        max_exceptions=3,
    )
    assert rewards(groups) == [[1], []]
    assert [failures(group) for group in groups] == [["bad reward -1"], ["bad reward -2", "bad reward -3"]]
    assert [group.metadata for group in groups] == [{"s": 1}, {"s": 2}]


@pytest.mark.parametrize(
    ("max_exceptions", "num_failing", "is_raised"),
    [
        (0, 1, True),
        (2, 2, False),
        (2, 3, True),
        (0.5, 4, False),
        (0.5, 5, True),
        (0.01, 1, True),
        (1.0, 8, False),
        (1, 2, True),
        (math.inf, 8, False),
    ],
)
async def test_max_exceptions_is_a_number_or_a_share_of_all_rollouts(
    max_exceptions: float, num_failing: int, is_raised: bool
):
    values = [-1] * num_failing + [1] * (8 - num_failing)

    def halves() -> list[art.TrajectoryGroup]:
        return [art.TrajectoryGroup(map(rollout, half)) for half in (values[:4], values[4:])]

    gathers: list[Callable[[], Awaitable[list]]] = [
        lambda: art.gather_trajectory_groups(halves(), max_exceptions=max_exceptions),
        lambda: art.gather_trajectories(map(rollout, values), max_exceptions=max_exceptions),
    ]
    for gather in gathers:
        if is_raised:
            with pytest.raises(BadReward):
                await gather()
        else:
            await gather()


async def test_a_share_waits_for_groups_of_which_nothing_is_known_yet():
    """Each group's rollouts are announced 5 ms after those of the group before it."""

    async def late(index: int, num_failing: int) -> art.TrajectoryGroup:
        await asyncio.sleep(0.005 * index)
        return await art.TrajectoryGroup(map(rollout, [-1] * num_failing + [1] * (8 - num_failing)))

    groups = await art.gather_trajectory_groups(late(index, index < 3) for index in range(10))
    assert sum(len(group.exceptions) for group in groups) == 3
    with pytest.raises(BadReward):
        await art.gather_trajectory_groups(late(index, index < 9) for index in range(10))


async def test_what_is_no_number_is_not_shown_and_ends_no_gather(capsys: pytest.CaptureFixture[str]):
    async def measures(value: object) -> art.Trajectory:
        trajectory = await rollout()
        trajectory.metrics["size"] = value  # type: ignore[assignment]
        return trajectory

    values = (np.array([1.0, 2.0]), 10**400, math.nan, "much", None, np.float32(3.0))
    gathered = await art.gather_trajectories([measures(value) for value in values])
    assert len(gathered) == len(values)
    assert "size=3]" in capsys.readouterr().err


class Textless(Exception):
    def __str__(self) -> str:
        raise ValueError("no text")

    __repr__ = __str__


async def test_an_exception_without_text_costs_no_other_rollout(caplog: pytest.LogCaptureFixture):
    async def fails() -> art.Trajectory:
        raise Textless

    groups = (art.TrajectoryGroup([rollout(1), fails(), rollout(0)]) for _ in range(2))
    gathered = await art.gather_trajectory_groups(groups, max_exceptions=2)
    assert rewards(gathered) == [[1, 0], [1, 0]]
    assert failures(gathered[0]) == ["<Textless, whose text raises ValueError>"]
    assert gathered[0].exceptions[0].type.endswith("Textless")
    assert "in fails" in gathered[0].exceptions[0].traceback
    assert "2 of 6 rollouts failed (Textless 2); the first: <Textless, whose text raises" in caplog.text
    with pytest.raises(Textless):
        await art.gather_trajectory_groups([art.TrajectoryGroup([fails()])], max_exceptions=0)

    async def failing_judge(group: art.TrajectoryGroup) -> art.TrajectoryGroup:
        raise Textless

    (kept,) = await art.gather_trajectory_groups([group_of(1, 0)], after_each=failing_judge, max_exceptions=1)
    assert failures(kept) == ["<Textless, whose text raises ValueError>"]


async def test_the_error_that_is_raised_is_the_first_one_with_its_own_context():
    async def fails(index: int) -> art.Trajectory:
        await asyncio.sleep(0.002 * index)
        try:
            raise KeyError("why")
        except KeyError:
            raise failures[index]  # noqa: B904

    failures = [ValueError(index) for index in range(3)]
    with pytest.raises(ValueError) as caught:
        await art.gather_trajectories([fails(0), fails(1), fails(2)], max_exceptions=1)
    assert caught.value is failures[0] and isinstance(caught.value.__context__, KeyError)


BUG = """
import art, asyncio
async def rollout(k): return art.Trajectory(reward=score(k))
async def main(): return await art.gather_trajectory_groups(art.TrajectoryGroup(rollout(k) for _ in range(8)) for k in range(8))
"""
NOTEBOOK = """
from IPython.core.interactiveshell import InteractiveShell
shell = InteractiveShell.instance(colors="nocolor")
for cell in CELLS:
    shell.run_cell(cell, store_history=True)
"""


def said_by(program: Path, text: str) -> list[str]:
    """The lines that a program prints."""
    program.write_text(text)
    ended = subprocess.run([sys.executable, str(program)], stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    return ended.stdout.splitlines()


@pytest.mark.parametrize(
    "program",
    [BUG + "asyncio.run(main())", NOTEBOOK.replace("CELLS", repr([BUG, "await main()"]))],
    ids=["program", "notebook"],
)
def test_a_bug_in_ones_own_rollout_is_printed_once(program: str, tmp_path: Path) -> None:
    lines = said_by(tmp_path / "bug.py", program)
    assert len(lines) <= 25, "\n".join(lines)
    text = "\n".join(lines)
    assert text.count("64 of 64 rollouts failed (NameError 64)") == 1
    assert "reward=score(k)" in text and "name 'score' is not defined" in text
    assert "pool.py" not in text and "gather.py" not in text


async def test_causes_of_a_failure_are_printed_without_the_frames_of_packages():
    def own_call(client: openai.AsyncOpenAI):
        return client.chat.completions.create(model="a", messages=[])

    async def asks() -> art.Trajectory:
        async with (
            openai.AsyncOpenAI(base_url="http://127.0.0.1:9/v1", api_key="x", max_retries=0) as client,
            asyncio.TaskGroup() as both,
        ):
            both.create_task(own_call(client))
        return art.Trajectory()

    with pytest.raises(ExceptionGroup) as caught:
        await art.gather_trajectory_groups([art.TrajectoryGroup([asks()])])
    printed = "".join(traceback.format_exception(caught.value))
    assert "in asks" in printed and "openai.APIConnectionError" in printed and "(ExceptionGroup 1)" in printed
    assert "site-packages" not in printed and "direct cause" in printed


async def test_too_many_failures_end_the_gather_even_where_a_coroutine_catches_them():
    async def catches() -> art.TrajectoryGroup:
        try:
            return await art.TrajectoryGroup([rollout(-1)])
        except BadReward:
            return art.TrajectoryGroup()

    with pytest.raises(BadReward):
        await art.gather_trajectory_groups([catches()])


async def test_group_coroutine_that_fails_becomes_a_group_of_one_failure():
    async def fails() -> art.TrajectoryGroup:
        raise NoScenario("no scenario")

    good = art.TrajectoryGroup([rollout(1)])
    groups = await art.gather_trajectory_groups([fails(), good], max_exceptions=1)
    assert rewards(groups) == [[], [1]]
    assert failures(groups[0]) == ["no scenario"]
    with pytest.raises(NoScenario):
        await art.gather_trajectory_groups([fails()])


async def test_what_is_no_group_is_a_failure_that_says_so():
    groups = await art.gather_trajectory_groups([rollout(1)], max_exceptions=1)  # type: ignore[list-item]
    assert failures(groups[0]) == [
        "the awaitable of a group returned Trajectory, not art.TrajectoryGroup: a group is made of several rollouts, "
        "`art.TrajectoryGroup(rollout(...) for _ in range(8))`"
    ]


async def test_cancelling_a_gather_passes():
    task = asyncio.create_task(art.gather_trajectory_groups([art.TrajectoryGroup([rollout(1, 60)])], max_exceptions=9))
    await asyncio.sleep(0.01)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task


def test_keyboard_interrupt_in_a_rollout_passes():
    async def interrupted() -> art.Trajectory:
        raise KeyboardInterrupt

    async def program() -> None:
        await art.gather_trajectories([interrupted()], max_exceptions=9)

    with pytest.raises(KeyboardInterrupt):
        asyncio.run(program())


async def test_after_each_replaces_drops_or_multiplies_groups():
    async def after_each(group: art.TrajectoryGroup):
        reward = group.trajectories[0].reward
        if reward == 0:
            return None
        if reward == 1:
            return [group, group]
        return art.TrajectoryGroup([art.Trajectory(reward=10 * reward)])

    groups = await art.gather_trajectory_groups(
        (art.TrajectoryGroup([rollout(i)]) for i in range(3)), after_each=after_each
    )
    assert rewards(groups) == [[1], [1], [20]]


async def test_after_each_is_not_called_for_a_group_without_trajectories():
    async def after_each(group: art.TrajectoryGroup) -> None:
        raise AssertionError("called")

    groups = await art.gather_trajectory_groups(
        [art.TrajectoryGroup([rollout(-1)])], max_exceptions=1, after_each=after_each
    )
    assert failures(groups[0]) == ["bad reward -1"]


async def test_failing_after_each_leaves_no_half_judged_trajectories():
    async def judge(group: art.TrajectoryGroup) -> art.TrajectoryGroup:
        raise RuntimeError("judge is down")

    groups = await art.gather_trajectory_groups(
        [art.TrajectoryGroup([rollout(1), rollout(-1)], metadata={"s": 1})], max_exceptions=2, after_each=judge
    )
    assert rewards(groups) == [[]]
    assert failures(groups[0]) == ["bad reward -1", "judge is down"]
    assert groups[0].metadata == {"s": 1}


async def test_gathered_exceptions_stand_in_place():
    results = await art.gather_trajectories([rollout(1), rollout(-1)], max_exceptions=1)
    assert isinstance(results[0], art.Trajectory) and isinstance(results[1], BadReward)


async def test_rollouts_may_return_several_trajectories_even_from_a_generator():
    async def pair():
        return (art.Trajectory(reward=i) for i in range(2))

    results = await art.gather_trajectories([pair(), pair()])
    assert [[trajectory.reward for trajectory in result] for result in results] == [[0, 1], [0, 1]]


async def test_bar_shows_running_means_and_failures(capsys: pytest.CaptureFixture[str]):
    groups = [art.TrajectoryGroup([rollout(1), rollout(0)]), art.TrajectoryGroup([rollout(-1)])]
    await art.gather_trajectory_groups(groups, pbar_desc="play", max_exceptions=1)
    bar = capsys.readouterr().err.splitlines()[-1]
    assert "play: 100%" in bar and "3/3" in bar
    assert "reward=0.5, exceptions=1, won=0.5" in bar


async def test_bar_can_show_fewer_metrics_or_stay_away(capsys: pytest.CaptureFixture[str]):
    await art.gather_trajectory_groups([art.TrajectoryGroup([rollout(1)])], max_metrics=0)
    bar = capsys.readouterr().err
    assert "reward=1" in bar and "won" not in bar
    await art.gather_trajectory_groups([art.TrajectoryGroup([rollout(1)])], pbar_desc=None)
    assert capsys.readouterr().err == ""


async def test_bar_ends_full_for_coroutines_of_groups(capsys: pytest.CaptureFixture[str]):
    async def make_group() -> art.TrajectoryGroup:
        return await art.TrajectoryGroup(rollout(i) for i in range(3))

    async def made_elsewhere() -> art.TrajectoryGroup:
        return art.TrajectoryGroup([await rollout(1), await rollout(1)])

    await art.gather_trajectory_groups([make_group(), made_elsewhere()])
    assert "5/5" in capsys.readouterr().err.splitlines()[-1]


async def test_sampled_tokens_are_recorded_and_shown(capsys: pytest.CaptureFixture[str]):
    async def sample(num_tokens: int) -> art.Trajectory:
        choice = {
            "finish_reason": "stop",
            "index": 0,
            "message": {"role": "assistant", "content": "x"},
            "token_ids": list(range(num_tokens)),
        }
        return art.Trajectory(messages_and_choices=[choice])  # type: ignore[list-item]  # in JSON

    first, second = await art.gather_trajectories([sample(2), sample(4)])
    assert (first.metrics, second.metrics) == ({"completion_tokens": 2}, {"completion_tokens": 4})
    assert "completion_tokens=3" in capsys.readouterr().err
    await art.gather_trajectories([sample(2), sample(4)], pbar_total_completion_tokens=True)
    assert "completion_tokens=6" in capsys.readouterr().err


# --- groups that are sampled until enough of them are informative -----------------------------------------------------


def group_of(*values: float) -> art.TrajectoryGroup:
    return art.TrajectoryGroup(map(rollout, values))


async def test_dead_groups_are_replaced_until_enough_are_informative(caplog: pytest.LogCaptureFixture):
    caplog.set_level("INFO", "art.core.gather")
    dead, mixed = (1, 1), (0, 1)
    stream = iter([group_of(*rewards_of_group) for rewards_of_group in (dead, mixed, dead, dead, mixed, mixed, dead)])
    groups = await art.gather_trajectory_groups(stream, min_informative=2)
    assert rewards(groups) == [[1, 1], [0, 1], [1, 1], [1, 1], [0, 1]]
    assert caplog.messages == ["sampled 5 groups, 2 of them informative"]
    rest = await art.gather_trajectory_groups(stream)
    assert rewards(rest) == [[0, 1], [1, 1]], "the iterator keeps what was not sampled"


async def test_no_more_groups_run_at_a_time_than_are_missing():
    running = Running()
    groups = (art.TrajectoryGroup([running.rollout(index)]) for index in range(6))
    await art.gather_trajectory_groups(groups, min_informative=2)
    assert running.most == 2 and running.started == list(range(6))


async def test_the_end_of_the_groups_is_the_limit(caplog: pytest.LogCaptureFixture):
    groups = await art.gather_trajectory_groups(
        (group_of(1, 1) if index else group_of(0, 1) for index in range(5)), min_informative=3
    )
    assert len(groups) == 5
    (message,) = caplog.messages
    assert message.startswith("only 1 of 5 sampled groups are informative, and no groups are left")


async def test_groups_that_were_not_sampled_are_closed_without_a_warning():
    async def own_group() -> art.TrajectoryGroup:
        return art.TrajectoryGroup([await rollout(0), await rollout(1)])

    with warnings.catch_warnings(record=True) as seen:
        warnings.simplefilter("always")
        pending = [own_group(), group_of(0, 1), group_of(0, 1), own_group()]
        groups = await art.gather_trajectory_groups(pending, min_informative=1)
        assert rewards(groups) == [[0, 1]]
        with pytest.raises(BadReward):
            await art.gather_trajectory_groups([group_of(-1, -1), group_of(0, 1), own_group()], min_informative=1)
        gc.collect()
    assert [str(warning.message) for warning in seen] == []


async def test_what_after_each_returns_decides_what_is_informative():
    async def judge(group: art.TrajectoryGroup) -> art.TrajectoryGroup | None:
        first = group.trajectories[0]
        if first.reward == 0:
            return None
        if first.reward == 2:
            first.reward += 1
        return group

    stream = (group_of(index, index) for index in range(9))
    groups = await art.gather_trajectory_groups(stream, min_informative=1, after_each=judge)
    assert rewards(groups) == [[1, 1], [3, 2]]


async def test_a_failing_source_of_groups_is_raised():
    def stream():
        yield group_of(1, 1)
        raise NoScenario

    with pytest.raises(NoScenario):
        await art.gather_trajectory_groups(stream(), min_informative=1)
    with pytest.raises(NoScenario):
        await art.gather_trajectory_groups(stream())


@pytest.mark.parametrize(
    ("fields", "is_expected"),
    [
        ([{"reward": 1.0}, {"reward": 1.0}], False),
        ([{"reward": 1.0}, {"reward": 0.0}], True),
        ([{"reward": 1.0}], False),
        ([], False),
        ([{"turn_rewards": [0.5, None]}, {"turn_rewards": [0.5]}], False),
        ([{"turn_rewards": [0.5, 1.0]}, {}], True),
        ([{"additional_histories": [{"turn_advantages": [None, -1.0]}]}], True),
        ([{"reward": math.nan}, {"reward": math.nan}], False),
        ([{"reward": 0.1 + 0.2}, {"reward": 0.3}], False),
        ([{"turn_rewards": [0.7]}, {"turn_rewards": [0.7000000476837158]}], False),
        ([{"turn_advantages": [0.0, [0.0, 0.0]]}], False),
        ([{"turn_targets": [None, TeacherTop(top_k=1, token_ids="", logprobs="")]}], True),
        ([{"turn_targets": [None]}], False),
    ],
)
def test_a_group_is_informative_where_rewards_differ(fields: list[dict], is_expected: bool):
    group = art.TrajectoryGroup(art.Trajectory(**trajectory_fields) for trajectory_fields in fields)
    assert is_informative(group) is is_expected


def test_scalars_of_other_libraries_are_compared_by_their_value():
    """As torch's, whose equal tensors are two keys of a set."""

    class Scalar:
        def __float__(self) -> float:
            return 0.5

    group = art.TrajectoryGroup([art.Trajectory(), art.Trajectory()])
    for trajectory in group:
        trajectory.reward = Scalar()  # type: ignore[assignment]
    assert not is_informative(group)
    group.trajectories[0].reward = np.array(1.0)  # type: ignore[assignment]
    assert is_informative(group)


@pytest.mark.parametrize("wrong", [{"max_concurrent_rollouts": 0}, {"max_exceptions": -1}, {"min_informative": 0}])
async def test_limits_that_cannot_be_are_refused(wrong: dict):
    with pytest.raises(ValueError, match=next(iter(wrong))):
        await art.gather_trajectory_groups([], **wrong)
