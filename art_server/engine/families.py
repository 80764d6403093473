"""Chooses vLLM's parsers for a model's tool calls and thinking, by its architecture and its chat template.

`--engine-arg tool_call_parser=...` and `reasoning_parser=...` override the choice.
"""

from dataclasses import dataclass
from functools import partial
from pathlib import Path

from art_server.base_models import (
    TEMPLATE_ERRORS,
    model_type,
    read_template,
    template_renderer,
)

BY_ARCHITECTURE: dict[str, tuple[str, str | None]] = {
    "deepseek_v3": ("deepseek_v3", "deepseek_r1"),
    "gemma4": ("gemma4", "gemma4"),
    "glm4_moe": ("glm45", "glm45"),
    "gpt_oss": ("openai", "openai_gptoss"),
    "kimi_k2": ("kimi_k2", "kimi_k2"),
    "llama4": ("llama4_pythonic", None),
    "minimax_m2": ("minimax_m2", "minimax_m2"),
    "seed_oss": ("seed_oss", "seed_oss"),
}
"""Tool and reasoning parser of architectures that cannot be recognised by their template."""

BY_MARKUP = (
    ("<function=", "qwen3_xml"),
    ("<tool_call>", "hermes"),
    ("<|python_tag|>", "llama3_json"),
    ("[TOOL_CALLS]", "mistral"),
)
"""Tool parsers by a string in the chat template; the first string that is found decides."""

DEFAULT_TOOL_PARSER = "hermes"


@dataclass(frozen=True, slots=True)
class Parsers:
    """vLLM's parsers for one model."""

    tool: str
    reasoning: str | None
    template_kwargs: dict[str, bool]
    """Defaults for template arguments where vLLM's parsers would assume another value."""


def choose_parsers(folder: Path) -> Parsers:
    """The parsers for the model in `folder`."""
    known = BY_ARCHITECTURE.get(model_type(folder))
    if known is not None:
        return Parsers(known[0], known[1], {})
    template, of_tools = read_template(folder), read_template(folder, has_tools=True)
    tool = next((name for mark, name in BY_MARKUP if mark in of_tools), DEFAULT_TOOL_PARSER)
    if "<think>" not in template:
        return Parsers(tool, None, {})
    is_off = "enable_thinking" in template and not thinks_by_default(template)
    return Parsers(tool, "qwen3", {"enable_thinking": False} if is_off else {})


def thinks_by_default(template: str) -> bool:
    """Whether a template with the argument `enable_thinking` thinks when the argument is missing."""
    messages = [{"role": "user", "content": "hello"}]
    try:
        render = partial(template_renderer(template), messages=messages, add_generation_prompt=True)
        return render() != render(enable_thinking=False)
    except TEMPLATE_ERRORS:  # vLLM assumes thinking
        return True
