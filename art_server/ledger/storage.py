"""The ledger's SQLite file: prompts, records, kept sets, sessions' turns and stored responses. Callers hold the ledger's
lock.

A prompt is stored as the choice that it continues plus its new tokens, and a turn's messages as a known
conversation plus the new messages. So a conversation of many turns is stored once.
"""

import array
import json
import sqlite3
import zlib
from collections import OrderedDict
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import msgspec

from art_server.ledger import conversation
from art_server.ledger.records import PRUNED, UNRECORDED, Prompt, Record, Request
from art_server.shared.kept_set import MASK
from art_server.store.database import insert, open_database, transaction

LOST_CHOICES = """
CREATE TABLE IF NOT EXISTS lost_choices (  -- of sessions, how many choices the ledger does not have
    number INTEGER PRIMARY KEY,
    session TEXT NOT NULL,
    model INTEGER NOT NULL,
    reason TEXT NOT NULL,
    num_choices INTEGER NOT NULL,
    UNIQUE (session, model, reason)
);
"""
SCHEMA = f"""{LOST_CHOICES}
CREATE TABLE IF NOT EXISTS prompts (
    number INTEGER PRIMARY KEY AUTOINCREMENT,  -- not reused after a deletion, because open requests hold it
    digest BLOB NOT NULL UNIQUE,
    parent TEXT,
    delta BLOB NOT NULL,
    cut INTEGER,  -- of a spliced prompt: its rendering is that of the parent's prompt without the last `cut` tokens,
    tail BLOB     -- followed by these tokens
);
CREATE TABLE IF NOT EXISTS records (
    number INTEGER PRIMARY KEY,
    choice_id TEXT NOT NULL UNIQUE,
    request_id TEXT NOT NULL,  -- choice ids begin with it, so it needs no index
    api TEXT NOT NULL,
    owner TEXT NOT NULL,
    model INTEGER,  -- its number in the server's database
    step INTEGER,
    session TEXT,
    created_at REAL NOT NULL,
    prompt INTEGER NOT NULL,
    continues TEXT,
    link TEXT,
    prefix_digest BLOB NOT NULL,  -- of the conversation before the answer
    answer_digest BLOB NOT NULL,
    fingerprint BLOB NOT NULL,
    tokens BLOB NOT NULL,
    logprobs BLOB NOT NULL,
    finish_reason TEXT NOT NULL,
    sampling TEXT NOT NULL,
    is_delivered INTEGER NOT NULL DEFAULT 0,
    -- sampled_from: log-probabilities (nil: the raw ones), kept, sets (each itself or its number); empty: raw, no sets
    sampled_from BLOB,
    requested_at INTEGER,  -- clock.tick
    delivered_at INTEGER
);
CREATE INDEX IF NOT EXISTS prompts_by_parent ON prompts (parent) WHERE parent IS NOT NULL;
CREATE INDEX IF NOT EXISTS records_by_prompt ON records (prompt);
CREATE INDEX IF NOT EXISTS records_by_session ON records (session) WHERE session IS NOT NULL;
CREATE INDEX IF NOT EXISTS records_by_conversation ON records (prefix_digest, answer_digest);
CREATE INDEX IF NOT EXISTS records_by_fingerprint ON records (fingerprint);
CREATE TABLE IF NOT EXISTS kept_sets (
    number INTEGER PRIMARY KEY,
    digest BLOB NOT NULL UNIQUE,
    used_at REAL NOT NULL,  -- at most USED_SECONDS before created_at of each record that refers to it
    packed BLOB NOT NULL
);
CREATE INDEX IF NOT EXISTS kept_sets_by_use ON kept_sets (used_at);
CREATE TABLE IF NOT EXISTS calls (
    number INTEGER PRIMARY KEY,
    call_id TEXT NOT NULL UNIQUE,
    choice_id TEXT  -- the choice that made the tool call; null if several used the id
);
CREATE TABLE IF NOT EXISTS turns (
    request_id TEXT PRIMARY KEY,
    body BLOB NOT NULL,  -- choices and constraints
    conversation INTEGER,  -- the messages
    tools INTEGER  -- as the only message of a conversation
);
CREATE TABLE IF NOT EXISTS conversations (
    number INTEGER PRIMARY KEY,
    digest BLOB NOT NULL UNIQUE,
    parent INTEGER,  -- the conversation before the last message
    message BLOB NOT NULL
);
CREATE TABLE IF NOT EXISTS responses (
    request_id TEXT PRIMARY KEY,
    items INTEGER  -- of the Responses API, input and output, as a conversation
);
CREATE TABLE IF NOT EXISTS response_items (
    item_id TEXT PRIMARY KEY,
    request_id TEXT NOT NULL  -- the response that made the item
);
CREATE INDEX IF NOT EXISTS conversations_by_parent ON conversations (parent) WHERE parent IS NOT NULL;
CREATE INDEX IF NOT EXISTS turns_by_conversation ON turns (conversation) WHERE conversation IS NOT NULL;
CREATE INDEX IF NOT EXISTS turns_by_tools ON turns (tools) WHERE tools IS NOT NULL;
CREATE INDEX IF NOT EXISTS responses_by_items ON responses (items) WHERE items IS NOT NULL;
CREATE INDEX IF NOT EXISTS response_items_by_request ON response_items (request_id);
"""

