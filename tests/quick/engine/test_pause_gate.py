import asyncio

import pytest

from art_server.engine.pause_gate import FIRST, HEAD_START_SECONDS, PauseGate
from art_server.errors import Unavailable
from tests.fakes.clock import FakeClock
from tests.refusals import refused
from tests.waiting import PATIENCE_SECONDS


async def turns() -> None:
    """All that can go on has gone on."""
    for _ in range(9):
        await asyncio.sleep(0)


@pytest.mark.anyio
async def test_requests_wait_while_the_gate_is_closed() -> None:
    gate = PauseGate()
    await gate.wait_open(0)
    gate.close("p/a")
    waiting = asyncio.create_task(gate.wait_open(PATIENCE_SECONDS))
    await turns()
    assert not waiting.done()
    gate.open()
    await waiting


@pytest.mark.anyio
async def test_a_few_go_first_and_the_rest_wait_again_where_the_gate_closes() -> None:
    clock = FakeClock(stands=True)
    gate = PauseGate(clock=clock)
    gate.close("p/a")
    waiting = [asyncio.create_task(gate.wait_open(PATIENCE_SECONDS)) for _ in range(10)]
    await turns()
    gate.open()
    await turns()
    assert [task.done() for task in waiting] == [True] * FIRST + [False] * (10 - FIRST)
    gate.close("p/a")
    clock.advance(HEAD_START_SECONDS)
    await turns()
    assert sum(task.done() for task in waiting) == FIRST
    # Where jobs follow one another the gate is open for a moment only. Who missed one opening goes at the next.
    gate.open()
    await turns()
    assert all(task.done() for task in waiting)
    await gate.wait_open(0)


@pytest.mark.anyio
async def test_a_gate_that_opens_just_before_the_limit_lets_the_request_in() -> None:
    """The head start of the first ones does not end before the limit of the last one does."""
    clock = FakeClock(stands=True)
    gate = PauseGate(clock=clock)
    gate.close("p/a")
    waiting = [asyncio.create_task(gate.wait_open(30.0)) for _ in range(FIRST + 1)]
    await turns()
    clock.advance(30.0 - HEAD_START_SECONDS / 2)
    gate.open()
    await turns()
    assert [task.done() for task in waiting] == [True] * FIRST + [False]
    clock.advance(HEAD_START_SECONDS / 2)
    await asyncio.gather(*waiting)


@pytest.mark.anyio
async def test_past_the_limit_the_request_may_be_repeated() -> None:
    clock = FakeClock()
    gate = PauseGate(clock=clock)
    gate.close("p/a")
    waiting = asyncio.create_task(gate.wait_open(30.0))
    await clock.end(30.0)
    with refused(Unavailable, "training_in_progress") as error:
        await waiting
    assert error.value.retryable


def test_an_adapter_is_in_use_until_its_last_request_left() -> None:
    gate = PauseGate()
    with gate.inside("a@1"):
        with gate.inside("a@1"):
            assert gate.uses("a@1") and not gate.uses("a@0") and gate.num_inside
        assert gate.uses("a@1")
    assert not gate.uses("a@1") and not gate.num_inside
