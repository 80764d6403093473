"""Gathering: runs rollouts concurrently, in order, with a limit on how many run at a time, and shows a progress bar.

A failed rollout is recorded and counted, never turned into a reward. `max_exceptions` failures are tolerated (a number,
or a share of all rollouts if between 0 and 1). One more failure cancels the running rollouts, and the first error is
raised. The default, 0, raises the first failure.

`pbar_desc=None` shows no bar. `max_metrics` limits the number of metrics that the bar shows. `max_concurrent_rollouts`
limits the rollouts of all groups together.
"""

from collections.abc import Awaitable, Callable, Iterable
from typing import Any, Literal, TypeVar, cast, overload

from art.pool import DEFAULT_MAX_CONCURRENT_ROLLOUTS, RolloutPool, close_unstarted, run_all
from art.trajectories import Trajectory, TrajectoryGroup, to_trajectory

AfterEach = Callable[[TrajectoryGroup], Awaitable[TrajectoryGroup | list[TrajectoryGroup] | None]]
R = TypeVar("R", bound=Trajectory | Iterable[Trajectory])


async def gather_trajectory_groups(
    groups: Iterable[Awaitable[TrajectoryGroup]],
    *,
    pbar_desc: str | None = "gather",
    pbar_total_completion_tokens: bool = False,
    max_exceptions: float = 0,
    max_metrics: int | None = None,
    after_each: AfterEach | None = None,
    max_concurrent_rollouts: int = DEFAULT_MAX_CONCURRENT_ROLLOUTS,
) -> list[TrajectoryGroup]:
    """The groups in order, each with its failed rollouts in `exceptions`.

    `after_each` is awaited with every group that has a trajectory, as soon as the group is complete. It returns the
    result: a group, a list of groups, or None to leave the group out. If it fails, or if the awaitable of a group
    fails, the result is a group with failures only, so that nothing is trained on incomplete rewards.

    The rollouts of a group made of coroutines, `TrajectoryGroup(rollout(...) for ...)`, are limited and counted one by
    one. Rollouts that an awaitable of the caller runs without such a group are not.
    """
    pending = list(groups)
    rollouts = RolloutPool(
        desc=pbar_desc,
        max_concurrent=max_concurrent_rollouts,
        max_exceptions=max_exceptions,
        max_metrics=max_metrics,
        show_total_tokens=pbar_total_completion_tokens,
    )
    rollouts.expect(sum(not isinstance(group, TrajectoryGroup) for group in pending))
    with rollouts:
        try:
            results = await run_all(_finish_group(rollouts, group, after_each) for group in pending)
        finally:
            close_unstarted(pending)
            for group in pending:
                if isinstance(group, TrajectoryGroup):
                    group.close()
        rollouts.raise_if_too_many_failures()  # a coroutine of the caller may have caught the error
    return [group for result in results for group in result]


async def _finish_group(
    rollouts: RolloutPool, awaitable: Awaitable[TrajectoryGroup], after_each: AfterEach | None
) -> list[TrajectoryGroup]:
    group = TrajectoryGroup()
    try:
        group = _to_group(await awaitable)
        if not isinstance(awaitable, TrajectoryGroup):
            rollouts.expect(-1)  # it counted as one rollout; the group's rollouts count instead
        rollouts.count_unexpected(group)
        if after_each is None or not group.trajectories:
            return [group]
        result = await after_each(group)
    except Exception as error:
        if rollouts.has_too_many_failures:
            raise
        failure = error
    else:
        if result is None:
            return []
        return result if isinstance(result, list) else [result]
    rollouts.fail(failure)
    return [
        TrajectoryGroup(
            exceptions=[*group.exceptions, failure],
            metadata=group.metadata,
            metrics=group.metrics,
            logs=group.logs,
        )
    ]


def _to_group(result: object) -> TrajectoryGroup:
    if not isinstance(result, TrajectoryGroup):
        raise TypeError(
            f"the awaitable of a group returned {type(result).__name__}, not art.TrajectoryGroup"
        )
    return result


@overload
async def gather_trajectories(
    trajectories: Iterable[Awaitable[R]],
    *,
    pbar_desc: str | None = "gather",
    pbar_total_completion_tokens: bool = False,
    max_exceptions: Literal[0] = 0,
    max_concurrent_rollouts: int = DEFAULT_MAX_CONCURRENT_ROLLOUTS,
) -> list[R]: ...


@overload
async def gather_trajectories(
    trajectories: Iterable[Awaitable[R]],
    *,
    pbar_desc: str | None = "gather",
    pbar_total_completion_tokens: bool = False,
    max_exceptions: float,
    max_concurrent_rollouts: int = DEFAULT_MAX_CONCURRENT_ROLLOUTS,
) -> list[R | Exception]: ...


async def gather_trajectories(
    trajectories: Iterable[Awaitable[Any]],
    *,
    pbar_desc: str | None = "gather",
    pbar_total_completion_tokens: bool = False,
    max_exceptions: float = 0,
    max_concurrent_rollouts: int = DEFAULT_MAX_CONCURRENT_ROLLOUTS,
) -> list[Any]:
    """The rollouts' results, in order: a trajectory, a list of trajectories, or the exception of a failed rollout."""
    pending = list(trajectories)
    rollouts = RolloutPool(
        desc=pbar_desc,
        max_concurrent=max_concurrent_rollouts,
        max_exceptions=max_exceptions,
        show_total_tokens=pbar_total_completion_tokens,
    )
    rollouts.expect(len(pending))
    with rollouts:
        try:
            return await run_all(_run_one(rollouts, rollout) for rollout in pending)
        finally:
            close_unstarted(pending)


async def _run_one(
    rollouts: RolloutPool, rollout: Awaitable[object]
) -> Trajectory | list[Trajectory] | Exception:
    result = await rollouts.run(rollout, _to_trajectories)
    if isinstance(result, Trajectory):
        rollouts.count(result)
    if isinstance(result, list):
        rollouts.expect(-1)  # it counted as one rollout; its trajectories count instead
        rollouts.count_unexpected(result)
    return result


def _to_trajectories(result: object) -> Trajectory | list[Trajectory]:
    if isinstance(result, (Trajectory, BaseException)) or not isinstance(result, Iterable):
        return to_trajectory(result)
    return [to_trajectory(entry) for entry in cast(Iterable[object], result)]
