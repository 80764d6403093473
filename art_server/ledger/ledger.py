"""The ledger: for every choice that the engine sampled, its prompt, tokens, log-probabilities and policy step.

It has its own SQLite file. A request is announced before it goes to the engine (`open_request`). The engine's process
sends the rendered prompt of a later turn (`take_prompt`) and may get the exact tokens of the conversation's past
instead (`splice.py`). Each choice that it then reports becomes a record. The proxy waits for the records before it ends
its answer, so a client that has the answer can train on it.

A prompt is stored as the choice that it continues plus its new tokens. Records are deleted by age and by file size.
"""

import array
import asyncio
import contextlib
import functools
import itertools
import json
import logging
import sqlite3
import threading
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from art_server.ledger import conversation
from art_server.ledger.candidates import MAX_TRIED, Candidates
from art_server.ledger.conversation import PastAnswer
from art_server.ledger.decoder import Decoder
from art_server.ledger.records import (
    NAMES_STEP,
    NEVER_LEARNS,
    TEMPLATE_KWARGS,
    UNRECORDED,
    Match,
    Prompt,
    Record,
    Request,
    choice_id,
)
from art_server.ledger.splice import (
    Candidate,
    Comparison,
    continue_answer,
    find_shown,
    loses_thinking,
    split_end,
)
from art_server.ledger.storage import OF_REQUEST, Storage, of_request, unpack_array
from art_server.shared.clock import REAL, Clock, tick
from art_server.shared.engine_messages import FinishedChoice
from art_server.store.base_facts import Facts, TemplateRules
from art_server.store.database import database_errors, overwriting, transaction

logger = logging.getLogger(__name__)

RECORD_WAIT_SECONDS = 10.0
"""A record arrives over a local socket beside the answer; if it takes this long, the engine's process is gone."""

CACHED_TEXTS = 1024
"""Decoded answers in memory. An answer with 8,000 tokens of thinking has about 32 KB."""

NEWEST = 20_000
"""Records in which a start looks for the latest event."""

MAX_MATCHES = 4096
"""Records that one look-up finds: the newest."""

NAMED_CALLS = 200_000
"""Tool calls whose choices are remembered, the latest ones: more than are answered at the same time."""

CHANGED_AT_A_TIME = 5000
"""Records that `forget_steps` and `find_unnamed` read at a time."""

PRUNED_AT_A_TIME = 500
"""Records that are deleted in one transaction; a thousand take some 50 ms, in which no prompt can be recorded."""


@dataclass(frozen=True, slots=True)
class Retention:
    """The limits beyond which records are deleted."""

    max_age_seconds: float = 7 * 86400.0
    max_bytes: int = 4 << 30


