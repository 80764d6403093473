"""Where tokens come from when a train request is resolved (`resolve.py`): the ledger and the engine, as functions."""

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from typing import Any

from art_server.ledger.conversation import Message
from art_server.ledger.records import Match, Record


@dataclass(frozen=True, slots=True)
class TokenSources:
    """Where the resolver finds tokens. `render` and `tokenize` call the engine, and block."""

    model: int
    """The number of the job's model."""
    name_of: Callable[[int], str]
    """From a model's number to PROJECT/NAME."""
    find_record: Callable[[str], Record | None]
    find_by_logprobs: Callable[[Sequence[float]], Sequence[Match]]
    """From log-probabilities to records of the job's model, newest first."""
    find_by_conversation: Callable[[bytes, bytes], Sequence[Match]]
    """From the digests of a conversation and of its answer to records of the job's model, newest first."""
    render: Callable[[list[Message], list[dict[str, Any]] | None, bool], list[int]]
    """From messages and tools to the conversation's tokens, with or without the header of the next answer."""
    tokenize: Callable[[str], list[int]]
    decode: Callable[[Sequence[int]], str | None]
    """The text of tokens; None without a tokenizer."""
    end_id: int | None
    """The token that usually ends a turn; None if it is unknown."""
    end_ids: Collection[int]
    """All tokens that end a turn."""
    stop_ids: Collection[int]
    """The tokens of `end_ids` at which the engine stops."""
    find_unnamed: Callable[[int], Collection[str]]
    """From a time (`clock.tick`) to the choices of the job's model that later requests without a session got."""


@dataclass(frozen=True, slots=True)
class Limits:
    """Limits of the loaded base model."""

    vocab_size: int
    max_seq_length: int
