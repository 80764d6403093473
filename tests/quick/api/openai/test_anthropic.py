"""What is Anthropic's own in /v1/messages: the effort."""

from typing import Any

import pytest

from art_server.inference_proxy import InferenceRequest, engine_body

ASKED: dict[str, Any] = {"model": "run", "max_tokens": 8, "messages": [{"role": "user", "content": "hi"}]}


def messages_request(**fields: Any) -> InferenceRequest:
    return InferenceRequest("messages", "/v1/messages", "run", ASKED | fields, {}, "me", None, None, None)


@pytest.mark.parametrize(
    ("fields", "config"),
    [
        ({"output_config": {"effort": "high"}}, {}),
        ({"output_config": {"effort": "high"}, "thinking": None}, {}),
        ({"output_config": {"effort": "low", "format": {"type": "json_schema"}}}, {"format": {"type": "json_schema"}}),
        ({"output_config": {"effort": "high"}, "thinking": {"type": "adaptive"}}, {"effort": "high"}),
        ({"output_config": {"effort": "high"}, "thinking": {"type": "disabled"}}, {"effort": "high"}),
    ],
)
def test_an_effort_reaches_the_engine_only_beside_thinking(fields: dict[str, Any], config: dict[str, Any]) -> None:
    asked = messages_request(**fields)
    assert engine_body(asked)["output_config"] == config
    assert asked.body == ASKED | fields, "the request itself is unchanged"