CACHED_PROMPTS = 512
"""Prompts kept in memory, the most recently used: a conversation's next turn needs the prompt of its last turn."""

SMALL_BYTES = 1024
"""Up to this size, compression costs more than it saves."""

CHECKPOINT_PAGES = 8000
"""Pages of the write-ahead log (32 MB) after which SQLite copies it into the file, and waits for the disk."""

CACHED_SETS = 4096
"""Shared kept sets in memory; a grammar has few different ones."""

MAX_OWN = 1024
"""Choices of a session in which a request's past is searched: the newest."""

MAX_EQUAL = 256
"""Equal answers to equal conversations that are compared: the newest."""

USED_SECONDS = 3600.0
"""A kept set's `used_at` is updated when it is older than this."""

HEADING = (
    "choice_id, request_id, api, model, step, owner, session, prefix_digest, requested_at, finish_reason,"
    " created_at, continues, link, answer_digest, is_delivered, delivered_at"
)
"""The columns of `find_heading`."""

COUNTED_SESSIONS = 200_000
"""Rows of `lost_choices`, the latest ones: some 30 MB."""

# One parameter for a list of any length: SQLite limits their number.
IN_LIST = "IN (SELECT value FROM json_each(?))"
WITHOUT_RECORD = "NOT EXISTS (SELECT 1 FROM records WHERE prompt = prompts.number)"
OF_REQUEST = "choice_id > ? AND choice_id < ?"


def of_request(request_id: str) -> tuple[str, str]:
    """The bounds of a request's choice ids, for OF_REQUEST."""
    # "." is the next character behind "-".
    return f"{request_id}-", f"{request_id}."


