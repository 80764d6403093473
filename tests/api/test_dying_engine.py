"""vLLM's API process outlives its engine core for a moment, in which it answers every request with an error."""

from pathlib import Path
from typing import Any

import httpx
import pytest

import art
from art_server import relay
from tests.server.served import Served, serving

pytestmark = pytest.mark.anyio


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(relay, "LOST_SECONDS", 0.0)


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
        served.engine.num_dying = 1
        response = await ask(served, stream)
        assert response.status_code == 200 and "a private answer" in response.text
        assert "EngineCore" not in response.text


@pytest.mark.parametrize("stream", [False, True])
async def test_a_request_that_kills_two_engines_is_refused(tmp_path: Path, stream: bool) -> None:
    async with serving(tmp_path) as served:
        served.engine.num_dying = 9
        response = await ask(served, stream)
        assert response.status_code == 503 and response.json()["error"]["retryable"]
        assert served.engine.num_dying == 7


async def test_an_error_of_a_living_engine_is_passed_on(tmp_path: Path) -> None:
    async with serving(tmp_path) as served:
        served.engine.num_dying = 1
        served.engine.is_alive = lambda: _true()  # type: ignore[method-assign]
        response = await ask(served, stream=False)
        assert response.status_code == 500 and "EngineCore" in response.text


async def _true() -> bool:
    return True
