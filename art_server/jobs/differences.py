"""Why a turn begins a new sequence: the first text that is not that of the turns before it, and whose text it is.

Turns of one history have the same messages, so their tokens are compared: the prompt that the policy read, with the
sequence so far. A history that repeats answers of an earlier one without continuing it differs from it in a message.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from art_protocol.wire import HistoryBody
from art_server.jobs.choices import is_choice
from art_server.jobs.turns import Place
from art_server.ledger import conversation
from art_server.ledger.conversation import Message
from art_server.ledger.splice import first_difference

ANSWER, TEMPLATE = "the policy's answer", "the chat template's own text"
BEFORE, BEHIND = 20, 60
"""Characters that are shown before and behind a difference."""
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
    return FirstDifference(_whose(history, turns, sequence, at, decode), *around(expected, found))


def _whose(
    history: HistoryBody,
    turns: Sequence[tuple[int, Place]],
    sequence: list[int],
    at: int,
    decode: Callable[[Sequence[int]], str | None],
) -> str:
    """Whose text is at a place of a sequence."""
    if any(place.start <= at < place.stop for _, place in turns):
        return ANSWER
    entry, start = max(((entry, place.stop) for entry, place in turns if place.stop <= at), default=(-1, 0))
    passed = decode(sequence[start:at]) or ""
    for message in history.messages_and_choices[entry + 1 :]:
        if is_choice(message):
            break
        if text_of(message).strip() not in passed:
            return whose_message(message)
    return TEMPLATE


def of_histories(
    earlier: Sequence[tuple[HistoryBody, Sequence[bytes]]], history: HistoryBody, digests: Sequence[bytes], entry: int
) -> FirstDifference | None:
    """The first difference between the messages before an entry and the history of the same trajectory that it begins
    like. None if the messages repeat no answer of one as plain text. Histories come with `conversation.prefix_digests`."""
    messages = messages_of(history)[:entry]
    answers = _plain_answers(history.messages_and_choices[:entry])
    nearest: list[Message] = []
    num_same = -1
    for each, its_digests in earlier:
        entries = each.messages_and_choices
        first = next((number for number, one in enumerate(entries) if is_choice(one)), None)
        if first is None or len(answers) <= len(_plain_answers(entries[:first])):  # these are examples
            continue
        same = first_difference(digests[1 : entry + 1], its_digests[1:])
        if same >= num_same and (same or _repeats(answers, each)):
            nearest, num_same = messages_of(each), same
    if num_same < 0:
        return None
    expected, found = (each[num_same] if num_same < len(each) else {} for each in (nearest, messages))
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
