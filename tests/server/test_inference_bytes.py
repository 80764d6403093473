"""What the gate does to the bytes that pass it."""

import json
from collections.abc import AsyncIterator
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from art_server.api.door import ANYONE
from art_server.api.inference import Ask, name_as_asked, sse_blocks


def ask(**fields: Any) -> Ask:
    made = Ask("chat", "/v1/chat/completions", "a", {}, ANYONE, {}, [], b"")
    made.adapter = "p/a@3"
    for key, value in fields.items():
        setattr(made, key, value)
    return made


@given(st.text())
def test_the_asked_name_comes_back_and_no_text_is_changed(text: str) -> None:
    content = text + '"model":"p/a@3"'
    body = {"model": "p/a@3", "choices": [{"message": {"content": content}}]}
    named = json.loads(name_as_asked(json.dumps(body, separators=(",", ":")).encode(), ask()))
    assert named == {"model": "a", "choices": [{"message": {"content": content}}]}


@pytest.mark.anyio
async def test_events_are_whole_however_the_network_cuts_them() -> None:
    stream = b'data: {"a": 1}\n\ndata: {"b": 2}\n\ndata: [DONE]\n\n'

    async def pieces(size: int) -> AsyncIterator[bytes]:
        for start in range(0, len(stream), size):
            yield stream[start : start + size]

    for size in range(1, len(stream) + 1):
        blocks = [block async for block in sse_blocks(pieces(size))]
        assert b"".join(blocks) == stream and len(blocks) == 3
