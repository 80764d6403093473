"""A request whose context has no room for restored thinking goes to the engine as the agent sent it."""

from pathlib import Path
from typing import Any

import httpx
import pytest
from aiohttp import web

import art
from tests.fakes.vllm import FakeVllm
from tests.quick.server.served import serving

pytestmark = pytest.mark.anyio

MESSAGES = [
    {"role": "user", "content": "q"},
    {"role": "assistant", "content": "fine"},
    {"role": "tool", "content": "r"},
]


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("has_room", [True, False])
async def test_thinking_is_left_out_where_it_has_no_room(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, stream: bool, has_room: bool
) -> None:
    sent: list[list[dict[str, Any]]] = []
    chat = FakeVllm._chat

    async def limited(self: FakeVllm, request: web.Request) -> web.Response:
        sent.append((await request.json())["messages"])
        if "reasoning" in str(sent[-1]) and not has_room:
            return web.json_response({"error": {"message": "too long"}}, status=400)
        return await chat(self, request)

    monkeypatch.setattr(FakeVllm, "_chat", limited)
    async with serving(tmp_path) as served:
        ledger = served.server.ledger
        monkeypatch.setattr(ledger, "recall_thinking", lambda opened: ["plan"])
        async with art.Backend(served.url) as backend:
            model = art.TrainableModel(name="a", project="p", base_model="art/tiny")
            await model.register(backend)
        body = {"model": "p/a", "messages": MESSAGES, "stream": stream}
        async with httpx.AsyncClient(base_url=served.url) as http:
            response = await http.post("/v1/chat/completions", json=body)
    assert response.status_code == 200 and "a private answer" in response.text
    restored = [MESSAGES[0], {**MESSAGES[1], "reasoning": "plan"}, MESSAGES[2]]
    assert sent == ([restored] if has_room else [restored, MESSAGES])
