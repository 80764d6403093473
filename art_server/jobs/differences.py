"""Why a turn begins a new sequence: the first text that differs from the turns before, and whose text that is.

Turns of one history have the same messages. So tokens are compared: the prompt that the policy read, with the sequence so
far. If both contain the next message behind the difference, the text before this message differs: the tool definitions, or
the chat template's own text.

A history may repeat answers of an earlier history without continuing the earlier history. Then a message or the tools
differ.
"""

import json
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from art_protocol.wire import HistoryBody
from art_server.jobs.choices import is_choice
from art_server.jobs.turns import TurnSpan
from art_server.ledger import conversation
from art_server.ledger.conversation import Message
from art_server.ledger.splice import first_difference

ANSWER, TEMPLATE, TOOLS = "the policy's answer", "the chat template's own text", "the tool definitions"
BEFORE, BEHIND = 20, 60
"""Characters that are shown before and behind a difference."""
LOOKED_AT = 4096
"""Tokens behind a difference in which the next message is looked for."""
COMPARED = 1000
"""Characters of a message that are looked for."""
SCHEMA_KEY = re.compile(r'"(?:type|function|name|description|parameters|properties|required|enum)"\s*:')
"""A key of a tool definition. All families but gpt-oss, which writes TypeScript, render definitions as JSON."""
DEFINITIONS = re.compile(r'"properties"\s*:|namespace functions')
"""Text that only the tool definitions of a template have."""
NEAR = 8
"""Tokens before a difference that are decoded with it: tokenizers split a changed text anew."""


@dataclass(frozen=True, slots=True)
class FirstDifference:
    """The first difference between a prompt and the turns before it."""

    whose: str
    expected: str
    actual: str
    num_tokens: int = 0
    """The tokens behind the difference that the later prompt has beside those of the turns before: they are computed again."""

    def __str__(self) -> str:
        return f"{self.whose}: expected {self.expected!r}, found {self.actual!r}; {self.num_tokens:,} tokens are computed again"


@dataclass(frozen=True, slots=True)
class OtherHistory:
    """Another history of the same trajectory."""

    history: HistoryBody
    digests: Sequence[bytes]
    """`conversation.prefix_digests` of its messages."""
    sequences: Sequence[Sequence[int]] = ()
    """The tokens of its sequences."""


def of_prompt(
    history: HistoryBody,
    turns: Sequence[tuple[int, TurnSpan]],
    sequence: list[int],
    prompt: list[int],
    decode: Callable[[Sequence[int]], str | None],
) -> FirstDifference | None:
    """The first difference between a prompt and the sequence of the turns before. `turns` are the turns of this sequence:
    their entries in the history, and their spans. None without a tokenizer."""
    at = first_difference(sequence, prompt)
    expected, actual = (decode(ids[max(0, at - NEAR) : at + BEHIND]) for ids in (sequence, prompt))
    if expected is None or actual is None:
        return None
    if expected == actual:  # the same text in other tokens: show the tokens
        expected = _texts_of_tokens(sequence[at : at + NEAR], decode)
        actual = _texts_of_tokens(prompt[at : at + NEAR], decode)
    whose = _whose(history, turns, sequence, prompt, at, decode)
    return FirstDifference(whose, *around(expected, actual), num_tokens=num_again(sequence, prompt, at))


def num_again(sequence: Sequence[int], prompt: Sequence[int], at: int) -> int:
    """The tokens that a prompt would share with a sequence if the two did not differ from `at` on."""
    return min(len(sequence), len(prompt)) - at


def _texts_of_tokens(token_ids: Sequence[int], decode: Callable[[Sequence[int]], str | None]) -> str:
    """The texts of single tokens, such as `un|til`."""
    return "|".join(decode([token_id]) or "" for token_id in token_ids)


def _whose(
    history: HistoryBody,
    turns: Sequence[tuple[int, TurnSpan]],
    sequence: list[int],
    prompt: list[int],
    at: int,
    decode: Callable[[Sequence[int]], str | None],
) -> str:
    """Whose text differs between a sequence and a prompt, which are the same before `at`."""
    if any(span.start <= at < span.stop for _, span in turns):
        return ANSWER
    # The texts between the last answer before the difference and the next answer.
    entry, start = max(((entry, span.stop) for entry, span in turns if span.stop <= at), default=(-1, 0))
    end = min((span.start for _, span in turns if span.start > at), default=len(sequence))
    expected = decode(sequence[start : min(end, at + LOOKED_AT)]) or ""
    actual = decode(prompt[start : at + LOOKED_AT]) or ""
    difference, behind = first_difference(expected, actual), 0
    for message in history.messages_and_choices[entry + 1 :]:
        if is_choice(message):
            break
        text = text_of(message).strip()
        begin = expected.find(text, behind)
        if 0 <= begin <= difference - len(text):  # the message ends before the difference
            behind = begin + len(text)
            continue
        begins = [rendered.find(text[:COMPARED], behind) for rendered in (expected, actual)]
        if min(begins) < difference:  # one text lacks the message, or the message begins before the difference
            return whose_message(message)
        # Both texts contain the message behind the difference.
        expected, actual = expected[: begins[0]], actual[: begins[1]]
        break
    return _whose_between(expected[behind:], actual[behind:])


