"""The durable queue: every train request that was acknowledged, in its own SQLite file.

A job is written with its resolved payload and the client's idempotency key before the request is acknowledged. The same
key returns the same job, also after a restart. Commits are synchronous: an acknowledged job survives a power loss.

    queued <-> running -> done | failed        queued, running -> cancelled        failed -> queued (the same key again)
"""

import contextlib
import gzip
import json
import sqlite3
import threading
import uuid
import zlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from art_protocol.history import GZIP_MAGIC, pack_rows
from art_protocol.wire import (
    ErrorDetail,
    JobInfo,
    JobReport,
    JobState,
    TrainConfig,
)
from art_server import clock
from art_server.errors import Conflict, NotFound, TooMany
from art_server.shared.tasks import Batch
from art_server.store.database import (
    add_columns,
    database_errors,
    insert,
    open_database,
    transaction,
)

SCHEMA = """
CREATE TABLE IF NOT EXISTS jobs (
    number INTEGER PRIMARY KEY AUTOINCREMENT,
    job_id TEXT NOT NULL UNIQUE,
    idempotency_key TEXT,
    owner TEXT NOT NULL,
    request_digest TEXT NOT NULL,
    project TEXT NOT NULL,
    name TEXT NOT NULL,
    state TEXT NOT NULL,
    target_step INTEGER,
    config TEXT NOT NULL,
    batch BLOB,
    trajectories BLOB,
    report TEXT NOT NULL,
    metrics TEXT NOT NULL DEFAULT '{}',
    error TEXT,
    created_at REAL NOT NULL,
    finished_at REAL,
    place REAL,             -- order in the queue; NULL: the number
    starts INTEGER NOT NULL DEFAULT 0
);
CREATE UNIQUE INDEX IF NOT EXISTS jobs_by_request ON jobs (project, name, idempotency_key);
CREATE INDEX IF NOT EXISTS jobs_by_state ON jobs (state, number);
"""

COLUMNS = "job_id, project, name, state, target_step, config, report, metrics, error, request_digest, created_at, starts"
"""The columns of a `Job`."""
OF_KEY = "project = ? AND name = ? AND idempotency_key = ?"
FAILED_PAYLOAD_SECONDS = 3 * 86400.0
"""How long the payload of a failed job is kept, so that a request with the same key can run it again."""
MAX_ENDED = 10_000
"""Number of ended jobs that are kept."""
ENDED = ("done", "failed", "cancelled")


@dataclass(frozen=True, slots=True)
class Payload:
    """What a job trains and what it writes into the model's folder, as stored bytes. Deleted when the job is done."""

    batch: bytes
    """JSON of a `shared.tasks.Batch`."""
    trajectories: bytes = pack_rows(())
    """The content of the trajectories file."""

    @staticmethod
    def make(batch: Batch, trajectories: bytes = pack_rows(())) -> "Payload":
        """Encodes one group at a time, because a call of a JSON library blocks all other threads."""
        shared = batch.model_copy(update={"groups": []}).model_dump_json().encode()
        trained = b",".join(group.model_dump_json().encode() for group in batch.groups)
        start, end = shared.split(b'"groups":[]')
        return Payload(start + b'"groups":[' + trained + b"]" + end, trajectories)


@dataclass(frozen=True, slots=True)
class Waiting:
    """A job that has not ended, with what the runner needs to choose one."""

    job_id: str
    model_id: str


@dataclass(frozen=True, slots=True)
class Job:
    """A row of the queue, without its payload."""

    job_id: str
    project: str
    name: str
    state: JobState
    target_step: int | None
    """The step that the job makes, set when the job starts."""
    config: str
    """JSON of a `TrainConfig`."""
    report: JobReport
    metrics: dict[str, float]
    """Metrics of the trajectories; when the job is done, also those of the training."""
    error: ErrorDetail | None
    """Why the job failed; for a queued job, why its last run failed."""
    request_digest: str
    created_at: float
    starts: int
    """How often the job was started."""

    def info(self, waits_for: str | None = None) -> JobInfo:
        return JobInfo(
            job_id=self.job_id,
            project=self.project,
            name=self.name,
            state=self.state,
            step=self.target_step if self.state == "done" else None,
            metrics=self.metrics if self.state == "done" else {},
            report=self.report,
            error=self.error,
            created_at=self.created_at,
            waits_for=waits_for,
        )


