"""The table of jobs: every train request that was acknowledged.

A row holds all that is known of a job: what it trains, its state, its phase and progress, its attempts so far and the time
of the next. Clients, the page, `art jobs` and trackers get the row. A job is written with its resolved payload and the
client's idempotency key before the request is acknowledged. The same key returns the same job, also after a restart.
Commits are synchronous, but for progress: an acknowledged job survives a power loss.

    queued <-> running -> done | failed        queued, running -> cancelled        failed -> queued (the same key again)
"""

import contextlib
import json
import sqlite3
import uuid
import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence

from art_protocol.display import counted
from art_protocol.wire import ErrorDetail, JobReport, JobState, TrainConfig
from art_server.errors import Conflict, NotFound, TooMany
from art_server.jobs.batch_signs import BatchSigns
from art_server.jobs.fair_order import FairOrder
from art_server.jobs.job_row import COLUMNS, ENDED, JOBS, PENDING, JobRow, Payload, WaitingJob, read_job
from art_server.shared.clock import REAL, Clock
from art_server.store.database import Database, database_errors, insert

OF_KEY = "model = ? AND idempotency_key = ?"
FAILED_PAYLOAD_SECONDS = 3 * 86400.0
"""How long the payload of a failed job is kept, so that a request with the same key can run it again."""
RATE_JOBS = 20
"""The rate is measured over this number of newest jobs."""
MAX_ENDED = 10_000
"""Number of ended jobs that are kept."""

NO_PROGRESS: dict[str, object] = {
    "phase": "queued",
    "completed": None,
    "total": None,
    "next_attempt_at": None,
}
NO_PAYLOAD: dict[str, object] = {"batch": None, "trajectories": None}


def step_moved(reason: str) -> Conflict:
    return Conflict(reason, code="step_moved", param="expected_step")


