"""A job: what is known of it, as a row of the table of jobs (`queue.py`), and its payload."""

import itertools
import json
import sqlite3
from collections import Counter
from dataclasses import dataclass, fields

from art_protocol.history import pack_rows
from art_protocol.wire import ErrorDetail, JobEvent, JobInfo, JobReport, JobState
from art_server.jobs.batch_signs import BatchSigns
from art_server.shared.trainer_messages import Batch, TrainableGroup

PENDING: tuple[JobState, ...] = ("queued", "running")
ENDED: tuple[JobState, ...] = ("done", "failed", "cancelled")


@dataclass(frozen=True, slots=True)
class Payload:
    """What a job trains and what it writes into the model's folder, as stored bytes. When the job is done, all but the signs
    is deleted."""

    batch: bytes
    """JSON of a `trainer_messages.Batch`."""
    trajectories: bytes = pack_rows(())
    """The content of the trajectories file."""
    num_tokens: int = 0
    """Number of tokens of the batch. Tokens that several sequences begin with count once."""
    signs: str | None = None
    """JSON of the batch's `batch_signs.BatchSigns`, with which later batches are compared."""

    @staticmethod
    def make(batch: Batch, trajectories: bytes = pack_rows(()), signs: BatchSigns | None = None) -> "Payload":
        """Encodes one group at a time, because a call of a JSON library blocks all other threads."""
        shared = batch.model_copy(update={"groups": []}).model_dump_json().encode()
        trained = b",".join(group.model_dump_json().encode() for group in batch.groups)
        # pydantic writes no white space, and no other field of a batch can contain this text: they are numbers and base64.
        start, end = shared.split(b'"groups":[]')
        num_tokens = sum(count_unshared(group) for group in batch.groups)
        content = start + b'"groups":[' + trained + b"]" + end
        return Payload(content, trajectories, num_tokens, None if signs is None else signs.model_dump_json())


def count_unshared(group: TrainableGroup) -> int:
    """The number of tokens of a group's sequences. Tokens that several sequences begin with count once."""
    sequences = sorted(sequence.token_ids for trajectory in group.trajectories for sequence in trajectory.sequences)
    num_tokens = sum(map(len, sequences))
    for sequence, following in itertools.pairwise(sequences):  # in this order neighbours share the longest beginnings
        pairs = enumerate(zip(sequence, following, strict=False))
        shorter = min(len(sequence), len(following))
        num_tokens -= next((index for index, (token, other) in pairs if token != other), shorter)
    return num_tokens


@dataclass(frozen=True, slots=True)
class WaitingJob:
    """A job that has not ended, with what the runner needs to choose one."""

    job_id: str
    model: int
    """The number of the job's model."""
    project: str
    name: str
    next_attempt_at: float
    num_tokens: int
    """Number of tokens that are computed for the job. Tokens that several sequences begin with count once."""
    begins: float | None
    """The job's virtual time (`fair_order.py`); None before the job has begun."""

    @property
    def model_id(self) -> str:
        return f"{self.project}/{self.name}"


@dataclass(frozen=True, slots=True)
class JobRow:
    """A row of the table, without its payload."""

    job_id: str
    model: int
    """The number of the job's model."""
    project: str
    name: str
    """Project and name that the model has now."""
    idempotency_key: str | None
    """The client's key; None without a key, and when the key may name another job."""
    request_digest: str
    config: str
    """JSON of a `TrainConfig`."""
    created_at: float
    state: JobState
    phase: str
    """What the job does now, if it runs; "queued" before it runs; the last phase of an ended job."""
    completed: int | None
    total: int | None
    """How much of the phase is done, if it can be counted."""
    target_step: int | None
    """The step that the job makes, set when the job starts."""
    attempts: Counter[str]
    """How many attempts ended with an error, by the error's code."""
    next_attempt_at: float
    """When a job with an error is tried again (`clock.now`)."""
    last_error: ErrorDetail | None
    """Why the job failed; for a job that has not ended, why its last attempt failed."""
    report: JobReport
    metrics: dict[str, float]
    """Metrics of the trajectories; when the job is done, also metrics of the training."""
    finished_at: float | None
    """When the job ended (`clock.now`)."""
    changes: int
    """Number of changes of the row."""
    expected_step: int | None
    """The step at which the model has to be whenever the job is queued; None: any step."""

    @property
    def model_id(self) -> str:
        return f"{self.project}/{self.name}"

    def info(self, waits_for: str | None = None) -> JobInfo:
        return JobInfo(
            job_id=self.job_id,
            project=self.project,
            name=self.name,
            state=self.state,
            phase=self.phase,
            completed=self.completed,
            total=self.total,
            step=self.target_step if self.state == "done" else None,
            metrics=self.metrics if self.state == "done" else {},
            report=self.report,
            attempts=self.attempts.total(),
            error=self.last_error,
            created_at=self.created_at,
            finished_at=self.finished_at,
            waits_for=waits_for,
        )

    def event(self, waits_for: str | None = None) -> JobEvent:
        """The row as a line of the job's event stream."""
        if self.state in PENDING:
            return JobEvent(
                event="progress" if self.state == "running" else "waiting",
                job_id=self.job_id,
                number=self.changes,
                phase=self.phase,
                completed=self.completed,
                total=self.total,
                waits_for=waits_for,
            )
        if self.state == "done":
            return JobEvent(
                event="done",
                job_id=self.job_id,
                step=self.target_step,
                metrics=self.metrics,
                report=self.report,
            )
        cancelled = ErrorDetail(message=f"job {self.job_id} was cancelled", code="cancelled")
        error = cancelled if self.state == "cancelled" else self.last_error
        return JobEvent(event="error", job_id=self.job_id, error=error, report=self.report)


JOBS = "jobs JOIN models USING (model)"
"""The table of jobs with the names of their models."""
COLUMNS = ", ".join(column.name for column in fields(JobRow))


def read_job(row: sqlite3.Row) -> JobRow:
    error = row["last_error"]
    parsed = {
        "attempts": Counter(json.loads(row["attempts"])),
        "next_attempt_at": row["next_attempt_at"] or 0.0,
        "last_error": None if error is None else ErrorDetail.model_validate_json(error),
        "report": JobReport.model_validate_json(row["report"]),
        "metrics": json.loads(row["metrics"]),
    }
    return JobRow(**dict(row) | parsed)
