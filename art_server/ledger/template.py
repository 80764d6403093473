"""What a chat template does to an earlier answer by its own rule: which white space it strips, which thinking it keeps.

Seen by rendering, once a base model: the answers to a few conversations show it, whatever the template's text. A template
that cannot be rendered here is taken to strip nothing and to keep nothing.
"""

import datetime
import json
import logging
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jinja2
from jinja2.ext import loopcontrols
from jinja2.sandbox import ImmutableSandboxedEnvironment

from art_server.base_models import read_template

logger = logging.getLogger(__name__)

SPACES = "\n\t \r\u2003"
"""White space that is tried. A template that strips all of these strips whatever is white space."""
WORD, THOUGHT = "WORD", "THOUGHT"
QUESTION = {"role": "user", "content": "question"}
CALL = {"id": "call12345", "type": "function", "function": {"name": "look", "arguments": {"a": 1}}}
RESULT = {"role": "tool", "tool_call_id": "call12345", "name": "look", "content": "result"}


@dataclass(frozen=True, slots=True)
class TemplateRules:
    """The defaults change nothing."""

    left: str | None = ""
    """White space that is stripped from an answer's beginning; None is any."""
    right: str | None = ""
    """...and from its end."""
    around_thinking: str = ""
    """White space that is written anew around thinking, and between it and the answer."""
    keeps_before_user: bool = False
    """Thinking of an answer that a user's turn follows is rendered."""
    keeps_before_tool: bool = False
    """Thinking of an answer that only tool results follow is rendered."""
    behind_answer: str = ""
    """What is rendered behind an answer that a user's turn follows."""


def find_rules(folder: Path) -> TemplateRules:
    """The rules of the template in a model's folder."""
    template = read_template(folder)
    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[loopcontrols]
    )
    environment.globals["raise_exception"] = _refuse
    environment.globals["strftime_now"] = datetime.datetime.now().strftime
    environment.filters["tojson"] = lambda value, **options: json.dumps(
        value, ensure_ascii=False, **{k: v for k, v in options.items() if k == "indent"}
    )

    def render(*messages: dict[str, Any]) -> str:
        try:
            compiled = environment.from_string(template)
            return compiled.render(messages=[*messages], bos_token="", eos_token="")
        except (jinja2.TemplateError, TypeError, ValueError, KeyError, AttributeError):
            return ""

    def stripped(left: str, right: str) -> str | None:
        """Which white space beside the word changes nothing; `left` and `right` say on which side."""
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


def _refuse(message: str) -> None:
    raise jinja2.TemplateError(message)
