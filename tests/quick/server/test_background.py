import asyncio
import hashlib
import os
import re
import time
from concurrent.futures import ThreadPoolExecutor

import pytest

from art_server import background as background_module
from art_server.background import SCHEDSTAT, Background, LoopWatch, seconds_without_core

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


async def test_what_holds_the_event_loop_is_named(
    caplog: pytest.LogCaptureFixture,
) -> None:
    watch, background = LoopWatch(), Background()
    background.start("loop watch", watch.run)
    await asyncio.sleep(0.2)

    def hold_the_loop() -> None:
        time.sleep(2.0)

    hold_the_loop()
    await asyncio.sleep(0.1)
    await background.stop()
    assert watch.longest_stall_seconds > 1.5
    told = [record.message for record in caplog.records if "event loop" in record.message]
    assert any("is blocked" in each and "hold_the_loop" in each for each in told)
    found = re.findall(r"was blocked for ([\d.]+) s, of which ([\d.]+) s", "\n".join(told))
    longest, computed = max((float(a), float(b)) for a, b in found)
    assert longest > 1.5 and computed < 1.0, "it slept"


@pytest.mark.skipif(not SCHEDSTAT.exists(), reason="this kernel does not count it")
def test_time_without_a_core_is_counted() -> None:
    """Two threads that compute on one core, without the GIL, wait for each other."""
    cores = os.sched_getaffinity(0)

    def compute() -> float:
        os.sched_setaffinity(0, {min(cores)})
        started = seconds_without_core()
        hashlib.scrypt(b"", salt=b"", n=2**14, r=8, p=8, maxmem=2**26)
        return seconds_without_core() - started

    with ThreadPoolExecutor(2) as pool:
        waited = [each.result() for each in [pool.submit(compute) for _ in range(2)]]
    assert max(waited) > 0.05
