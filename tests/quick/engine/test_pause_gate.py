import asyncio

import pytest

from art_server.engine import pause_gate as gate_module
from art_server.engine.pause_gate import PauseGate
from art_server.errors import Unavailable


@pytest.mark.anyio
async def test_requests_wait_while_the_gate_is_closed() -> None:
    gate = PauseGate()
    await gate.wait_open(0.01)
    gate.close("a step")
    waiting = asyncio.create_task(gate.wait_open(5))
    await asyncio.sleep(0.01)
    assert not waiting.done()
    gate.open()
    await waiting


@pytest.mark.anyio
async def test_a_few_go_first_and_the_rest_wait_again_where_the_gate_closes(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(gate_module, "HEAD_START_SECONDS", 0.01)
    gate = PauseGate()
    gate.close("a step")
    waiting = [asyncio.create_task(gate.wait_open(5)) for _ in range(10)]
    await asyncio.sleep(0)
    gate.open()
    for _ in range(5):
        await asyncio.sleep(0)
    assert [task.done() for task in waiting] == [True] * gate_module.FIRST + [False] * (10 - gate_module.FIRST)
    gate.close("a step")
    await asyncio.sleep(0.05)
    assert sum(task.done() for task in waiting) == gate_module.FIRST
    # Where jobs follow one another the gate is open for a moment only. Who missed one opening goes at the next.
    gate.open()
    for _ in range(5):
        await asyncio.sleep(0)
    assert all(task.done() for task in waiting)
    await asyncio.wait_for(gate.wait_open(0), 1)


@pytest.mark.anyio
async def test_a_gate_that_opens_just_before_the_limit_lets_the_request_in() -> None:
    gate = PauseGate()
    gate.close("a step")
    limit = gate_module.HEAD_START_SECONDS
    waiting = [asyncio.create_task(gate.wait_open(limit)) for _ in range(gate_module.FIRST + 1)]
    await asyncio.sleep(limit / 2)
    gate.open()  # the head start of the first ones outlasts the limit of the last one
    await asyncio.gather(*waiting)


@pytest.mark.anyio
async def test_past_the_limit_the_request_may_be_repeated() -> None:
    gate = PauseGate()
    gate.close("a step of 'p/a', which trains")
    with pytest.raises(Unavailable, match="for a step, which trains; repeat the request") as error:
        await gate.wait_open(0.01)
    assert error.value.retryable


def test_an_adapter_is_in_use_until_its_last_request_left() -> None:
    gate = PauseGate()
    with gate.inside("a@1"):
        with gate.inside("a@1"):
            assert gate.uses("a@1") and not gate.uses("a@0") and gate.num_inside
        assert gate.uses("a@1")
    assert not gate.uses("a@1") and not gate.num_inside
