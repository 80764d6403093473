"""ART's capture of a coroutine: the coroutine's requests to the program's models become a trajectory.

    trajectory = await art.trajectory(run_agent(question))      # or art.capture_auto_trajectory

All requests of the coroutine to the server of a registered model belong to one session, with any HTTP client that
`art.patches` covers. Where no registered model answers, the trajectory has the answers of other servers
(`art.other_providers`). The conversations come after the coroutine has ended. Until then the trajectory contains only what the
coroutine sets, for example its reward.
"""

import asyncio
import math
import uuid
from collections.abc import Awaitable, Coroutine, Iterable
from contextlib import nullcontext
from typing import Any, Literal, overload

from art import other_providers, patches
from art.capturing import captured_in
from art.pool import RolloutPool, current_pool
from art.scopes import current_scope
from art.sessions import add_captured, add_histories, show_command
from art.trajectories import Trajectory, TrajectoryGroup
from art_protocol.wire import FailureBody, SessionReply


async def trajectory(coroutine: Coroutine[Any, Any, object]) -> Trajectory:
    """Runs the coroutine, and returns the answers of all models in it as a trajectory, with metrics["duration"].

    The coroutine sets reward, metrics and metadata on `art.current_trajectory()`; its result is dropped. In nested
    scopes, requests belong to the inner scope. Requests of tasks that still run when the coroutine ends may be missing. A failure
    has a note with the command that shows the answers (`art show MODEL --session ...`).
    """
    if isinstance(coroutine, asyncio.Future):
        raise TypeError("art.trajectory takes a coroutine, not a task: a task has its own context")
    patches.patch_http_clients()
    session = uuid.uuid4().hex
    scope = other_providers.Capture(session)
    captured = scope.trajectory
    try:
        with captured_in(scope):
            await coroutine
    except Exception as error:
        commands = [
            show_command(name, session, server.base_url) for server in scope.servers for name in server.trainable_names
        ]
        if commands:
            error.add_note(f"{' or '.join(commands)} shows what it was answered, if it asked the model")
        raise
    replies: dict[str, SessionReply] = {}
    for server in scope.servers:
        replies |= await server.fetch_captured(session, replies)
    add_captured(captured, replies.values())
    if not any(reply.histories or reply.unused for reply in replies.values()):
        add_histories(captured, other_providers.histories(scope.answers))
    return captured.finish()


capture_auto_trajectory = trajectory
"""ART's first name for `trajectory`."""


@overload
def current_trajectory(*, required: Literal[True]) -> Trajectory: ...
@overload
def current_trajectory(*, require: Literal[True]) -> Trajectory: ...
@overload
def current_trajectory(*, required: bool = False, require: bool = False) -> Trajectory | None: ...
def current_trajectory(*, required: bool = False, require: bool = False) -> Trajectory | None:
    """The trajectory that is being captured, the same object that `trajectory` returns; None outside a capture.

    Raises:
        RuntimeError: outside a capture, with `required` (`require` in later releases of ART).
    """
    scope = current_scope.get()
    captured = scope.trajectory if isinstance(scope, other_providers.Capture) else None
    if captured is None and (required or require):
        raise RuntimeError("no trajectory is being captured here: run this coroutine with `await art.trajectory(...)`")
    return captured


auto_trajectory = current_trajectory
"""ART's first name for `current_trajectory`."""


async def trajectory_group(
    trajectories: Iterable[Trajectory | BaseException | Awaitable[Trajectory]],
    *,
    exceptions: Iterable[BaseException | FailureBody] = (),
    metadata: dict[str, Any] | None = None,
    metrics: dict[str, float | int | bool] | None = None,
    logs: list[str] | None = None,
    return_exceptions: bool = False,
) -> TrajectoryGroup:
    """Runs `trajectory(...)` calls concurrently, and returns their group.

    The first failure is raised. With `return_exceptions`, all failures are recorded on the group instead. In a gather
    call, that call's `max_exceptions` decides.
    """
    group = TrajectoryGroup(trajectories, exceptions=exceptions, metadata=metadata, metrics=metrics, logs=logs)
    max_exceptions = math.inf if return_exceptions else 0
    outer = current_pool.get()
    with nullcontext() if outer is not None else RolloutPool(max_exceptions=max_exceptions):
        return await group
