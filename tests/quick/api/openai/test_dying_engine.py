"""vLLM's API process outlives its engine core for a moment, in which it answers every request with an error."""

import contextlib
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import httpx
import pytest

import art
from art_server import inference_proxy
from art_server.api.openai.streaming import StreamRefused, answer_stream, stream_events
from art_server.errors import Unavailable
from tests.quick.server.served import Served, serving

pytestmark = pytest.mark.anyio


async def ask(served: Served, stream: bool) -> httpx.Response:
    async with art.Backend(served.url) as backend:
        model = art.TrainableModel(name="a", project="p", base_model="art/tiny")
        await model.register(backend)
    body: dict[str, Any] = {"model": "p/a", "messages": [{"role": "user", "content": "q"}]}
    async with httpx.AsyncClient(base_url=served.url) as http:
        return await http.post("/v1/chat/completions", json=body | {"stream": stream})


@pytest.mark.parametrize("stream", [False, True])
async def test_the_request_is_sampled_again(tmp_path: Path, stream: bool) -> None:
    async with serving(tmp_path) as served:
        served.engine.vllm.num_dying = 1
        response = await ask(served, stream)
        assert response.status_code == 200 and "a private answer" in response.text
        assert "EngineCore" not in response.text


@pytest.mark.parametrize("stream", [False, True])
async def test_a_request_that_kills_two_engines_is_refused(tmp_path: Path, stream: bool) -> None:
    async with serving(tmp_path) as served:
        served.engine.vllm.num_dying = 9
        response = await ask(served, stream)
        assert response.status_code == 503 and response.json()["error"]["retryable"]
        assert served.engine.vllm.num_dying == 7


async def test_an_error_of_a_living_engine_is_passed_on(tmp_path: Path) -> None:
    async with serving(tmp_path) as served:
        served.engine.vllm.num_dying = 1
        served.engine.is_alive = lambda: _true()  # type: ignore[method-assign]
        response = await ask(served, stream=False)
        assert response.status_code == 500 and "EngineCore" in response.text


async def _true() -> bool:
    return True


class Parts:
    """A response of vLLM whose connection breaks behind its parts."""

    def __init__(self, *parts: bytes):
        self.status, self.content, self._parts = 200, self, list(parts)

    async def readany(self) -> bytes:
        if not self._parts:
            raise inference_proxy.EngineLost
        return self._parts.pop(0)


def stream_request(api: str) -> inference_proxy.InferenceRequest:
    return inference_proxy.InferenceRequest(api, f"/v1/{api}", "p/a", {"n": 2}, {}, "me", None, None, None)


async def test_a_part_of_an_event_does_not_begin_a_stream() -> None:
    """The engine dies behind it, and the second try is refused: the client gets the refusal, not an empty 200."""

    class DyingProxy:
        num_calls = 0

        @contextlib.asynccontextmanager
        async def answer(self, inference: Any) -> AsyncIterator[Any]:
            self.num_calls += 1
            if self.num_calls == 2:
                raise Unavailable("the engine could not be started", code="engine_failed")
            yield Parts(b'data: {"id":"x","choi'), None

        async def was_engine_killed(self, inference: Any) -> bool:
            return True

    dying: Any = DyingProxy()
    response = await answer_stream(dying, stream_request("chat"))
    assert (response.status_code, dying.num_calls) == (503, 2)
    assert b"could not be started" in response.body


DEATHS = {
    "chat": b'data: {"error":{"message":"EngineCore encountered an issue.","code":500}}\n\n',
    "messages": b'event: error\ndata: {"type":"error","error":{"type":"internal_error","message":"EngineCore"}}\n\n',
    "responses": b'event: error\ndata: {"type":"error","message":"EngineCore","sequence_number":3}\n\n',
}
"""What vLLM's API process writes into the streams of a dying core."""


@pytest.mark.parametrize("is_begun", [False, True])
@pytest.mark.parametrize("api", DEATHS)
async def test_the_error_event_of_a_dying_engine_counts_as_its_death(api: str, is_begun: bool) -> None:
    """A stream that has begun ends with our retryable error; another one is sampled again."""

    class DyingProxy:
        num_calls = 0

        @contextlib.asynccontextmanager
        async def answer(self, inference: Any) -> AsyncIterator[Any]:
            self.num_calls += 1
            if self.num_calls == 2:
                raise Unavailable("asked again", code="engine_failed")
            begun = [b'event: a\ndata: {"a":1}\n\n'] if is_begun else []
            yield Parts(*begun, DEATHS[api]), None

        async def check_engine(self, inference: Any) -> None:
            raise inference_proxy.EngineLost

        async def was_engine_killed(self, inference: Any) -> bool:
            return True

    dying: Any = DyingProxy()
    events = stream_events(dying, stream_request(api))
    if not is_begun:
        with pytest.raises(StreamRefused) as refused:
            await anext(events)
        assert (dying.num_calls, b"asked again" in refused.value.content) == (2, True)
        return
    text = b"".join([event async for event in events])
    assert b'"engine_restarted"' in text and b"EngineCore" not in text and dying.num_calls == 1
