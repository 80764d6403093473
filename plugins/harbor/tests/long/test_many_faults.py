"""Rollouts with all faults mixed, many at one time; ART_TEST_FULL=1 plays 200."""

import asyncio
import itertools
import os
import random
from pathlib import Path

import pytest

from plugins.harbor.tests.boxed import left, needs_bubblewrap
from plugins.harbor.tests.faults import FAULTS, end_of

pytestmark = [pytest.mark.anyio, needs_bubblewrap]

NUM_ROLLOUTS = 200 if os.environ.get("ART_TEST_FULL") else 40
NUM_AT_ONE_TIME = 8


async def test_rollouts_with_faults_side_by_side_have_right_rewards_and_leave_nothing(tmp_path: Path) -> None:
    names = list(itertools.islice(itertools.cycle(FAULTS), NUM_ROLLOUTS))
    random.Random(1).shuffle(names)
    free = asyncio.Semaphore(NUM_AT_ONE_TIME)

    async def play_one(number: int, name: str) -> tuple[str, object]:
        async with free:
            return name, await end_of(FAULTS[name], tmp_path / str(number))

    descriptors = len(os.listdir("/proc/self/fd"))
    ends = await asyncio.gather(*(play_one(number, name) for number, name in enumerate(names)))
    assert {(name, end) for name, end in ends if end != FAULTS[name].ends} == set()
    assert left() == []
    assert len(os.listdir("/proc/self/fd")) <= descriptors + 1  # the loop's own pipe
