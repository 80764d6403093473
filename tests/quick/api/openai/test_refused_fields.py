"""vLLM's errors about a request's fields, in sentences."""

import json
from typing import Any

import pytest

from art_server.api.openai.refusals import in_words
from art_server.api.openai.routes import check_conversation
from art_server.errors import BadRequest


def refusal(message: str) -> bytes:
    return json.dumps({"error": {"message": message, "type": "Bad Request", "param": "body.x", "code": 400}}).encode()


@pytest.mark.parametrize(
    ("said", "message", "param"),
    [
        (
            "1 validation error:\n  {'type': 'missing', 'loc': 'body.tools.0.function', 'msg': 'Field required', 'input': '<dict>'}",
            "the request is invalid: tools[0].function: Field required",
            "tools[0].function",
        ),
        (
            "2 validation errors:\n  {'type': 'float_parsing', 'loc': 'body.top_p', 'msg': 'Input should be a valid number', "
            "'input': 'x'}\n  {'type': 'literal_error', 'loc': 'body.tools.0.NamedTool.type', 'msg': \"Input should be 'function'\"}",
            "the request is invalid: top_p: Input should be a valid number; tools[0].type: Input should be 'function'",
            "top_p",
        ),
    ],
)
def test_fields_are_named_as_the_request_names_them(said: str, message: str, param: str) -> None:
    error = json.loads(in_words(refusal(said), {}))["error"]
    assert (error["message"], error["param"]) == (message, param)


def test_other_refusals_are_unchanged() -> None:
    for text in ("top_p must be in (0, 1], got 2.0.", "1 validation error: of another form"):
        assert in_words(refusal(text), {}) == refusal(text)


@pytest.mark.parametrize(
    ("api", "message", "said"),
    [
        ("chat", {"content": "hi"}, r"messages\[0\].role: it must be a text, such as 'user' or 'assistant', not null"),
        ("chat", {"role": 5}, r"messages\[0\].role: it must be a text, .*, not a number"),
        (
            "chat",
            {
                "role": "user",
                "content": [{"type": "text", "text": "a"}, {"type": "image_url", "image_url": {"url": "x"}}],
            },
            r"messages\[0\].content\[1\]: it is of the type 'image_url', and this server takes text only: leave it out",
        ),
        ("messages", {"role": "user", "content": [{"type": "image"}]}, "'image', and this server takes text only"),
        (
            "responses",
            {"role": "user", "content": [{"type": "input_image"}]},
            "'input_image', and this server takes text only",
        ),
    ],
)
def test_messages_that_no_template_takes_are_named(api: str, message: dict[str, Any], said: str) -> None:
    with pytest.raises(BadRequest, match=said):
        check_conversation(api, {"input" if api == "responses" else "messages": [message]})
