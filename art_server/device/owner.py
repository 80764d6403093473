"""One owner of the device at a time: the engine, or the trainer for a step.

Whatever allocates on the device goes through here: an engine's start, the loading of an adapter, a wake-up, a step. So no
engine starts on a card that the trainer holds, and no adapter is written into memory that has been given up. Where the
two have devices of their own, each has an owner of its own, and nobody waits.
"""

import asyncio
import contextlib
from collections.abc import AsyncIterator
from typing import Literal

Who = Literal["engine", "trainer"]


class DeviceOwner:
    """A lock that knows who holds it."""

    def __init__(self) -> None:
        self._lock = asyncio.Lock()
        self.holder: Who | None = None
        """None: whoever comes next; the engine goes on computing in what it has."""

    @contextlib.asynccontextmanager
    async def held_by(self, who: Who) -> AsyncIterator[None]:
        """Wait for the device, and keep it for the block."""
        async with self._lock:
            self.holder = who
            try:
                yield
            finally:
                self.holder = None
