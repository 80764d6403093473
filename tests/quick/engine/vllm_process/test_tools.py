"""Tools of a base model whose template has no mark of a call, and chat without a template, are refused in vLLM's own code."""

import asyncio
import warnings
from types import SimpleNamespace
from typing import Any

import pytest
from transformers import AutoTokenizer

from art_server.engine.vllm_process import child
from art_server.store.base_models import TINY_DIR

with warnings.catch_warnings(action="ignore"):  # vLLM's and torch's own deprecations
    from vllm.entrypoints.openai.chat_completion.protocol import ChatCompletionRequest
    from vllm.entrypoints.openai.responses.protocol import ResponsesRequest
    from vllm.entrypoints.openai.responses.serving import OpenAIServingResponses
    from vllm.renderers import hf, online_renderer

FUNCTION = {"name": "look", "parameters": {"type": "object"}}


@pytest.fixture(autouse=True)
def changed(monkeypatch: pytest.MonkeyPatch) -> None:
    """vLLM with our messages, as long as a test lasts."""
    for owner, name in (
        (online_renderer, "create_error_response"),
        (OpenAIServingResponses, "create_responses"),
        (hf, "safe_apply_chat_template"),
    ):
        monkeypatch.setattr(owner, name, getattr(owner, name))
    child.name_missing_parser()
    child.name_missing_template()


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
def test_responses_refuse_tools_without_a_parser(parser: Any, choice: str, is_refused: bool) -> None:
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


def test_chat_without_a_template_is_refused_with_the_remedy() -> None:
    tokenizer: Any = AutoTokenizer.from_pretrained(TINY_DIR)
    messages: Any = [
        {"role": "developer", "content": "be brief"},
        {"role": "user", "content": "hi"},
    ]
    config: Any = SimpleNamespace(
        model="m",
        tokenizer="m",
        tokenizer_revision=None,
        code_revision=None,
        trust_remote_code=False,
        hf_config=SimpleNamespace(model_type="qwen3"),
    )

    def render(**options: Any) -> Any:
        return hf.safe_apply_chat_template(config, tokenizer, messages, tokenize=False, **options)

    assert "be brief" in render()
    old = "{% for m in messages %}{% if m.role in ('system', 'user') %}[{{ m.content }}]{% endif %}{% endfor %}"
    assert render(chat_template=old) == "[be brief][hi]", "vLLM renders it as a system message"
    tokenizer.chat_template = None
    with pytest.raises(ValueError, match="--chat-template"):
        render()
