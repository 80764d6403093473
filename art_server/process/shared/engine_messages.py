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
tokens for it, and sends the prompt with the samples."""


@dataclass(frozen=True, slots=True)
class FinishedChoice:
    """One finished choice, as the engine sampled it."""

    request_id: str
    """vLLM's own id of the request; it contains the proxy's id."""
    index: int
    text: str
    """As vLLM decoded it, without special tokens, cut where a stop string cut it."""
    token_ids: list[int]
    logprobs: list[float]
    """One for each of token_ids: the model's own log-probability, at temperature 1."""
    finish_reason: str
    stop_reason: int | str | None
    sampling: dict[str, Any]
    sampled_logprobs: list[float] | None = None
    kept: list[int] = field(default_factory=list)
    sets: list[bytes] = field(default_factory=list)
    """sampled_logprobs, kept and sets: as in the ledger's `Record`."""
    rendered: list[int] | None = None
    """The rendered prompt of a first turn, of a turn whose exact tokens leave no room for an answer, or of one that the
    ledger could not store."""


def new_request_id(is_first_turn: bool) -> str:
    """A random id of 32 hexadecimal digits."""
    return (FIRST_TURN if is_first_turn else "0") + uuid.uuid4().hex[1:]


def is_first_turn(engine_request_id: str) -> bool:
    found = REQUEST_ID.search(engine_request_id)
    return found is not None and found[1].startswith(FIRST_TURN)


@dataclass(frozen=True, slots=True)
class EngineMessage:
    """A part of every message. With a prompt, it requests the exact tokens for it; without, it is a `FinishedChoice`."""

    request_id: str
    prompt: list[int] | None = None


class MessageName(msgspec.Struct):
    """The fields that name the choice of a sample that cannot be decoded as a whole."""

    request_id: str = ""
    index: int = 0
    sampling: dict[str, Any] = {}


GRAMMAR_MARK = "@grammar@"
"""Stands in an error of vLLM's process for the field of the request that contains the grammar."""

ESCAPED_HALF = re.compile(
    r"(?<!\\)((?:\\\\)*)(?:(\\u[dD][89abAB][0-9a-fA-F]{2}\\u[dD][c-fC-F][0-9a-fA-F]{2})|\\u[dD][89a-fA-F][0-9a-fA-F]{2})"
)
"""A surrogate pair that JSON writes as two escapes, or one half of a pair."""


class CutText(str):
    """The end of an answer that the limit of tokens ended. vLLM tells its parsers nothing of an answer but text and tokens."""

    def __radd__(self, before: str) -> "CutText":
        """vLLM's Responses add up the parts of an answer."""
        return CutText(str.__add__(before, self))


def whole_characters(text: str) -> str:
    """JSON in which each half of a surrogate pair, as a character or as an escape, is U+FFFD."""
    if not text.isascii():
        text = text.encode("utf-16", "surrogatepass").decode("utf-16", "replace")
    if "\\u" not in text:
        return text
    return ESCAPED_HALF.sub(lambda found: found[1] + (found[2] or "\\ufffd"), text)
