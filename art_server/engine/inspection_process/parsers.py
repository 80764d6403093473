"""Chooses vLLM's parsers for a model's tool calls and thinking, by the marks in its chat template.

A mark is the text that the model writes around a call. An architecture with a new name keeps its marks, so marks decide before
the `model_type`. `--engine-arg tool_call_parser=...` and `reasoning_parser=...` override the choice. The marks stand in
`shared/parser_families.py`, and a parser is added there.
"""

from dataclasses import replace
from functools import partial

from art_server.engine.inspection_process.template import (
    TEMPLATE_ERRORS,
    Templates,
    renders_tools,
    template_renderer,
)
from art_server.shared.parser_families import FAMILIES
from art_server.store.base_facts import Parsers


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