class Storage:
    """The database and its caches. Each write is committed at once (WAL), except inside a `transaction`."""

    def __init__(self, file: Path):
        self.db = open_database(file, SCHEMA, is_durable=False)
        self.db.execute(f"PRAGMA wal_autocheckpoint={CHECKPOINT_PAGES}")
        self._sets: dict[int, bytes] = {}
        self._prompts: OrderedDict[int, array.array[int]] = OrderedDict()
        self._renderings: OrderedDict[int, array.array[int]] = OrderedDict()
        # The prompts of requests that never got an answer.
        self.db.execute(f"DELETE FROM prompts WHERE {WITHOUT_RECORD}")

    def forget(self) -> None:
        """Clears the caches of prompts: after a rollback SQLite gives the numbers of rolled-back prompts to others."""
        self._prompts.clear()
        self._renderings.clear()

    # --- prompts ---

    def store_prompt(self, prompt: Prompt) -> int:
        ids = prompt.token_ids
        name = conversation.digest(ids.tobytes())
        row = self.db.execute("SELECT number FROM prompts WHERE digest = ?", (name,)).fetchone()
        if row is not None:
            return row[0]
        parent, start, cut, tail = None, 0, None, None
        if prompt.link in ("exact", "spliced"):
            past = self.db.execute(
                "SELECT prompt, tokens FROM records WHERE choice_id = ?", (prompt.continues,)
            ).fetchone()
            if past is not None:
                before = self.load_prompt(past[0]) + unpack_array(past[1], "i")
                if ids[: len(before)] == before:
                    parent, start = prompt.continues, len(before)
                if prompt.link == "spliced" and parent is not None:
                    cut = len(self.load_rendering(past[0])) - prompt.length
        if prompt.link == "spliced":
            tail = pack_array(prompt.rendered[prompt.length if parent else 0 :])
        row = {
            "digest": name,
            "parent": parent,
            "delta": pack_array(ids[start:]),
            "cut": cut,
            "tail": tail,
        }
        number = insert(self.db, "prompts", row)
        self._cache(self._prompts, number, ids)
        return number

    def load_rendering(self, number: int) -> "array.array[int]":
        """A prompt's rendered tokens. If the prompt was spliced, they differ from the tokens that were sampled from."""
        cached = self._renderings.get(number)
        if cached is not None:
            self._renderings.move_to_end(number)
            return cached
        tails: list[tuple[int, bytes]] = []
        whole: array.array[int] = array.array("i")
        wanted: int | None = number
        while wanted is not None:
            if wanted in self._renderings:
                # A copy, here and below: the list is extended, and the cache keeps its own.
                whole = self._renderings[wanted][:]
                break
            row = self.db.execute(
                "SELECT tail, cut, prompt FROM prompts LEFT JOIN records ON choice_id = parent WHERE prompts.number = ?",
                (wanted,),
            ).fetchone()
            if row is None:
                return whole
            tail, cut, past = row
            if tail is None:
                whole = self.load_prompt(wanted)[:]
                break
            tails.append((cut or 0, tail))
            wanted = past
        for cut, tail in reversed(tails):
            del whole[len(whole) - cut :]
            whole.extend(unpack_array(tail, "i"))
        self._cache(self._renderings, number, whole)
        return whole

    def load_prompt(self, number: int) -> "array.array[int]":
        """The tokens that were sampled from, assembled from the choices that the prompt continues."""
        cached = self._prompts.get(number)
        if cached is not None:
            self._prompts.move_to_end(number)
            return cached
        pieces: list[array.array[int]] = []
        wanted: int | None = number
        while wanted is not None:
            parent, delta = self.db.execute("SELECT parent, delta FROM prompts WHERE number = ?", (wanted,)).fetchone()
            pieces.append(unpack_array(delta, "i"))
            wanted = None
            if parent is not None:
                wanted, tokens = self.db.execute(
                    "SELECT prompt, tokens FROM records WHERE choice_id = ?", (parent,)
                ).fetchone()
                pieces.append(unpack_array(tokens, "i"))
                if wanted in self._prompts:
                    pieces.append(self._prompts[wanted])
                    wanted = None
        whole = array.array("i")
        for piece in reversed(pieces):
            whole.extend(piece)
        self._cache(self._prompts, number, whole)
        return whole

    @staticmethod
    def _cache(cache: "OrderedDict[int, array.array[int]]", number: int, token_ids: "array.array[int]") -> None:
        cache[number] = token_ids
        while len(cache) > CACHED_PROMPTS:
            cache.popitem(last=False)

    # --- records ---

    def write(self, record: Record, prompt: Prompt) -> None:
        request = record.request
        insert(
            self.db,
            "records",
            {
                "choice_id": record.choice_id,
                "request_id": request.request_id,
                "api": request.api,
                "owner": request.owner,
                "model": request.model,
                "step": request.step,
                "session": request.session,
                "created_at": record.created_at,
                "prompt": prompt.number,
                "continues": record.continues,
                "link": record.link,
                "prefix_digest": request.prefix_digest,
                "answer_digest": record.answer_digest,
                "fingerprint": conversation.fingerprint(record.logprobs),
                "tokens": pack_array(array.array("i", record.token_ids)),
                "logprobs": pack_array(array.array("d", record.logprobs)),
                "finish_reason": record.finish_reason,
                "sampling": json.dumps(record.sampling, separators=(",", ":")),
                "sampled_from": self._store_sampled(record),
                "requested_at": request.requested_at,
            },
            or_else="REPLACE",
        )

    def newest_event(self, num: int) -> int:
        """The latest request or delivery of the `num` newest records; 0 if there is none."""
        (newest,) = self.db.execute(
            # The inner MAX has two arguments: SQLite's scalar function, not its aggregate.
            "SELECT MAX(MAX(COALESCE(requested_at, 0), COALESCE(delivered_at, 0))) FROM"
            " (SELECT requested_at, delivered_at FROM records ORDER BY number DESC LIMIT ?)",
            (num,),
        ).fetchone()
        return newest or 0

    def select(self, where: str, *values: Any) -> list[Record]:
        rows = self.db.execute(f"SELECT * FROM records WHERE {where} ORDER BY number", values)
        return [self._record(row) for row in rows.fetchall()]

    def find_heading(self, choice_id: str) -> Record | None:
        """A record without tokens, log-probabilities and sampling parameters; None if there is none."""
        row = self.db.execute(f"SELECT {HEADING} FROM records WHERE choice_id = ?", (choice_id,)).fetchone()
        if row is None:
            return None
        return Record(
            row["choice_id"],
            _request(row),
            *([], [], []),
            finish_reason=row["finish_reason"],
            sampling={},
            **{name: row[name] for name in ("created_at", "continues", "link", "answer_digest")},
            is_delivered=bool(row["is_delivered"]),
            delivered_at=row["delivered_at"],
        )

    def _record(self, row: sqlite3.Row) -> Record:
        logprobs = unpack_array(row["logprobs"], "d").tolist()
        sampled_logprobs, kept, sets = self._load_sampled(row["sampled_from"], logprobs)
        return Record(
            choice_id=row["choice_id"],
            request=_request(row),
            prompt_token_ids=self.load_prompt(row["prompt"]).tolist(),
            token_ids=unpack_array(row["tokens"], "i").tolist(),
            logprobs=logprobs,
            finish_reason=row["finish_reason"],
            sampling=json.loads(row["sampling"]),
            created_at=row["created_at"],
            sampled_logprobs=sampled_logprobs,
            kept=kept,
            sets=sets,
            continues=row["continues"],
            link=row["link"],
            answer_digest=row["answer_digest"],
            is_delivered=bool(row["is_delivered"]),
            delivered_at=row["delivered_at"],
        )

    def _store_sampled(self, record: Record) -> bytes | None:
        """The `sampled_from` of a record. Choices share a grammar's sets, but rarely the few ids that top_p keeps."""
        if record.sampled_logprobs is None:
            return None
        is_raw = record.sampled_logprobs == record.logprobs
        if is_raw and not record.sets:
            return b""
        sampling = record.sampling
        is_cut_by_p = sampling.get("top_p", 1.0) < 1 or sampling.get("min_p", 0.0) > 0
        is_shared = not is_cut_by_p and sampling.get("top_k", 0) <= 0
        logprobs = None if is_raw else array.array("f", record.sampled_logprobs).tobytes()
        sets: list[int | bytes] = []
        for packed in record.sets:
            if is_shared or packed[:1] == MASK:
                sets.append(self._share_set(packed, record.created_at))
            else:
                sets.append(packed)
        return zlib.compress(msgspec.msgpack.encode((logprobs, record.kept, sets)), 1)

    def _load_sampled(
        self, stored: bytes | None, raw: list[float]
    ) -> tuple[list[float] | None, list[int], list[bytes]]:
        if not stored:
            return (None if stored is None else raw), [], []
        packed, kept, sets = msgspec.msgpack.decode(zlib.decompress(stored))
        logprobs = raw if packed is None else array.array("f", packed).tolist()
        return logprobs, kept, [self._load_set(stored_set) for stored_set in sets]

    def _share_set(self, packed: bytes, used_at: float) -> int:
        digest = conversation.digest(packed)
        row = self.db.execute("SELECT number, used_at FROM kept_sets WHERE digest = ?", (digest,)).fetchone()
        if row is None:
            return insert(self.db, "kept_sets", {"digest": digest, "used_at": used_at, "packed": packed})
        number, last = row
        if last < used_at - USED_SECONDS:
            update = "UPDATE kept_sets SET used_at = ? WHERE number = ?"
            self.db.execute(update, (used_at, number))
        return number

    def _load_set(self, stored: int | bytes) -> bytes:
        if isinstance(stored, bytes):
            return stored
        packed = self._sets.get(stored)
        if packed is None:
            if len(self._sets) >= CACHED_SETS:
                self._sets.clear()
            select = "SELECT packed FROM kept_sets WHERE number = ?"
            (packed,) = self.db.execute(select, (stored,)).fetchone()
            self._sets[stored] = packed
        return packed

    # --- what a request may continue ---

    def find_cited(self, request: Request, names: Iterable[str]) -> dict[str, sqlite3.Row]:
        """The choices that have these names: choice ids, or ids of tool calls that only one choice made."""
        names = set(names)
        if not names:
            return {}
        callers = self.db.execute(
            f"SELECT call_id, choice_id FROM calls WHERE call_id {IN_LIST}",
            (json.dumps(list(names)),),
        ).fetchall()
        choices = {name: name for name in names} | dict(callers)
        wanted = json.dumps([choice for choice in choices.values() if choice is not None])
        rows = self._find_choices(request, "", f"choice_id {IN_LIST}", wanted, limit=-1)
        by_id = {row["choice_id"]: row for row in rows}
        return {name: by_id[choice] for name, choice in choices.items() if choice in by_id}

    def find_of_session(self, request: Request) -> list[sqlite3.Row]:
        """The newest choices of a request's session; none without a session."""
        if request.session is None:
            return []
        # The index is named, here and below: SQLite keeps no statistics that show how few records it leaves.
        return self._find_choices(request, "INDEXED BY records_by_session", "TRUE", limit=MAX_OWN)

    def find_answers(
        self,
        request: Request,
        prefix_digest: bytes,
        answer_digest: bytes | None,
        limit: int = MAX_EQUAL,
    ) -> list[sqlite3.Row]:
        """The newest choices that answered a conversation, with this text (None: any)."""
        where = "prefix_digest = ?" + (" AND answer_digest = ?" if answer_digest else "")
        digests = (prefix_digest, answer_digest) if answer_digest else (prefix_digest,)
        index = "INDEXED BY records_by_conversation"
        return self._find_choices(request, index, where, *digests, limit=limit)

    def _find_choices(self, request: Request, index: str, where: str, *values: Any, limit: int) -> list[sqlite3.Row]:
        """Choices of the request's owner and model, and of its session if it has one, newest first."""
        session, of_session = "", ()
        if request.session is not None:
            session, of_session = "AND session = ?", (request.session,)
        return self.db.execute(
            "SELECT choice_id, prompt, tokens, prefix_digest, answer_digest, continues"
            f" FROM records {index} WHERE {where} {session} AND owner = ? AND model IS ?"
            " ORDER BY number DESC LIMIT ?",
            (*values, *of_session, request.owner, request.model, limit),
        ).fetchall()

    # --- sessions ---

    def store_turn(self, request_id: str, turn: dict[str, Any]) -> None:
        """Stores a session's request. `turn` has its messages, its tools, and what is stored as it is."""
        rest = {name: value for name, value in turn.items() if name not in ("messages", "tools")}
        with transaction(self.db):
            tools = turn.get("tools")
            row = {
                "request_id": request_id,
                "body": zlib.compress(json.dumps(rest).encode(), 1),
                "conversation": self._store_conversation(turn["messages"]),
                "tools": None if tools is None else self._store_conversation([{"tools": tools}]),
            }
            # A stream stores its turn again at the end of each of its choices.
            insert(self.db, "turns", row, or_else="REPLACE")

    def _store_conversation(self, messages: Sequence[Any]) -> int | None:
        """Stores a conversation, and returns its number. Only new messages are written. None without messages."""
        bodies = [json.dumps(message).encode() for message in messages]
        digests = [conversation.EMPTY]
        for body in bodies:
            digests.append(conversation.digest(digests[-1], body))
        number: int | None = None
        known = len(bodies)
        while known and number is None:
            row = self.db.execute("SELECT number FROM conversations WHERE digest = ?", (digests[known],)).fetchone()
            if row is not None:
                number = row[0]
            else:
                known -= 1
        for body, name in zip(bodies[known:], digests[known + 1 :], strict=True):
            # Level 0 keeps the bytes as they are, in the same format.
            packed = zlib.compress(body, 1 if len(body) > SMALL_BYTES else 0)
            row = {"digest": name, "parent": number, "message": packed}
            number = insert(self.db, "conversations", row)
        return number

    def load_turn(self, request_id: str, known: dict[int, conversation.Conversation]) -> dict[str, Any] | None:
        """What `store_turn` stored, with a `conversation` instead of messages; None if there is nothing. `known` holds the
        conversations that were loaded before, by number."""
        row = self.db.execute(
            "SELECT body, conversation, tools FROM turns WHERE request_id = ?", (request_id,)
        ).fetchone()
        if row is None:
            return None
        turn = json.loads(zlib.decompress(row["body"]))
        tools = self._load_conversation(row["tools"], known)
        return turn | {
            "conversation": self._load_conversation(row["conversation"], known),
            "tools": None if tools is None else tools.message["tools"],
        }

    def _load_conversation(
        self, number: int | None, known: dict[int, conversation.Conversation]
    ) -> conversation.Conversation | None:
        new: list[tuple[int, bytes]] = []
        while number is not None and number not in known:
            parent, message = self.db.execute(
                "SELECT parent, message FROM conversations WHERE number = ?", (number,)
            ).fetchone()
            new.append((number, message))
            number = parent
        grown = None if number is None else known[number]
        for number, message in reversed(new):
            grown = known[number] = conversation.grow(grown, json.loads(zlib.decompress(message)))
        return grown

    def _drop_conversations(self, numbers: Iterable[int | None]) -> None:
        """Deletes these conversations if no turn, response or longer conversation needs them, and then the conversations
        before them."""
        left = {number for number in numbers if number is not None}
        while left:
            dropped = self.db.execute(
                f"DELETE FROM conversations WHERE number {IN_LIST}"
                " AND NOT EXISTS (SELECT 1 FROM conversations AS longer WHERE longer.parent = conversations.number)"
                " AND NOT EXISTS (SELECT 1 FROM turns WHERE conversation = conversations.number)"
                " AND NOT EXISTS (SELECT 1 FROM turns WHERE turns.tools = conversations.number)"
                " AND NOT EXISTS (SELECT 1 FROM responses WHERE items = conversations.number)"
                " RETURNING parent",
                (json.dumps(list(left)),),
            ).fetchall()
            left = {parent for (parent,) in dropped if parent is not None}

    # --- stored responses ---

    def store_response(self, request_id: str, items: Sequence[Any], item_ids: Iterable[str]) -> None:
        """Stores the items of a response: the items of its conversation and its own items, whose ids are `item_ids`."""
        with transaction(self.db):
            row = {"request_id": request_id, "items": self._store_conversation(items)}
            insert(self.db, "responses", row, or_else="REPLACE")
            for item_id in item_ids:
                row = {"item_id": item_id, "request_id": request_id}
                insert(self.db, "response_items", row, or_else="REPLACE")

    def load_response(self, owner: str, model: int | None, request_id: str) -> list[Any] | None:
        """What `store_response` stored of a model's response; None if there is nothing."""
        row = self.db.execute(
            "SELECT items FROM responses JOIN records ON choice_id = responses.request_id || '-0'"
            " WHERE responses.request_id = ? AND owner = ? AND model IS ?",
            (request_id, owner, model),
        ).fetchone()
        if row is None:
            return None
        items: list[Any] = []
        number: int | None = row["items"]
        while number is not None:
            number, item = self.db.execute(
                "SELECT parent, message FROM conversations WHERE number = ?", (number,)
            ).fetchone()
            items.append(json.loads(zlib.decompress(item)))
        return items[::-1]

    def response_of(self, item_id: str) -> str | None:
        """The request id of the stored response that made an item; None if there is none."""
        row = self.db.execute("SELECT request_id FROM response_items WHERE item_id = ?", (item_id,)).fetchone()
        return None if row is None else row[0]

    def count_lost(self, session: str, model: int, reason: str, num_choices: int) -> None:
        """Adds to the number of choices of a session that the ledger does not have."""
        self.db.execute(
            "INSERT INTO lost_choices (session, model, reason, num_choices) VALUES (?, ?, ?, ?)"
            " ON CONFLICT (session, model, reason) DO UPDATE SET num_choices = num_choices + excluded.num_choices",
            (session, model, reason, num_choices),
        )

    def lost_choices(self, model: int, session: str) -> dict[str, int]:
        """The number of choices of a session that the ledger does not have, by reason."""
        lost = dict(
            self.db.execute(
                "SELECT reason, num_choices FROM lost_choices WHERE session = ? AND model = ?",
                (session, model),
            ).fetchall()
        )
        (num_without_turn,) = self.db.execute(
            "SELECT COUNT(*) FROM records INDEXED BY records_by_session WHERE session = ? AND model = ?"
            " AND is_delivered AND NOT EXISTS (SELECT 1 FROM turns WHERE turns.request_id = records.request_id)",
            (session, model),
        ).fetchone()
        if num_without_turn:
            lost[UNRECORDED] = lost.get(UNRECORDED, 0) + num_without_turn
        return lost

    # --- keeping within bounds ---

    def size(self) -> int:
        """Bytes in use, without free pages, which SQLite fills before the file grows."""
        (pages,) = self.db.execute("PRAGMA page_count").fetchone()
        (free,) = self.db.execute("PRAGMA freelist_count").fetchone()
        (page_size,) = self.db.execute("PRAGMA page_size").fetchone()
        return (pages - free) * page_size

    def numbers_of(self, choices: Sequence[str]) -> list[int]:
        rows = self.db.execute(f"SELECT number FROM records WHERE choice_id {IN_LIST}", (json.dumps(choices),))
        return [number for (number,) in rows.fetchall()]

    def continued_by(self, choices: Sequence[str]) -> list[str]:
        """The other choices whose prompts are stored as continuations of these choices."""
        rows = self.db.execute(
            "SELECT choice_id FROM prompts JOIN records ON prompt = prompts.number"
            f" WHERE parent {IN_LIST} AND NOT choice_id {IN_LIST} ORDER BY records.number",
            (json.dumps(choices), json.dumps(choices)),
        )
        return [choice for (choice,) in rows.fetchall()]

    def forget_session(self, model: int, session: str) -> None:
        self.db.execute("DELETE FROM lost_choices WHERE session = ? AND model = ?", (session, model))

    def drop(self, numbers: Sequence[int], used_prompts: Iterable[int]) -> None:
        """Deletes records and everything that only they need, except `used_prompts`, which open requests need."""
        in_use = json.dumps(list(used_prompts))
        rows = self.db.execute(
            f"SELECT choice_id, prompt, request_id FROM records WHERE number {IN_LIST}",
            (json.dumps(numbers),),
        ).fetchall()
        choices, prompts, requests = (json.dumps(list(set(column))) for column in zip(*rows, strict=True))
        with transaction(self.db):
            of_sessions = self.db.execute(
                f"SELECT session, model, COUNT(*) FROM records WHERE number {IN_LIST} AND is_delivered"
                " AND session IS NOT NULL AND model IS NOT NULL GROUP BY session, model",
                (json.dumps(numbers),),
            ).fetchall()
            for session, model, num_choices in of_sessions:
                self.count_lost(session, model, PRUNED, num_choices)
            self.db.execute(
                "DELETE FROM lost_choices WHERE number <= (SELECT MAX(number) FROM lost_choices) - ?",
                (COUNTED_SESSIONS,),
            )
            stay = self.db.execute(
                f"SELECT number FROM prompts WHERE parent {IN_LIST} AND (number {IN_LIST} OR EXISTS"
                f" (SELECT 1 FROM records WHERE prompt = prompts.number AND NOT choice_id {IN_LIST}))",
                (choices, in_use, choices),
            ).fetchall()
            for (number,) in stay:  # their parent is deleted: store them whole
                whole, rendering = self.load_prompt(number), self.load_rendering(number)
                self.db.execute(
                    "UPDATE prompts SET parent = NULL, delta = ?, cut = NULL, tail = ? WHERE number = ?",
                    (pack_array(whole), pack_array(rendering) if rendering != whole else None, number),
                )
            self.db.execute(f"DELETE FROM records WHERE choice_id {IN_LIST}", (choices,))
            self.db.execute(f"DELETE FROM prompts WHERE parent {IN_LIST}", (choices,))
            self._drop_unused(prompts, in_use)
            turns = self.db.execute(
                f"DELETE FROM turns WHERE request_id {IN_LIST} AND NOT EXISTS (SELECT 1 FROM records WHERE"
                " choice_id > turns.request_id || '-' AND choice_id < turns.request_id || '.')"
                " RETURNING conversation, tools",
                (requests,),
            ).fetchall()
            responses = self.db.execute(
                f"DELETE FROM responses WHERE request_id {IN_LIST} RETURNING items", (requests,)
            ).fetchall()
            self.db.execute(f"DELETE FROM response_items WHERE request_id {IN_LIST}", (requests,))
            self._drop_conversations(number for row in (*turns, *responses) for number in row)
            self.db.execute(
                "DELETE FROM kept_sets WHERE used_at < COALESCE("
                " (SELECT created_at FROM records ORDER BY number LIMIT 1), 1e99) - ?",
                (USED_SECONDS,),
            )
        self.forget()
        # SQLite gives the numbers of deleted sets to new ones.
        self._sets.clear()

    def drop_prompts(self, numbers: Sequence[int], used_prompts: Iterable[int]) -> None:
        """Deletes these prompts if they have no record, except `used_prompts`."""
        self._drop_unused(json.dumps(list(numbers)), json.dumps(list(used_prompts)))
        self.forget()

    def _drop_unused(self, numbers: str, in_use: str) -> None:
        self.db.execute(
            f"DELETE FROM prompts WHERE number {IN_LIST} AND NOT number {IN_LIST} AND {WITHOUT_RECORD}",
            (numbers, in_use),
        )


def _request(row: sqlite3.Row) -> Request:
    names = ("request_id", "api", "model", "step", "owner", "session", "prefix_digest")
    return Request(**{name: row[name] for name in (*names, "requested_at")})


def pack_array(values: "array.array[Any]") -> bytes:
    content = values.tobytes()
    return zlib.compress(content, 1 if len(content) > SMALL_BYTES else 0)


def unpack_array(blob: bytes, kind: str) -> "array.array[Any]":
    values: array.array[Any] = array.array(kind)
    values.frombytes(zlib.decompress(blob))
    return values
