"""How a chat template changes earlier answers: which white space it strips, and which thinking it keeps.

The rules are found by rendering a few conversations once per base model, so the template's text does not matter. A
template that cannot be rendered here is assumed to strip nothing and to keep no thinking.
"""

from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

import jinja2

from art_server.base_models import TEMPLATE_ERRORS, read_template, template_renderer

SPACES = "\n\t \r\u2003"
"""White space that is tried. A template that strips all of these is assumed to strip all white space."""
WORD, THOUGHT = "WORD", "THOUGHT"
QUESTION = {"role": "user", "content": "question"}
CALL = {"id": "call12345", "type": "function", "function": {"name": "look", "arguments": {"a": 1}}}
RESULT = {"role": "tool", "tool_call_id": "call12345", "name": "look", "content": "result"}


@dataclass(frozen=True, slots=True)
class TemplateRules:
    """A template's rules for earlier answers. With the defaults it strips nothing and keeps no thinking."""

    left: str | None = ""
    """White space that is stripped from an answer's beginning; None: all white space."""
    right: str | None = ""
    """White space that is stripped from an answer's end; None: all white space."""
    around_thinking: str = ""
    """White space that the template replaces by its own around thinking, and between thinking and answer."""
    keeps_before_user: bool = False
    """Whether thinking is rendered in an answer that a user message follows."""
    keeps_before_tool: bool = False
    """Whether thinking is rendered in an answer that only tool results follow."""
    behind_answer: str = ""
    """The text that is rendered after an answer that a user message follows."""


def find_rules(folder: Path) -> TemplateRules:
    """The rules of the template in a model's folder. Of two templates, one of them for conversations with tools, those
    that both have."""
    rules, with_tools = (
        _find_rules(read_template(folder, has_tools=has_tools)) for has_tools in (False, True)
    )
    common = {
        each.name: getattr(rules, each.name)
        for each in fields(TemplateRules)
        if getattr(rules, each.name) == getattr(with_tools, each.name)
    }
    return TemplateRules(**common)


def _find_rules(template: str) -> TemplateRules:
    try:
        rendered = template_renderer(template)
    except jinja2.TemplateError:
        return TemplateRules()

    def render(*messages: dict[str, Any]) -> str:
        try:
            return rendered(messages=[*messages])
        except TEMPLATE_ERRORS:
            return ""

    def stripped(left: str, right: str) -> str | None:
        """The white space that is stripped beside an answer, on the side of the "x"; None: all white space."""
        plain = render(QUESTION, {"role": "assistant", "content": WORD}, QUESTION)
        gone = "".join(
            space
            for space in SPACES
            for content in [left.replace("x", space) + WORD + right.replace("x", space)]
            if WORD in plain
            and render(QUESTION, {"role": "assistant", "content": content}, QUESTION) == plain
        )
        return None if gone == SPACES else gone

    thinking = {"reasoning_content": THOUGHT, "reasoning": THOUGHT, "thinking": THOUGHT}
    answer = {"role": "assistant", "content": WORD, **thinking}
    calling = {"role": "assistant", "content": "", "tool_calls": [CALL], **thinking}
    padded = dict.fromkeys(thinking, f"\n{THOUGHT}\n")
    moved = render(QUESTION, {"role": "assistant", "content": f"\n\n{WORD}", **padded}, RESULT)
    usual = render(QUESTION, answer, RESULT)
    return TemplateRules(
        left=stripped("x", ""),
        right=stripped("", "x"),
        around_thinking="\n" if usual and THOUGHT in usual and moved == usual else "",
        keeps_before_user=THOUGHT in render(QUESTION, answer, QUESTION),
        keeps_before_tool=THOUGHT in render(QUESTION, calling, RESULT),
        behind_answer=render(QUESTION, {"role": "assistant", "content": WORD}, QUESTION)
        .partition(WORD)[2]
        .lstrip(),
    )
