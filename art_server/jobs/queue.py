"""The durable queue: every train request that was acknowledged, in its own SQLite file.

A job is written with its resolved payload and the client's idempotency key before it is acknowledged; the same key
returns the same job, now and after a restart. Commits are synchronous: what was acknowledged survives a power loss.

    queued -> running -> done | failed
"""

import contextlib
import hashlib
import json
import sqlite3
import threading
import time
import uuid
import zlib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from art.wire import ErrorDetail, JobInfo, JobReport, JobState, TrainConfig, TrajectoryGroupBody
from art_server.errors import Conflict, NotFound
from art_server.store import files
from art_server.training.task import Batch

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
    payload BLOB,
    report TEXT NOT NULL,
    metrics TEXT NOT NULL DEFAULT '{}',
    error TEXT,
    created_at REAL NOT NULL,
    finished_at REAL
);
CREATE UNIQUE INDEX IF NOT EXISTS jobs_by_key ON jobs (owner, project, name, idempotency_key);
CREATE INDEX IF NOT EXISTS jobs_by_state ON jobs (state, number);
"""


@dataclass(frozen=True, slots=True)
class Payload:
    """What a job trains, and what it leaves in the model's folder. Dropped when the job has ended."""

    batch: Batch
    groups: list[TrajectoryGroupBody]

    def pack(self) -> bytes:
        value = {
            "batch": self.batch.model_dump(mode="json"),
            "groups": [group.model_dump(mode="json") for group in self.groups],
        }
        return zlib.compress(json.dumps(value).encode(), 1)

    @staticmethod
    def unpack(blob: bytes) -> "Payload":
        value = json.loads(zlib.decompress(blob))
        return Payload(
            Batch.model_validate(value["batch"]),
            [TrajectoryGroupBody.model_validate(group) for group in value["groups"]],
        )


@dataclass(frozen=True, slots=True)
class Job:
    """A row of the queue, without its payload."""

    job_id: str
    project: str
    name: str
    state: JobState
    target_step: int | None
    """The step that it makes, set when it begins to run."""
    config: TrainConfig
    report: JobReport
    metrics: dict[str, float]
    error: ErrorDetail | None
    request_digest: str

    def info(self) -> JobInfo:
        return JobInfo(
            job_id=self.job_id,
            project=self.project,
            name=self.name,
            state=self.state,
            step=self.target_step if self.state == "done" else None,
            metrics=self.metrics,
            report=self.report,
            error=self.error,
        )


COLUMNS = (
    "job_id, project, name, state, target_step, config, report, metrics, error, request_digest"
)


def _job(row: tuple[str, ...]) -> Job:
    state: JobState = row[3]  # type: ignore[assignment]  # written by this module only
    return Job(
        job_id=row[0],
        project=row[1],
        name=row[2],
        state=state,
        target_step=int(row[4]) if row[4] is not None else None,
        config=TrainConfig.model_validate_json(row[5]),
        report=JobReport.model_validate_json(row[6]),
        metrics=json.loads(row[7]),
        error=ErrorDetail.model_validate_json(row[8]) if row[8] is not None else None,
        request_digest=row[9],
    )


def digest(body: bytes) -> str:
    """Names the content of a request, to notice a key that is used for two of them."""
    return hashlib.sha256(body).hexdigest()


