"""Thousands of jobs, and a week of the clock: nothing grows but what is meant to be kept."""

import asyncio
import gc
import os
import threading
import time
import tracemalloc
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from art_server.store.registry import RegisteredModel
from art_server.store.server_database import FILE
from tests.quick.jobs.job_runner import House, running

pytestmark = [pytest.mark.anyio, pytest.mark.timeout(3600)]

NUM_JOBS = 10_000 if os.environ.get("ART_TEST_FULL") else 400
METRICS_BYTES = 1000
"""What the metrics of a step take in the database."""
MAX_GROWTH_BYTES = 1 << 20
"""Of what Python holds. A process that ran other tests moves by more than that by itself (its heap is in pieces)."""


def held() -> tuple[int, int, int, int]:
    """Handles, threads, tasks and objects that Python tracks."""
    gc.collect()
    process = psutil.Process()
    return (
        process.num_fds(),
        threading.active_count(),
        len(asyncio.all_tasks()),
        len(gc.get_objects()),
    )


async def keep_ten(model: RegisteredModel) -> None:
    """As `--keep-last` does."""
    await asyncio.to_thread(model.folder.remove_steps, model.folder.steps()[:-10])


async def make_steps(house: House, num: int) -> None:
    for _ in range(num // 20):
        jobs = [house.add_job("a") for _ in range(20)]
        house.runner._wake()
        assert await house.wait(*jobs) == ["done"] * 20
        house.trainer.tasks.clear()
        house.trainer.batches.clear()


@pytest.fixture
def memory_traced() -> Iterator[None]:
    tracemalloc.start()
    yield
    tracemalloc.stop()


@pytest.mark.usefixtures("memory_traced")
async def test_jobs_leave_nothing_behind(tmp_path: Path) -> None:
    database = tmp_path / ".server" / FILE
    async with running(tmp_path, "a", retain=keep_ten, max_ended=50) as house:
        await make_steps(house, NUM_JOBS // 2)
        house.queue.prune()
        # Python's pool of threads grows to its limit whenever all of its threads are busy.
        await asyncio.gather(*(asyncio.to_thread(time.sleep, 0.05) for _ in range(64)))
        before, size = held(), database.stat().st_size
        memory = tracemalloc.get_traced_memory()[0]
        await make_steps(house, NUM_JOBS // 2)
        house.clock.advance(8 * 86400)
        house.queue.prune()
        after, grown = held(), tracemalloc.get_traced_memory()[0] - memory
        assert all(now <= then for now, then in zip(after[:3], before[:3], strict=True))
        assert after[3] - before[3] < 1000 + NUM_JOBS // 2
        assert grown < MAX_GROWTH_BYTES
        assert database.stat().st_size <= size + 4096 * 20 + METRICS_BYTES * (NUM_JOBS // 2)
        assert len(house.queue.jobs(None, ("done",), limit=1000)) == 50
        assert house.registry.get("p", "a").step == NUM_JOBS // 20 * 20
        assert len(house.engine.adapters) <= 2
        assert not house.runner._attempts
