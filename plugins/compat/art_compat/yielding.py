"""ART's way to hand over a trajectory from inside an agent that returns something else."""

from collections.abc import Awaitable
from contextvars import ContextVar

from art.trajectories import Trajectory

_yielded: ContextVar[list[Trajectory] | None] = ContextVar("_yielded", default=None)


def yield_trajectory(trajectory: Trajectory) -> None:
    """Hands a trajectory to the `capture_yielded_trajectory` that runs this coroutine. The last trajectory counts.

    Raises:
        RuntimeError: no `capture_yielded_trajectory` runs this coroutine.
    """
    slot = _yielded.get()
    if slot is None:
        raise RuntimeError(
            "yield_trajectory: nothing captures here: run this coroutine with "
            "`await art.capture_yielded_trajectory(...)`"
        )
    slot[:] = [trajectory]


async def capture_yielded_trajectory(coroutine: Awaitable[object]) -> Trajectory:
    """Runs the coroutine, drops its result, and returns the yielded trajectory.

    Raises:
        RuntimeError: the coroutine yielded no trajectory.
    """
    slot: list[Trajectory] = []
    token = _yielded.set(slot)
    try:
        await coroutine
    finally:
        _yielded.reset(token)
    if not slot:
        raise RuntimeError("the coroutine did not call art.yield_trajectory")
    return slot[0]
