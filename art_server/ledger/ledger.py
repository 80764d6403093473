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
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from art_server import clock
from art_server.ledger import conversation
from art_server.ledger.decoder import Decoder
from art_server.ledger.records import Match, Prompt, Record, Request, choice_id
from art_server.ledger.splice import (
    MAX_PROMPTS,
    Answer,
    PromptIndex,
    Reading,
    continue_answer,
    prefix_hashes,
)
from art_server.ledger.storage import OF_REQUEST, Storage, of_request, unpack
from art_server.ledger.template import TemplateRules, find_rules
from art_server.shared.samples import Sample
from art_server.store.database import insert, transaction

logger = logging.getLogger(__name__)

RECORD_WAIT_SECONDS = 10.0
"""A record travels over a local socket beside the answer; longer than this, the engine's process is gone."""

MAX_BEGINNINGS = 8
"""Beginnings of a prompt that are looked at, longest first: its last turn, or one that an equal prompt hides."""

NAMED_CALLS = 20_000
"""Tool calls of which the choice is remembered, the latest ones: more than are ever being answered at once."""

PRUNED_AT_A_TIME = 500
"""Records that are dropped in one transaction; a thousand take some 50 ms, in which no prompt is taken."""


@dataclass(frozen=True, slots=True)
class Retention:
    """How much is kept."""

    max_age_seconds: float = 7 * 86400.0
    max_bytes: int = 4 << 30


class Ledger:
    """Writes are committed as they come (WAL); a record costs well under a millisecond. Safe to use from threads."""

    def __init__(self, file: Path, retention: Retention = Retention(), is_splicing: bool = True):
        self._retention = retention
        self._is_splicing = is_splicing
        self._decoder: Decoder | None = None
        self._rules = TemplateRules()
        self._lock = threading.RLock()
        self._storage = Storage(file)
        self._open: dict[str, OpenRequest] = {}
        self._callers: OrderedDict[str, str] = OrderedDict()
        self._fill_index()

    def close(self) -> None:
        with self._lock:
            self._storage.db.close()

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
            with transaction(self._storage.db):
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
                        self._storage.write(record, prompt)
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
        made.number = self._storage.store_prompt(made)
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
                rendering = self._storage.load_rendering(number)
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
        rows = self._storage.db.execute(
            f"SELECT choice_id, session, prompt, tokens FROM records WHERE prompt IN ({marks}) AND said = ?"
            " AND owner = ? AND project IS ? AND name IS ? ORDER BY number DESC LIMIT 1024",
            (*openings, said, request.owner, request.project, request.name),
        ).fetchall()
        return [
            Answer(r[0], r[1], self._storage.load_prompt(r[2]), unpack(r[3], "i"), openings[r[2]])
            for r in rows
        ]

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
            self._storage.db.execute(
                f"UPDATE records SET is_delivered = 1 WHERE {OF_REQUEST}", of_request(request_id)
            )

    def keep_turn(self, request_id: str, turn: dict[str, Any]) -> None:
        """Keep what a session's request and its choices look like to the agent."""
        blob = zlib.compress(json.dumps(turn).encode(), 1)
        with self._lock, tolerated("a session's turn"):
            turn_row = {"request_id": request_id, "body": blob}
            insert(self._storage.db, "turns", turn_row, or_else="REPLACE")

    # --- finding ---

    def find(self, choice: str) -> Record | None:
        """The record of a choice id, None when there is none (any more)."""
        with self._lock:
            found = self._storage.select("choice_id = ?", choice)
        return found[0] if found else None

    def find_session(
        self, project: str, name: str, session: str
    ) -> list[tuple[Record, dict[str, Any]]]:
        """What one model said in one of a project's sessions, in order, with the turns as the agent saw them."""
        where = "session = ? AND project = ? AND name = ?"
        with self._lock:
            records = self._storage.select(where, session, project, name)
            turns = {
                key: json.loads(zlib.decompress(blob))
                for (key, blob) in self._storage.db.execute(
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
            rows = self._storage.db.execute(
                f"SELECT choice_id, step, prompt, tokens FROM records WHERE {where} ORDER BY number DESC LIMIT 4096",
                values,
            ).fetchall()
        return [Match(*row, load=functools.partial(self.find, row[0])) for row in rows]

    # --- keeping within bounds ---

    def _fill_index(self) -> None:
        """Know the prompts that may still be continued, and nothing else."""
        self._storage.forget()
        self._index = PromptIndex()
        self._without_thinking = PromptIndex()
        """Prompts that open the thinking themselves, up to where they do: later renderings leave it out."""
        rows = self._storage.db.execute(
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
            oldest = self._storage.db.execute(
                "SELECT number, created_at FROM records ORDER BY number LIMIT ?",
                (PRUNED_AT_A_TIME,),
            ).fetchall()
            self._storage.db.execute(  # made while the clock ran ahead: their age counts from here
                "UPDATE records SET created_at = ? WHERE number <= ? AND created_at > ?",
                (now, oldest[-1][0] if oldest else 0, now),
            )
            too_old = now - self._retention.max_age_seconds
            doomed = [number for number, created_at in oldest if created_at < too_old]
            if not doomed and self._storage.size() > self._retention.max_bytes:
                (newest,) = self._storage.db.execute("SELECT MAX(number) FROM records").fetchone()
                tenth = max(1, (newest - oldest[0][0]) // 10) if oldest else 0
                doomed = [number for number, _ in oldest[:tenth]]
            if doomed:
                opened = list(self._open.values())
                used = [prompt.number for each in opened for prompt in each.prompts.values()]
                self._storage.drop(doomed, used)
            return len(doomed)


@contextlib.contextmanager
def tolerated(what: str) -> Iterator[None]:
    """A disk that takes no write must not cost an answer."""
    try:
        yield
    except sqlite3.Error as error:
        logger.error("%s is not recorded: %s", what, error)


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

    async def mark_delivered(self) -> None:
        """The answer went out in full: only now may a session hold it."""
        self.ledger.mark_delivered(self.request.request_id)

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
