"""Gathering: runs rollouts concurrently, in order, with a limit on how many run at a time, and shows a progress bar.

A failed rollout is recorded and counted, never turned into a reward. `max_exceptions` failures are tolerated (an int is a
count, a float up to 1.0 a share of all rollouts), and one warning names their number and the first. One more failure
cancels the running rollouts, and the first error is raised: its traceback has the program's own frames, and one line
counts the failures by type. Groups tolerate a tenth by default. `gather_trajectories`
raises the first failure by default, because it returns tolerated failures among the trajectories.

`min_informative` refills dead groups. A group whose rewards are all equal has no signal, so the next group is sampled
instead. An iterator keeps the groups that were not taken, for the next call. Source: dynamic sampling, Yu et al. 2025,
arXiv:2503.14476, section 3.2.

`pbar_desc=None` shows no bar. `max_metrics` limits the number of metrics that the bar shows. `max_concurrent_rollouts`
limits the rollouts of all groups together.
"""

import itertools
import logging
from collections.abc import Awaitable, Callable, Collection, Iterable, Iterator, Sequence
from typing import Any, Literal, TypeVar, cast, overload

from art.contained import contained
from art.pool import (
    DEFAULT_MAX_CONCURRENT_ROLLOUTS,
    DEFAULT_MAX_EXCEPTIONS,
    RolloutPool,
    close_unstarted,
    run_all,
)
from art.trajectories import Trajectory, TrajectoryGroup, is_informative, to_trajectory

logger = logging.getLogger(__name__)

AfterEach = Callable[[TrajectoryGroup], Awaitable[TrajectoryGroup | list[TrajectoryGroup] | None]]
R = TypeVar("R", bound=Trajectory | Iterable[Trajectory])


async def gather_trajectory_groups(
    groups: Iterable[Awaitable[TrajectoryGroup]],
    *,
    pbar_desc: str | None = "gather",
    pbar_total_completion_tokens: bool = False,
    max_exceptions: float = DEFAULT_MAX_EXCEPTIONS,
    max_metrics: int | None = None,
    after_each: AfterEach | None = None,
    max_concurrent_rollouts: int = DEFAULT_MAX_CONCURRENT_ROLLOUTS,
    min_informative: int | None = None,
) -> list[TrajectoryGroup]:
    """The groups in order, each with its failed rollouts in `exceptions`.

    `max_exceptions` is the count of failures that are tolerated (an int), or their share (a float up to 1.0, which tolerates all).

    `after_each` is awaited with every group that has a trajectory, as soon as the group is complete. It returns the
    result: a group, a list of groups, or None to leave the group out. If `after_each` or the awaitable of a group fails,
    the result is a group with failures only, so that nothing is trained on incomplete rewards.

    The rollouts of a group made of coroutines, `TrajectoryGroup(rollout(...) for ...)`, are limited and counted one by
    one. Rollouts that an awaitable of the caller runs without such a group are neither limited nor counted.

    With `min_informative`, groups are taken one by one until this number of groups has rewards that are not all equal. The
    result has all groups that were taken. If `groups` ends before, a warning reports the end.
    """
    if min_informative is not None and min_informative < 1:
        raise ValueError(f"min_informative must be at least 1, not {min_informative}")
    if isinstance(groups, TrajectoryGroup):
        groups.close()
        raise TypeError("gather_trajectory_groups takes a list of groups, not one TrajectoryGroup: pass [group]")
    pool = RolloutPool(
        desc=pbar_desc,
        max_concurrent=max_concurrent_rollouts,
        max_exceptions=max_exceptions,
        max_metrics=max_metrics,
        show_total_tokens=pbar_total_completion_tokens,
    )
    waiting = iter(groups)
    taken: list[Awaitable[TrajectoryGroup]] = []
    with pool:
        try:
            if min_informative is None:
                taken += waiting
                pool.expect_groups(sum(not isinstance(group, TrajectoryGroup) for group in taken))
                results = await run_all(_finish_group(pool, group, after_each) for group in taken)
            else:
                results = await _refill(pool, waiting, taken, after_each, min_informative)
        finally:
            close_groups([*taken, *waiting] if isinstance(groups, Collection) else taken)
        pool.raise_if_too_many_failures()  # a coroutine of the caller may have caught the error
    return [group for result in results for group in result]


