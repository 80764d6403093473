"""The ledger: for every choice that the engine sampled, its prompt, tokens, log-probabilities and policy step.

Its own SQLite file. A request is announced before it goes to the engine (`open_request`). The engine's process asks with
each rendered prompt (`take_prompt`) and may be given the exact tokens of the conversation's past instead (`splice.py`);
each choice that it then reports becomes a record. The gate waits for the records before it ends its answer, so whoever
has the answer can train on it.

A prompt is stored as the choice that it continues plus what is new, so a conversation of many turns is stored once.
Records are dropped by age and by the file's size.
"""

import array
import asyncio
import contextlib
import functools
import heapq
import itertools
import json
import logging
import sqlite3
import threading
import zlib
from collections import OrderedDict
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import msgspec

from art_server import clock
from art_server.engine.records import Sample
from art_server.ledger import conversation
from art_server.ledger.decoder import Decoder
from art_server.ledger.splice import (
    MAX_PROMPTS,
    Answer,
    Link,
    PromptIndex,
    Reading,
    continue_answer,
    prefix_hashes,
)
from art_server.ledger.template import TemplateRules, find_rules
from art_server.store.database import add_columns, open_database, transaction
from art_server.training.kept_set import MASK

logger = logging.getLogger(__name__)

SCHEMA = """
CREATE TABLE IF NOT EXISTS prompts (
    number INTEGER PRIMARY KEY AUTOINCREMENT,  -- never given again: indexes in memory know prompts by it
    digest BLOB NOT NULL UNIQUE,
    parent TEXT,
    delta BLOB NOT NULL,
    cut INTEGER,  -- of a spliced prompt: its rendering is that of the parent's prompt without its last `cut` tokens,
    tail BLOB     -- and these
);
CREATE TABLE IF NOT EXISTS records (
    number INTEGER PRIMARY KEY,
    choice_id TEXT NOT NULL UNIQUE,
    request_id TEXT NOT NULL,  -- the choice ids begin with it, so that it needs no index of its own
    api TEXT NOT NULL,
    owner TEXT NOT NULL,
    project TEXT,
    name TEXT,
    step INTEGER,
    session TEXT,
    created_at REAL NOT NULL,
    prompt INTEGER NOT NULL,
    rendered INTEGER NOT NULL,
    continues TEXT,
    link TEXT,
    before BLOB NOT NULL,
    said BLOB NOT NULL,
    fingerprint BLOB NOT NULL,
    tokens BLOB NOT NULL,
    logprobs BLOB NOT NULL,
    finish_reason TEXT NOT NULL,
    sampling TEXT NOT NULL,
    is_delivered INTEGER NOT NULL DEFAULT 0,
    -- beginnings: where else later renderings go on from, 1 where thinking begins there, and the hash
    -- sampled_from: log-probabilities (NULL: the raw ones), kept, sets (each itself or its number); empty: raw, whole
    beginnings BLOB,
    sampled_from BLOB
);
CREATE INDEX IF NOT EXISTS prompts_by_parent ON prompts (parent) WHERE parent IS NOT NULL;
CREATE INDEX IF NOT EXISTS records_by_prompt ON records (prompt, said);
DROP INDEX IF EXISTS records_by_request;
CREATE INDEX IF NOT EXISTS records_by_session ON records (session) WHERE session IS NOT NULL;
CREATE INDEX IF NOT EXISTS records_by_said ON records (said);
CREATE INDEX IF NOT EXISTS records_by_fingerprint ON records (fingerprint);
CREATE TABLE IF NOT EXISTS kept_sets (
    number INTEGER PRIMARY KEY,
    digest BLOB NOT NULL UNIQUE,
    used_at REAL NOT NULL,  -- at most USED_SECONDS before created_at of each record that refers to it
    packed BLOB NOT NULL
);
CREATE TABLE IF NOT EXISTS turns (
    request_id TEXT PRIMARY KEY,
    body BLOB NOT NULL
);
"""

RECORD_WAIT_SECONDS = 10.0
"""A record travels over a local socket beside the answer; longer than this, the engine's process is gone."""

MAX_BEGINNINGS = 8
"""Beginnings of a prompt that are looked at, longest first: its last turn, or one that an equal prompt hides."""

CACHED_PROMPTS = 512
"""Prompts kept in memory, the most recently used: a conversation's next turn needs its last one."""

SMALL_BYTES = 1024
"""Up to this size, packing costs more than it saves."""

CHECKPOINT_PAGES = 8000
"""The log's length (32 MB) at which it goes into the file: each time waits for the disk."""