def _whose_between(expected: str, actual: str) -> str:
    """Whose text differs between two messages: TOOLS or TEMPLATE."""
    at = first_difference(expected, actual)
    have_tools = [DEFINITIONS.search(text) is not None for text in (expected, actual)]
    if any(have_tools) and (not all(have_tools) or any(_is_in_tools(text, at) for text in (expected, actual))):
        return TOOLS
    return TEMPLATE


def _is_in_tools(text: str, at: int) -> bool:
    """Whether index `at` of a text lies between the first key of a tool definition and the empty line behind the last key."""
    keys = [*SCHEMA_KEY.finditer(text)]
    if not keys:
        return "namespace functions" in text[:at]
    end = text.find("\n\n", keys[-1].end())
    return keys[0].start() <= at and (end < 0 or at <= end)


def of_histories(
    others: Sequence[OtherHistory],
    history: HistoryBody,
    digests: Sequence[bytes],
    entry: int,
    prompt: Sequence[int],
) -> FirstDifference | None:
    """The first difference between the messages before an entry and the most similar other history of the trajectory.

    None if the messages repeat no answer of another history as plain text: the later of two repeats the earlier. `prompt` are the tokens
    before the entry.
    """
    messages = messages_of(history)[:entry]
    answers = _plain_answers(history.messages_and_choices[:entry])
    nearest: OtherHistory | None = None
    num_same = -1
    for other in others:
        entries = other.history.messages_and_choices
        first_choice = next((index for index, message in enumerate(entries) if is_choice(message)), None)
        # As many plain answers as the other history begins with can be examples, which no policy sampled.
        if first_choice is None or len(answers) <= len(_plain_answers(entries[:first_choice])):
            continue
        same = first_difference(digests[1 : entry + 1], other.digests[1:])
        if same >= num_same and (same or _repeats(answers, other.history)):
            nearest, num_same = other, same
    if nearest is None:
        return None
    nearest_messages, nearest_tools = messages_of(nearest.history), nearest.history.tools
    num_tokens = max((num_again(ids, prompt, first_difference(ids, prompt)) for ids in nearest.sequences), default=0)
    expected = nearest_messages[num_same] if num_same < len(nearest_messages) else {}
    actual = messages[num_same] if num_same < len(messages) else {}
    if not (expected and actual) and (nearest_tools or []) != (history.tools or []):
        shown = (json.dumps(tools or [], ensure_ascii=False) for tools in (nearest_tools, history.tools))
        return FirstDifference(TOOLS, *around(*shown), num_tokens=num_tokens)
    written = text_of if expected.get("role") == actual.get("role") else _with_role
    whose = whose_message(expected or actual)
    return FirstDifference(whose, *around(written(expected), written(actual)), num_tokens=num_tokens)


def _with_role(message: Message) -> str:
    """A message's role and text, such as `user: Hi`; empty without a message."""
    return f"{message.get('role')}: {text_of(message)}" if message else ""


def _plain_answers(entries: Sequence[dict[str, Any]]) -> list[str]:
    """The assistant's messages among entries, without choices."""
    return [text_of(entry) for entry in entries if entry.get("role") == "assistant"]


def _repeats(answers: Sequence[str], history: HistoryBody) -> bool:
    """Whether any of these answers begins with an answer that was sampled in a history."""
    texts = [text_of(entry["message"]) for entry in history.messages_and_choices if is_choice(entry)]
    sampled = tuple(text for text in texts if text)
    return any(answer.startswith(sampled) for answer in answers)


def messages_of(history: HistoryBody) -> list[Message]:
    return [entry["message"] if is_choice(entry) else entry for entry in history.messages_and_choices]


def text_of(message: dict[str, Any]) -> str:
    """A message's text, followed by its tool calls."""
    calls = map(conversation.call_text, conversation.as_list(message.get("tool_calls")))
    return conversation.content_text(message.get("content")) + "".join(calls)


def whose_message(message: Message) -> str:
    role = message.get("role")
    return ANSWER if role == "assistant" else f"the {role} message"


def around(expected: str, actual: str) -> tuple[str, str]:
    """Two texts near their first difference."""
    at = first_difference(expected, actual)
    start = max(0, at - BEFORE)
    return expected[start : at + BEHIND], actual[start : at + BEHIND]
