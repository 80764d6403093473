"""The server's endless tasks. After an error a task is started again; `/health` shows the error until the task
works."""

import asyncio
import contextlib
import logging
import math
from collections.abc import Awaitable, Callable, Coroutine
from typing import Any

from art_server.shared.clock import REAL, Clock

logger = logging.getLogger(__name__)

FIRST_PAUSE_SECONDS, LONGEST_PAUSE_SECONDS = 0.2, 30.0
"""Pause before failed work is started again, doubled after each failure."""
BEAT_SECONDS = 0.1
"""Interval of the checks of the event loop."""
STALL_SECONDS = 0.25
"""If the event loop is later than this, it was blocked."""
SAY_SECONDS = 60.0
"""The least time between two warnings that the event loop was blocked."""


class Background:
    """The server's endless tasks, and the present errors of tasks that fail."""

    def __init__(self, *, clock: Clock = REAL) -> None:
        self._clock = clock
        self.faults: dict[str, str] = {}
        """The last error, by the name of the work that fails."""
        self.num_faults: dict[str, int] = {}
        """Number of errors since the server's start, by the same name."""
        self._tasks: dict[str, asyncio.Task[None]] = {}

    def start(self, name: str, work: Callable[[], Coroutine[Any, Any, None]]) -> None:
        """Runs `work` in the background until it returns or `stop` is called; starts it again after every error."""
        self._tasks[name] = asyncio.create_task(self._keep(name, work), name=name)

    async def _keep(self, name: str, work: Callable[[], Awaitable[None]]) -> None:
        pause = FIRST_PAUSE_SECONDS
        while True:
            running = asyncio.ensure_future(work())
            try:
                # If it runs for longer than its last pause, it counts as working.
                async with self._clock.at_most(2 * pause):
                    # `wait` leaves the work running when the limit cancels it.
                    await asyncio.wait({running})
                if not running.done():
                    self.clear_fault(name)
                    pause = FIRST_PAUSE_SECONDS
                await running
                self.clear_fault(name)
                return
            except asyncio.CancelledError as error:
                task = asyncio.current_task()
                if task is not None and task.cancelling():  # `stop`
                    running.cancel()
                    await asyncio.wait({running})
                    raise
                self.record_fault(name, error)
            except Exception as error:  # the outermost handler of everything that runs here
                self.record_fault(name, error)
            await self._clock.sleep(pause)
            pause = min(2 * pause, LONGEST_PAUSE_SECONDS)

    def record_fault(self, name: str, error: BaseException) -> None:
        """Records and logs an error."""
        self.num_faults[name] = self.num_faults.get(name, 0) + 1
        self.faults[name] = f"{type(error).__name__}: {error}"
        logger.error("%s failed: %s", name, error, exc_info=error)

    def clear_fault(self, name: str) -> None:
        """Removes the recorded error, if there is one."""
        if self.faults.pop(name, None) is not None:
            logger.info("%s works again", name)

    async def stop(self, name: str | None = None) -> None:
        """Ends one task, or all of them."""
        names = list(self._tasks) if name is None else [name]
        tasks = [self._tasks.pop(task_name) for task_name in names if task_name in self._tasks]
        for task in tasks:
            task.cancel()
        for task in tasks:
            with contextlib.suppress(asyncio.CancelledError):
                await task


class LoopWatch:
    """Measures how late the event loop is."""

    def __init__(self, *, clock: Clock = REAL) -> None:
        self._clock = clock
        self.longest_stall_seconds = 0.0
        self._unsaid: list[float] = []
        """The seconds of the stalls since the last warning."""
        self._said_at = -math.inf

    async def run(self) -> None:
        """Runs until it is cancelled."""
        while True:
            began = self._clock.monotonic()
            await self._clock.sleep(BEAT_SECONDS)
            late = self._clock.monotonic() - began - BEAT_SECONDS
            self.longest_stall_seconds = max(self.longest_stall_seconds, late)
            if late > STALL_SECONDS:
                self._unsaid.append(late)
            if self._unsaid and self._clock.monotonic() - self._said_at >= SAY_SECONDS:
                logger.warning(
                    "the event loop was blocked (times: %d, longest: %.2f s)", len(self._unsaid), max(self._unsaid)
                )
                self._said_at = self._clock.monotonic()
                self._unsaid.clear()
