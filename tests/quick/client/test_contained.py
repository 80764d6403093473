"""Rollouts that end as a program ends. Only the program's own end passes."""

import asyncio
import contextlib
import gc
import signal
import sys
from collections.abc import Awaitable, Callable
from typing import Any

import pytest

import art

pytestmark = pytest.mark.anyio


class Panic(BaseException):
    """As the bindings of Rust libraries raise it."""


async def good(reward: float = 1.0) -> art.Trajectory:
    return art.Trajectory(reward=reward)


async def in_coroutine() -> art.Trajectory:
    sys.exit(2)


async def in_thread() -> art.Trajectory:
    await asyncio.to_thread(sys.exit, 2)
    return await good()


async def in_parallel_tools() -> art.Trajectory:
    await asyncio.gather(asyncio.sleep(0), in_coroutine())
    return await good()


async def in_task_group() -> art.Trajectory:
    async with asyncio.TaskGroup() as tasks:
        tasks.create_task(in_coroutine())
        tasks.create_task(asyncio.Event().wait())
    return await good()


async def in_a_tools_clean_up() -> art.Trajectory:
    async def tool() -> None:
        try:
            await asyncio.Event().wait()
        finally:
            sys.exit(2)

    task = asyncio.create_task(tool())
    await asyncio.sleep(0)
    task.cancel()
    await task
    return await good()


async def returned() -> art.Trajectory:
    return SystemExit(2)  # type: ignore[return-value]


async def panics() -> art.Trajectory:
    raise Panic("index out of bounds")


async def panics_in_group() -> art.Trajectory:
    raise BaseExceptionGroup("tools", [Panic("a"), ValueError("b")])


async def raises_generator_exit() -> art.Trajectory:
    raise GeneratorExit


ENDS: list[Callable[[], Awaitable[art.Trajectory]]] = [
    in_coroutine,
    in_thread,
    in_parallel_tools,
    in_task_group,
    in_a_tools_clean_up,
    returned,
    panics,
    panics_in_group,
    raises_generator_exit,
]


@pytest.mark.parametrize("end", ENDS)
async def test_what_ends_a_rollout_is_a_failed_rollout(end: Callable[[], Awaitable[art.Trajectory]]):
    (group,) = await art.gather_trajectory_groups(
        [art.TrajectoryGroup([good(), end(), good(0.0)])], pbar_desc=None, max_exceptions=1
    )
    assert [trajectory.reward for trajectory in group] == [1.0, 0.0]
    (failure,) = group.exceptions
    assert failure.traceback is not None
    assert any(name in failure.traceback for name in ("ended with SystemExit(2)", "Panic", "GeneratorExit"))
    assert asyncio.get_running_loop().get_task_factory() is None


async def test_each_way_to_run_a_rollout_survives_its_end():
    results = await art.gather_trajectories([in_coroutine(), good()], pbar_desc=None, max_exceptions=1)
    assert [type(result) for result in results] == [RuntimeError, art.Trajectory]

    async def group_of_the_caller() -> art.TrajectoryGroup:
        await in_parallel_tools()
        return art.TrajectoryGroup()

    async def judge(group: art.TrajectoryGroup) -> art.TrajectoryGroup:
        sys.exit(3)

    groups = await art.gather_trajectory_groups(
        [group_of_the_caller(), art.TrajectoryGroup([good()])], pbar_desc=None, max_exceptions=9, after_each=judge
    )
    assert ["SystemExit(2)" in groups[0].exceptions[0].message, "SystemExit(3)" in groups[1].exceptions[0].message] == [
        True,
        True,
    ]
    (alone,) = (await art.TrajectoryGroup([in_thread(), good()])).exceptions
    assert alone.message == (
        "the rollout ended with SystemExit(2), as a command line does: call the function behind it"
    )


async def test_too_many_exits_are_an_exception_of_the_gather():
    with pytest.raises(RuntimeError, match=r"SystemExit\(2\)"):
        await art.gather_trajectories([in_coroutine(), good()], pbar_desc=None)


def run_to_the_end(rollout: Callable[[], Awaitable[art.Trajectory]]) -> None:
    async def program() -> None:
        await art.gather_trajectories([rollout(), good()], pbar_desc=None, max_exceptions=9)

    with contextlib.closing(asyncio.new_event_loop()) as loop:
        loop.run_until_complete(program())


@pytest.mark.filterwarnings("ignore")  # the loop is left in mid-program
@pytest.mark.parametrize("is_in_task", [False, True])
def test_the_programs_own_end_passes(is_in_task: bool):
    async def interrupted() -> None:
        raise KeyboardInterrupt

    class Program:
        def end(self, *_: Any) -> None:
            sys.exit(143)

    async def terminated() -> None:
        signal.raise_signal(signal.SIGTERM)

    def rollout(end: Callable[[], Awaitable[None]]) -> Callable[[], Awaitable[art.Trajectory]]:
        async def play() -> art.Trajectory:
            await (asyncio.gather(end()) if is_in_task else end())
            return await good()

        return play

    with pytest.raises(KeyboardInterrupt):
        run_to_the_end(rollout(interrupted))
    before = signal.signal(signal.SIGTERM, Program().end)
    try:
        with pytest.raises(SystemExit):
            run_to_the_end(rollout(terminated))
    finally:
        signal.signal(signal.SIGTERM, before)
        gc.collect()


async def test_a_loops_own_task_factory_is_used_and_comes_back():
    names: list[str] = []

    def factory(loop: asyncio.AbstractEventLoop, coroutine: Any, **options: Any) -> asyncio.Task[Any]:
        task = asyncio.Task(coroutine, loop=loop, **options)
        names.append(task.get_coro().__name__)  # type: ignore[union-attr]
        return task

    async def two_tools() -> art.Trajectory:
        await asyncio.gather(good(), good())
        return await good()

    asyncio.get_running_loop().set_task_factory(factory)
    try:
        await art.gather_trajectories([two_tools(), two_tools()], pbar_desc=None)
        assert asyncio.get_running_loop().get_task_factory() is factory
    finally:
        asyncio.get_running_loop().set_task_factory(None)
    assert names.count("good") == 4
