"""Chooses vLLM's parsers for a model's tool calls and thinking, by the marks in its chat template.

A mark is the text that the model writes around a call. An architecture with a new name keeps its marks, so marks decide before
the `model_type`. `--engine-arg tool_call_parser=...` and `reasoning_parser=...` override the choice.
"""

from dataclasses import dataclass, replace
from functools import partial

from art_server.engine.inspection_process.template import (
    TEMPLATE_ERRORS,
    Templates,
    renders_tools,
    template_renderer,
)
from art_server.store.base_facts import Parsers


@dataclass(frozen=True, slots=True)
class Family:
    """Models that write calls and thinking in the same form."""

    tool: str | None
    """vLLM's tool parser."""
    reasoning: str | None = None
    """vLLM's reasoning parser, for templates that contain `thinks`."""
    marks: tuple[str, ...] = ()
    """Texts that the template contains, all of them."""
    types: tuple[str, ...] = ()
    """Values of `model_type`; empty: any."""
    thinks: str = "<think>"
    always: bool = False
    """Whether such a model opens its thinking by itself, although no argument of the template says so."""

    def holds(self, template: str, model_type: str) -> bool:
        """Whether a model is of this family."""
        is_type = not self.types or model_type in self.types
        return is_type and all(mark in template for mark in self.marks)


FAMILIES = (
    # DeepSeek V3 and R1 write arguments into a JSON fence, V3.1 does not.
    Family("deepseek_v3", "deepseek_r1", ("<｜tool▁calls▁begin｜>", "```json")),
    Family("deepseek_v31", "deepseek_v3", ("<｜tool▁calls▁begin｜>",)),
    Family("functiongemma", marks=("<start_function_call>",)),
    Family("gemma4", "gemma4", ("<|tool_call>",), thinks="<|channel>"),
    Family("mistral", "mistral", ("[TOOL_CALLS]", "[ARGS]"), thinks="[THINK]"),
    # Models before [ARGS] write a list of JSON, which vLLM reads with Mistral's own tokenizers only.
    Family(None, marks=("[TOOL_CALLS]",)),
    Family("poolside_v1", "poolside_v1", ("<tool_call>",), ("laguna",)),
    Family("hy_v3", "hy_v3", ("<tool_sep",)),
    Family("glm47", "glm47", ("<arg_key>",)),
    Family("olmo3", "olmo3", ("<function_calls>",)),
    Family("granite", "granite", ("<|tool_call|>",), thinks="thought process"),
    Family("lfm2", "qwen3", ("<|tool_call_start|>",)),
    Family("lfm2", marks=("<|tool_list_start|>",)),
    Family("minimax_m2", "minimax_m2", ("<minimax:tool_call>",)),
    Family("seed_oss", "seed_oss", ("<seed:tool_call>",), thinks="<seed:think>", always=True),
    Family("kimi_k2", "kimi_k2", ("<|tool_calls_section_begin|>",), always=True),
    Family("apertus", marks=("<|tools_prefix|>",)),
    # vLLM reads calls of Cohere's Command with a package of Cohere's only.
    Family(None, marks=("<|START_ACTION|>",)),
    Family("phi4_mini_json", marks=("<|tool|>",)),
    Family("hunyuan_a13b", "hunyuan_a13b", ("<tool_calls>",), ("hunyuan_v1_dense", "hunyuan_v1_moe")),
    Family("ernie45", "ernie45", ("<tool_call>",), ("ernie4_5", "ernie4_5_moe")),
    Family("muse_glimmer", "muse_glimmer", types=("muse_glimmer",), thinks=""),
    Family("openai", "openai_gptoss", types=("gpt_oss",), thinks=""),
    Family("qwen3_coder", "nemotron_v3", ("<function=",), ("nemotron_h",)),
    Family("qwen3_xml", "qwen3", ("<function=",)),
    Family(None, "nemotron_v3", types=("nemotron_h",)),  # vLLM cannot read its <TOOLCALL>
    Family("hermes", "qwen3", ("<tool_call>",)),
    Family("llama3_json", "qwen3", ("<|python_tag|>",)),
    Family("llama3_json", "qwen3", ('"parameters": dictionary',)),
    Family("llama4_pythonic", types=("llama4",)),
    Family(None, "qwen3"),
)
"""The first family that holds decides."""


def choose_parsers(templates: Templates, model_type: str) -> Parsers:
    """The parsers for a model with these templates."""
    family = next(candidate for candidate in FAMILIES if candidate.holds(templates.with_tools, model_type))
    reasoning = family.reasoning if family.thinks in templates.usual else None
    thinks = None
    if reasoning is not None and "enable_thinking" in templates.usual:
        thinks = thinks_by_default(templates.usual)
    elif reasoning is not None and family.always:
        thinks = True
    return Parsers(family.tool, reasoning, thinks)


def seen_parsers(templates: Templates, model_type: str) -> Parsers:
    """As `choose_parsers`, but no tool parser if the model would not see the tools, so that a request with tools is
    refused."""
    parsers = choose_parsers(templates, model_type)
    return parsers if renders_tools(templates) else replace(parsers, tool=None)


def thinks_by_default(template: str) -> bool:
    """Whether a template with the argument `enable_thinking` thinks when the argument is missing."""
    messages = [{"role": "user", "content": "hello"}]
    try:
        render = partial(template_renderer(template), messages=messages, add_generation_prompt=True)
        return render() != render(enable_thinking=False)
    except TEMPLATE_ERRORS:  # vLLM assumes thinking
        return True
