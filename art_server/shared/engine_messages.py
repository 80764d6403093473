"""Messages about requests from vLLM's process to the server, as JSON lines over a socket, and their request ids."""

import re
import uuid
from dataclasses import dataclass, field
from typing import Any

import msgspec

REQUEST_ID = re.compile(r"([0-9a-f]{32})(?:[-_](\d+))?$")
"""vLLM's request id ends with the proxy's id and, for completions of several prompts, the prompt's index."""

FIRST_TURN = "f"
"""First digit of the id of a request that cannot continue an earlier answer. The engine does not request exact
tokens for such a request, and sends the prompt with the samples. The id says this, because every API of vLLM passes the
id to the function that samples."""


@dataclass(frozen=True, slots=True)
class FinishedChoice:
    """One finished choice, as the engine sampled it."""

    request_id: str
    """vLLM's own id of the request; it contains the proxy's id."""
    index: int
    text: str
    """The answer as vLLM decoded it, without special tokens, cut where a stop string ended it."""
    token_ids: list[int]
    logprobs: list[float]
    """For each of token_ids the model's own log-probability, at temperature 1."""
    finish_reason: str
    stop_reason: int | str | None
    sampling: dict[str, Any]
    sampled_logprobs: list[float] | None = None
    kept: list[int] = field(default_factory=list)
    sets: list[bytes] = field(default_factory=list)
    """sampled_logprobs, kept and sets: as in the ledger's `Record`."""
    rendered: list[int] | None = None
    """The rendered prompt of a first turn, of a turn whose exact tokens leave no room for an answer, or of a turn
    that the ledger could not store."""


def new_request_id(is_first_turn: bool) -> str:
    """A random id of 32 hexadecimal digits."""
    return (FIRST_TURN if is_first_turn else "0") + uuid.uuid4().hex[1:]


def is_first_turn(engine_request_id: str) -> bool:
    match = REQUEST_ID.search(engine_request_id)
    return match is not None and match[1].startswith(FIRST_TURN)


@dataclass(frozen=True, slots=True)
class EngineMessage:
    """The part that every message has. A message with a prompt requests the exact tokens of this prompt. A message without a
    prompt is a `FinishedChoice`."""

    request_id: str
    prompt: list[int] | None = None


class MessageName(msgspec.Struct):
    """The fields that name the choice, in a message that cannot be decoded as a whole."""

    request_id: str = ""
    index: int = 0
    sampling: dict[str, Any] = {}


GRAMMAR_MARK = "@grammar@"
"""Stands, in an error of vLLM's process, for the name of the request's field with the grammar, which only the server knows
(`grammar_limits.py`)."""

ESCAPED_HALF = re.compile(
    r"(?<!\\)((?:\\\\)*)(?:(\\u[dD][89abAB][0-9a-fA-F]{2}\\u[dD][c-fC-F][0-9a-fA-F]{2})|\\u[dD][89a-fA-F][0-9a-fA-F]{2})"
)
"""A surrogate pair that JSON writes as two escapes, or one half of a pair."""


class CutText(str):
    """The end of an answer that the limit of tokens ended. The class marks such a text, because vLLM gives its parsers nothing
    of an answer but text and tokens."""

    def __radd__(self, before: str) -> "CutText":
        """Stays a CutText where vLLM's Responses add up the parts of an answer."""
        return CutText(str.__add__(before, self))


def whole_characters(text: str) -> str:
    r"""JSON in which each half of a surrogate pair, as a character or as an escape, is U+FFFD: `"a\ud83c"` -> `"a\ufffd"`."""
    if not text.isascii():
        # In UTF-16 two halves that stand side by side become their character.
        text = text.encode("utf-16", "surrogatepass").decode("utf-16", "replace")
    if "\\u" not in text:
        return text
    return ESCAPED_HALF.sub(lambda match: match[1] + (match[2] or "\\ufffd"), text)
