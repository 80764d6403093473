import asyncio
import itertools
from types import SimpleNamespace

import pytest

from art_server.process import background as background_module
from art_server.process.background import Background, LoopWatch
from tests.waiting import until

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
        await asyncio.Event().wait()

    background.start("pruning", work)
    await works.wait()
    assert background.faults == {"pruning": "OSError: no room"} and tries == 3
    await until(lambda: not background.faults)
    assert background.num_faults == {"pruning": 2}
    await background.stop()


async def test_work_that_returns_is_over() -> None:
    background, tries = Background(), 0

    async def work() -> None:
        nonlocal tries
        tries += 1

    background.start("once", work)
    await background._tasks["once"]
    assert tries == 1 and not background.faults
    await background.stop("once")


async def test_a_blocked_event_loop_is_measured_and_logged(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each beat comes a second later than the one before it."""
    clock = SimpleNamespace(monotonic=itertools.count(0.0, 1.0).__next__)
    monkeypatch.setattr(background_module, "time", clock)
    watch, background = LoopWatch(), Background()
    background.start("loop watch", watch.run)
    await until(lambda: watch.longest_stall_seconds)
    assert watch.longest_stall_seconds == 1.0 - background_module.BEAT_SECONDS
    await background.stop()
    assert any("was blocked" in record.message for record in caplog.records)
