"""ART's parts of a gather call, for programs with a gather function of their own.

    with set_gather_context(GatherContext(max_exceptions=2)):
        results = await asyncio.gather(*(wrap_group_awaitable(awaitable) for awaitable in awaitables))

The names are importable from `art.gather`."""

from collections.abc import Awaitable, Iterable
from typing import Any, TypeVar, cast

from tqdm.auto import tqdm

from art.pool import RolloutPool, current_pool
from art.trajectories import Trajectory, TrajectoryGroup

T = TypeVar("T")


class GatherContext(RolloutPool):
    """The pool of rollouts, with ART's names. `pbar` may be set later: the pool moves the bar and sets its length."""

    def __init__(
        self,
        pbar: "tqdm[Any] | None" = None,
        *,
        max_metrics: int | None = None,
        pbar_total_completion_tokens: bool = False,
        max_exceptions: float = 0,
    ) -> None:
        super().__init__(
            max_exceptions=max_exceptions,
            max_metrics=max_metrics,
            show_total_tokens=pbar_total_completion_tokens,
        )
        self.max_exceptions = max_exceptions
        self.pbar = pbar

    @property
    def pbar(self) -> "tqdm[Any] | None":
        return None if self._bar.disable else self._bar

    @pbar.setter
    def pbar(self, bar: "tqdm[Any] | None") -> None:
        if bar is not None:
            self._bar = bar
            self._update_bar()


def set_gather_context(context: GatherContext) -> GatherContext:
    """A `with` block: groups and rollouts that are awaited inside it belong to this context."""
    return context


def get_gather_context() -> RolloutPool:
    """The context of the `with` block or gather call; outside of both, a context that tolerates no failure."""
    return current_pool.get() or GatherContext()


async def wrap_group_awaitable(awaitable: Awaitable[T]) -> T | None:
    """The awaitable's result; None if the awaitable failed and the context tolerates the failure.

    Raises:
        Exception: too many rollouts of the context failed.
    """
    pool = get_gather_context()
    if isinstance(awaitable, TrajectoryGroup):
        return cast(T, await awaitable)  # each of the group's rollouts counts in the context
    pool.expect(1)
    result = await pool.run(awaitable, lambda result: result)
    if isinstance(result, Exception):
        return None
    is_many = isinstance(result, list | tuple | TrajectoryGroup)
    results = list(cast(Iterable[object], result)) if is_many else [result]
    trajectories = [trajectory for trajectory in results if isinstance(trajectory, Trajectory)]
    if trajectories:
        pool.expect(-1)  # the awaitable counted as one rollout; the trajectories count instead
    pool.count_unexpected(trajectories)
    return cast(T, result)


wrap_trajectories_awaitable = wrap_group_awaitable
"""ART has a second name for awaitables of trajectories."""