async def _refill(
    pool: RolloutPool,
    waiting: Iterator[Awaitable[TrajectoryGroup]],
    taken: list[Awaitable[TrajectoryGroup]],
    after_each: AfterEach | None,
    min_informative: int,
) -> list[list[TrajectoryGroup]]:
    """Moves groups from `waiting` to `taken` and runs them, until `min_informative` are informative. Returns the
    results of all `taken` groups."""
    results_by_index: dict[int, list[TrajectoryGroup]] = {}

    async def run_until_informative() -> None:
        for group in waiting:
            index = len(taken)
            taken.append(group)
            if not isinstance(group, TrajectoryGroup):
                pool.expect_groups(1)
            result = results_by_index[index] = await _finish_group(pool, group, after_each)
            if any(map(is_informative, result)):
                return

    await run_all(run_until_informative() for _ in range(min_informative))
    results = [results_by_index[index] for index in range(len(taken))]
    num_informative = sum(is_informative(group) for result in results for group in result)
    logger.info("sampled %d groups, %d of them informative", len(taken), num_informative)
    if num_informative < min_informative:
        logger.warning(
            "only %d of %d sampled groups are informative, and no groups are left; min_informative=%d. "
            "Pass more groups, or scenarios that the model neither always solves nor always fails",
            *(num_informative, len(taken), min_informative),
        )
    return results


def close_groups(groups: Iterable[Awaitable[TrajectoryGroup]]) -> None:
    """Closes coroutines that have not started, so that Python does not warn about them."""
    for group in groups:
        if isinstance(group, TrajectoryGroup):
            group.close()
        else:
            close_unstarted([group])


async def _finish_group(
    pool: RolloutPool, awaitable: Awaitable[TrajectoryGroup], after_each: AfterEach | None
) -> list[TrajectoryGroup]:
    group = TrajectoryGroup()
    try:
        group = await _resolve(pool, awaitable)
        pool.count_unexpected(group)
        if after_each is None or not group.trajectories:
            return [group]
        with contained("after_each"):
            result = await after_each(group)
    except Exception as error:
        if pool.has_too_many_failures:
            raise
        failure = error
    else:
        if result is None:
            return []
        return result if isinstance(result, list) else [result]
    pool.fail(failure)
    return [
        TrajectoryGroup(
            exceptions=[*group.exceptions, failure],
            metadata=group.metadata,
            metrics=group.metrics,
            logs=group.logs,
        )
    ]


async def _resolve(pool: RolloutPool, awaitable: Awaitable[TrajectoryGroup]) -> TrajectoryGroup:
    if isinstance(awaitable, TrajectoryGroup):
        return await awaitable
    is_failed = True
    try:
        with contained("the awaitable of a group"):
            group = _to_group(await awaitable)
        is_failed = False
    finally:
        pool.resolve_group(is_failed=is_failed)
    return group


def _to_group(result: object) -> TrajectoryGroup:
    if not isinstance(result, TrajectoryGroup):
        kind = type(result).__name__
        raise TypeError(
            f"the awaitable of a group returned {kind}, not art.TrajectoryGroup: a group is made of several rollouts, "
            "`art.TrajectoryGroup(rollout(...) for _ in range(8))`"
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
    """The rollouts' results, in order: a trajectory, a list of trajectories, or the exception of a failed rollout.

    `max_exceptions` is a count (an int) or a share (a float up to 1.0), as in `gather_trajectory_groups`.
    """
    pool = RolloutPool(
        desc=pbar_desc,
        max_concurrent=max_concurrent_rollouts,
        max_exceptions=max_exceptions,
        show_total_tokens=pbar_total_completion_tokens,
    )
    return await gather_in(pool, trajectories, [""])


async def gather_in(pool: RolloutPool, trajectories: Iterable[Awaitable[Any]], labels: Sequence[str]) -> list[Any]:
    """The rollouts' results as of `gather_trajectories`. The labels of the rollouts, in the pool's bar, are `labels` in turn."""
    pending = list(trajectories)
    pool.expect(len(pending))
    with pool:
        try:
            pairs = zip(pending, itertools.cycle(labels), strict=False)
            return await run_all(_run_one(pool, rollout, label) for rollout, label in pairs)
        finally:
            close_unstarted(pending)


async def _run_one(
    pool: RolloutPool, rollout: Awaitable[object], label: str
) -> Trajectory | list[Trajectory] | Exception:
    result = await pool.run(rollout, _to_trajectories)
    if isinstance(result, Trajectory):
        pool.count(result, label)
    if isinstance(result, list):
        pool.expect(-1)  # the list counted as one rollout; its trajectories count instead
        pool.count_unexpected(result)
    return result


def _to_trajectories(result: object) -> Trajectory | list[Trajectory]:
    # A trajectory is iterable itself, as every pydantic model: it yields its fields.
    if isinstance(result, (Trajectory, BaseException)) or not isinstance(result, Iterable):
        return to_trajectory(result)
    return [to_trajectory(entry) for entry in cast(Iterable[object], result)]
