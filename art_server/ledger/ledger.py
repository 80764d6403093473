"""The ledger: for every choice that the engine sampled, its prompt, tokens, log-probabilities and policy step.

Its own SQLite file. A request is announced before it goes to the engine (`open_request`); each sample that the engine
reports for it becomes a record; the gate waits for the records before it ends its answer, so whoever has the answer can
train on it. Records are looked up by choice id, always within the project that sampled them.
"""

import array
import asyncio
import json
import sqlite3
import time
import zlib
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from art_server.engine.records import Sample

SCHEMA = """
CREATE TABLE IF NOT EXISTS records (
    choice_id TEXT PRIMARY KEY,
    request_id TEXT NOT NULL,
    api TEXT NOT NULL,
    project TEXT,
    name TEXT,
    step INTEGER,
    owner TEXT NOT NULL,
    created_at REAL NOT NULL,
    prompt BLOB NOT NULL,
    tokens BLOB NOT NULL,
    logprobs BLOB NOT NULL,
    finish_reason TEXT NOT NULL,
    sampling TEXT NOT NULL
) WITHOUT ROWID;
CREATE INDEX IF NOT EXISTS records_by_request ON records (request_id);
"""

RECORD_WAIT_SECONDS = 10.0
"""A record travels over a local socket beside the answer; longer than this, the engine's process is gone."""


@dataclass(frozen=True, slots=True)
class Request:
    """Who asked for what: known before anything is sampled."""

    request_id: str
    """32 hexadecimal digits, chosen by the gate."""
    api: str
    project: str | None
    name: str | None
    step: int | None
    """Project, name and step are None for the base model."""
    owner: str
    """Names the caller's key without telling it."""


@dataclass(frozen=True, slots=True)
class Record:
    """One sampled choice. token_ids and logprobs have equal length."""

    choice_id: str
    request: Request
    prompt_token_ids: list[int]
    token_ids: list[int]
    logprobs: list[float]
    finish_reason: str
    sampling: dict[str, Any]
    created_at: float


def choice_id(request_id: str, index: int) -> str:
    return f"{request_id}-{index}"


def _pack(values: list[int] | list[float], kind: str) -> bytes:
    return zlib.compress(array.array(kind, values).tobytes(), 1)


def _unpack(blob: bytes, kind: str) -> list[Any]:
    values: array.array[Any] = array.array(kind)
    values.frombytes(zlib.decompress(blob))
    return values.tolist()


class Ledger:
    """Writes are committed as they come (WAL); a record costs well under a millisecond."""

    def __init__(self, file: Path):
        file.parent.mkdir(parents=True, exist_ok=True)
        self._db = sqlite3.connect(file, isolation_level=None, check_same_thread=False)
        self._db.execute("PRAGMA journal_mode=WAL")
        self._db.execute("PRAGMA synchronous=NORMAL")
        self._db.executescript(SCHEMA)
        self._open: dict[str, OpenRequest] = {}

    def close(self) -> None:
        self._db.close()

    def open_request(self, request: Request) -> "OpenRequest":
        """Announce a request; use as a context manager around the time that it is with the engine."""
        return OpenRequest(self, request)

    def receive(self, sample: Sample, request_id: str, index: int) -> None:
        """Take a sample, the choice `index` of a request. One that no open request asked for is not kept."""
        opened = self._open.get(request_id)
        if opened is None:
            return
        assert len(sample.token_ids) == len(sample.logprobs), (
            "one log-probability per sampled token"
        )
        record = Record(
            choice_id=choice_id(request_id, index),
            request=opened.request,
            prompt_token_ids=sample.prompt_token_ids,
            token_ids=sample.token_ids,
            logprobs=sample.logprobs,
            finish_reason=sample.finish_reason,
            sampling=sample.sampling,
            created_at=time.time(),
        )
        self._write(record)
        opened.add(index, record)

    def find(self, choice: str) -> Record | None:
        """The record of a choice id, None when there is none (any more)."""
        row = self._db.execute("SELECT * FROM records WHERE choice_id = ?", (choice,)).fetchone()
        return _record(row) if row is not None else None

    def find_request(self, request_id: str) -> list[Record]:
        """The records of one request, by choice index."""
        rows = self._db.execute(
            "SELECT * FROM records WHERE request_id = ?", (request_id,)
        ).fetchall()
        return sorted(map(_record, rows), key=lambda r: int(r.choice_id.rpartition("-")[2]))

    def _write(self, record: Record) -> None:
        request = record.request
        self._db.execute(
            "INSERT OR REPLACE INTO records VALUES (?,?,?,?,?,?,?,?,?,?,?,?,?)",
            (
                record.choice_id,
                request.request_id,
                request.api,
                request.project,
                request.name,
                request.step,
                request.owner,
                record.created_at,
                _pack(record.prompt_token_ids, "i"),
                _pack(record.token_ids, "i"),
                _pack(record.logprobs, "d"),
                record.finish_reason,
                json.dumps(record.sampling),
            ),
        )


def _record(row: tuple[Any, ...]) -> Record:
    return Record(
        choice_id=row[0],
        request=Request(row[1], row[2], row[3], row[4], row[5], row[6]),
        created_at=row[7],
        prompt_token_ids=_unpack(row[8], "i"),
        token_ids=_unpack(row[9], "i"),
        logprobs=_unpack(row[10], "d"),
        finish_reason=row[11],
        sampling=json.loads(row[12]),
    )


class OpenRequest:
    """A request that is with the engine, and the records that came for it."""

    def __init__(self, ledger: Ledger, request: Request):
        self.request = request
        self.records: dict[int, Record] = {}
        self._ledger = ledger
        self._came = asyncio.Event()

    def __enter__(self) -> "OpenRequest":
        self._ledger._open[self.request.request_id] = self
        return self

    def __exit__(self, *_: object) -> None:
        self._ledger._open.pop(self.request.request_id, None)

    def add(self, index: int, record: Record) -> None:
        self.records[index] = record
        self._came.set()

    async def wait(self, index: int) -> Record | None:
        """The record of choice `index`, None when it does not come."""
        try:
            async with asyncio.timeout(RECORD_WAIT_SECONDS):
                while index not in self.records:
                    self._came.clear()
                    await self._came.wait()
        except TimeoutError:
            return None
        return self.records[index]
