"""Work of the server that never ends by itself: it is started again after an error, and `/health` names what is not well."""

import asyncio
import contextlib
import logging
import sys
import threading
import time
import traceback
from collections.abc import Awaitable, Callable, Coroutine
from typing import Any

logger = logging.getLogger(__name__)

FIRST_PAUSE_SECONDS, LONGEST_PAUSE_SECONDS = 0.2, 30.0
"""Before work that failed begins again, doubled from one failure to the next."""
BEAT_SECONDS = 0.1
"""Between two looks at the event loop."""
STALL_SECONDS = 0.25
"""An event loop that answers later than this is logged, with the line that holds it."""


class Background:
    """The server's endless tasks, and the faults that they have met and not yet overcome."""

    def __init__(self) -> None:
        self.faults: dict[str, str] = {}
        """By the name of what is not well: what happened last."""
        self.num_faults: dict[str, int] = {}
        """By the same name, since the server's start."""
        self._tasks: dict[str, asyncio.Task[None]] = {}

    def start(self, name: str, work: Callable[[], Coroutine[Any, Any, None]]) -> None:
        """Run `work` in the background until it returns or `stop` is called; again after every error."""
        self._tasks[name] = asyncio.create_task(self._keep(name, work), name=name)

    async def _keep(self, name: str, work: Callable[[], Awaitable[None]]) -> None:
        pause = FIRST_PAUSE_SECONDS
        while True:
            running = asyncio.ensure_future(work())
            try:
                # Well again when it has run for longer than it was paused.
                await asyncio.wait({running}, timeout=2 * pause)
                if not running.done():
                    self.is_well(name)
                    pause = FIRST_PAUSE_SECONDS
                await running
                self.is_well(name)
                return
            except asyncio.CancelledError as error:
                task = asyncio.current_task()
                if task is not None and task.cancelling():  # `stop`
                    running.cancel()
                    await asyncio.wait({running})
                    raise
                self.is_faulty(name, error)
            except Exception as error:  # the outermost handler of everything that runs here
                self.is_faulty(name, error)
            await asyncio.sleep(pause)
            pause = min(2 * pause, LONGEST_PAUSE_SECONDS)

    def is_faulty(self, name: str, error: BaseException) -> None:
        """Note and log an error."""
        self.num_faults[name] = self.num_faults.get(name, 0) + 1
        self.faults[name] = f"{type(error).__name__}: {error}"
        logger.error("%s failed: %s", name, error, exc_info=error)

    def is_well(self, name: str) -> None:
        """What failed last works again."""
        if self.faults.pop(name, None) is not None:
            logger.info("%s works again", name)

    async def stop(self, name: str | None = None) -> None:
        """End one task, or all of them."""
        names = list(self._tasks) if name is None else [name]
        tasks = [self._tasks.pop(each) for each in names if each in self._tasks]
        for task in tasks:
            task.cancel()
        for task in tasks:
            with contextlib.suppress(asyncio.CancelledError):
                await task


class LoopWatch:
    """Measures how late the event loop is, and logs what holds it.

    A thread looks at a number that the loop raises; when the number stands still, it reads the loop's stack.
    """

    def __init__(self) -> None:
        self.longest_stall_seconds = 0.0
        self._thread_id = threading.get_ident()
        self._beat = time.monotonic()
        self._is_over = threading.Event()

    async def run(self) -> None:
        """Until it is cancelled."""
        self._thread_id, self._beat = threading.get_ident(), time.monotonic()
        self._is_over.clear()
        watcher = threading.Thread(target=self._look, name="loop watch", daemon=True)
        watcher.start()
        try:
            while True:
                await asyncio.sleep(BEAT_SECONDS)
                now = time.monotonic()
                self.longest_stall_seconds = max(
                    self.longest_stall_seconds, now - self._beat - BEAT_SECONDS
                )
                self._beat = now
        finally:
            self._is_over.set()

    def _look(self) -> None:
        told = 0.0
        while not self._is_over.wait(BEAT_SECONDS):
            beat = self._beat
            late = time.monotonic() - beat - BEAT_SECONDS
            if late > STALL_SECONDS and beat != told:
                told = beat
                frame = sys._current_frames().get(self._thread_id)
                where = "".join(traceback.format_stack(frame, limit=6)) if frame else "?"
                logger.warning("the event loop is held for more than %.2f s by\n%s", late, where)