CACHED_SETS = 4096
"""Kept sets of other records kept in memory: a grammar's are few."""

NAMED_CALLS = 20_000
"""Tool calls of which the choice is remembered, the latest ones: more than are ever being answered at once."""

USED_SECONDS = 3600.0
"""A kept set's time of use is written again when it is older than this."""

PRUNED_AT_A_TIME = 500
"""Records that are dropped in one transaction; a thousand take some 50 ms, in which no prompt is taken."""


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
    """Whose the request is: the project, whatever key opened it; for the base model a name of the caller's key."""
    session: str | None = None
    before: bytes = conversation.EMPTY
    """Names the conversation that the request carries."""
    named: frozenset[str] = frozenset()
    """Choices that the request names: by `art.id`, the id of a tool call, or that of an earlier response."""
    is_before_user: bool = True
    """A user's turn follows the last answer."""

    @property
    def scope(self) -> str:
        """Splicing never crosses projects or models."""
        return f"{self.owner}\0{self.project}/{self.name}"


@dataclass(frozen=True, slots=True)
class Record:
    """One sampled choice. token_ids and logprobs have equal length."""

    choice_id: str
    request: Request
    prompt_token_ids: list[int]
    token_ids: list[int]
    logprobs: list[float]
    """Raw: of the model's own distribution at temperature 1, which is what the client sees."""
    finish_reason: str
    sampling: dict[str, Any]
    created_at: float
    sampled_logprobs: list[float] | None = None
    """Under the distribution that the token was really sampled from (temperature, logit bias, kept set); None where the
    engine cannot tell it (temperature 0, penalties)."""
    kept: list[int] = field(default_factory=list)
    """For each token an index into `sets`, -1 where the whole vocabulary stayed in play. Empty: -1 everywhere."""
    sets: list[bytes] = field(default_factory=list)
    """`kept_set.pack_set` of each distinct set of this choice."""
    continues: str | None = None
    """The choice whose answer the prompt goes on from, and how (`splice.Link`)."""
    link: Link | None = None
    said: bytes = b""
    text: str = ""
    """What was sampled, with special tokens; known only until the answer is out."""
    is_delivered: bool = False

    @property
    def after(self) -> bytes:
        """Names the conversation that this choice made."""
        return conversation.after(self.request.before, self.said)


@dataclass(frozen=True, slots=True)
class Match:
    """A record that fits, before it is loaded."""

    choice_id: str
    step: int | None
    prompt: Hashable
    tokens: Hashable
    """Equal for equal prompts and tokens."""
    load: Callable[[], Record | None]


@dataclass(slots=True)
class Prompt:
    """A rendered prompt, as it was taken from the engine's process."""

    number: int
    token_ids: list[int]
    """What is sampled from."""
    rendered: list[int]
    """As the template made it."""
    hashes: list[int]
    """Names each of the rendering's beginnings."""
    beginnings: list[tuple[int, bool]]
    """Lengths at which the rendering is known as an earlier prompt, and whether thinking begins there."""
    continues: str | None = None
    link: Link | None = None
    length: int = 0
    """Of a spliced prompt: how many first tokens of the rendering are those of the earlier prompt."""


@dataclass(frozen=True, slots=True)
class Retention:
    """How much is kept."""

    max_age_seconds: float = 7 * 86400.0
    max_bytes: int = 4 << 30


def choice_id(request_id: str, index: int) -> str:
    return f"{request_id}-{index}"


IN_LIST = "IN (SELECT value FROM json_each(?))"
WITHOUT_RECORD = "NOT EXISTS (SELECT 1 FROM records WHERE prompt = prompts.number)"
OF_REQUEST = "choice_id > ? AND choice_id < ?"


def of_request(request_id: str) -> tuple[str, str]:
    """The bounds of a request's choice ids."""
    return f"{request_id}-", f"{request_id}."


