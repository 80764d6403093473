"""Why a turn begins a new sequence: the first text that is not that of the turns before it, and whose text it is.

Turns of one history have the same messages, so their tokens are compared: the prompt that the policy read, with the
sequence so far. A message that both of them contain behind the difference is not what differs: the text before it is, which
is that of the tool definitions or the chat template's own. A history that repeats answers of an earlier one without
continuing it differs from it in a message, or in its tools.
"""

import json
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from art_protocol.wire import HistoryBody
from art_server.jobs.choices import is_choice
from art_server.jobs.turns import Place
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
"""What no text of a template but tool definitions has."""
NEAR = 8
"""Tokens before a difference that are decoded with it: tokenizers split a changed text anew."""


@dataclass(frozen=True, slots=True)
class FirstDifference:
    """The first difference between a prompt and the turns before it."""

    whose: str
    expected: str
    found: str

    def __str__(self) -> str:
        return f"{self.whose}: expected {self.expected!r}, found {self.found!r}"


def of_prompt(
    history: HistoryBody,
    turns: Sequence[tuple[int, Place]],
    sequence: list[int],
    prompt: list[int],
    decode: Callable[[Sequence[int]], str | None],
) -> FirstDifference | None:
    """The first difference between a prompt and the sequence of the turns before it, which are given with their entries.
    None without a tokenizer."""
    at = first_difference(sequence, prompt)
    expected, found = (decode(ids[max(0, at - NEAR) : at + BEHIND]) for ids in (sequence, prompt))
    if expected is None or found is None:
        return None
    if expected == found:
        expected, found = ("|".join(decode([id]) or "" for id in ids[at : at + NEAR]) for ids in (sequence, prompt))
    return FirstDifference(_whose(history, turns, sequence, prompt, at, decode), *around(expected, found))


def _whose(
    history: HistoryBody,
    turns: Sequence[tuple[int, Place]],
    sequence: list[int],
    prompt: list[int],
    at: int,
    decode: Callable[[Sequence[int]], str | None],
) -> str:
    """Whose text differs between a sequence and a prompt, which are the same before `at`."""
    if any(place.start <= at < place.stop for _, place in turns):
        return ANSWER
    entry, start = max(((entry, place.stop) for entry, place in turns if place.stop <= at), default=(-1, 0))
    end = min((place.start for _, place in turns if place.start > at), default=len(sequence))
    expected = decode(sequence[start : min(end, at + LOOKED_AT)]) or ""
    found = decode(prompt[start : at + LOOKED_AT]) or ""
    difference, behind = first_difference(expected, found), 0
    for message in history.messages_and_choices[entry + 1 :]:
        if is_choice(message):
            break
        text = text_of(message).strip()
        begin = expected.find(text, behind)
        if 0 <= begin <= difference - len(text):
            behind = begin + len(text)
            continue
        begins = [each.find(text[:COMPARED], behind) for each in (expected, found)]
        if min(begins) < difference:  # in one of them it is absent, or it begins before the difference
            return whose_message(message)
        expected, found = expected[: begins[0]], found[: begins[1]]
        break
    return _whose_between(expected[behind:], found[behind:])


def _whose_between(expected: str, found: str) -> str:
    """Whose text differs between two messages: that of the tool definitions, or the template's."""
    at = first_difference(expected, found)
    have_tools = [DEFINITIONS.search(text) is not None for text in (expected, found)]
    if any(have_tools) and (not all(have_tools) or any(_is_in_tools(text, at) for text in (expected, found))):
        return TOOLS
    return TEMPLATE


def _is_in_tools(text: str, at: int) -> bool:
    """Whether a place of a text is between the first key of a tool definition and the empty line behind the last."""
    keys = [*SCHEMA_KEY.finditer(text)]
    if not keys:
        return "namespace functions" in text[:at]
    end = text.find("\n\n", keys[-1].end())
    return keys[0].start() <= at and (end < 0 or at <= end)


def of_histories(
    earlier: Sequence[tuple[HistoryBody, Sequence[bytes]]], history: HistoryBody, digests: Sequence[bytes], entry: int
) -> FirstDifference | None:
    """The first difference between the messages before an entry and the history of the same trajectory that it begins
    like. None if the messages repeat no answer of one as plain text. Histories come with `conversation.prefix_digests`."""
    messages = messages_of(history)[:entry]
    answers = _plain_answers(history.messages_and_choices[:entry])
    nearest: list[Message] = []
    nearest_tools: Any = None
    num_same = -1
    for each, its_digests in earlier:
        entries = each.messages_and_choices
        first = next((number for number, one in enumerate(entries) if is_choice(one)), None)
        if first is None or len(answers) <= len(_plain_answers(entries[:first])):  # these are examples
            continue
        same = first_difference(digests[1 : entry + 1], its_digests[1:])
        if same >= num_same and (same or _repeats(answers, each)):
            nearest, nearest_tools, num_same = messages_of(each), each.tools, same
    if num_same < 0:
        return None
    expected, found = (each[num_same] if num_same < len(each) else {} for each in (nearest, messages))
    if not (expected and found) and (nearest_tools or []) != (history.tools or []):
        shown = (json.dumps(tools or [], ensure_ascii=False) for tools in (nearest_tools, history.tools))
        return FirstDifference(TOOLS, *around(*shown))
    texts = [text_of(each) for each in (expected, found)]
    if expected.get("role") != found.get("role"):
        texts = [
            f"{each.get('role')}: {text}" if each else "" for each, text in zip((expected, found), texts, strict=True)
        ]
    return FirstDifference(whose_message(expected or found), *around(*texts))


def _plain_answers(entries: Sequence[dict[str, Any]]) -> list[str]:
    """The assistant's messages among entries, without choices."""
    return [text_of(entry) for entry in entries if entry.get("role") == "assistant"]


def _repeats(answers: Sequence[str], history: HistoryBody) -> bool:
    """Whether one of these begins like an answer that was sampled in a history."""
    sampled = [text_of(entry["message"]) for entry in history.messages_and_choices if is_choice(entry)]
    return any(said and answer.startswith(said) for answer in answers for said in sampled)


def messages_of(history: HistoryBody) -> list[Message]:
    return [entry["message"] if is_choice(entry) else entry for entry in history.messages_and_choices]


def text_of(message: dict[str, Any]) -> str:
    """What a message says: its text and its tool calls."""
    calls = map(conversation.call_text, conversation.as_list(message.get("tool_calls")))
    return conversation.content_text(message.get("content")) + "".join(calls)


def whose_message(message: Message) -> str:
    role = message.get("role")
    return ANSWER if role == "assistant" else f"the {role} message"


def around(expected: str, found: str) -> tuple[str, str]:
    """Two texts near their first difference."""
    at = first_difference(expected, found)
    start = max(0, at - BEFORE)
    return expected[start : at + BEHIND], found[start : at + BEHIND]
