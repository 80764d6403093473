import asyncio
import time

import pytest

from art_server.process import background as background_module
from art_server.process.background import Background, LoopWatch

pytestmark = pytest.mark.anyio


async def test_work_that_fails_begins_again_and_is_named_until_it_works(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(background_module, "FIRST_PAUSE_SECONDS", 0.02)
    background, tries = Background(), 0
    works = asyncio.Event()

    async def work() -> None:
        nonlocal tries
        tries += 1
        if tries == 1:
            raise asyncio.CancelledError  # from inside: nobody has stopped it
        if tries < 3:
            raise OSError("no room")
        works.set()
        await asyncio.sleep(60)

    background.start("pruning", work)
    await asyncio.wait_for(works.wait(), 5)
    assert background.faults == {"pruning": "OSError: no room"} and tries == 3
    async with asyncio.timeout(5):
        while background.faults:  # noqa: ASYNC110
            await asyncio.sleep(0.01)
    assert background.num_faults == {"pruning": 2}
    await background.stop()


async def test_work_that_returns_is_over() -> None:
    background, tries = Background(), 0

    async def work() -> None:
        nonlocal tries
        tries += 1

    background.start("once", work)
    await asyncio.sleep(0.05)
    assert tries == 1 and not background.faults
    await background.stop("once")


async def test_a_blocked_event_loop_is_measured_and_logged(
    caplog: pytest.LogCaptureFixture,
) -> None:
    watch, background = LoopWatch(), Background()
    background.start("loop watch", watch.run)
    for _ in range(5):
        await asyncio.sleep(0)  # so that it has begun
    time.sleep(1.0)  # noqa: ASYNC251 - this is what is measured
    while watch.longest_stall_seconds < 0.5:  # noqa: ASYNC110 - it has no event
        await asyncio.sleep(0.01)
    await background.stop()
    assert any("was blocked" in record.message for record in caplog.records)