class Ledger:
    """Writes are committed as they come (WAL); a record costs well under a millisecond. Safe to use from threads."""

    def __init__(self, file: Path, retention: Retention = Retention(), is_splicing: bool = True):
        self._file = file
        self._retention = retention
        self._is_splicing = is_splicing
        self._decoder: Decoder | None = None
        self._rules = TemplateRules()
        self._lock = threading.RLock()
        self._db = open_database(file, SCHEMA, is_durable=False)
        self._db.execute(f"PRAGMA wal_autocheckpoint={CHECKPOINT_PAGES}")
        add_columns(self._db, "records", {"sampled_from": "BLOB", "beginnings": "BLOB"})
        add_columns(self._db, "prompts", {"cut": "BLOB", "tail": "BLOB"})
        self._sets: dict[int, bytes] = {}
        self._open: dict[str, OpenRequest] = {}
        self._prompts: OrderedDict[int, array.array[int]] = OrderedDict()
        self._renderings: OrderedDict[int, array.array[int]] = OrderedDict()
        self._callers: OrderedDict[str, str] = OrderedDict()
        # Of requests that never got an answer.
        self._db.execute(f"DELETE FROM prompts WHERE {WITHOUT_RECORD}")
        self._fill_index()

    def close(self) -> None:
        with self._lock:
            self._db.close()

    def use_tokenizer(self, folder: Path) -> None:
        """Read answers with a base model's tokenizer; before this, and without one, nothing is spliced."""
        self._rules = find_rules(folder)
        decoder = Decoder(folder, self._rules.behind_answer)
        self._decoder = decoder if decoder.can_decode else None

    @property
    def end_id(self) -> int | None:
        """The token that ends a turn, None without a tokenizer."""
        return self._decoder.end_id if self._decoder is not None else None

    def token_text(self, token_id: int) -> str | None:
        """How a token reads on its own, None without a tokenizer."""
        return self._decoder.decode([token_id]) if self._decoder is not None else None

    def open_request(self, request: Request) -> "OpenRequest":
        """Announce a request; use as a context manager around the time that it is with the engine."""
        return OpenRequest(self, request)

    # --- what the engine tells ---

    def take_prompt(self, request_id: str, position: int, rendered: list[int]) -> list[int] | None:
        """Take prompt `position` of a request as it was rendered. Returns the tokens to sample from instead, if any."""
        opened = self._open.get(request_id)
        if opened is None:
            return None
        with self._lock:
            prompt = self._make_prompt(opened.request, rendered)
            opened.prompts[position] = prompt
        return prompt.token_ids if prompt.link == "spliced" else None

    def take_samples(self, samples: Sequence[tuple[str, int, int, Sample]]) -> None:
        """Take choices: (request id, the choice's index, the number of its prompt, the sample). They are committed
        together. Unknown requests are passed over."""
        made: list[tuple[OpenRequest, int, Record]] = []
        with self._lock, contextlib.ExitStack() as undo:
            # What came to nothing leaves numbers of prompts in memory that others will be given.
            undo.callback(self._fill_index)
            with transaction(self._db):
                for request_id, index, position, sample in samples:
                    opened = self._open.get(request_id)
                    if opened is None:
                        continue
                    taken = opened.prompts.get(position)
                    if sample.rendered is not None and (
                        taken is None or taken.token_ids != sample.rendered
                    ):
                        # A first turn, or one whose spliced prompt left no room: sampled from as it was rendered.
                        opened.prompts[position] = self._make_prompt(
                            opened.request, sample.rendered, is_rendered=True
                        )
                        undo.callback(opened.prompts.pop, position)
                    if position in opened.prompts:
                        prompt = opened.prompts[position]
                        record = self._make_record(opened.request, index, prompt, sample)
                        self._write(record, prompt)
                        made.append((opened, index, record))
                    else:
                        opened.lose(index, "its prompt could not be recorded")
            undo.pop_all()
        for opened, index, record in made:
            opened.add(index, record)

    def lose(self, request_id: str, index: int, reason: str) -> None:
        """Say that there will be no record of a choice, so that nobody waits for it."""
        opened = self._open.get(request_id)
        if opened is not None:
            opened.lose(index, reason)

    def _make_record(self, request: Request, index: int, prompt: Prompt, sample: Sample) -> Record:
        assert len(sample.token_ids) == len(sample.logprobs), (
            "one log-probability per sampled token"
        )
        text = self._text(sample)
        return Record(
            choice_id=choice_id(request.request_id, index),
            request=request,
            prompt_token_ids=prompt.token_ids,
            token_ids=sample.token_ids,
            logprobs=sample.logprobs,
            finish_reason=sample.finish_reason,
            sampling=sample.sampling,
            sampled_logprobs=sample.sampled_logprobs,
            kept=sample.kept,
            sets=sample.sets,
            created_at=clock.now(),
            continues=prompt.continues,
            link=prompt.link,
            said=conversation.said(text),
            text=text,
        )

    def _text(self, sample: Sample) -> str:
        """What a choice says. Where a stop string cut it, only vLLM knows the visible text."""
        if self._decoder is None or isinstance(sample.stop_reason, str):
            return sample.text
        ids = sample.token_ids
        has_ended = bool(ids) and ids[-1] in self._decoder.end_ids
        return self._decoder.decode(ids[:-1] if has_ended else ids)

    def _make_prompt(
        self, request: Request, rendered: list[int], *, is_rendered: bool = False
    ) -> Prompt:
        """A prompt as it will be sampled from; `is_rendered`: from the rendering, whatever it continues."""
        hashes = prefix_hashes(rendered)
        made = Prompt(0, rendered, rendered, hashes, self._beginnings(rendered))
        if self._decoder is not None and not is_rendered:
            self._continue(made, request, self._decoder)
        made.number = self._store_prompt(made)
        for length, is_thinking in made.beginnings:
            index = self._without_thinking if is_thinking else self._index
            index.add(request.scope, hashes[length], made.number)
        return made

    def _beginnings(self, rendered: list[int]) -> list[tuple[int, bool]]:
        """Where later renderings may go on from this one: at its end; where it opens the thinking, which they may leave out;
        and one earlier, for white space at the end may melt into the answer's first token."""
        lengths = [(len(rendered), False)]
        if self._decoder is None:
            return lengths
        start = self._decoder.thinking_start(rendered)
        if start is not None:
            lengths.append((start, True))
        return lengths + [
            (length - 1, is_thinking)
            for length, is_thinking in lengths
            if length > 1 and self._decoder.is_space(rendered[length - 1])
        ]

    def _continue(self, made: Prompt, request: Request, decoder: Decoder) -> None:
        """Find the answer that a rendered prompt goes on from, and take over its tokens."""
        plain = ((*found, False) for found in self._index.beginnings(request.scope, made.hashes))
        opened = (
            (*found, True)
            for found in self._without_thinking.beginnings(request.scope, made.hashes)
        )
        longest_first = heapq.merge(plain, opened, key=lambda found: -found[0])
        rules = self._rules
        keeps = rules.keeps_before_user if request.is_before_user else rules.keeps_before_tool
        reading = Reading(
            decoder.end_ids,
            decoder.decode_behind,
            rules,
            request.session,
            request.named,
            keeps,
            self._is_splicing,
        )
        whole = array.array("i", made.rendered)
        for length, known, is_thinking_left_out in itertools.islice(longest_first, MAX_BEGINNINGS):
            beginning = whole[:length]
            openings: dict[int, Sequence[int]] = {}
            for number in known:
                rendering = self._load_rendering(number)
                if rendering[:length] == beginning:
                    start = decoder.thinking_start(rendering) if is_thinking_left_out else None
                    openings[number] = rendering[length:start]
            found = continue_answer(
                made.rendered,
                length,
                lambda said, openings=openings: self._answers(request, openings, said),
                reading,
                is_thinking_left_out,
            )
            if found is None:
                continue
            made.continues, made.link = found.choice_id, found.link
            if made.link == "spliced":
                assert found.token_ids is not None
                made.token_ids, made.length = found.token_ids, length
            return

    def _answers(
        self, request: Request, openings: Mapping[int, Sequence[int]], said: bytes
    ) -> list[Answer]:
        """The answers that say so, sampled from these prompts."""
        marks = ",".join("?" * len(openings))
        rows = self._db.execute(
            f"SELECT choice_id, session, prompt, tokens FROM records WHERE prompt IN ({marks}) AND said = ?"
            " AND owner = ? AND project IS ? AND name IS ? ORDER BY number DESC LIMIT 1024",
            (*openings, said, request.owner, request.project, request.name),
        ).fetchall()
        return [
            Answer(r[0], r[1], self._load_prompt(r[2]), _unpack(r[3], "i"), openings[r[2]])
            for r in rows
        ]

    # --- storing ---

    def _store_prompt(self, prompt: Prompt) -> int:
        ids = array.array("i", prompt.token_ids)
        name = conversation.digest(ids.tobytes())
        row = self._db.execute("SELECT number FROM prompts WHERE digest = ?", (name,)).fetchone()
        if row is not None:
            return row[0]
        parent, start, cut, tail = None, 0, None, None
        if prompt.link in ("exact", "spliced"):
            past = self._db.execute(
                "SELECT prompt, tokens FROM records WHERE choice_id = ?", (prompt.continues,)
            ).fetchone()
            if past is not None:
                before = self._load_prompt(past[0]) + _unpack(past[1], "i")
                if ids[: len(before)] == before:
                    parent, start = prompt.continues, len(before)
                if prompt.link == "spliced" and parent is not None:
                    cut = len(self._load_rendering(past[0])) - prompt.length
        if prompt.link == "spliced":
            tail = _pack(array.array("i", prompt.rendered[prompt.length if parent else 0 :]))
        cursor = self._db.execute(
            "INSERT INTO prompts (digest, parent, delta, cut, tail) VALUES (?,?,?,?,?)",
            (name, parent, _pack(ids[start:]), cut, tail),
        )
        assert cursor.lastrowid is not None
        self._cache(self._prompts, cursor.lastrowid, ids)
        return cursor.lastrowid

    def _load_rendering(self, number: int) -> "array.array[int]":
        """A prompt as it was rendered: another than what was sampled from where it was spliced."""
        cached = self._renderings.get(number)
        if cached is not None:
            self._renderings.move_to_end(number)
            return cached
        row = self._db.execute(
            "SELECT parent, cut, tail FROM prompts WHERE number = ?", (number,)
        ).fetchone()
        if row is None:
            return array.array("i")
        parent, cut, tail = row
        if tail is None:
            whole = self._load_prompt(number)
        else:
            whole = _unpack(tail, "i")
            if parent is not None:
                (past,) = self._db.execute(
                    "SELECT prompt FROM records WHERE choice_id = ?", (parent,)
                ).fetchone()
                before = self._load_rendering(past)
                whole = before[: len(before) - cut] + whole
        self._cache(self._renderings, number, whole)
        return whole

    def _load_prompt(self, number: int) -> "array.array[int]":
        """A prompt's tokens, put together from the choices that it continues."""
        cached = self._prompts.get(number)
        if cached is not None:
            self._prompts.move_to_end(number)
            return cached
        pieces: list[array.array[int]] = []
        wanted: int | None = number
        while wanted is not None:
            parent, delta = self._db.execute(
                "SELECT parent, delta FROM prompts WHERE number = ?", (wanted,)
            ).fetchone()
            pieces.append(_unpack(delta, "i"))
            wanted = None
            if parent is not None:
                wanted, tokens = self._db.execute(
                    "SELECT prompt, tokens FROM records WHERE choice_id = ?", (parent,)
                ).fetchone()
                pieces.append(_unpack(tokens, "i"))
                if wanted in self._prompts:
                    pieces.append(self._prompts[wanted])
                    wanted = None
        whole = array.array("i")
        for piece in reversed(pieces):
            whole.extend(piece)
        self._cache(self._prompts, number, whole)
        return whole

    @staticmethod
    def _cache(
        cache: "OrderedDict[int, array.array[int]]", number: int, token_ids: "array.array[int]"
    ) -> None:
        cache[number] = token_ids
        while len(cache) > CACHED_PROMPTS:
            cache.popitem(last=False)

    def _write(self, record: Record, prompt: Prompt) -> None:
        request = record.request
        self._db.execute(
            "INSERT OR REPLACE INTO records (choice_id, request_id, api, owner, project, name, step, session,"
            " created_at, prompt, rendered, continues, link, before, said, fingerprint, tokens, logprobs,"
            " finish_reason, sampling, sampled_from, beginnings)"
            " VALUES (?,?,?,?,?,?,?,?,?,?,?,?,?,?,?,?,?,?,?,?,?,?)",
            (
                record.choice_id,
                request.request_id,
                request.api,
                request.owner,
                request.project,
                request.name,
                request.step,
                request.session,
                record.created_at,
                prompt.number,
                _signed(prompt.hashes[-1]),
                record.continues,
                record.link,
                request.before,
                record.said,
                conversation.fingerprint(record.logprobs),
                _pack(array.array("i", record.token_ids)),
                _pack(array.array("d", record.logprobs)),
                record.finish_reason,
                json.dumps(record.sampling, separators=(",", ":")),
                self._store_sampled(record),
                _pack_beginnings(prompt),
            ),
        )

    def _store_sampled(self, record: Record) -> bytes | None:
        """What a choice was sampled from. Other choices share the sets of a grammar, but hardly the few ids that top_p left."""
        if record.sampled_logprobs is None:
            return None
        is_raw = record.sampled_logprobs == record.logprobs
        if is_raw and not record.sets:
            return b""
        sampling = record.sampling
        is_cut_by_p = sampling.get("top_p", 1.0) < 1 or sampling.get("min_p", 0.0) > 0
        is_shared = not is_cut_by_p and sampling.get("top_k", 0) <= 0
        stored = (
            None if is_raw else array.array("f", record.sampled_logprobs).tobytes(),
            record.kept,
            [
                self._share_set(packed, record.created_at)
                if is_shared or packed[:1] == MASK
                else packed
                for packed in record.sets
            ],
        )
        return zlib.compress(msgspec.msgpack.encode(stored), 1)

    def _load_sampled(
        self, stored: bytes | None, raw: list[float]
    ) -> tuple[list[float] | None, list[int], list[bytes]]:
        if not stored:
            return (None if stored is None else raw), [], []
        packed, kept, sets = msgspec.msgpack.decode(zlib.decompress(stored))
        logprobs = raw if packed is None else array.array("f", packed).tolist()
        return logprobs, kept, [self._load_set(one) for one in sets]

    def _share_set(self, packed: bytes, used_at: float) -> int:
        digest = conversation.digest(packed)
        found = self._db.execute(
            "SELECT number, used_at FROM kept_sets WHERE digest = ?", (digest,)
        ).fetchone()
        if found is None:
            insert = "INSERT INTO kept_sets (digest, used_at, packed) VALUES (?,?,?)"
            return self._db.execute(insert, (digest, used_at, packed)).lastrowid or 0
        number, last = found
        if last < used_at - USED_SECONDS:
            update = "UPDATE kept_sets SET used_at = ? WHERE number = ?"
            self._db.execute(update, (used_at, number))
        return number

    def _load_set(self, stored: int | bytes) -> bytes:
        if isinstance(stored, bytes):
            return stored
        packed = self._sets.get(stored)
        if packed is None:
            if len(self._sets) >= CACHED_SETS:
                self._sets.clear()
            select = "SELECT packed FROM kept_sets WHERE number = ?"
            (packed,) = self._db.execute(select, (stored,)).fetchone()
            self._sets[stored] = packed
        return packed

    def name_calls(self, choice: str, call_ids: Iterable[str]) -> None:
        """Remember which choice made tool calls, so that a request that carries them back names it."""
        with self._lock:
            for call_id in call_ids:
                self._callers[call_id] = choice
            while len(self._callers) > NAMED_CALLS:
                self._callers.popitem(last=False)

    def callers(self, names: Iterable[str]) -> frozenset[str]:
        """The choices that made these tool calls, as far as they are remembered; names of choices are their own."""
        with self._lock:
            return frozenset(self._callers.get(name, name) for name in names)

    def mark_delivered(self, request_id: str) -> None:
        """The answer went out in full."""
        with self._lock, tolerated("that an answer went out"):
            self._db.execute(
                f"UPDATE records SET is_delivered = 1 WHERE {OF_REQUEST}", of_request(request_id)
            )

    def keep_turn(self, request_id: str, turn: dict[str, Any]) -> None:
        """Keep what a session's request and its choices look like to the agent."""
        blob = zlib.compress(json.dumps(turn).encode(), 1)
        with self._lock, tolerated("a session's turn"):
            self._db.execute("INSERT OR REPLACE INTO turns VALUES (?,?)", (request_id, blob))

    # --- finding ---

    def find(self, choice: str) -> Record | None:
        """The record of a choice id, None when there is none (any more)."""
        found = self._select("choice_id = ?", choice)
        return found[0] if found else None

    def find_session(
        self, project: str, name: str, session: str
    ) -> list[tuple[Record, dict[str, Any]]]:
        """What one model said in one of a project's sessions, in order, with the turns as the agent saw them."""
        records = self._select("session = ? AND project = ? AND name = ?", session, project, name)
        with self._lock:
            turns = {
                key: json.loads(zlib.decompress(blob))
                for (key, blob) in self._db.execute(
                    "SELECT request_id, body FROM turns WHERE request_id IN"
                    " (SELECT request_id FROM records WHERE session = ?)",
                    (session,),
                )
            }
        return [(r, turns[r.request.request_id]) for r in records if r.request.request_id in turns]

    def find_text(
        self,
        project: str,
        name: str,
        said: bytes | None,
        logprobs: Sequence[float] | None,
        before: bytes | None = None,
    ) -> list[Match]:
        """What a model said in these words (None: in any), newest first; with log-probabilities, only what was sampled
        with them, and with `before`, only in that conversation. Records are not loaded: of a frequent answer there are
        thousands."""
        where = "project = ? AND name = ?"
        values: tuple[Any, ...] = (project, name)
        if said is not None:
            where += " AND said = ?"
            values = (*values, said)
        if before is not None:
            where += " AND before = ?"
            values = (*values, before)
        if logprobs is not None:
            where += " AND fingerprint = ?"
            values = (*values, conversation.fingerprint(logprobs))
        with self._lock:
            rows = self._db.execute(
                f"SELECT choice_id, step, prompt, tokens FROM records WHERE {where} ORDER BY number DESC LIMIT 4096",
                values,
            ).fetchall()
        return [Match(*row, load=functools.partial(self.find, row[0])) for row in rows]

    def _select(self, where: str, *values: Any) -> list[Record]:
        order = "" if "ORDER BY" in where else " ORDER BY number"
        with self._lock:
            rows = self._db.execute(
                "SELECT choice_id, request_id, api, owner, project, name, step, session, created_at, prompt, continues,"
                " link, before, said, tokens, logprobs, finish_reason, sampling, is_delivered, sampled_from"
                f" FROM records WHERE {where}{order}",
                values,
            ).fetchall()
            return [self._record(row) for row in rows]

    def _record(self, row: tuple[Any, ...]) -> Record:
        logprobs = _unpack(row[15], "d").tolist()
        sampled_logprobs, kept, sets = self._load_sampled(row[19], logprobs)
        return Record(
            choice_id=row[0],
            request=Request(
                request_id=row[1],
                api=row[2],
                owner=row[3],
                project=row[4],
                name=row[5],
                step=row[6],
                session=row[7],
                before=row[12],
            ),
            created_at=row[8],
            prompt_token_ids=self._load_prompt(row[9]).tolist(),
            continues=row[10],
            link=row[11],
            said=row[13],
            token_ids=_unpack(row[14], "i").tolist(),
            logprobs=logprobs,
            finish_reason=row[16],
            sampling=json.loads(row[17]),
            is_delivered=bool(row[18]),
            sampled_logprobs=sampled_logprobs,
            kept=kept,
            sets=sets,
        )

    # --- keeping within bounds ---

    def _fill_index(self) -> None:
        """Know the prompts that may still be continued, and nothing else."""
        self._prompts.clear()
        self._renderings.clear()
        self._index = PromptIndex()
        self._without_thinking = PromptIndex()
        """Prompts that open the thinking themselves, up to where they do: later renderings leave it out."""
        rows = self._db.execute(
            "SELECT owner, project, name, rendered, beginnings, prompt FROM records ORDER BY number DESC LIMIT ?",
            (MAX_PROMPTS,),
        ).fetchall()
        for owner, project, name, rendered, beginnings, prompt in reversed(rows):
            scope = f"{owner}\0{project}/{name}"
            self._index.add(scope, rendered % (1 << 64), prompt)
            more = array.array("q", beginnings or b"")
            for is_thinking, hashed in zip(more[::2], more[1::2], strict=True):
                index = self._without_thinking if is_thinking else self._index
                index.add(scope, hashed % (1 << 64), prompt)

    def prune(self) -> int:
        """Drop what is too old, and the oldest while the file is too large. Returns how many records went. A few at a time:
        requests wait meanwhile."""
        dropped = 0
        while part := self._prune_some():
            dropped += part
        if dropped:
            logger.info("ledger: %d records dropped by age or size", dropped)
        return dropped

    def _prune_some(self) -> int:
        now = clock.now()
        with self._lock:
            oldest = self._db.execute(
                "SELECT number, created_at FROM records ORDER BY number LIMIT ?",
                (PRUNED_AT_A_TIME,),
            ).fetchall()
            self._db.execute(  # made while the clock ran ahead: their age counts from here
                "UPDATE records SET created_at = ? WHERE number <= ? AND created_at > ?",
                (now, oldest[-1][0] if oldest else 0, now),
            )
            too_old = now - self._retention.max_age_seconds
            doomed = [number for number, created_at in oldest if created_at < too_old]
            if not doomed and self._size() > self._retention.max_bytes:
                (newest,) = self._db.execute("SELECT MAX(number) FROM records").fetchone()
                tenth = max(1, (newest - oldest[0][0]) // 10) if oldest else 0
                doomed = [number for number, _ in oldest[:tenth]]
            if doomed:
                self._drop(doomed)
            return len(doomed)

    def _size(self) -> int:
        """Bytes in use; free pages are filled before the file grows."""
        (pages,) = self._db.execute("PRAGMA page_count").fetchone()
        (free,) = self._db.execute("PRAGMA freelist_count").fetchone()
        (page_size,) = self._db.execute("PRAGMA page_size").fetchone()
        return (pages - free) * page_size

    def _drop(self, numbers: Sequence[int]) -> None:
        """Drop records, with all that nothing else needs."""
        asked = json.dumps(
            [p.number for one in [*self._open.values()] for p in one.prompts.values()]
        )
        rows = self._db.execute(
            f"SELECT choice_id, prompt, request_id FROM records WHERE number {IN_LIST}",
            (json.dumps(numbers),),
        ).fetchall()
        choices, prompts, requests = (
            json.dumps(list(set(each))) for each in zip(*rows, strict=True)
        )
        with transaction(self._db):
            stay = self._db.execute(
                f"SELECT number FROM prompts WHERE parent {IN_LIST} AND (number {IN_LIST} OR EXISTS"
                f" (SELECT 1 FROM records WHERE prompt = prompts.number AND NOT choice_id {IN_LIST}))",
                (choices, asked, choices),
            ).fetchall()
            for (number,) in stay:  # their past goes: store them whole
                whole, rendering = self._load_prompt(number), self._load_rendering(number)
                self._db.execute(
                    "UPDATE prompts SET parent = NULL, delta = ?, cut = NULL, tail = ? WHERE number = ?",
                    (_pack(whole), _pack(rendering) if rendering != whole else None, number),
                )
            self._db.execute(f"DELETE FROM records WHERE choice_id {IN_LIST}", (choices,))
            self._db.execute(f"DELETE FROM prompts WHERE parent {IN_LIST}", (choices,))
            self._db.execute(
                f"DELETE FROM prompts WHERE number {IN_LIST} AND NOT number {IN_LIST} AND {WITHOUT_RECORD}",
                (prompts, asked),
            )
            self._db.execute(
                f"DELETE FROM turns WHERE request_id {IN_LIST} AND NOT EXISTS (SELECT 1 FROM records WHERE"
                " choice_id > turns.request_id || '-' AND choice_id < turns.request_id || '.')",
                (requests,),
            )
            self._db.execute(
                "DELETE FROM kept_sets WHERE used_at < COALESCE("
                " (SELECT created_at FROM records ORDER BY number LIMIT 1), 1e99) - ?",
                (USED_SECONDS,),
            )
        self._prompts.clear()
        self._renderings.clear()
        self._sets.clear()


@contextlib.contextmanager
def tolerated(what: str) -> Iterator[None]:
    """A disk that takes no write must not cost an answer."""
    try:
        yield
    except sqlite3.Error as error:
        logger.error("%s is not recorded: %s", what, error)


def _signed(hashed: int) -> int:
    return hashed - (1 << 64) if hashed >> 63 else hashed


def _pack_beginnings(prompt: Prompt) -> bytes | None:
    """Those beside the whole prompt."""
    values = array.array("q")
    for length, is_thinking in prompt.beginnings[1:]:
        values.extend([int(is_thinking), _signed(prompt.hashes[length])])
    return values.tobytes() or None


def _pack(values: "array.array[Any]") -> bytes:
    content = values.tobytes()
    return zlib.compress(content, 1 if len(content) > SMALL_BYTES else 0)


def _unpack(blob: bytes, kind: str) -> "array.array[Any]":
    values: array.array[Any] = array.array(kind)
    values.frombytes(zlib.decompress(blob))
    return values


@dataclass(slots=True)
class OpenRequest:
    """A request that is with the engine: its prompts, and the records that came for it."""

    ledger: Ledger
    request: Request
    prompts: dict[int, Prompt] = field(default_factory=dict)
    records: dict[int, Record] = field(default_factory=dict)
    lost: dict[int, str] = field(default_factory=dict)
    """Choices of which there is no record, with the reason."""
    _came: asyncio.Event = field(default_factory=asyncio.Event)

    def __enter__(self) -> "OpenRequest":
        self.ledger._open[self.request.request_id] = self
        return self

    def __exit__(self, *_: object) -> None:
        self.ledger._open.pop(self.request.request_id, None)

    def add(self, index: int, record: Record) -> None:
        self.records[index] = record
        self._came.set()

    def lose(self, index: int, reason: str) -> None:
        self.lost[index] = reason
        self._came.set()

    async def wait(self, index: int) -> Record | None:
        """The record of choice `index`; None when there is none, and `lost` tells why."""
        try:
            async with asyncio.timeout(RECORD_WAIT_SECONDS):
                while index not in self.records and index not in self.lost:
                    self._came.clear()
                    await self._came.wait()
        except TimeoutError:
            logger.error("no record came for choice %d of %s", index, self.request.request_id)
            self.lost[index] = f"no record came within {RECORD_WAIT_SECONDS:.0f} s"
        return self.records.get(index)