class JobQueue:
    """The table. Calls block for a few milliseconds; from the event loop use `asyncio.to_thread`. A model is named by its
    number."""

    def __init__(
        self,
        database: Database,
        max_queued: int = 1000,
        shares: Mapping[str, float] | None = None,
        *,
        max_ended: int = MAX_ENDED,
        on_end: Callable[[str, int | None], None] = lambda job_id, step: None,
        clock: Clock = REAL,
    ):
        """`max_queued` jobs of a project may wait, and `max_ended` jobs that have ended are kept. `shares` are the weights of
        projects in `fair_order.py`. `on_end(JOB, STEP)` is called in the transaction that ends a job; STEP is None if the job made
        no step."""
        self._on_end = on_end
        self._max_queued, self._max_ended = max_queued, max_ended
        self._clock = clock
        self.database = database
        self._lock, self._db = database.lock, database.connection
        self._order = FairOrder(shares or {})
        for project, begins, ends in self._rows(f"SELECT project, MAX(begins), MAX(ends) FROM {JOBS} GROUP BY project"):
            if begins is not None:
                self._order.began = max(self._order.began, begins)
                self._order.finishes[project] = ends
        # A start is often the remedy for what made jobs wait.
        self._db.execute("UPDATE jobs SET next_attempt_at = NULL WHERE next_attempt_at IS NOT NULL")

    # --- requests ---

    def has_key(self, model: int, key: str) -> bool:
        """Whether an earlier request with this key made a job."""
        return bool(self._select(OF_KEY, model, key))

    def find_key(self, model: int, key: str, body_digest: str) -> JobRow | None:
        """The job that an earlier request with the same key made, from any caller; None if there is none.

        Raises:
            Conflict: the key was used for a request with another body.
        """
        rows = self._select(OF_KEY, model, key)
        if not rows:
            return None
        if rows[0].request_digest != body_digest:
            raise Conflict(
                "this idempotency key was used for another train request: use a new key for new trajectories",
                code="key_reused",
                param="idempotency-key",
            )
        return rows[0]

    def insert(
        self,
        model: int,
        key: str | None,
        body_digest: str,
        config: TrainConfig,
        payload: Payload,
        report: JobReport,
        metrics: dict[str, float] | None = None,
        *,
        expected_step: int | None = None,
        newest_step: Callable[[], int | None] = lambda: 0,
        on_insert: Callable[[str], None] = lambda job_id: None,
    ) -> JobRow:
        """Writes a job durably. Of two requests with the same key the second gets the job of the first.

        `newest_step` reads the model's step. It is called while no job can be added. `on_insert(JOB)` is called in the transaction
        that writes the job; an error there undoes the transaction.

        Raises:
            TooMany: the project's part of the queue is full.
            Conflict: the model is not at `expected_step`, or has jobs that have not ended and will change its step; or the
                key was used for a request with another body.
            StorageFull: the disk refused the write.
        """
        job_id = uuid.uuid4().hex
        row = {
            "job_id": job_id,
            "idempotency_key": key,
            "request_digest": body_digest,
            "model": model,
            "config": config.model_dump_json(),
            "batch": zlib.compress(payload.batch, 1),
            "trajectories": payload.trajectories,
            "report": report.model_dump_json(),
            "metrics": json.dumps(metrics or {}),
            "created_at": self._clock.now(),
            "num_tokens": payload.num_tokens * config.passes,
            "signs": payload.signs,
            "expected_step": expected_step,
        }
        with self.database.changes("the job"):
            twin = None if key is None else self.find_key(model, key, body_digest)
            if twin is not None:
                return twin
            self._check_acceptable(model, expected_step, newest_step)
            insert(self._db, "jobs", row)
            on_insert(job_id)
        return self.get(job_id)

    def revive(self, model: int, key: str, newest_step: Callable[[], int | None]) -> JobRow | None:
        """The failed job of a key, queued again as if it was new. None if the key names no failed job any more.

        Raises:
            TooMany, Conflict: `insert` would refuse the job.
        """
        with self._lock, database_errors("the job"):
            for job in self._select(f"{OF_KEY} AND state = 'failed' AND batch IS NOT NULL", model, key):
                self._check_acceptable(model, job.expected_step, newest_step)
                values = {"state": "queued", "attempts": "{}", "finished_at": None}
                values |= {"place": None, "begins": None, "ends": None}
                self._update(job.job_id, values | NO_PROGRESS, ("failed",))
                return self.get(job.job_id)
        return None

    def _check_acceptable(self, model: int, expected_step: int | None, newest_step: Callable[[], int | None]) -> None:
        ((project, name),) = self._rows("SELECT project, name FROM models WHERE model = ?", model)
        pending = self._rows(f"SELECT model FROM {JOBS} WHERE state IN ('queued', 'running') AND project = ?", project)
        if len(pending) >= self._max_queued:
            raise TooMany(
                f"the queue of project '{project}' is full with {counted(len(pending), 'job')}: wait until some have ended, cancel some "
                "(DELETE /api/jobs/JOB), or start the server with a larger --max-queued-jobs",
                code="queue_full",
            )
        if expected_step is None:
            return
        if (model,) in map(tuple, pending):
            raise step_moved(
                f"expected_step: model '{project}/{name}' has a job that has not ended and will change its step: wait for "
                "the job, then send trajectories that were sampled afterwards"
            )
        newest = newest_step() or 0
        if expected_step != newest:
            raise step_moved(
                f"expected_step is {expected_step}, but model '{project}/{name}' is at step {newest}: sample with that "
                "step, or leave out expected_step"
            )

    def get(self, job_id: str) -> JobRow:
        """The job with this id.

        Raises:
            NotFound: no such job.
        """
        rows = self._select("job_id = ?", job_id)
        if not rows:
            raise NotFound(f"there is no job '{job_id[:80]}'", code="unknown_job", param="job_id")
        return rows[0]

    def jobs(self, projects: frozenset[str] | None, states: Sequence[str], limit: int) -> list[JobRow]:
        """The first `limit` jobs in these states and projects (None: all): jobs that have not ended in the order of the
        queue, then ended jobs, the latest first."""
        marks = ",".join("?" * len(states))
        where = f"state IN ({marks})"
        values: list[object] = [*states]
        if projects is not None:
            where += f" AND project IN ({','.join('?' * len(projects))})"
            values += sorted(projects)
        order = "CASE WHEN finished_at IS NULL THEN COALESCE(place, number) ELSE 1e12 - number END"
        return self._select(f"{where} ORDER BY finished_at IS NOT NULL, {order} LIMIT ?", *values, limit)

    def pending(self) -> dict[str, tuple[int, float]]:
        """For each state, the number of jobs in this state and when the oldest of them was accepted; jobs that have ended are
        left out."""
        rows = self._rows(
            "SELECT state, COUNT(*), MIN(created_at) FROM jobs WHERE state IN ('queued', 'running') GROUP BY state"
        )
        return {state: (count, oldest) for state, count, oldest in rows}

    # --- for the runner ---

    def waiting(self) -> list[WaitingJob]:
        """Jobs that have not ended, in the order in which they run: interrupted jobs come first, others in fair order."""
        in_order = "state = ? ORDER BY COALESCE(place, number)"
        with self._lock:
            return self._waiting(in_order, "running") + self._order.sort(self._waiting(in_order, "queued"))

    def _waiting(self, where: str, *values: object) -> list[WaitingJob]:
        columns = "job_id, model, project, name, COALESCE(next_attempt_at, 0), num_tokens, begins"
        return [WaitingJob(*row) for row in self._rows(f"SELECT {columns} FROM {JOBS} WHERE {where}", *values)]

    def tokens_per_second(self) -> float | None:
        """How many tokens the newest steps computed in a second; None before one is done."""
        ((tokens, seconds),) = self._rows(
            "SELECT SUM(num_tokens), SUM(seconds) FROM (SELECT num_tokens, seconds FROM jobs WHERE seconds > 0 AND"
            " num_tokens > 0 ORDER BY finished_at DESC LIMIT ?)",
            RATE_JOBS,
        )
        return tokens / seconds if tokens else None

    @contextlib.contextmanager
    def held_idle(self, model: int) -> Iterator[None]:
        """Locks the queue while a model without jobs is changed; no job is accepted or started meanwhile.

        Raises:
            Conflict: jobs of the model wait or run.
        """
        with self._lock:
            where = "model = ? AND state IN ('queued', 'running')"
            pending = self._rows(f"SELECT project || '/' || name FROM {JOBS} WHERE {where}", model)
            if pending:
                raise Conflict(
                    f"model '{pending[0][0]}' has {counted(len(pending), 'job')} not ended: repeat the request after the last",
                    code="jobs_pending",
                    param="name",
                )
            yield

    def forget_keys(self, model: int, after: int) -> None:
        """Lets the keys of a model's ended jobs whose step is later than `after` name new jobs, because these steps are
        deleted."""
        self._rows(
            # Python writes a tuple of texts as SQL writes a list.
            f"UPDATE jobs SET idempotency_key = NULL WHERE model = ? AND state IN {ENDED} AND target_step > ?",
            model,
            after,
        )

    def batch(self, job_id: str) -> bytes:
        """JSON of the job's `trainer_messages.Batch`."""
        return zlib.decompress(self.packed_batch(job_id))

    def packed_batch(self, job_id: str) -> bytes:
        """JSON of the job's batch, compressed with zlib."""
        return self._blob("batch", job_id)

    def trajectories(self, job_id: str) -> bytes:
        """The content of the job's trajectories file."""
        return self._blob("trajectories", job_id)

    def signs(self, job_ids: Sequence[str]) -> list[BatchSigns]:
        """The signs of these jobs' batches, in this order; jobs without signs are left out."""
        marks = ",".join("?" * len(job_ids))
        rows = self._rows(f"SELECT job_id, signs FROM jobs WHERE signs IS NOT NULL AND job_id IN ({marks})", *job_ids)
        signs = dict(map(tuple, rows))
        return [BatchSigns.model_validate_json(signs[job_id]) for job_id in job_ids if job_id in signs]

    def _blob(self, column: str, job_id: str) -> bytes:
        ((blob,),) = self._rows(f"SELECT {column} FROM jobs WHERE job_id = ?", job_id)
        return blob

    def set_running(self, job_id: str, target_step: int) -> bool:
        """Marks a job as running; returns False if the job has ended meanwhile."""
        values = {"state": "running", "target_step": target_step} | NO_PROGRESS
        with self._lock:
            new = self._waiting("job_id = ? AND state IN ('queued', 'running') AND begins IS NULL", job_id)
            for job in new:
                values["begins"], values["ends"] = self._order.times(job)
            is_pending = self._update(job_id, values, PENDING)
            # After the write, which the disk may refuse: the next try would charge the project again.
            for job in new:
                self._order.begin(job)
            return is_pending

    def set_progress(self, job_id: str, phase: str, completed: int | None = None, total: int | None = None) -> None:
        """Writes the progress of a running job. A power loss may undo the write."""
        values = {"phase": phase, "completed": completed, "total": total}
        with self._lock:
            # SQLite refuses this inside a transaction. None is open here: whoever opens one holds the lock.
            self._db.execute("PRAGMA synchronous=NORMAL")
            try:
                self._update(job_id, values, ("running",))
            finally:
                self._db.execute("PRAGMA synchronous=FULL")

    def set_waiting(
        self,
        job_id: str,
        error: ErrorDetail,
        attempts: Mapping[str, int],
        next_attempt_at: float,
        *,
        is_committed: bool = False,
    ) -> bool:
        """Makes a job wait for its next attempt; returns False if the job has ended. If `is_committed`, the job's step exists:
        the job stays before all others, to be finished, and cannot be cancelled."""
        values: dict[str, object] = {
            "state": "running" if is_committed else "queued",
            "last_error": error.model_dump_json(),
            "attempts": json.dumps(attempts),
            "next_attempt_at": next_attempt_at,
        }
        return self._update(job_id, NO_PROGRESS | values, PENDING)

    def set_done(self, job_id: str, metrics: dict[str, float], report: JobReport) -> None:
        values = {
            "state": "done",
            "seconds": metrics.get("time/step_backend_train_s"),
            "metrics": json.dumps(metrics),
            "report": report.model_dump_json(),
            "last_error": None,
            "finished_at": self._clock.now(),
        }
        self._update(job_id, values | NO_PAYLOAD, PENDING)

    def set_failed(self, job_id: str, error: ErrorDetail, *, is_unreadable: bool = False) -> bool:
        """Marks a job as failed, and returns False if the job has ended before. The job's payload is kept for some days; an
        unreadable job's payload, report and metrics are deleted at once."""
        values: dict[str, object] = {
            "state": "failed",
            "last_error": error.model_dump_json(),
            "finished_at": self._clock.now(),
        }
        if is_unreadable:
            values |= {"report": "{}", "metrics": "{}", "attempts": "{}"} | NO_PAYLOAD
        return self._update(job_id, values, PENDING)

    def set_cancelled(self, job_id: str, *, is_running: bool) -> bool:
        """Marks a job as cancelled; returns whether it could. `is_running` (runner only) also allows a running job."""
        values = {"state": "cancelled", "finished_at": self._clock.now()} | NO_PAYLOAD
        return self._update(job_id, values, PENDING if is_running else ("queued",))

    def move(self, job_id: str, before: str | None) -> None:
        """Moves a queued job before another one of its project, or behind all of them.

        Raises:
            Conflict: one of the two jobs is not queued, or they are of two projects, or a job that expects a step would come
                behind another job of its model.
        """
        with self.database.changes("the queue"):
            queued = self._db.execute(
                f"SELECT job_id, COALESCE(place, number), model, expected_step FROM {JOBS} WHERE state = 'queued'"
                f" AND project = (SELECT project FROM {JOBS} WHERE job_id = ?) ORDER BY COALESCE(place, number)",
                (job_id,),
            ).fetchall()
            job_ids = [queued_id for queued_id, *_ in queued]
            for wanted_id in (job_id, before):
                if wanted_id is not None and wanted_id not in job_ids:
                    reason = (
                        f"job '{wanted_id[:80]}' does not wait in this project: only a job whose state is \"queued\" can be "
                        "moved, before another one of its project"
                    )
                    raise Conflict(reason, code="not_queued", param="job_id")
            job_ids.remove(job_id)
            is_last = before is None or before == job_id
            job_ids.insert(len(job_ids) if is_last else job_ids.index(before), job_id)
            models = {queued_id: (model, step) for queued_id, _, model, step in queued}
            passed: set[int] = set()
            for queued_id in job_ids:
                model, expected_step = models[queued_id]
                if expected_step is not None and model in passed:
                    raise step_moved(
                        f"job '{queued_id}' expects step {expected_step}, and would come behind another job of its model, which "
                        "changes the step: leave it before the model's other jobs"
                    )
                passed.add(model)
            orders = sorted(order for _, order, *_ in queued)
            self._db.executemany("UPDATE jobs SET place = ? WHERE job_id = ?", list(zip(orders, job_ids, strict=True)))

    def prune(self) -> None:
        """Deletes the payloads of jobs that failed days ago, and the oldest ended jobs. A failed job that a repeated request
        could have run again loses its key, which then names a new job."""
        ended = f"state IN {ENDED}"
        with self.database.changes("the queue"):
            old = "state = 'failed' AND finished_at < ?"
            before = (self._clock.now() - FAILED_PAYLOAD_SECONDS,)
            self._db.execute(f"UPDATE jobs SET batch = NULL, trajectories = NULL WHERE {old}", before)
            self._db.execute(
                f"UPDATE jobs SET idempotency_key = NULL WHERE {old} AND json_extract(last_error, '$.retryable')",
                before,
            )
            self._db.execute(
                f"DELETE FROM jobs WHERE {ended} AND number <= (SELECT number FROM jobs WHERE {ended}"
                " ORDER BY number DESC LIMIT 1 OFFSET ?)",
                (self._max_ended,),
            )

    def _select(self, where: str, *values: object) -> list[JobRow]:
        return [read_job(row) for row in self._rows(f"SELECT {COLUMNS} FROM {JOBS} WHERE {where}", *values)]

    def _rows(self, statement: str, *values: object) -> list[sqlite3.Row]:
        with self._lock, database_errors("the queue"):
            return self._db.execute(statement, values).fetchall()

    def _update(
        self,
        job_id: str,
        values: Mapping[str, object],
        states: Sequence[JobState],
    ) -> bool:
        """Changes columns of a job that is in one of the states; returns whether the job was."""
        changes = ", ".join(f"{column} = ?" for column in values)
        marks = ",".join("?" * len(states))
        statement = f"UPDATE jobs SET {changes}, changes = changes + 1 WHERE job_id = ? AND state IN ({marks})"
        if values.get("state") not in ENDED:
            with self._lock, database_errors("the job"):
                return self._db.execute(statement, (*values.values(), job_id, *states)).rowcount > 0
        with self.database.changes("the job"):
            has_ended = self._db.execute(statement, (*values.values(), job_id, *states)).rowcount > 0
            if has_ended:
                step = self.get(job_id).target_step if values["state"] == "done" else None
                self._on_end(job_id, step)
        return has_ended
