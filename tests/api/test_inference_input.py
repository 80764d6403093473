"""Requests that are refused before a token is sampled."""

from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.server.served import serving

pytestmark = pytest.mark.anyio
MESSAGES = [{"role": "user", "content": "q"}]


@pytest.mark.parametrize(
    ("body", "code"),
    [
        ({"messages": MESSAGES, "use_beam_search": True, "n": 5}, "beam_search"),
        ({"messages": [{"role": ["user"], "content": "q"}]}, "unknown_model"),
        ({"messages": [{"role": {"a": 1}, "content": "q"}]}, "unknown_model"),
    ],
)
async def test_a_request_is_refused_with_its_reason(
    tmp_path: Path, body: dict[str, Any], code: str
) -> None:
    """The role of a message is vLLM's to judge; here the model is unknown before that."""
    async with serving(tmp_path) as served, httpx.AsyncClient(base_url=served.url) as http:
        response = await http.post("/v1/chat/completions", json={"model": "p/none", **body})
    assert response.status_code in (404, 422), response.text
    assert response.json()["error"]["code"] == code
