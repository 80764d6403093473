import asyncio

import pytest

from art_server.engine.gate import Gate
from art_server.errors import Unavailable


@pytest.mark.anyio
async def test_requests_wait_while_the_gate_is_closed() -> None:
    gate = Gate()
    await gate.wait_open(0.01)
    gate.close()
    waiting = asyncio.create_task(gate.wait_open(5))
    await asyncio.sleep(0.01)
    assert not waiting.done()
    gate.open()
    await waiting


@pytest.mark.anyio
async def test_past_the_limit_the_request_may_be_repeated() -> None:
    gate = Gate()
    gate.close()
    with pytest.raises(Unavailable, match="repeat the request") as error:
        await gate.wait_open(0.01)
    assert error.value.retryable


def test_an_adapter_is_in_use_until_its_last_request_left() -> None:
    gate = Gate()
    with gate.inside("a@1"):
        with gate.inside("a@1"):
            assert gate.uses("a@1") and not gate.uses("a@0") and gate.is_busy
        assert gate.uses("a@1")
    assert not gate.uses("a@1") and not gate.is_busy
