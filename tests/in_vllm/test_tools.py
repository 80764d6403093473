"""Tools of a base model whose template has no mark of a call are refused, in vLLM's own code."""

import asyncio
import warnings
from types import SimpleNamespace
from typing import Any

import pytest

from art_server.in_vllm import child

with warnings.catch_warnings(action="ignore"):  # vLLM's and torch's own deprecations
    from vllm.entrypoints.openai.chat_completion.protocol import ChatCompletionRequest
    from vllm.entrypoints.openai.responses.protocol import ResponsesRequest
    from vllm.entrypoints.openai.responses.serving import OpenAIServingResponses
    from vllm.renderers import online_renderer

FUNCTION = {"name": "look", "parameters": {"type": "object"}}


@pytest.fixture(autouse=True)
def changed(monkeypatch: pytest.MonkeyPatch) -> None:
    """vLLM with our messages, as long as a test lasts."""
    for owner, name in (
        (online_renderer, "create_error_response"),
        (OpenAIServingResponses, "create_responses"),
    ):
        monkeypatch.setattr(owner, name, getattr(owner, name))
    child.name_missing_parser()


@pytest.mark.parametrize("choice", ["auto", "required"])
def test_chat_refuses_tools_without_a_parser(choice: str) -> None:
    renderer: Any = object.__new__(online_renderer.OnlineRenderer)
    renderer.__dict__ |= {
        "renderer": SimpleNamespace(tokenizer=None),
        "parser": None,
        "use_harmony": False,
        "enable_auto_tools": False,
    }
    request = ChatCompletionRequest.model_validate(
        {
            "model": "m",
            "messages": [{"role": "user", "content": "hi"}],
            "tools": [{"type": "function", "function": FUNCTION}],
            "tool_choice": choice,
        }
    )
    refused = asyncio.run(renderer.render_chat(request))
    assert (refused.error.code, refused.error.param) == (400, "tools")
    assert refused.error.message == child.NO_TOOLS


@pytest.mark.parametrize(
    ("parser", "choice", "is_refused"),
    [
        (None, "auto", True),
        (SimpleNamespace(tool_parser_cls=None), "auto", True),
        (None, "none", False),
        (SimpleNamespace(tool_parser_cls=object), "auto", False),
    ],
)
def test_responses_refuse_tools_without_a_parser(
    parser: Any, choice: str, is_refused: bool
) -> None:
    handler: Any = object.__new__(OpenAIServingResponses)
    handler.__dict__ |= {"parser": parser, "use_harmony": False}
    handler._create_responses = lambda *args: None
    answered = object()

    async def passed(*args: Any) -> object:
        return answered

    handler._with_kv_transfer_rejection_cleanup = passed
    request = ResponsesRequest.model_validate(
        {
            "model": "m",
            "input": "hi",
            "tools": [{"type": "function", **FUNCTION}],
            "tool_choice": choice,
        }
    )
    answer = asyncio.run(handler.create_responses(request))
    assert (answer is answered) is not is_refused
    if is_refused:
        assert (answer.error.code, answer.error.param) == (400, "tools")
