"""The time of day, waiting, and the order of events."""

import asyncio
import contextlib
import threading
import time
from collections.abc import AsyncIterator

_latest = 0
_lock = threading.Lock()


class Clock:
    """The time, for parts of the server that wait. Tests give them a clock that does not take as long."""

    def now(self) -> float:
        """Seconds since 1970."""
        return now()

    def monotonic(self) -> float:
        """Seconds since some moment, whatever becomes of the time of day."""
        return time.monotonic()

    async def sleep(self, seconds: float) -> None:
        """Waits."""
        await asyncio.sleep(seconds)

    def timeout(self, seconds: float) -> contextlib.AbstractAsyncContextManager[object]:
        """A limit for a block, which raises TimeoutError if it takes longer."""
        return asyncio.timeout(seconds)

    @contextlib.asynccontextmanager
    async def at_most(self, seconds: float) -> AsyncIterator[None]:
        """A pause that something may end early: the block, which waits for it, ends without an error after `seconds`."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(seconds):
                yield


REAL = Clock()


def now() -> float:
    """Seconds since 1970."""
    return time.time()


def tick(after: int = 0) -> int:
    """A time in microseconds since 1970 that is later than the times of all earlier calls, and later than `after`: the
    order of events is exact, also across restarts."""
    global _latest
    with _lock:
        _latest = max(int(now() * 1e6), _latest + 1, after + 1)
        return _latest
