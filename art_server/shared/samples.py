"""What vLLM's process reports of a request, as JSON lines over a socket, and the ids that tie them to it."""

import re
import uuid
from dataclasses import dataclass, field
from typing import Any

import msgspec

REQUEST_ID = re.compile(r"([0-9a-f]{32})(?:[-_](\d+))?$")
"""vLLM's request id holds the gate's and, for completions of several prompts, the prompt's number."""

FIRST_TURN = "f"
"""The first digit of a request's id when it cannot continue an answer: its prompt comes with its samples, and the engine does
not wait for other tokens."""


@dataclass(frozen=True, slots=True)
class Sample:
    """One finished choice, as the engine sampled it."""

    request_id: str
    """vLLM's own id of the request; it contains the id that the gate set."""
    index: int
    text: str
    """As vLLM decoded it, without special tokens, cut where a stop string cut it."""
    token_ids: list[int]
    logprobs: list[float]
    """One for each of token_ids: raw log-probabilities, at temperature 1."""
    finish_reason: str
    stop_reason: int | str | None
    sampling: dict[str, Any]
    sampled_logprobs: list[float] | None = None
    kept: list[int] = field(default_factory=list)
    sets: list[bytes] = field(default_factory=list)
    """As in the ledger's `Record`."""
    rendered: list[int] | None = None
    """The prompt of a first turn; another's was asked about before."""


def new_request_id(is_first_turn: bool) -> str:
    """32 hexadecimal digits."""
    return (FIRST_TURN if is_first_turn else "0") + uuid.uuid4().hex[1:]


def is_first_turn(engine_request_id: str) -> bool:
    found = REQUEST_ID.search(engine_request_id)
    return found is not None and found[1].startswith(FIRST_TURN)


@dataclass(frozen=True, slots=True)
class Line:
    """What each line has; one with a prompt asks about it, any other is a sample."""

    request_id: str
    prompt: list[int] | None = None


class Name(msgspec.Struct):
    """What a line that cannot be taken still tells."""

    request_id: str = ""
    index: int = 0
    sampling: dict[str, Any] = {}