def _job(row: sqlite3.Row) -> Job:
    as_they_are = ("job_id", "project", "name", "state", "target_step", "config")
    error = row["error"]
    return Job(
        **{name: row[name] for name in (*as_they_are, "request_digest", "created_at", "starts")},
        report=JobReport.model_validate_json(row["report"]),
        metrics=json.loads(row["metrics"]),
        error=ErrorDetail.model_validate_json(error) if error is not None else None,
    )


def step_will_move(model_id: str) -> Conflict:
    return Conflict(
        f"expected_step: model '{model_id}' has a job that has not ended and will change its step: wait for the job, then "
        "send trajectories that were sampled afterwards",
        code="step_moved",
        param="expected_step",
    )


class JobQueue:
    """The queue's database. Calls block for a few milliseconds; from the event loop use `asyncio.to_thread`."""

    def __init__(self, file: Path, max_queued: int = 1000):
        self._max_queued = max_queued
        self._lock = threading.RLock()
        self._db = open_database(file, SCHEMA, is_durable=True)
        later = {"batch": "BLOB", "trajectories": "BLOB", "place": "REAL"}
        add_columns(self._db, "jobs", later | {"starts": "INTEGER NOT NULL DEFAULT 0"})

    def close(self) -> None:
        with self._lock:
            self._db.close()

    # --- requests ---

    def has_key(self, project: str, name: str, key: str) -> bool:
        """Whether an earlier request with this key made a job."""
        return bool(self._select(OF_KEY, project, name, key))

    def find_key(self, project: str, name: str, key: str, body_digest: str) -> Job | None:
        """The job that an earlier request with the same key made, from any caller; None if there is none.

        Raises:
            Conflict: the key was used for a request with another body.
        """
        rows = self._select(OF_KEY, project, name, key)
        if not rows:
            return None
        if rows[0].request_digest != body_digest:
            raise Conflict(
                "this idempotency key was used for another train request: use a new key for new trajectories",
                code="key_reused",
                param="idempotency-key",
            )
        return rows[0]

    def add(
        self,
        project: str,
        name: str,
        key: str | None,
        body_digest: str,
        config: TrainConfig,
        payload: Payload,
        report: JobReport,
        metrics: dict[str, float] | None = None,
        *,
        check_alone: Callable[[], None] | None = None,
    ) -> Job:
        """Writes a job durably. Of two requests with the same key the second gets the job of the first.

        `check_alone` refuses the job if the model has jobs that have not ended. Without them it is called, while none
        can be added.

        Raises:
            TooMany: the queue is full.
            Conflict: `check_alone` is given, and the model has jobs that have not ended; or the key was used for a
                request with another body.
            StorageFull: the disk refused the write.
        """
        job_id = uuid.uuid4().hex
        row = {
            "job_id": job_id,
            "idempotency_key": key,
            "owner": "",  # a column of earlier versions
            "request_digest": body_digest,
            "project": project,
            "name": name,
            "state": "queued",
            "config": config.model_dump_json(),
            "batch": zlib.compress(payload.batch, 1),
            "trajectories": payload.trajectories,
            "report": report.model_dump_json(),
            "metrics": json.dumps(metrics or {}),
            "created_at": clock.now(),
        }
        with self._lock, database_errors("the job"):
            twin = None if key is None else self.find_key(project, name, key, body_digest)
            if twin is not None:
                return twin
            self._check_room(project, name, check_alone)
            insert(self._db, "jobs", row)
        return self.get(job_id)

    def _check_room(self, project: str, name: str, check_alone: Callable[[], None] | None) -> None:
        waiting = self._db.execute(
            "SELECT project, name FROM jobs WHERE state IN ('queued', 'running')"
        ).fetchall()
        if len(waiting) >= self._max_queued:
            raise TooMany(
                f"the queue is full with {len(waiting)} jobs: wait until some have ended, cancel some "
                "(DELETE /api/jobs/JOB), or start the server with a larger --max-queued-jobs",
                code="queue_full",
            )
        if check_alone is not None:
            if (project, name) in map(tuple, waiting):
                raise step_will_move(f"{project}/{name}")
            check_alone()

    def get(self, job_id: str) -> Job:
        """The job with this id.

        Raises:
            NotFound: no such job.
        """
        rows = self._select("job_id = ?", job_id)
        if not rows:
            raise NotFound(f"there is no job '{job_id[:80]}'", code="unknown_job", param="job_id")
        return rows[0]

    def jobs(self, projects: frozenset[str] | None, states: Sequence[str], limit: int) -> list[Job]:
        """The first `limit` jobs in these states and projects (None: all): jobs that have not ended in the order of the
        queue, then ended jobs, the latest first."""
        marks = ",".join("?" * len(states))
        where = f"state IN ({marks})"
        values: list[object] = [*states]
        if projects is not None:
            where += f" AND project IN ({','.join('?' * len(projects))})"
            values += sorted(projects)
        order = "CASE WHEN finished_at IS NULL THEN COALESCE(place, number) ELSE 1e12 - number END"
        return self._select(
            f"{where} ORDER BY finished_at IS NOT NULL, {order} LIMIT ?", *values, limit
        )

    def pending(self) -> dict[str, tuple[int, float]]:
        """By state, the number of jobs in it and when the oldest was accepted; jobs that have ended are left out."""
        rows = self._rows(
            "SELECT state, COUNT(*), MIN(created_at) FROM jobs WHERE state IN ('queued', 'running') GROUP BY state"
        )
        return {state: (count, oldest) for state, count, oldest in rows}

    # --- for the runner ---

    def waiting(self) -> list[Waiting]:
        """Jobs that have not ended, in the order in which they run: interrupted jobs come first."""
        rows = self._rows(
            "SELECT job_id, project || '/' || name FROM jobs WHERE state IN ('running', 'queued')"
            " ORDER BY state = 'queued', COALESCE(place, number)"
        )
        return [Waiting(*row) for row in rows]

    def next(self) -> Job | None:
        """The job that runs or will run first; None if there is none."""
        waiting = self.waiting()
        return self.get(waiting[0].job_id) if waiting else None

    @contextlib.contextmanager
    def held_idle(self, project: str, name: str) -> Iterator[None]:
        """Locks the queue while a model without jobs is changed; no job is accepted or started meanwhile.

        Raises:
            Conflict: jobs of the model wait or run.
        """
        where = "project = ? AND name = ? AND state IN ('queued', 'running')"
        with self._lock:
            query = f"SELECT COUNT(*) FROM jobs WHERE {where}"
            ((count,),) = self._rows(query, project, name)
            if count:
                raise Conflict(
                    f"{count} jobs of model '{project}/{name}' wait or run: repeat the request when they have ended",
                    code="jobs_pending",
                    param="name",
                )
            yield

    def forget_keys(self, project: str, name: str, after: int = -1) -> None:
        """Lets the keys of a model's ended jobs name new jobs, if their steps later than `after` go."""
        self._rows(
            "UPDATE jobs SET idempotency_key = NULL WHERE project = ? AND name = ?"
            f" AND state IN {ENDED} AND (target_step > ? OR ? < 0)",
            *(project, name, after, after),
        )

    def batch(self, job_id: str) -> bytes:
        """JSON of the job's `shared.tasks.Batch`."""
        return zlib.decompress(self.packed_batch(job_id))

    def packed_batch(self, job_id: str) -> bytes:
        """The same, compressed with zlib."""
        return self._blob("batch", job_id)

    def trajectories(self, job_id: str) -> bytes:
        """The content of the job's trajectories file."""
        blob = self._blob("trajectories", job_id)
        if blob.startswith(GZIP_MAGIC):
            return blob
        return gzip.compress(zlib.decompress(blob), mtime=0)  # written by an earlier version

    def _blob(self, column: str, job_id: str) -> bytes:
        ((blob,),) = self._rows(f"SELECT {column} FROM jobs WHERE job_id = ?", job_id)
        return blob

    def set_running(self, job_id: str, target_step: int) -> bool:
        """Marks a job as running; returns False if the job has ended meanwhile."""
        return self._update(
            job_id,
            "state = 'running', starts = starts + 1, target_step = ?",
            target_step,
            where="state IN ('queued', 'running')",
        )

    def set_waiting(self, job_id: str, error: ErrorDetail) -> None:
        """Puts a job back into the queue, with the reason."""
        self._update(job_id, "state = 'queued', error = ?", error.model_dump_json())

    def set_done(self, job_id: str, metrics: dict[str, float], report: JobReport) -> None:
        self._update(
            job_id,
            "state = 'done', metrics = ?, report = ?, error = NULL, batch = NULL, trajectories = NULL, finished_at = ?",
            json.dumps(metrics),
            report.model_dump_json(),
            clock.now(),
        )

    def set_failed(self, job_id: str, error: ErrorDetail, *, is_unreadable: bool = False) -> None:
        """Marks a job as failed; its payload is kept for some days. What nobody can read is deleted at once."""
        change = "state = 'failed', error = ?, finished_at = ?"
        if is_unreadable:
            change += ", report = '{}', metrics = '{}', batch = NULL, trajectories = NULL"
        self._update(job_id, change, error.model_dump_json(), clock.now())

    def set_cancelled(self, job_id: str, *, is_running: bool) -> bool:
        """Marks a job as cancelled; returns whether it could. `is_running` (runner only) also allows a running job."""
        states = "('queued', 'running')" if is_running else "('queued')"
        change = "state = 'cancelled', batch = NULL, trajectories = NULL, finished_at = ?"
        return self._update(job_id, change, clock.now(), where=f"state IN {states}")

    def revive(self, job_id: str) -> bool:
        """Queues a failed job again; returns False if its payload was deleted."""
        change = "state = 'queued', finished_at = NULL, place = NULL"
        return self._update(job_id, change, where="state = 'failed' AND batch IS NOT NULL")

    def move(self, job_id: str, before: str | None) -> None:
        """Moves a queued job before another one, or to the end of the queue.

        Raises:
            Conflict: one of the two jobs is not queued.
        """
        with self._lock, database_errors("the queue"), transaction(self._db):
            queued = self._db.execute(
                "SELECT job_id, COALESCE(place, number) FROM jobs WHERE state = 'queued'"
                " ORDER BY COALESCE(place, number)"
            ).fetchall()
            names = [name for name, _ in queued]
            for name in (job_id, before):
                if name is not None and name not in names:
                    raise Conflict(
                        f"job '{name[:80]}' does not wait", code="not_queued", param="job_id"
                    )
            names.remove(job_id)
            names.insert(
                len(names) if before is None or before == job_id else names.index(before), job_id
            )
            orders = sorted(order for _, order in queued)
            self._db.executemany(
                "UPDATE jobs SET place = ? WHERE job_id = ?", list(zip(orders, names, strict=True))
            )

    def prune(self) -> None:
        """Deletes the payloads of jobs that failed days ago, and the oldest ended jobs."""
        ended = f"state IN {ENDED}"
        with self._lock, database_errors("the queue"):
            self._db.execute(
                "UPDATE jobs SET batch = NULL, trajectories = NULL WHERE state = 'failed' AND finished_at < ?",
                (clock.now() - FAILED_PAYLOAD_SECONDS,),
            )
            self._db.execute(
                f"DELETE FROM jobs WHERE {ended} AND number <= (SELECT number FROM jobs WHERE {ended}"
                " ORDER BY number DESC LIMIT 1 OFFSET ?)",
                (MAX_ENDED,),
            )

    def _select(self, where: str, *values: object) -> list[Job]:
        return [
            _job(row) for row in self._rows(f"SELECT {COLUMNS} FROM jobs WHERE {where}", *values)
        ]

    def _rows(self, statement: str, *values: object) -> list[sqlite3.Row]:
        with self._lock, database_errors("the queue"):
            return self._db.execute(statement, values).fetchall()

    def _update(self, job_id: str, assignments: str, *values: object, where: str = "1") -> bool:
        with self._lock, database_errors("the job"):
            changed = self._db.execute(
                f"UPDATE jobs SET {assignments} WHERE job_id = ? AND {where}", (*values, job_id)
            )
        return changed.rowcount > 0
