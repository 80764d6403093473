"""The table of scores: what users, tests and people said of an agent's answers, and what became of each score.

    scored -> queued -> trained         a job has taken the score, and has made a step
    queued -> scored                    the job failed or was cancelled
    scored -> dropped                   the score is not trained; the row says why
    scored -> replaced | retracted      the same user gave another score, or took the score back

A row holds the exact tokens of its answer (`pinned.py`), so that the ledger's pruning cannot reach them. The row is committed
before a request is acknowledged. A batch of rows and their job are one transaction, and so are the end of a job and its rows'
state: each answer is trained at most once.
"""

import contextlib
import json
import sqlite3
import uuid
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from art_protocol.learning import Score, ScoreState
from art_server.errors import Conflict, NotFound
from art_server.shared.clock import REAL, Clock
from art_server.store.database import Database, insert, overwriting
from art_server.store.server_database import ENDED_SCORE

COLUMNS = "score_id, state, reason, target, name, value, step, job_id, trained_step, replaces, texts, created_at, digest, number"
WAITING = "number, target, choices, user, name, value, step, answered_at, session, teaches"
KEPT_SECONDS = 90 * 86400.0
"""Ended scores stay so much longer than the ledger's records, because they say which steps a deletion concerns."""
PRUNED_AT_A_TIME = 500
"""Scores that are changed in one transaction."""
READ_AT_A_TIME = 1000
"""Waiting scores that one statement reads. The event loop waits for such a read, and 100,000 scores may wait."""
TOO_OLD = "too_old"
"""The reason of a score whose answer is older than the policy's `max_age_days`."""
ALREADY_TRAINED = "already_trained"
"""The reason of a score whose answer a job has taken before."""
Teaching = Literal["comment", "correction"]


@dataclass(frozen=True, slots=True)
class NewScore:
    """A score before it is a row."""

    model: int
    target: str
    """"answer RID-0" or "session S"."""
    choices: Sequence[str]
    """The ids of the judged choices."""
    step: int | None
    names_step: bool
    """Whether a judged request named its step, or was a rollout's: such a score counts for no canary."""
    user: str | None
    session: str | None
    """A keyed hash of the session of a judged answer."""
    owner: str
    name: str
    value: float | None
    """None: the score has texts only."""
    texts: Mapping[str, Any]
    client_id: str | None
    digest: str
    made_at: float | None
    answered_at: float
    pinned: bytes
    reason: str | None = None
    """Why the score is not trained; None: it may be."""
    teaches: Teaching | None = None
    """Which of its texts may teach: the messages of the judged answers are pinned."""


@dataclass(frozen=True, slots=True)
class WaitingScore:
    """A score that a batch may take."""

    number: int
    target: str
    choices: Sequence[str]
    user: str | None
    name: str
    value: float | None
    step: int | None
    answered_at: float
    session: str | None = None
    """A keyed hash of the session of a judged answer."""
    teaches: Teaching | None = None
    """As in `NewScore`."""


@dataclass(frozen=True, slots=True)
class DoomedScore:
    """A score that is to be deleted."""

    number: int
    choices: Sequence[str]
    trained_step: int | None
    is_rolled_back: bool


