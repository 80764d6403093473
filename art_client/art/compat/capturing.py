"""ART's in-process capture: a coroutine runs, and what it asked of the program's models is its trajectory.

    trajectory = await art.trajectory(run_agent(question))      # or art.capture_auto_trajectory

Everything that the coroutine sends to the server of a registered model belongs to one session, whichever HTTP client
sends it (`patches` lists those, and what stays outside). The conversations come from the server when the coroutine has
ended; until then the trajectory holds what the coroutine itself puts there, its reward for example.
"""

import asyncio
import math
import uuid
from collections.abc import Awaitable, Coroutine, Generator, Iterable
from contextlib import contextmanager, nullcontext
from typing import Any, Literal, overload

from art.compat import patches
from art.pool import RolloutPool, current_pool
from art.scopes import Scope, current_scope
from art.sessions import add_captured
from art.trajectories import Trajectory, TrajectoryGroup
from art.wire import FailureBody, SessionReply


async def trajectory(coroutine: Coroutine[Any, Any, object]) -> Trajectory:
    """Runs the coroutine, and returns what all models said in it as a trajectory, with metrics["duration"].

    The coroutine's result is dropped; it sets reward, metrics and metadata on `art.current_trajectory()`. Of two scopes,
    one in the other, requests belong to the inner one. Requests of tasks that still run when the coroutine has ended
    may be missing.
    """
    if isinstance(coroutine, asyncio.Future):
        raise TypeError("art.trajectory takes a coroutine: a task has a context of its own")
    patches.install()
    captured = Trajectory()
    scope = Scope(uuid.uuid4().hex, captured)
    with _entered(scope):
        await coroutine
    replies: dict[str, SessionReply] = {}
    for server in scope.servers:
        replies |= await server.fetch_captured(scope.session, replies)
    add_captured(captured, replies.values())
    return captured.finish()


capture_auto_trajectory = trajectory
"""The name that ART gave it first."""


@overload
def current_trajectory(*, required: Literal[True]) -> Trajectory: ...
@overload
def current_trajectory(*, require: Literal[True]) -> Trajectory: ...
@overload
def current_trajectory(*, required: bool = False, require: bool = False) -> Trajectory | None: ...
def current_trajectory(*, required: bool = False, require: bool = False) -> Trajectory | None:
    """The trajectory that is being captured here, the same object that `trajectory` returns; None outside.

    `required`, which later releases of ART spell `require`, raises RuntimeError instead.
    """
    scope = current_scope.get()
    captured = None if scope is None else scope.trajectory
    if captured is None and (required or require):
        raise RuntimeError(
            "no trajectory is being captured here: run this coroutine with `await art.trajectory(...)`"
        )
    return captured


auto_trajectory = current_trajectory
"""The name that ART gave it first."""


@contextmanager
def no_capture() -> Generator[None, None, None]:
    """A scope whose requests belong to no session: those of a judge, for example."""
    with _entered(None):
        yield


async def trajectory_group(
    trajectories: Iterable[Trajectory | BaseException | Awaitable[Trajectory]],
    *,
    exceptions: Iterable[BaseException | FailureBody] = (),
    metadata: dict[str, Any] | None = None,
    metrics: dict[str, float | int | bool] | None = None,
    logs: list[str] | None = None,
    return_exceptions: bool = False,
) -> TrajectoryGroup:
    """Runs `trajectory(...)` calls together, and returns their group.

    The first failure is raised, or with `return_exceptions` each is recorded on the group; inside a gather call, that
    call's `max_exceptions` decides.
    """
    group = TrajectoryGroup(
        trajectories, exceptions=exceptions, metadata=metadata, metrics=metrics, logs=logs
    )
    max_exceptions = math.inf if return_exceptions else 0
    outer = current_pool.get()
    with nullcontext() if outer is not None else RolloutPool(max_exceptions=max_exceptions):
        return await group


@contextmanager
def _entered(scope: Scope | None) -> Generator[None, None, None]:
    token = current_scope.set(scope)
    try:
        yield
    finally:
        current_scope.reset(token)
