"""Runs art-server, and kills it when it reaches a named point of a job for the n-th time.

ART_CHAOS_POINT="step renamed:2" python -m tests.long.chaos.server --path ...
"""

import functools
import inspect
import os
import signal
import sys
from collections.abc import Callable
from typing import Any

from art_server import cli
from art_server.engine.engine import Engine
from art_server.jobs import trainer_process
from art_server.jobs.queue import JobQueue
from art_server.jobs.trainer import ServerTrainer
from art_server.store import files
from art_server.store.history import MetricHistory
from art_server.store.model_folder import ModelFolder

VARIABLE = "ART_CHAOS_POINT"

POINTS: dict[str, tuple[Any, str, bool]] = {
    "job written": (JobQueue, "insert", True),
    "job begins": (JobQueue, "set_running", False),
    "job is running": (JobQueue, "set_running", True),
    "engine paused": (Engine, "pause", True),
    "trained": (ServerTrainer, "run", True),
    "step described": (files, "publish_folder", False),
    "step renamed": (files, "publish_folder", True),
    "engine woken": (Engine, "resume", True),
    "adapter loaded": (Engine, "_load", True),
    "trajectories written": (ModelFolder, "write_lines", True),
    "history begins": (MetricHistory, "add", False),
    "history written": (MetricHistory, "add", True),
    "job ends": (JobQueue, "set_done", False),
    "job is done": (JobQueue, "set_done", True),
}
"""The function's owner and name, and whether the server dies after the call (True) or before it (False)."""


def arm(point: str, count: int) -> None:
    owner, name, is_after = POINTS[point]
    real = getattr(owner, name)
    left = [count]

    def arrive() -> None:
        left[0] -= 1
        if not left[0]:
            os.kill(os.getpid(), signal.SIGKILL)

    setattr(owner, name, dying(real, arrive, is_after))


def dying(real: Callable[..., Any], arrive: Callable[[], None], is_after: bool) -> Any:
    if inspect.iscoroutinefunction(real):

        @functools.wraps(real)
        async def call_async(*args: Any, **kwargs: Any) -> Any:
            if not is_after:
                arrive()
            result = await real(*args, **kwargs)
            if is_after:
                arrive()
            return result

        return call_async

    @functools.wraps(real)
    def call(*args: Any, **kwargs: Any) -> Any:
        if not is_after:
            arrive()
        result = real(*args, **kwargs)
        if is_after:
            arrive()
        return result

    return call


def main() -> None:
    trainer_process.SHORTEST_LIMIT_SECONDS = 60.0  # a stopped rank is found sooner
    if wanted := os.environ.pop(VARIABLE, None):
        name, _, number = wanted.partition(":")
        arm(name, int(number))
    cli.main(sys.argv[1:])


if __name__ == "__main__":
    main()
