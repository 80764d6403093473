"""What a chat template does with earlier answers: which white space it strips.

A few conversations are rendered once per base model, so the template's text does not matter. A template that
cannot be rendered is assumed to strip nothing.
"""

import json
from collections.abc import Callable
from dataclasses import fields
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import jinja2
from transformers.utils import chat_template_utils

from art_server.store.base_facts import TemplateRules

TEMPLATE_ERRORS = (jinja2.TemplateError, TypeError, ValueError, KeyError, AttributeError)
"""What a chat template raises that needs other arguments, or refuses a conversation."""

SPACES = "\n\t \r\u2003"
"""White space that is tried. A template that strips all of these is assumed to strip all white space."""
WORD, THOUGHT = "WORD", "THOUGHT"
QUESTION = {"role": "user", "content": "question"}
TOOL = {
    "type": "function",
    "function": {
        "name": "look_around",
        "description": "",
        "parameters": {"type": "object", "properties": {"a": {"type": "integer"}}},
    },
}
# The id has nine characters: Mistral's templates refuse any other length.
RESULT = {"role": "tool", "tool_call_id": "call12345", "name": "look", "content": "result"}


def template_renderer(template: str) -> Callable[..., str]:
    """A function that renders messages by a chat template, as transformers does. The function raises `TEMPLATE_ERRORS`.

    Raises:
        jinja2.TemplateError: the template has a wrong syntax.
    """
    compiled = chat_template_utils._compile_jinja_template(template)  # pyright: ignore[reportPrivateUsage]  # no tokenizer
    return partial(compiled.render, bos_token="", eos_token="", tools=None, documents=None)


class Templates(NamedTuple):
    """The chat templates of a model; empty if the model has none."""

    usual: str
    with_tools: str
    """The template for conversations with tools."""


def read_templates(folder: Path, own: Path | None = None) -> Templates:
    """The templates of the model in `folder`, or instead the template in the file `own`.

    A model can have several by name: "default", and "tool_use" for conversations with tools. Templates are files, or a list in
    tokenizer_config.json, or in chat_template.json of models that also read images. Source: transformers,
    `PreTrainedTokenizerBase.get_chat_template` and `from_pretrained`, `ProcessorMixin.get_processor_dict`.
    """
    if own is not None:
        return Templates(own.read_text(), own.read_text())
    more = folder / "additional_chat_templates"
    named = {file.stem: file.read_text() for file in sorted(more.glob("*.jinja"))}
    if (file := folder / "chat_template.jinja").exists():
        named["default"] = file.read_text()
    for name in ("tokenizer_config.json", "chat_template.json"):
        if named or not (folder / name).exists():
            continue
        listed = json.loads((folder / name).read_text()).get("chat_template")
        if isinstance(listed, list):
            named = {entry["name"]: entry["template"] for entry in listed}
        elif isinstance(listed, str):
            named = {"default": listed}
    usual = named.get("default", "")
    return Templates(usual, named.get("tool_use", usual))


def find_rules(templates: Templates) -> TemplateRules:
    """The rules of a model's templates. If conversations with tools have their own template, the rules that both share."""
    rules, with_tools = map(_find_rules, templates)
    common = {
        rule.name: getattr(rules, rule.name)
        for rule in fields(TemplateRules)
        if getattr(rules, rule.name) == getattr(with_tools, rule.name)
    }
    return TemplateRules(**common)


def _find_rules(template: str) -> TemplateRules:
    render = partial(_render, template)

    def stripped(left: str, right: str) -> str | None:
        """The white space that is stripped beside an answer, on the side of the "x"; None: all white space."""
        plain = render(QUESTION, {"role": "assistant", "content": WORD}, QUESTION)
        if WORD not in plain:
            return ""
        gone = ""
        for space in SPACES:
            content = left.replace("x", space) + WORD + right.replace("x", space)
            if render(QUESTION, {"role": "assistant", "content": content}, QUESTION) == plain:
                gone += space
        return None if gone == SPACES else gone

    thinking = {"reasoning_content": THOUGHT, "reasoning": THOUGHT, "thinking": THOUGHT}
    answer = {"role": "assistant", "content": WORD, **thinking}
    padded = dict.fromkeys(thinking, f"\n{THOUGHT}\n")
    moved = render(QUESTION, {"role": "assistant", "content": f"\n\n{WORD}", **padded}, RESULT)
    usual = render(QUESTION, answer, RESULT)
    return TemplateRules(
        left=stripped("x", ""),
        right=stripped("", "x"),
        around_thinking="\n" if usual and THOUGHT in usual and moved == usual else "",
        behind_answer=render(QUESTION, {"role": "assistant", "content": WORD}, QUESTION).partition(WORD)[2].lstrip(),
    )


def find_notes(templates: Templates, folder: Path) -> tuple[str, ...]:
    """What a user of the model in `folder` has to know about its templates, one sentence each."""
    if not templates.usual:
        return (
            "it has no chat template, so chat is refused: start the server with --chat-template FILE, or send prompts to "
            "/v1/completions",
        )
    notes: list[str] = []
    if _render(templates.usual, QUESTION) and not _render(templates.usual, QUESTION, QUESTION):
        notes.append("its chat template wants user and assistant messages in turns, and refuses two of a kind")
    system = {"role": "system", "content": WORD}
    in_parts = [message | {"content": [{"type": "text", "text": message["content"]}]} for message in (system, QUESTION)]
    rendered = _render(templates.usual, system, QUESTION)
    if WORD not in rendered + _render(templates.usual, *in_parts):
        how = "leaves system messages out" if rendered else "refuses system messages"
        notes.append(f"its chat template {how}: write instructions into the first user message")
    if begin := _twice(templates.usual, folder):
        notes.append(
            f"its chat template and its tokenizer both begin a text with {begin}: send a prompt that you render yourself to "
            '/v1/completions with "add_special_tokens": false'
        )
    return tuple(notes)


def renders_tools(templates: Templates) -> bool:
    """Whether the model sees the tools of a request."""
    return TOOL["function"]["name"] in _render(templates.with_tools, QUESTION, tools=[TOOL])


def _render(template: str, *messages: dict[str, Any], **more: Any) -> str:
    """The rendered messages; empty if the template refuses the messages."""
    try:
        return template_renderer(template)(messages=[*messages], **more)
    except TEMPLATE_ERRORS:
        return ""


def _twice(template: str, folder: Path) -> str | None:
    """The token that begins a rendered text twice, if the tokenizer reads the text like any other; None: no token does."""
    from transformers import AutoTokenizer  # takes seconds: a template is checked before

    try:
        tokenizer: Any = AutoTokenizer.from_pretrained(folder)  # Any: its methods are untyped
        text = tokenizer.apply_chat_template([QUESTION], chat_template=template, tokenize=False)
        first = tokenizer(text).input_ids[:2]
    except (*TEMPLATE_ERRORS, OSError, ImportError):
        return None
    return tokenizer.bos_token if first == [tokenizer.bos_token_id] * 2 else None
