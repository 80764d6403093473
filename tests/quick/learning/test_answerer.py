"""Steps that answer for the server: an engine that ended is told from one that refuses."""

from pathlib import Path

import pytest

from art_server.engine.engine import AdapterRefused
from art_server.learning.answerer import Answerer, EngineEnded
from tests.quick.learning.crowd import crowd

pytestmark = pytest.mark.anyio


async def test_an_engine_that_ended_is_no_refusal_of_the_step(tmp_path: Path) -> None:
    async with crowd(tmp_path) as shop:
        server, engine = shop.served.server, shop.served.engine
        (model,) = server.registry.all()
        answerer = Answerer(fleet=server.fleet, gate=server.gate)
        assert await answerer.logprobs(model, 0, [1, 2], [3, 4]) == [-0.5, -0.5]
        engine.vllm.num_refusing = 1
        with pytest.raises(AdapterRefused):
            await answerer.logprobs(model, 0, [1, 2], [3])
        engine.vllm.num_refusing, engine.vllm.is_dead = 1, True
        with pytest.raises(EngineEnded):
            await answerer.logprobs(model, 0, [1, 2], [3])
        await engine.vllm.stop()
        with pytest.raises(EngineEnded):
            await answerer.complete(model, 0, {"prompt": [1], "max_tokens": 1})
        assert server.gate.num_inside == 0
