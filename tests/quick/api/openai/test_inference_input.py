"""Requests that are refused before a token is sampled."""

from pathlib import Path
from typing import Any

import httpx
import pytest

from art_server.api.error_responses import status_of
from art_server.api.openai.routes import check_conversation
from art_server.errors import BadRequest
from tests.quick.server.served import serving
from tests.refusals import refused

pytestmark = pytest.mark.anyio
MESSAGES = [{"role": "user", "content": "q"}]


@pytest.mark.parametrize(
    ("body", "code"),
    [
        ({"messages": MESSAGES, "use_beam_search": True, "n": 5}, "beam_search"),
        ({"messages": [{"role": ["user"], "content": "q"}]}, "invalid_body"),
        ({"messages": [{"role": {"a": 1}, "content": "q"}]}, "invalid_body"),
    ],
)
async def test_a_request_is_refused_with_its_reason(tmp_path: Path, body: dict[str, Any], code: str) -> None:
    async with serving(tmp_path) as served, httpx.AsyncClient(base_url=served.url) as http:
        response = await http.post("/v1/chat/completions", json={"model": "p/none", **body})
    assert response.status_code in (400, 422), response.text
    assert response.json()["error"]["code"] == code


@pytest.mark.parametrize(
    ("api", "body", "path"),
    [
        ("chat", {"messages": None}, "messages"),
        ("chat", {"messages": "hi"}, "messages"),
        ("chat", {"messages": [*MESSAGES, None]}, "messages[1]"),
        ("chat", {"messages": [{"role": "assistant", "tool_calls": 5}]}, "messages[0].tool_calls"),
        ("messages", {"messages": {"role": "user"}}, "messages"),
        ("messages", {"messages": [[]]}, "messages[0]"),
        ("responses", {"input": None}, "input"),
        ("responses", {"input": [1]}, "input[0]"),
    ],
)
def test_a_conversation_of_another_shape_is_named(api: str, body: dict[str, Any], path: str) -> None:
    with refused(BadRequest, "invalid_body", path) as error:
        check_conversation(api, body)
    assert error.value.message.startswith(f"{path}: ")
    assert status_of(error.value) == 400


def test_names_that_are_null_are_left_out() -> None:
    """Clients send back whole message objects; vLLM accepts a null name in a tool's message only."""
    body = {"messages": [*MESSAGES, {"role": "assistant", "content": "a", "name": None}]}
    check_conversation("chat", body)
    assert body == {"messages": [*MESSAGES, {"role": "assistant", "content": "a"}]}
    for fine in ({}, {"messages": []}, {"input": "text"}, {"prompt": "text"}):
        for api in ("chat", "responses", "completions"):
            check_conversation(api, dict(fine))
