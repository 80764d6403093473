"""A clock that a test moves: what waits for minutes takes milliseconds, and a limit ends only where the test says so."""

import asyncio
import contextlib
from collections.abc import AsyncIterator
from dataclasses import dataclass

from art_server.shared.clock import Clock
from tests.waiting import until

PAUSE_SECONDS = 0.01
"""How long a pause takes, whatever its length."""


@dataclass
class Wait:
    """A block that ends when the test has let `end` seconds pass."""

    seconds: float
    end: float


class FakeClock(Clock):
    """A pause takes some milliseconds, and then its time has passed; on a clock that `stands` it takes until the test lets
    its time pass. A limit always does: work under a limit has all the time that it needs."""

    def __init__(self, *, stands: bool = False) -> None:
        self._pause_seconds = None if stands else PAUSE_SECONDS
        self._time = 1e9
        self._passed = 0.0
        """What the test has let pass."""
        self._waits: dict[asyncio.Timeout, Wait] = {}

    def now(self) -> float:
        return self._time

    def monotonic(self) -> float:
        return self._time

    def advance(self, seconds: float) -> None:
        """Lets time pass."""
        self._time += seconds
        self._passed += seconds
        for block, wait in list(self._waits.items()):
            if wait.end <= self._passed:
                self._end(block)

    async def reach(self, seconds: float) -> None:
        """Returns when something waits for at most so long."""
        await until(lambda: any(wait.seconds == seconds for wait in self._waits.values()))

    async def end(self, seconds: float) -> None:
        """Does what `reach` does, and then lets this time pass."""
        await self.reach(seconds)
        self.advance(seconds)

    async def sleep(self, seconds: float) -> None:
        async with self.at_most(seconds):
            await asyncio.Event().wait()

    def timeout(self, seconds: float) -> contextlib.AbstractAsyncContextManager[object]:
        return self._block(seconds, None)

    @contextlib.asynccontextmanager
    async def at_most(self, seconds: float) -> AsyncIterator[None]:
        over = self._time + seconds
        try:
            async with self._block(seconds, self._pause_seconds):
                yield
        except TimeoutError:
            self._time = max(self._time, over)

    @contextlib.asynccontextmanager
    async def _block(self, seconds: float, real_seconds: float | None) -> AsyncIterator[None]:
        async with asyncio.timeout(real_seconds) as block:
            self._waits[block] = Wait(seconds, self._passed + seconds)
            if seconds <= 0:
                self._end(block)
            try:
                yield
            finally:
                self._waits.pop(block, None)

    def _end(self, block: asyncio.Timeout) -> None:
        del self._waits[block]
        if not block.expired():  # a pause may just have taken its milliseconds
            block.reschedule(0)