class JobQueue:
    """Blocking calls of a few milliseconds; callers on the event loop go through `asyncio.to_thread`."""

    def __init__(self, file: Path):
        file.parent.mkdir(parents=True, exist_ok=True)
        self._lock = threading.Lock()
        self._db = sqlite3.connect(file, isolation_level=None, check_same_thread=False)
        self._db.execute("PRAGMA journal_mode=WAL")
        self._db.execute("PRAGMA synchronous=FULL")
        self._db.executescript(SCHEMA)

    def close(self) -> None:
        with self._lock:
            self._db.close()

    def find_key(
        self, owner: str, project: str, name: str, key: str, body_digest: str
    ) -> Job | None:
        """The job that an earlier request with the same key made.

        Raises:
            Conflict: the key was used for another content.
        """
        rows = self._select(
            "owner = ? AND project = ? AND name = ? AND idempotency_key = ?",
            owner,
            project,
            name,
            key,
        )
        if not rows:
            return None
        if rows[0].request_digest != body_digest:
            raise Conflict(
                "this idempotency key was used for another train request: take a new key for new trajectories",
                code="key_reused",
                param="idempotency-key",
            )
        return rows[0]

    def add(
        self,
        owner: str,
        project: str,
        name: str,
        key: str | None,
        body_digest: str,
        config: TrainConfig,
        payload: Payload,
        report: JobReport,
    ) -> Job:
        """Write a job; when it returns, the job survives anything. A request without a key is always a new job; of two
        with the same key that come at once, the second gets the first one's job."""
        job_id = uuid.uuid4().hex
        values = (
            job_id,
            key,
            owner,
            body_digest,
            project,
            name,
            config.model_dump_json(),
            payload.pack(),
            report.model_dump_json(),
            time.time(),
        )
        with self._lock, full_disk_errors():
            self._db.execute(
                "INSERT OR IGNORE INTO jobs (job_id, idempotency_key, owner, request_digest, project, name, state, config,"
                " payload, report, created_at) VALUES (?,?,?,?,?,?,'queued',?,?,?,?)",
                values,
            )
        if key is not None:
            job = self.find_key(owner, project, name, key, body_digest)
            assert job is not None, "just written"
            return job
        return self.get(job_id)

    def get(self, job_id: str) -> Job:
        """
        Raises:
            NotFound: no such job.
        """
        rows = self._select("job_id = ?", job_id)
        if not rows:
            raise NotFound(f"no job '{job_id[:80]}' here", code="unknown_job", param="job_id")
        return rows[0]

    def payload(self, job_id: str) -> Payload:
        with self._lock:
            row = self._db.execute(
                "SELECT payload FROM jobs WHERE job_id = ?", (job_id,)
            ).fetchone()
        return Payload.unpack(row[0])

    def next(self) -> Job | None:
        """The job to run: one that was interrupted, else the oldest that waits."""
        rows = self._select(
            "state IN ('running', 'queued') ORDER BY state = 'queued', number LIMIT 1"
        )
        return rows[0] if rows else None

    def set_running(self, job_id: str, target_step: int) -> None:
        self._update(job_id, "state = 'running', target_step = ?", target_step)

    def set_done(self, job_id: str, metrics: dict[str, float], report: JobReport) -> None:
        self._update(
            job_id,
            "state = 'done', metrics = ?, report = ?, payload = NULL, finished_at = ?",
            json.dumps(metrics),
            report.model_dump_json(),
            time.time(),
        )

    def set_failed(self, job_id: str, error: ErrorDetail) -> None:
        self._update(
            job_id,
            "state = 'failed', error = ?, payload = NULL, finished_at = ?",
            error.model_dump_json(),
            time.time(),
        )

    def _select(self, where: str, *values: object) -> list[Job]:
        with self._lock:
            rows = self._db.execute(f"SELECT {COLUMNS} FROM jobs WHERE {where}", values).fetchall()
        return [_job(row) for row in rows]

    def _update(self, job_id: str, assignments: str, *values: object) -> None:
        with self._lock, full_disk_errors():
            self._db.execute(f"UPDATE jobs SET {assignments} WHERE job_id = ?", (*values, job_id))


@contextlib.contextmanager
def full_disk_errors() -> Iterator[None]:
    """SQLite tells of a full disk in its own words; say it in ours."""
    try:
        yield
    except sqlite3.OperationalError as error:
        if "full" not in str(error):
            raise
        with files.disk_errors("the job"):
            raise OSError(files.FULL_DISK[0], str(error)) from error
