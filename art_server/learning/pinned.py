"""What a score keeps of its answer or session: the conversations, and the records of their choices with the exact tokens.

A row of `scores.py` has these bytes until a step has trained the score. The format is MessagePack, compressed with zlib; the
bytes are read by type, never as a program's objects.
"""

import zlib
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import msgspec

from art_protocol.wire import HistoryBody
from art_server.ledger.records import Record


@dataclass(frozen=True, slots=True)
class Pinned:
    """The judged conversations and the records of their choices."""

    histories: list[dict[str, Any]]
    """As `HistoryBody`, with each choice by its id."""
    records: list[Record]


def pack(histories: Sequence[HistoryBody], records: Sequence[Record]) -> bytes:
    bare = [
        replace(record, request=replace(record.request, answers=(), cited_choices=()), text="") for record in records
    ]
    content = Pinned([history.model_dump(exclude_none=True) for history in histories], bare)
    return zlib.compress(msgspec.msgpack.encode(content), 1)


def unpack(packed: bytes) -> Pinned:
    return msgspec.msgpack.decode(zlib.decompress(packed), type=Pinned)
