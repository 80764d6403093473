"""One owner of the device at a time: the engine, or the trainer for a step.

Everything that allocates on the device holds this lock: an engine's start, the loading of an adapter, a wake-up, a
step. So no engine starts on a card that the trainer holds, and no adapter is written into memory that was released.
Where engine and trainer have separate devices, only the engine uses the lock.
"""

import asyncio
import contextlib
from collections.abc import AsyncIterator


class DeviceOwner:
    """A lock on the device."""

    def __init__(self) -> None:
        self._lock = asyncio.Lock()

    @contextlib.asynccontextmanager
    async def held(self) -> AsyncIterator[None]:
        """Waits for the device and holds it during the block."""
        async with self._lock:
            yield
