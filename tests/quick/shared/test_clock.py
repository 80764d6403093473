"""The clock of the server, and the fake one that tests use in its place."""

import asyncio

import pytest

from art_server.shared.clock import Clock
from tests.fakes.clock import FakeClock

pytestmark = pytest.mark.anyio


@pytest.mark.parametrize("clock", [Clock(), FakeClock(), FakeClock(stands=True)], ids=["real", "fake", "stands"])
async def test_a_limit_raises_and_a_pause_does_not(clock: Clock) -> None:
    with pytest.raises(TimeoutError):
        async with clock.timeout(0.0):
            await asyncio.Event().wait()
    async with clock.at_most(0.0):
        await asyncio.Event().wait()
    await clock.sleep(0.0)
    async with clock.timeout(60.0), clock.at_most(60.0):
        await asyncio.sleep(0)
    with pytest.raises(ValueError, match="of the block"):
        async with clock.at_most(60.0):
            raise ValueError("of the block")


async def test_on_the_fake_clock_a_pause_passes_by_itself_and_a_limit_does_not() -> None:
    clock = FakeClock()
    before = clock.monotonic()
    async with clock.timeout(60.0):
        await clock.sleep(3600.0)
    assert clock.monotonic() == before + 3600.0
    with pytest.raises(TimeoutError):
        async with clock.timeout(60.0):
            clock.advance(60.0)
            await asyncio.Event().wait()


async def test_on_a_fake_clock_that_stands_a_pause_takes_what_the_test_lets_pass() -> None:
    clock = FakeClock(stands=True)
    before = clock.now()
    sleeping = asyncio.create_task(clock.sleep(60.0))
    await clock.reach(60.0)
    clock.advance(59.0)
    await asyncio.sleep(0)
    assert not sleeping.done()
    clock.advance(1.0)
    await sleeping
    assert clock.now() == before + 60.0
