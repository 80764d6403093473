"""One owner of the device at a time: the engine, or the trainer for a step.

Everything that allocates on the device holds this lock: an engine's start, the loading of an adapter, a wake-up, a
step. So no engine starts on a card that the trainer holds, and no adapter is written into memory that was released.
Where engine and trainer have separate devices, only the engine uses the lock.
"""

import asyncio
import contextlib
from collections.abc import AsyncIterator, Sequence


class DeviceOwner:
    """A lock on the device."""

    def __init__(self) -> None:
        self._lock = asyncio.Lock()

    @property
    def is_held(self) -> bool:
        return self._lock.locked()

    @contextlib.asynccontextmanager
    async def held(self) -> AsyncIterator[None]:
        """Waits for the device and holds it during the block."""
        async with self._lock:
            yield


class AllDevices(DeviceOwner):
    """The devices of several engines at once, for the trainer, which takes turns with all of them."""

    def __init__(self, owners: Sequence[DeviceOwner]) -> None:
        super().__init__()
        self._owners = owners

    @contextlib.asynccontextmanager
    async def held(self) -> AsyncIterator[None]:
        """Waits for all devices and holds them during the block. Devices that an engine uses while it starts come first:
        meanwhile the other devices are free."""
        async with super().held():
            owners = sorted(self._owners, key=lambda owner: not owner.is_held)
            async with each_held(owners):
                yield


@contextlib.asynccontextmanager
async def each_held(owners: Sequence[DeviceOwner]) -> AsyncIterator[None]:
    """Waits for one device after the other and holds them during the block."""
    if not owners:
        yield
        return
    async with owners[0].held(), each_held(owners[1:]):
        yield
