import asyncio

import pytest

from art_server.process.background import BEAT_SECONDS, FIRST_PAUSE_SECONDS, SAY_SECONDS, Background, LoopWatch
from tests.fakes.clock import FakeClock
from tests.waiting import until

pytestmark = pytest.mark.anyio


async def test_work_that_fails_begins_again_and_is_named_until_it_works() -> None:
    clock = FakeClock(stands=True)
    background, tries = Background(clock=clock), 0
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
    await clock.end(FIRST_PAUSE_SECONDS)
    await clock.end(2 * FIRST_PAUSE_SECONDS)
    await works.wait()
    assert background.faults == {"pruning": "OSError: no room"} and tries == 3
    await clock.end(8 * FIRST_PAUSE_SECONDS)  # twice the pause that the next failure would have
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


async def test_a_blocked_event_loop_is_measured_and_logged(caplog: pytest.LogCaptureFixture) -> None:
    clock = FakeClock(stands=True)
    watch, background = LoopWatch(clock=clock), Background()
    background.start("loop watch", watch.run)
    await clock.end(BEAT_SECONDS)
    clock.advance(1.0)  # before the loop gets to the beat's end
    await until(lambda: watch.longest_stall_seconds)
    assert watch.longest_stall_seconds == pytest.approx(1.0)
    for seconds in (3.0, 2.0, SAY_SECONDS):  # the last is a stall, too
        before = len(watch._unsaid)
        await clock.end(BEAT_SECONDS)
        clock.advance(seconds)
        await until(lambda before=before: len(watch._unsaid) != before)
    await background.stop()
    lines = [record.message.partition(" was ")[2] for record in caplog.records if "was blocked" in record.message]
    assert lines == ["blocked (times: 1, longest: 1.00 s)", "blocked (times: 3, longest: 60.00 s)"]
