"""What becomes of jobs, for the people who run them: steps for trackers, spans for traces, totals for Prometheus.

The job runner calls one function with each change of a job. Nothing here waits: trackers have their own threads.
"""

import contextlib
import functools
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

from art_protocol.history import read_rows
from art_protocol.tracking import (
    RolloutRow,
    Span,
    StepRecord,
    Tracer,
    link_of,
    make_rows,
    open_tracer,
    open_trackers,
)
from art_protocol.wire import JobReport, LogReply
from art_server.jobs.job_row import ENDED, JobRow
from art_server.store.registry import RegisteredModel


@dataclass(slots=True)
class Totals:
    """Numbers since the server's start."""

    jobs: Counter[str] = field(default_factory=Counter)
    """Ended jobs by outcome."""
    trained_tokens: int = 0
    seconds: dict[str, float] = field(default_factory=dict)
    """Seconds of the last step, by phase."""

    def count(self, job: JobRow) -> None:
        if job.state in ENDED:
            self.jobs[job.state] += 1
        if job.state == "done":
            self.trained_tokens += job.report.num_trained_tokens
            self.seconds = {
                name.removeprefix("time/").removesuffix("_s"): value
                for name, value in job.metrics.items()
                if name.startswith("time/")
            }


class Reports:
    """The receivers of what a server reports. `tracing` is None without a tracer among the names."""

    def __init__(self, names: Sequence[str], folder: Path):
        self.totals = Totals()
        self._trackers = open_trackers(names, folder)
        self.tracing = open_tracer(names, "art-server")
        self._spans = JobSpans(self.tracing) if self.tracing is not None else None

    def take(self, job: JobRow, model: RegisteredModel | None) -> None:
        """Passes on the row of a job that has changed. `model` is None if the job's model is deleted."""
        self.totals.count(job)
        if self._spans is not None:
            self._spans.take(job)
        if job.state == "done" and job.target_step is not None and model is not None:
            record = step_record(model, job.target_step, "train", job.metrics, job.report)
            self._report(record)

    def logged(self, model: RegisteredModel, split: str, reply: LogReply, *, has_groups: bool) -> None:
        """Passes on a log call."""
        record = step_record(model, reply.step, split, reply.metrics, has_groups=has_groups)
        self._report(record)

    def _report(self, record: StepRecord) -> None:
        for tracker in self._trackers:
            tracker.report(record)

    def close(self) -> None:
        """Delivers what is queued; takes some seconds at most (blocking)."""
        for tracker in self._trackers:
            tracker.close()
        if self.tracing is not None:
            self.tracing.close()


def step_record(
    model: RegisteredModel,
    step: int,
    split: str,
    metrics: Mapping[str, float],
    report: JobReport | None = None,
    *,
    has_groups: bool = True,
) -> StepRecord:
    """A train or log call as trackers receive it. Its rollouts are read from disk when a tracker wants them."""
    registered = model.record
    config = {"base_model": registered.base_model, "lora": registered.lora.model_dump()}
    record = StepRecord(
        registered.project,
        registered.name,
        step,
        split,
        metrics,
        config | (report.config if report is not None else {}),
        report=report,
    )
    if not has_groups:
        return record
    file = model.folder.trajectories_file(split, step)
    return replace(record, rollouts=functools.partial(stored_rows, file))


def stored_rows(file: Path) -> Iterator[RolloutRow]:
    """The rollouts in a trajectories file, read one group at a time; nothing if the file was deleted."""
    with contextlib.suppress(FileNotFoundError):
        for number, group in enumerate(read_rows(file)):
            trained = [
                (trajectory["reward"], [entry.get("message", entry) for entry in trajectory["messages"]])
                for trajectory in group["trajectories"]
            ]
            failed = [(failure["type"], failure["message"]) for failure in group["exceptions"]]
            yield from make_rows(number, trained, failed)


@dataclass(slots=True)
class _OpenJob:
    span: Span
    phase: str = ""
    phase_span: Span | None = None

    def end_phase(self, error: str | None = None) -> None:
        if self.phase_span is not None:
            self.phase_span.end(error)
        self.phase, self.phase_span = "", None


class JobSpans:
    """A span for each job, from its acceptance to its end, with a child for each phase."""

    def __init__(self, tracing: Tracer):
        self._tracing = tracing
        self._open: dict[str, _OpenJob] = {}

    def take(self, job: JobRow) -> None:
        if job.job_id not in self._open:  # an earlier server may have accepted it
            about = {"art.job": job.job_id, "art.model": job.model_id}
            span = self._tracing.start("job", link_of(job.idempotency_key), about, kind="SERVER")
            self._open[job.job_id] = _OpenJob(span)
        open_job = self._open[job.job_id]
        error = None if job.last_error is None else job.last_error.code
        if job.state in ENDED:
            error = {"failed": error, "cancelled": "cancelled"}.get(job.state)
            open_job.end_phase(error)
            if job.state == "done" and job.target_step is not None:
                open_job.span.set({"art.step": job.target_step, **made_by(job)})
            open_job.span.end(error)
            del self._open[job.job_id]
        # The trainer numbers the mini-batches in the phase's name, "train 2 of 3" (`trainer/job.py`).
        elif (phase := job.phase.partition(" ")[0]) != open_job.phase:
            open_job.end_phase(error if phase == "queued" else None)
            open_job.phase = phase
            open_job.phase_span = self._tracing.start(phase, open_job.span, made_by(job))


def made_by(job: JobRow) -> dict[str, str]:
    """The adapter that a job makes, for its spans."""
    return {} if job.target_step is None else {"art.adapter": f"{job.model_id}@{job.target_step}"}
