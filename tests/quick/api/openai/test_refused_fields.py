"""vLLM's errors about a request's fields, in sentences."""

import json
from typing import Any

import pytest

from art_server.api.openai.refusals import in_words, refusal_of
from art_server.api.openai.routes import check_conversation
from art_server.errors import BadRequest
from art_server.inference_proxy import InferenceRequest


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


SAID = {
    "limit": "max_completion_tokens=70000 cannot be greater than max_model_len=1024. Please request fewer output tokens.",
    "long": "This model's maximum context length is 1024 tokens. However, your prompt contains at least 1025 input tokens, which "
    "exceeds this limit even without any output tokens.",
    "longer": "This model's maximum context length is 1024 tokens. However, your prompt contains 25050 characters (more than 16384).",
}
"""vLLM's sentences about lengths."""


@pytest.mark.parametrize(
    ("api", "said", "beginning", "code"),
    [
        ("chat", "limit", "max_completion_tokens: 70000 > 1024, ", "max_tokens_too_large"),
        ("messages", "limit", "max_tokens: 70000 > 1024, ", "max_tokens_too_large"),
        ("messages", "long", "prompt is too long: 1025 tokens > 1024 maximum, ", "context_length_exceeded"),
        (
            "messages",
            "longer",
            "prompt is too long: 25050 characters > 1024 tokens maximum, ",
            "context_length_exceeded",
        ),
        ("chat", "long", SAID["long"], "context_length_exceeded"),
    ],
)
def test_lengths_are_refused_in_the_words_that_agents_read(api: str, said: str, beginning: str, code: str) -> None:
    field = "max_completion_tokens" if api == "chat" else "max_tokens"
    asked = InferenceRequest(api, f"/v1/{api}", "p/a", {field: 70000}, {}, "me", None, None, None)
    error = json.loads(refusal_of(refusal(SAID[said]), 400, asked))["error"]
    assert error["message"].startswith(beginning) and error["code"] == code
