"""A program for test_broken_disk.py: a job runner and a ledger at work, while the operating system refuses some writes.

`python -m tests.long.server.broken_disk FOLDER` prints, as JSON, the jobs and the choices that were acknowledged."""

import asyncio
import contextlib
import json
import sqlite3
import sys
from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

from art_server.errors import ServerError
from art_server.jobs import backoff
from art_server.jobs import runner as runner_module
from art_server.ledger.ledger import Ledger
from tests.quick.jobs.job_runner import House
from tests.quick.ledger.recorded_choices import add

NUM_JOBS = 6
T = TypeVar("T")


async def work(folder: Path) -> dict[str, list[str]]:
    backoff.FIRST_PAUSE_SECONDS = backoff.LONGEST_PAUSE_SECONDS = 0.02
    runner_module.REST_SECONDS = 0.01
    ledger = started(lambda: Ledger(folder / "ledger.sqlite"))
    house = started(lambda: House(folder))
    house.background.start("job runner", house.runner.run_forever)
    jobs: list[str] = []
    choices: list[str] = []
    for number in range(NUM_JOBS):
        jobs += await asyncio.to_thread(acknowledged_job, house)
        choices += await asyncio.to_thread(acknowledged_choice, ledger, number)
        await asyncio.sleep(0.02)
    assert await house.wait(*jobs) == ["done"] * len(jobs)
    await house.background.stop()
    house.registry.database.close()
    ledger.close()
    return {"jobs": jobs, "choices": choices}


def started(make: Callable[[], T]) -> T:
    """A server that cannot begin is started again."""
    for _ in range(20):
        with contextlib.suppress(sqlite3.OperationalError):
            return make()
    raise TimeoutError


def acknowledged_job(house: House) -> list[str]:
    try:
        return [house.add_job("a")]
    except ServerError:
        return []  # the client is told, and repeats it


def acknowledged_choice(ledger: Ledger, number: int) -> list[str]:
    try:
        return [add(ledger, number, [number, number + 1])]
    except sqlite3.OperationalError:
        return []  # the answer says that it has no record


if __name__ == "__main__":
    print(json.dumps(asyncio.run(work(Path(sys.argv[1])))))