class Ledger:
    """The store of records. Thread-safe. Writes are committed at once (WAL); each takes well under a millisecond."""

    def __init__(
        self, file: Path, retention: Retention = Retention(), is_splicing: bool = True, *, clock: Clock = REAL
    ):
        self._retention = retention
        self._clock = clock
        self._is_splicing = is_splicing
        self._decoder: Decoder | None = None
        self._stop_ids: frozenset[int] = frozenset()
        self._rules = TemplateRules()
        self._lock = threading.RLock()
        self._storage = Storage(file)
        self._open: dict[str, OpenRequest] = {}
        self._expected: list[tuple[str | None, int | None]] = []
        """Session and model of each answer that a request waits for."""
        self._texts: dict[tuple[str, int | None, int], str] = {}
        """`Comparison.texts`."""
        self._thoughts: dict[str, tuple[str | None, bool]] = {}
        """By choice id: the choice's thinking (None: it has none), and whether its digest shows that a message is edited."""
        self._unanswered: list[int] = []
        """The numbers of prompts whose requests ended without a record, for `prune`."""
        # The clock may have been set back since, and the order of events decides which answers an agent discarded.
        tick(after=self._storage.newest_event(NEWEST))

    def close(self) -> None:
        with self._lock:
            self._storage.db.close()

    def use_tokenizer(self, folder: Path, facts: Facts) -> None:
        """Loads the tokenizer of the base model in `folder`; takes up to a second. Without a tokenizer nothing is
        spliced."""
        rules = facts.rules
        # Without the lock, for which requests wait.
        decoder = Decoder(folder, facts.stop_ids, rules.behind_answer)
        with self._lock:
            self._rules = rules
            self._decoder = decoder if decoder.can_decode else None
            self._stop_ids = decoder.stop_ids
            self._texts.clear()
            self._thoughts.clear()

    @property
    def end_id(self) -> int | None:
        """The token that usually ends a turn; None if it is unknown."""
        return self._decoder.end_id if self._decoder is not None else None

    @property
    def end_ids(self) -> frozenset[int]:
        """All tokens that end a turn."""
        return self._decoder.end_ids if self._decoder is not None else self._stop_ids

    @property
    def stop_ids(self) -> frozenset[int]:
        """The tokens of `end_ids` at which the engine stops."""
        return self._stop_ids

    def decode(self, token_ids: Sequence[int]) -> str | None:
        """The text of tokens; None without a tokenizer."""
        return self._decoder.decode(token_ids) if self._decoder is not None else None

    def open_request(self, request: Request, silence_seconds: float = 0.0) -> "OpenRequest":
        """Announces a request. Use the result as a context manager while the engine has the request. Its records may be late
        by `silence_seconds`, if the engine's network stalls."""
        return OpenRequest(self, request, RECORD_WAIT_SECONDS + silence_seconds)

    @contextlib.contextmanager
    def expecting(self, request: Request, num_choices: int) -> Iterator[None]:
        """Counts the answers of a request in `num_expected`, also while the request waits for the engine."""
        answers = [(request.session, request.model)] * num_choices
        self._expected += answers
        try:
            yield
        finally:
            for answer in answers:
                self._expected.remove(answer)

    # --- messages from the engine ---

    def take_prompt(self, request_id: str, position: int, rendered: list[int]) -> list[int] | None:
        """Stores rendered prompt number `position` of a request. Returns the tokens to sample from instead, or None."""
        opened = self._open.get(request_id)
        # Its client has disconnected.
        if opened is None:
            return None
        with self._lock:
            prompt = self._make_prompt(opened, rendered)
            opened.prompts[position] = prompt
        return prompt.token_ids.tolist() if prompt.link == "spliced" else None

    def take_samples(self, samples: Sequence[tuple[str, int, int, FinishedChoice]]) -> None:
        """Stores choices in one transaction, given as (request id, choice index, prompt number, sample). Choices of
        unknown requests are ignored."""
        records: list[tuple[OpenRequest, int, Record]] = []
        with self._lock, contextlib.ExitStack() as undo:
            with transaction(self._storage.db):
                for request_id, index, position, sample in samples:
                    opened = self._open.get(request_id)
                    if opened is None:
                        continue
                    taken = opened.prompts.get(position)
                    if sample.rendered is not None and (
                        taken is None or taken.token_ids != array.array("i", sample.rendered)
                    ):
                        # After a rollback SQLite reuses prompt numbers that the caches still hold.
                        undo.callback(self._storage.forget)
                        # A first turn, or a turn whose spliced prompt left no room: the rendering was sampled from.
                        opened.prompts[position] = self._make_prompt(opened, sample.rendered, is_rendered=True)
                        undo.callback(opened.prompts.pop, position)
                    if position in opened.prompts:
                        prompt = opened.prompts[position]
                        record = self._make_record(opened.request, index, prompt, sample)
                        self._storage.write(record, prompt)
                        records.append((opened, index, record))
                    else:
                        opened.lose(index, "its prompt was not recorded")
            undo.pop_all()
        # After the commit: from here on answers end, and an answer that has ended has its records on the disk.
        for opened, index, record in records:
            opened.add(index, record)

    def lose(self, request_id: str, index: int, reason: str) -> None:
        """Reports that a choice will have no record, so that `OpenRequest.wait` returns."""
        opened = self._open.get(request_id)
        if opened is not None:
            opened.lose(index, reason)

    def _make_record(self, request: Request, index: int, prompt: Prompt, sample: FinishedChoice) -> Record:
        assert len(sample.token_ids) == len(sample.logprobs), "one log-probability per sampled token"
        text = self._text(sample)
        prompt.listed = prompt.listed or prompt.token_ids.tolist()
        return Record(
            choice_id=choice_id(request.request_id, index),
            request=request,
            prompt_token_ids=prompt.listed,
            token_ids=sample.token_ids,
            logprobs=sample.logprobs,
            finish_reason=sample.finish_reason,
            sampling={**sample.sampling, **marks_of(request)},
            sampled_logprobs=sample.sampled_logprobs,
            kept=sample.kept,
            sets=sample.sets,
            created_at=self._clock.now(),
            continues=prompt.continues,
            link=prompt.link,
            answer_digest=conversation.text_digest(text),
            text=text,
        )

    def _text(self, sample: FinishedChoice) -> str:
        """The text of a choice. If a stop string cut it, only vLLM knows the visible text."""
        if self._decoder is None or isinstance(sample.stop_reason, str):
            return sample.text
        ids = sample.token_ids
        has_ended = bool(ids) and ids[-1] in self._decoder.end_ids
        return self._decoder.decode(ids[:-1] if has_ended else ids)

    def _make_prompt(self, opened: "OpenRequest", token_ids: Sequence[int], *, is_rendered: bool = False) -> Prompt:
        """Stores the prompt that is sampled from; with `is_rendered` this is the rendering, without splicing."""
        rendered = array.array("i", token_ids)
        prompt = Prompt(0, rendered, rendered)
        if self._decoder is not None and not is_rendered:
            self._continue(prompt, opened.candidates, self._decoder)
        prompt.number = self._storage.store_prompt(prompt)
        return prompt

    def _continue(self, prompt: Prompt, candidates: Candidates, decoder: Decoder) -> None:
        """Finds the answer that a rendered prompt continues, and splices the answer's tokens into `prompt`."""
        if len(self._texts) > CACHED_TEXTS:
            self._texts.clear()
        reading = Comparison(decoder, self._rules, self._is_splicing, self._texts)

        def read(row: sqlite3.Row) -> bytes | None:
            earlier = self._storage.load_rendering(row["prompt"])
            shown = find_shown(prompt.rendered, earlier, reading)
            return conversation.text_digest(shown.text) if shown is not None else None

        nearest: Candidate | None = None
        for rows, is_repeated in itertools.islice(candidates.groups(read), MAX_TRIED):
            continuation = continue_answer(prompt.rendered, map(self._answer, rows), reading)
            if continuation is not None:
                prompt.continues, prompt.link = continuation.choice_id, continuation.link
                if continuation.token_ids is not None:
                    prompt.token_ids, prompt.length = continuation.token_ids, continuation.length
                return
            if is_repeated and nearest is None:
                nearest = self._answer(rows[0])
                if loses_thinking(nearest, prompt.rendered, reading):
                    prompt.continues, prompt.link = nearest.choice_id, "dropped"
                    return

    def _answer(self, row: sqlite3.Row) -> Candidate:
        rendering = self._storage.load_rendering(row["prompt"])
        prompt = self._storage.load_prompt(row["prompt"])
        return Candidate(row["choice_id"], rendering, prompt, unpack_array(row["tokens"], "i"))

    def recall_thinking(self, opened: "OpenRequest") -> list[str | None]:
        """For each past answer of a request, the thinking that was sampled before the answer. None if the message brings its
        own thinking, or is not certainly a recorded choice without edits."""
        if self._decoder is None or not self._is_splicing:
            return []
        with self._lock:
            return [
                None if answer.has_thinking else self._thought(answer, opened.candidates.own(answer))
                for answer in opened.request.answers
            ]

    def _thought(self, answer: PastAnswer, row: sqlite3.Row | None) -> str | None:
        if row is None or self._decoder is None:
            return None
        if row["choice_id"] not in self._thoughts:
            if len(self._thoughts) >= CACHED_TEXTS:
                self._thoughts.clear()
            sampled_ids, _ = split_end(unpack_array(row["tokens"], "i"), self._decoder.end_ids)
            thought, visible = conversation.split_thinking(self._decoder.decode(sampled_ids))
            # If calls are no JSON, the choice's digest differs from the parsed message's, edited or not.
            is_comparable = not answer.has_calls or conversation.split_calls(visible) is not None
            thought = (thought or "").strip("\n") or None
            self._thoughts[row["choice_id"]] = thought, is_comparable
        thought, is_comparable = self._thoughts[row["choice_id"]]
        is_edited = is_comparable and row["answer_digest"] not in answer.digests
        return None if is_edited else thought

    def name_calls(self, choice: str, call_ids: Iterable[str]) -> None:
        """Remembers which choice made these tool calls, so that a request with their ids refers to it. An id that two
        choices used refers to neither choice."""
        with self._lock, tolerated("a tool call's id"):
            self._storage.db.executemany(
                "INSERT INTO calls (call_id, choice_id) VALUES (?, ?) ON CONFLICT (call_id) DO UPDATE"
                " SET choice_id = NULL WHERE choice_id IS NOT excluded.choice_id",
                [(call_id, choice) for call_id in call_ids],
            )

    def mark_delivered(self, request_id: str) -> None:
        """Marks the choices of a request whose answer was sent in full at this moment."""
        with self._lock, tolerated("the delivery of an answer"):
            self._storage.db.execute(
                f"UPDATE records SET is_delivered = 1, delivered_at = ? WHERE {OF_REQUEST}",
                (tick(), *of_request(request_id)),
            )

    def count_lost(self, request: Request, reason: str, num_choices: int) -> None:
        """Counts choices of a session's request that have no record, or that have no turn because the agent hung up."""
        if request.session is None or request.model is None:
            return
        with self._lock, tolerated("the number of lost choices"):
            self._storage.count_lost(request.session, request.model, reason, num_choices)

    def keep_turn(self, request_id: str, turn: dict[str, Any]) -> None:
        """Stores a request's messages and, for a session, its choices as the agent has them."""
        with self._lock, tolerated("a request's messages"):
            self._storage.store_turn(request_id, turn)

    def keep_response(self, request_id: str, items: Sequence[Any], item_ids: Iterable[str]) -> None:
        """Stores a response, so that later requests can name the response in place of its conversation. The response stays as
        long as its record."""
        with self._lock, tolerated("a response"):
            self._storage.store_response(request_id, items, item_ids)

    # --- finding ---

    def find_response(self, owner: str, model: int | None, response_id: str) -> list[dict[str, Any]] | None:
        """The items of a model's stored response, and the items of the conversation before; None if there is no response."""
        with self._lock, database_errors("the stored responses"):
            request_id = response_id.removeprefix(conversation.RESPONSE_PREFIX)
            return self._storage.load_response(owner, model, request_id)

    def find_item(self, owner: str, model: int | None, item_id: str) -> dict[str, Any] | None:
        """An item that a model's stored response made; None if there is none."""
        with self._lock, database_errors("the stored responses"):
            request_id = self._storage.response_of(item_id)
            items = None if request_id is None else self._storage.load_response(owner, model, request_id)
        return next((item for item in reversed(items or ()) if item.get("id") == item_id), None)

    def find(self, choice: str) -> Record | None:
        """The record of a choice id; None if there is none or it was deleted."""
        with self._lock:
            records = self._storage.select("choice_id = ?", choice)
        return records[0] if records else None

    def find_messages(self, request_id: str) -> tuple[list[conversation.Message], list[dict[str, Any]] | None] | None:
        """The messages and tools of a request; None if they were not kept."""
        with self._lock:
            turn = self._storage.load_turn(request_id, {})
        if turn is None or turn["conversation"] is None:
            return None
        return [beginning.message for beginning in turn["conversation"]][::-1], turn["tools"]

    def find_recent(self, model: int, num_prompts: int, newest: int = 2000) -> list[Record]:
        """A record of each of the model's newest prompts that differ, among its `newest` records."""
        with self._lock:
            rows = self._storage.db.execute(
                "SELECT number, prompt FROM records WHERE model = ? ORDER BY number DESC LIMIT ?", (model, newest)
            ).fetchall()
            by_prompt: dict[int, int] = {}
            for number, prompt in rows:
                by_prompt.setdefault(prompt, number)
            numbers = [*by_prompt.values()][:num_prompts]
            return self._storage.select("number IN (SELECT value FROM json_each(?))", json.dumps(numbers))

    def find_session(self, model: int, session: str) -> list[tuple[Record, dict[str, Any]]]:
        """The choices that one model sampled in a session, in order, without tokens, each with its turn as the agent has
        it (`Storage.load_turn`). Choices whose end did not reach the agent are left out."""
        return self._find_turns(session, "model = ?", model)

    def find_other_speakers(
        self, model: int, project: str, session: str, owner: str
    ) -> list[tuple[Record, dict[str, Any]]]:
        """`find_session` for the project's other models, and for the base model under the keys of `owner`."""
        where = "((model <> ? AND owner = ?) OR (model IS NULL AND owner = ?))"
        return self._find_turns(session, where, model, project, owner)

    def _find_turns(self, session: str, where: str, *values: object) -> list[tuple[Record, dict[str, Any]]]:
        """Reads one turn at a time, because requests wait meanwhile."""
        with self._lock:
            rows = self._storage.db.execute(
                "SELECT choice_id, request_id FROM records INDEXED BY records_by_session"
                f" WHERE session = ? AND {where} ORDER BY number",
                (session, *values),
            ).fetchall()
        recorded: list[tuple[Record, dict[str, Any]]] = []
        turns: dict[str, dict[str, Any] | None] = {}
        known: dict[int, conversation.Conversation] = {}
        for choice, request_id in rows:
            with self._lock:
                if request_id not in turns:
                    turns[request_id] = self._storage.load_turn(request_id, known)
                turn = turns[request_id]
                if turn is None or choice.rpartition("-")[2] not in turn["choices"]:
                    continue
                record = self._storage.find_heading(choice)
            if record is not None:
                recorded.append((record, turn))
        return recorded

    def count_answers(self, session: str) -> dict[tuple[str, int | None], int]:
        """The number of choices in a session, of any model: by owner and the model's number, None for the base model."""
        with self._lock:
            rows = self._storage.db.execute(
                "SELECT owner, model, COUNT(*) FROM records WHERE session = ? GROUP BY owner, model",
                (session,),
            ).fetchall()
        return {(owner, model): count for owner, model, count in rows}

    def find_unnamed(self, model: int, since: int) -> list[str]:
        """The ids of the choices that a model's requests without a session got. Only requests that came at `since`
        (`clock.tick`) or later count. Reads some records at a time, newest first, because requests wait meanwhile."""
        with self._lock:
            (stop,) = self._storage.db.execute("SELECT COALESCE(MAX(number), 0) FROM records").fetchone()
        unnamed: list[str] = []
        while stop > 0:
            start = stop - CHANGED_AT_A_TIME
            with self._lock:
                rows = self._storage.db.execute(
                    "SELECT choice_id, requested_at, session IS NULL AND is_delivered AND model IS ?"
                    " FROM records WHERE number > ? AND number <= ?",
                    (model, start, stop),
                ).fetchall()
            later = [(choice, is_unnamed) for choice, requested_at, is_unnamed in rows if (requested_at or 0) >= since]
            unnamed += [choice for choice, is_unnamed in later if is_unnamed]
            # Records are in the order in which answers ended, which is the order of the requests, except for requests that
            # ran at the same time.
            stop = start if later else 0
        return unnamed

    def lost_choices(self, model: int, session: str) -> dict[str, int]:
        """The number of choices that a model sampled or began in a session, and that the ledger does not have, by reason."""
        with self._lock:
            return self._storage.lost_choices(model, session)

    def num_expected(self, model: int, session: str) -> int:
        """The number of answers of a model that a session's requests wait for at this moment."""
        return self._expected.count((session, model))

    def find_by_logprobs(self, model: int, logprobs: Sequence[float]) -> list[Match]:
        """A model's records with these log-probabilities, newest first. They are not loaded, because a frequent answer has
        thousands."""
        # The index is named: SQLite cannot know that few records have equal log-probabilities.
        fingerprint = conversation.fingerprint(logprobs)
        return self._find_matches("records_by_fingerprint", model, fingerprint=fingerprint)

    def find_by_conversation(self, model: int, prefix_digest: bytes, answer_digest: bytes) -> list[Match]:
        """A model's records of this answer to this conversation, newest first."""
        digests = {"prefix_digest": prefix_digest, "answer_digest": answer_digest}
        return self._find_matches("records_by_conversation", model, **digests)

    def _find_matches(self, index: str, model: int, **wanted: bytes) -> list[Match]:
        where = " AND ".join(f"{column} = ?" for column in wanted)
        with self._lock:
            rows = self._storage.db.execute(
                "SELECT choice_id, step, prompt, tokens, prefix_digest, answer_digest"
                f" FROM records INDEXED BY {index} WHERE {where} AND model = ?"
                " ORDER BY number DESC LIMIT ?",
                (*wanted.values(), model, MAX_MATCHES),
            ).fetchall()
        return [Match(**dict(row), load=functools.partial(self.find, row[0])) for row in rows]

    def forget_steps(self, model: int, after: int) -> None:
        """Forgets which step sampled the records of a model's steps later than `after`: their numbers will be used again.
        Changes a few records at a time, because requests wait meanwhile."""
        with self._lock, database_errors("the records"):
            (last,) = self._storage.db.execute("SELECT COALESCE(MAX(number), 0) FROM records").fetchone()
        for start in range(0, last + 1, CHANGED_AT_A_TIME):
            with self._lock, database_errors("the records"):
                self._storage.db.execute(
                    "UPDATE records SET step = NULL WHERE model = ? AND step > ? AND number >= ? AND number < ?",
                    (model, after, start, start + CHANGED_AT_A_TIME),
                )

    # --- deletion ---

    def choices_of_request(self, model: int, request_id: str) -> list[str]:
        """The ids of the choices of a model's answer."""
        return self._choices(f"{OF_REQUEST} AND model = ?", *of_request(request_id), model)

    def choices_of_session(self, model: int, session: str) -> list[str]:
        """The ids of a model's choices in a session, also of choices that did not reach the agent."""
        return self._choices("session = ? AND model = ?", session, model)

    def _choices(self, where: str, *values: object) -> list[str]:
        with self._lock:
            rows = self._storage.db.execute(f"SELECT choice_id FROM records WHERE {where} ORDER BY number", values)
            return [choice for (choice,) in rows.fetchall()]

    def delete(self, choices: Sequence[str]) -> list[str]:
        """Deletes the records of choices and what only they need, and overwrites it in the file. Returns the choices whose prompts
        contain them."""
        with self._lock:
            continued_by = self._storage.continued_by(choices)
        for start in range(0, len(choices), PRUNED_AT_A_TIME):
            part = choices[start : start + PRUNED_AT_A_TIME]
            with self._lock, database_errors("the records"), overwriting(self._storage.db):
                self._storage.drop(self._storage.numbers_of(part), self._used_prompts())
                self._texts.clear()
                self._thoughts.clear()
        return continued_by

    def forget_session(self, model: int, session: str) -> None:
        """Deletes the number of choices that a model's session lacks."""
        with self._lock, database_errors("the records"):
            self._storage.forget_session(model, session)

    # --- keeping within bounds ---

    def prune(self) -> int:
        """Deletes records that are too old, and the oldest ones while the file is too large. Returns their number.
        Deletes a few at a time, because requests wait meanwhile. Also forgets the oldest tool calls."""
        with self._lock:
            self._storage.db.execute(
                "DELETE FROM calls WHERE number <= (SELECT MAX(number) FROM calls) - ?",
                (NAMED_CALLS,),
            )
        while self._prune_prompts():
            pass
        dropped = 0
        while part := self._prune_some():
            dropped += part
        if dropped:
            logger.info("ledger: %d records deleted by age or size", dropped)
        return dropped

    def _prune_prompts(self) -> bool:
        """Deletes some of the prompts that no answer followed, before records are deleted because of the size."""
        with self._lock:
            some, self._unanswered = (
                self._unanswered[:PRUNED_AT_A_TIME],
                self._unanswered[PRUNED_AT_A_TIME:],
            )
            if some:
                self._storage.drop_prompts(some, self._used_prompts())
            return bool(some)

    def _used_prompts(self) -> list[int]:
        """The numbers of the prompts of open requests."""
        open_requests = list(self._open.values())
        return [prompt.number for request in open_requests for prompt in request.prompts.values()]

    def _prune_some(self) -> int:
        with self._lock:
            oldest = self._storage.db.execute(
                "SELECT number, created_at FROM records ORDER BY number LIMIT ?",
                (PRUNED_AT_A_TIME,),
            ).fetchall()
            too_old = self._clock.now() - self._retention.max_age_seconds
            doomed = [number for number, created_at in oldest if created_at < too_old]
            if not doomed and self._storage.size() > self._retention.max_bytes:
                (newest,) = self._storage.db.execute("SELECT MAX(number) FROM records").fetchone()
                tenth = max(1, (newest - oldest[0][0]) // 10) if oldest else 0
                doomed = [number for number, _ in oldest[:tenth]]
            if doomed:
                self._storage.drop(doomed, self._used_prompts())
            return len(doomed)


def marks_of(request: Request) -> dict[str, Any]:
    """What a record's sampling parameters say besides the engine's."""
    marks = {
        NEVER_LEARNS: request.never_learns,
        NAMES_STEP: request.names_step,
        TEMPLATE_KWARGS: request.template_kwargs,
    }
    return {mark: value for mark, value in marks.items() if value}


@contextlib.contextmanager
def tolerated(what: str) -> Iterator[None]:
    """Logs a failed write instead of raising, so that a full disk does not cost an answer."""
    try:
        yield
    except sqlite3.Error as error:
        logger.error("%s is not recorded: %s", what, error)


@dataclass(slots=True)
class OpenRequest:
    """A request that the engine has: its prompts, and the records that have arrived."""

    ledger: Ledger
    request: Request
    record_wait_seconds: float
    """How long an answer waits for its records, for all of its choices together."""
    prompts: dict[int, Prompt] = field(default_factory=dict)
    records: dict[int, Record] = field(default_factory=dict)
    lost: dict[int, str] = field(default_factory=dict)
    """Choices without a record, with the reason."""
    _candidates: Candidates | None = None
    _came: asyncio.Event = field(default_factory=asyncio.Event)
    _waited: float = 0.0
    """Seconds of `record_wait_seconds` that are over."""

    def __enter__(self) -> "OpenRequest":
        self.ledger._open[self.request.request_id] = self
        return self

    def __exit__(self, *_: object) -> None:
        self.ledger._open.pop(self.request.request_id, None)
        if not self.records:
            self.ledger._unanswered += [prompt.number for prompt in self.prompts.values()]

    @property
    def candidates(self) -> Candidates:
        """The choices that the request may continue. Call it with the ledger's lock."""
        if self._candidates is None:
            self._candidates = Candidates(self.ledger._storage, self.request)
        return self._candidates

    def add(self, index: int, record: Record) -> None:
        self.records[index] = record
        self._came.set()

    def lose(self, index: int, reason: str) -> None:
        self.lost[index] = reason
        self._came.set()

    async def mark_delivered(self) -> None:
        """Marks the answer as sent in full; only then can a session contain it."""
        self.ledger.mark_delivered(self.request.request_id)
        if self.lost:
            self.ledger.count_lost(self.request, UNRECORDED, len(self.lost))

    async def wait(self, index: int) -> Record | None:
        """The record of choice `index`, once it has arrived; None if there is none, and then `lost` has the reason."""
        if index in self.records:
            return self.records[index]
        clock = self.ledger._clock
        started = clock.monotonic()
        try:
            async with clock.timeout(max(0.0, self.record_wait_seconds - self._waited)):
                while index not in self.records and index not in self.lost:
                    # `add` and `lose` run on the same event loop, so nothing comes between the check and this line.
                    self._came.clear()
                    await self._came.wait()
        except TimeoutError:
            logger.error("no record came for choice %d of %s", index, self.request.request_id)
            self.lost[index] = f"no record came within {self.record_wait_seconds:.0f} s"
        finally:
            self._waited += clock.monotonic() - started
        return self.records.get(index)
