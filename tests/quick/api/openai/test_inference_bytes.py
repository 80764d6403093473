"""What the gate does to the bytes that pass it."""

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from art_server.api.openai.answers import with_requested_name
from art_server.api.openai.streaming import take_events
from art_server.inference_proxy import InferenceRequest


def ask(**fields: Any) -> InferenceRequest:
    inference = InferenceRequest("chat", "/v1/chat/completions", "a", {}, {}, "me", None, None, None)
    inference.adapter = "p/a@3"
    for key, value in fields.items():
        setattr(inference, key, value)
    return inference


@given(st.text())
def test_the_asked_name_comes_back_and_no_text_is_changed(text: str) -> None:
    content = text + '"model":"p/a@3"'
    body = {"model": "p/a@3", "choices": [{"message": {"content": content}}]}
    named = json.loads(with_requested_name(json.dumps(body, separators=(",", ":")).encode(), ask()))
    assert named == {"model": "a", "choices": [{"message": {"content": content}}]}


@pytest.mark.parametrize("size", range(1, 48))
def test_events_are_whole_however_the_network_cuts_them(size: int) -> None:
    stream = b'data: {"a": 1}\n\ndata: {"b": 2}\n\ndata: [DONE]\n\n'
    taken: list[bytes] = []
    rest = b""
    for start in range(0, len(stream), size):
        events, rest = take_events(rest + stream[start : start + size])
        assert not events or events.endswith(b"\n\n")
        taken.append(events)
    assert b"".join(taken) == stream and rest == b""