class Scores:
    """The table. Calls block for a few milliseconds. A model is named by its number."""

    def __init__(self, database: Database, *, clock: Clock = REAL):
        self._database = database
        self._clock = clock

    # --- requests ---

    def find_repeated(self, model: int, owner: str, client_id: str | None, digest: str) -> Score | None:
        """The score of an earlier request with the same id; None if there is none.

        Raises:
            Conflict: the earlier request had another content.
        """
        if client_id is None:
            return None
        where = "model = ? AND owner = ? AND client_id = ?"
        rows = self._database.select(f"SELECT {COLUMNS} FROM scores WHERE {where}", model, owner, client_id)
        if not rows:
            return None
        if rows[0]["digest"] != digest:
            raise Conflict(
                f"id '{client_id}' is of another score: give each score an id of its own", code="id_reused", param="id"
            )
        return read_score(rows[0])

    def add(self, scores: Sequence[NewScore]) -> list[Score]:
        """Writes scores durably, in one transaction. A score replaces an earlier one of the same target, user and name; with texts
        only, an earlier one with texts only.

        Raises:
            Conflict: an id is of another score.
            StorageFull: the disk refused the write.
        """
        with self._database.changes("the scores") as connection:
            return [self._add(connection, score) for score in scores]

    def _add(self, connection: sqlite3.Connection, score: NewScore) -> Score:
        repeated = self.find_repeated(score.model, score.owner, score.client_id, score.digest)
        if repeated is not None:
            return repeated
        state: ScoreState = "scored"
        reason, replaces = None, None
        same = "model = ? AND target = ? AND name = ? AND user IS ? AND owner = ? AND (value IS NULL) = ?"
        values = (score.model, score.target, score.name, score.user, score.owner, score.value is None)
        for row in connection.execute(
            f"SELECT number, score_id FROM scores WHERE {same} AND state = 'scored'", values
        ).fetchall():
            replaces = row["score_id"]
            connection.execute("UPDATE scores SET state = 'replaced', pinned = NULL WHERE number = ?", (row["number"],))
        if score.reason is not None:
            state, reason = "dropped", score.reason
        elif not self.untaken(score.choices):
            state, reason = "dropped", ALREADY_TRAINED
        score_id = f"F{uuid.uuid4().hex}"
        row = {
            "score_id": score_id,
            "model": score.model,
            "target": score.target,
            "choices": json.dumps(list(score.choices)),
            "step": score.step,
            "names_step": score.names_step,
            "user": score.user,
            "session": score.session,
            "owner": score.owner,
            "name": score.name,
            "value": score.value,
            "texts": json.dumps(dict(score.texts)),
            "teaches": score.teaches,
            "client_id": score.client_id,
            "digest": score.digest,
            "made_at": score.made_at,
            "answered_at": score.answered_at,
            "created_at": self._clock.now(),
            "state": state,
            "reason": reason,
            "replaces": replaces,
            "pinned": score.pinned if state == "scored" else None,
        }
        insert(connection, "scores", row)
        (added,) = connection.execute(f"SELECT {COLUMNS} FROM scores WHERE score_id = ?", (score_id,)).fetchall()
        return read_score(added)

    def get(self, model: int, score_id: str, owner: str | None = None) -> Score:
        """A score of a model; with `owner` only a score that this key gave.

        Raises:
            NotFound: there is no such score.
        """
        where = "model = ? AND score_id = ?" + ("" if owner is None else " AND owner = ?")
        values = (model, score_id) if owner is None else (model, score_id, owner)
        rows = self._database.select(f"SELECT {COLUMNS} FROM scores WHERE {where}", *values)
        if not rows:
            raise NotFound(f"there is no score '{score_id[:80]}'", code="unknown_score", param="score")
        return read_score(rows[0])

    def retract(self, model: int, score_id: str, owner: str | None = None) -> Score:
        """Takes a score back.

        Raises:
            NotFound: there is no such score.
            Conflict: a job has the score, or the score has trained a step.
        """
        with self._database.changes("the scores") as connection:
            score = self.get(model, score_id, owner)
            if score.state in ("queued", "trained"):
                trained = f"trained step {score.trained_step}" if score.state == "trained" else "is in a job's batch"
                raise Conflict(
                    f"score '{score_id}' {trained} and cannot be taken back: roll the model back to an earlier step",
                    code=ALREADY_TRAINED,
                    param="score",
                )
            connection.execute(
                "UPDATE scores SET state = 'retracted', reason = NULL, pinned = NULL WHERE score_id = ?", (score_id,)
            )
            return self.get(model, score_id, owner)

    def page(
        self, model: int, states: Sequence[str], after: int, limit: int, owner: str | None = None
    ) -> tuple[list[Score], int | None]:
        """Scores in the order in which they came, and the number from which the next call continues (None: these are all)."""
        where, values = "model = ? AND number > ?", [model, after]
        more: list[object] = []
        if states:
            where += f" AND state IN ({','.join('?' * len(states))})"
            more += states
        if owner is not None:
            where += " AND owner = ?"
            more.append(owner)
        rows = self._database.select(
            f"SELECT {COLUMNS} FROM scores WHERE {where} ORDER BY number LIMIT ?", *values, *more, limit + 1
        )
        scores = [read_score(row) for row in rows[:limit]]
        return scores, rows[limit - 1]["number"] if len(rows) > limit else None

    def count_open(self, model: int) -> int:
        """The number of scores that wait for a batch."""
        return self.open_mark(model)[0]

    def open_mark(self, model: int) -> tuple[int, int]:
        """The number of scores that wait for a batch, and the largest of their numbers: while both stay, the same scores wait."""
        ((count, newest),) = self._database.select(
            "SELECT COUNT(*), MAX(number) FROM scores WHERE model = ? AND state = 'scored' AND reason IS NULL", model
        )
        return count, newest or 0

    def counts(self, model: int) -> dict[str, int]:
        """The number of scores by state; of dropped scores also by reason."""
        rows = self._database.select(
            "SELECT state, reason, COUNT(*) FROM scores WHERE model = ? GROUP BY state, reason", model
        )
        counts: dict[str, int] = {}
        for state, reason, count in rows:
            counts[state] = counts.get(state, 0) + count
            if state == "dropped":
                counts[f"dropped: {reason}"] = count
        return counts

    # --- deletion ---

    def of_request(self, model: int, request_id: str) -> list[DoomedScore]:
        """The scores of a request's choices, and of the session that they are in.

        Raises:
            Conflict: a job has one of them, here and below.
        """
        doomed = self._doomed("model = ? AND target > ? AND target < ?", model, *answers_of(request_id))
        in_sessions = "model = ? AND target >= 'session ' AND target < 'session!' AND instr(choices, ?)"
        return doomed + self._doomed(in_sessions, model, request_id)

    def of_session(self, model: int, session: str, choices: Sequence[str]) -> list[DoomedScore]:
        """The scores of a session, of its choices, and of these choices."""
        doomed = self._doomed("model = ? AND target = ?", model, f"session {session}")
        targets = {f"answer {choice}" for choice in (*choices, *(c for score in doomed for c in score.choices))}
        in_list = "model = ? AND target IN (SELECT value FROM json_each(?))"
        return doomed + self._doomed(in_list, model, json.dumps([*targets]))

    def of_user(self, model: int, user: str) -> list[DoomedScore]:
        """The scores of a user."""
        return self._doomed("model = ? AND user = ?", model, user)

    def _doomed(self, where: str, *values: object) -> list[DoomedScore]:
        columns = "number, choices, trained_step, state, score_id, job_id"
        # Inside `changes`, because the event loop waits for other reads, and this one may take long.
        with self._database.changes("the scores") as connection:
            rows = connection.execute(f"SELECT {columns} FROM scores WHERE {where} ORDER BY number", values).fetchall()
        for row in rows:
            if row["state"] == "queued":
                raise Conflict(
                    f"job {row['job_id']} trains score {row['score_id']}: delete again when the job has ended",
                    code="score_in_job",
                )
        return [
            DoomedScore(row["number"], json.loads(row["choices"]), row["trained_step"], row["state"] == "dropped")
            for row in rows
        ]

    def delete(self, scores: Sequence[DoomedScore], choices: Iterable[str]) -> None:
        """Deletes scores, and what jobs have taken of these choices, which the ledger does not have any more."""
        with self._deleting() as connection:
            self._delete(connection, scores)
            connection.execute(
                "DELETE FROM taken_choices WHERE choice_id IN (SELECT value FROM json_each(?))",
                (json.dumps([*choices]),),
            )

    def delete_of_user(self, scores: Sequence[DoomedScore]) -> None:
        """Deletes scores. Those that have trained a step stay without their user and texts."""
        with self._deleting() as connection:
            self._delete(connection, [score for score in scores if score.trained_step is None])
            connection.execute(
                "UPDATE scores SET user = NULL, session = NULL, texts = '{}', client_id = NULL, digest = ''"
                " WHERE number IN (SELECT value FROM json_each(?))",
                (json.dumps([score.number for score in scores]),),
            )

    @contextlib.contextmanager
    def _deleting(self) -> Iterator[sqlite3.Connection]:
        database = self._database
        with database.lock, overwriting(database.connection), database.changes("the scores") as connection:
            yield connection

    def _delete(self, connection: sqlite3.Connection, scores: Sequence[DoomedScore]) -> None:
        """Deletes scores in the caller's transaction.

        Raises:
            Conflict: a job has taken one of them meanwhile.
        """
        deleted = connection.execute(
            "DELETE FROM scores WHERE state <> 'queued' AND number IN (SELECT value FROM json_each(?))",
            (json.dumps([score.number for score in scores]),),
        )
        if deleted.rowcount != len(scores):
            raise Conflict(
                "a job has taken one of the scores meanwhile: delete again when it has ended", code="score_in_job"
            )

    # --- keeping within bounds ---

    def drop_old(self, model: int, max_age_seconds: float) -> None:
        """Marks scores that have waited longer as too old, also if the model does not learn."""
        waiting = "model = ? AND state = 'scored' AND reason IS NULL ORDER BY number LIMIT ?"
        before = self._clock.now() - max_age_seconds
        while True:
            rows = self._database.select(
                f"SELECT number, created_at FROM scores WHERE {waiting}", model, PRUNED_AT_A_TIME
            )
            old = [number for number, created_at in rows if created_at < before]
            if not old:
                return
            self.drop(old, TOO_OLD)

    def prune(self, max_age_seconds: float) -> None:
        """Deletes the texts of ended scores that are older than the ledger's age limit, and KEPT_SECONDS later the scores, and what
        jobs have taken of their answers. Changes a few rows at a time, because requests wait meanwhile."""
        before = self._clock.now() - max_age_seconds
        while self._prune_texts(before) == PRUNED_AT_A_TIME:
            pass
        while self._prune_rows(before - KEPT_SECONDS, before - KEPT_SECONDS + max_age_seconds) == PRUNED_AT_A_TIME:
            pass

    def _prune_texts(self, before: float) -> int:
        with self._database.changes("the scores") as connection:
            changed = connection.execute(
                "UPDATE scores SET texts = '{}' WHERE number IN (SELECT number FROM scores"
                f" WHERE {ENDED_SCORE} AND texts <> '{{}}' AND created_at < ? ORDER BY created_at LIMIT ?)",
                (before, PRUNED_AT_A_TIME),
            )
            return changed.rowcount

    def _prune_rows(self, before: float, waiting_since: float) -> int:
        """Deletes some ended scores that are older than `before`, of models without a score that waits since `waiting_since`: such
        a score may have the tokens of an answer that was trained before."""
        oldest = (
            "(SELECT created_at FROM scores AS waiting WHERE waiting.model = scores.model AND waiting.state = 'scored'"
            " AND waiting.reason IS NULL ORDER BY waiting.number LIMIT 1)"
        )
        with self._database.changes("the scores") as connection:
            rows = connection.execute(
                f"SELECT number, choices FROM scores WHERE {ENDED_SCORE} AND created_at < ?"
                f" AND COALESCE({oldest}, 1e99) >= ? ORDER BY created_at LIMIT ?",
                (before, waiting_since, PRUNED_AT_A_TIME),
            ).fetchall()
            choices = [choice for row in rows for choice in json.loads(row["choices"])]
            for table, column, values in (
                ("taken_choices", "choice_id", choices),
                ("scores", "number", [row["number"] for row in rows]),
            ):
                in_list = f"{column} IN (SELECT value FROM json_each(?))"
                connection.execute(f"DELETE FROM {table} WHERE {in_list}", (json.dumps(values),))
            return len(rows)

    # --- batches ---

    def waiting(self, model: int) -> list[WaitingScore]:
        """The scores that a batch may take, oldest first."""
        where = "model = ? AND state = 'scored' AND reason IS NULL AND number > ? ORDER BY number LIMIT ?"
        scores: list[WaitingScore] = []
        while True:
            after = scores[-1].number if scores else 0
            rows = self._database.select(f"SELECT {WAITING} FROM scores WHERE {where}", model, after, READ_AT_A_TIME)
            scores += map(waiting_score, rows)
            if len(rows) < READ_AT_A_TIME:
                return scores

    def of_canary(self, model: int, steps: Sequence[int], since: float) -> list[WaitingScore]:
        """The scores of answers that the users of these steps got since a moment, also of scores that no batch may take."""
        where = "model = ? AND step IN (SELECT value FROM json_each(?)) AND answered_at >= ? AND NOT names_step"
        rows = self._database.select(
            f"SELECT {WAITING} FROM scores WHERE {where} AND state NOT IN ('replaced', 'retracted') ORDER BY number",
            model,
            json.dumps(list(steps)),
            since,
        )
        return [waiting_score(row) for row in rows]

    def queued_job(self, model: int) -> str | None:
        """The job that trains scores of a model and has not ended."""
        where = "model = ? AND state = 'queued' LIMIT 1"
        rows = self._database.select(f"SELECT job_id FROM scores WHERE {where}", model)
        return rows[0][0] if rows else None

    def untaken(self, choices: Sequence[str]) -> set[str]:
        """The choices that no job has taken."""
        taken = self._database.select(
            "SELECT choice_id FROM taken_choices WHERE choice_id IN (SELECT value FROM json_each(?))",
            json.dumps(list(choices)),
        )
        return {*choices} - {choice for (choice,) in taken}

    def pinned(self, numbers: Sequence[int]) -> dict[int, bytes]:
        """The pinned tokens of scores that still wait."""
        rows = self._database.select(
            "SELECT number, pinned FROM scores WHERE state = 'scored' AND number IN (SELECT value FROM json_each(?))",
            json.dumps(list(numbers)),
        )
        return dict(map(tuple, rows))

    def texts(self, numbers: Sequence[int]) -> dict[int, dict[str, Any]]:
        """The texts of scores, by their numbers."""
        rows = self._database.select(
            "SELECT number, texts FROM scores WHERE number IN (SELECT value FROM json_each(?))",
            json.dumps(list(numbers)),
        )
        return {number: json.loads(texts) for number, texts in rows}

    def drop(self, numbers: Iterable[int], reason: str) -> None:
        """Marks waiting scores as never to be trained."""
        with self._database.changes("the scores") as connection:
            connection.execute(
                "UPDATE scores SET state = 'dropped', reason = ?, pinned = NULL WHERE state = 'scored'"
                " AND number IN (SELECT value FROM json_each(?))",
                (reason, json.dumps(list(numbers))),
            )

    def silence(self, numbers: Sequence[int], reason: str) -> None:
        """Notes that the texts of waiting scores cannot teach. Scores that have nothing else are dropped with this reason."""
        where = "state = 'scored' AND number IN (SELECT value FROM json_each(?))"
        with self._database.changes("the scores") as connection:
            connection.execute(f"UPDATE scores SET teaches = NULL WHERE {where}", (json.dumps(list(numbers)),))
            connection.execute(
                f"UPDATE scores SET state = 'dropped', reason = ?, pinned = NULL WHERE {where} AND value IS NULL",
                (reason, json.dumps(list(numbers))),
            )

    def queue(self, numbers: Sequence[int], choices: Iterable[str], job_id: str) -> bool:
        """Gives waiting scores and their choices to a job, in the caller's transaction. Returns False if a score waits no more."""
        with self._database.changes("the scores") as connection:
            changed = connection.execute(
                "UPDATE scores SET state = 'queued', job_id = ? WHERE state = 'scored'"
                " AND number IN (SELECT value FROM json_each(?))",
                (job_id, json.dumps(list(numbers))),
            )
            if changed.rowcount != len(numbers):
                return False
            connection.executemany(
                "INSERT INTO taken_choices (choice_id, job_id) VALUES (?, ?)", [(choice, job_id) for choice in choices]
            )
            return True

    def end_job(self, job_id: str, step: int | None) -> None:
        """Follows the end of a job, in the caller's transaction: its scores have trained `step`, or (None) wait again, and the
        model's learning is paused."""
        with self._database.changes("the scores") as connection:
            if step is None:
                connection.execute("DELETE FROM taken_choices WHERE job_id = ?", (job_id,))
                connection.execute(
                    "UPDATE learning SET state = 'paused', reason = ? WHERE state = 'on'"
                    " AND model IN (SELECT model FROM scores WHERE job_id = ?)",
                    (f"job {job_id} failed or was cancelled, and its scores wait again", job_id),
                )
                state = "state = 'scored', job_id = NULL"
            else:
                state = f"state = 'trained', trained_step = {step:d}, pinned = NULL"
            connection.execute(f"UPDATE scores SET {state} WHERE job_id = ? AND state = 'queued'", (job_id,))

    def roll_back(self, model: int, step: int) -> None:
        """Follows a rollback, in the caller's transaction: what the later steps have learned is gone."""
        with self._database.changes("the scores") as connection:
            connection.execute(
                "UPDATE scores SET state = 'dropped', reason = 'rolled_back' WHERE model = ? AND state = 'trained'"
                " AND trained_step > ?",
                (model, step),
            )


def answers_of(request_id: str) -> tuple[str, str]:
    """The bounds of the targets of a request's choices."""
    return f"answer {request_id}-", f"answer {request_id}."


def waiting_score(row: sqlite3.Row) -> WaitingScore:
    number, target, choices, *rest = row
    return WaitingScore(number, target, json.loads(choices), *rest)


def read_score(row: sqlite3.Row) -> Score:
    kind, _, named = row["target"].partition(" ")
    return Score(
        id=row["score_id"],
        state=row["state"],
        reason=row["reason"],
        answer=named if kind == "answer" else None,
        session=named if kind == "session" else None,
        name=row["name"],
        value=row["value"],
        step=row["step"],
        job_id=row["job_id"],
        trained_step=row["trained_step"],
        replaces=row["replaces"],
        comment=json.loads(row["texts"]).get("comment"),
        created_at=row["created_at"],
    )
