"""What a run is: its base, when it began, how much it trained, the configuration in force, and what its jobs noted.

The jobs are read from the database of the server that made them (`art_server/jobs/queue.py`), which `art view` finds in the
same folder. A model's folder that was copied alone has no database.
"""

import contextlib
import re
import sqlite3
from collections.abc import Collection, Iterator, Mapping
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from art_protocol.wire import JobReport, TrainConfig
from art_server.jobs.job_row import COLUMNS, JOBS, JobRow, read_job
from art_server.store.model_folder import ModelFolder
from art_server.store.server_database import FILE
from art_watch.costs import LOGGED, costs, opened, price
from art_watch.runs import Runs, read_record

MAX_JOBS = 500
"""Newest jobs of a model that are read: enough for the configuration in force and the notes."""
MAX_NOTES = 20
TOKENS = "data/step_trainable_assistant_tokens"
DEAD, SUBMITTED = "data/step_num_groups_dead", "data/step_num_groups_submitted"


def context(runs: Runs, folder: ModelFolder) -> dict[str, Any]:
    """A run's base, times, tokens, configuration, notes and costs."""
    history, record = runs.history(folder), read_record(folder)
    num_rows, first_at, last_at = history.span()
    created_at = record.created_at if record is not None else 0.0
    jobs = read_jobs(runs.root, folder, created_at)
    config = next((job.report.config for job in jobs if job.report.config), {})
    trained, dead, submitted = (history.means(name) for name in (TOKENS, DEAD, SUBMITTED))
    rates = history.newest("loss/learning_rate", 1)
    if created_at:
        first_at = datetime.fromtimestamp(created_at, UTC).isoformat()
    about = folder.read_about()
    return {
        "base_model": record.base_model if record is not None else None,
        "lora": record.lora.model_dump() if record is not None else None,
        "started_at": first_at,
        "last_at": last_at,
        "num_rows": num_rows,
        "trained_tokens": history.total(TOKENS),
        "idle": idle(trained, {step for step in dead if dead[step] == submitted.get(step)}),
        "num_trained_steps": sum(tokens > 0 for tokens in trained.values()),
        "num_jobs": len(trained),
        "config": config,
        "changed": changed_from_defaults(config),
        "learning_rate": rates[0] if rates else config.get("learning_rate"),
        "notes": notes(jobs),
        "costs": costs(runs.root, folder, created_at),
        "price": price(about.price_per_hour, first_at, last_at),
        "logged_costs": history.total(LOGGED),
        "about": about.model_dump(),
    }


def idle(trained: Mapping[int, float], dead: Collection[int]) -> str | None:
    """A sentence about an idle run: its newest steps, or more than half of its steps, trained no token. None for other runs.
    `trained` has the number of trained tokens of each step. In the steps in `dead`, all rewards of each group were equal."""
    steps = sorted(trained)
    idle_steps = [step for step in steps if not trained[step]]
    last_trained = max((step for step in steps if trained[step]), default=None)
    newest = [step for step in idle_steps if last_trained is None or step > last_trained]
    if not newest and 2 * len(idle_steps) <= len(steps):
        return None
    is_dead = all(step in dead for step in newest or idle_steps)
    reason = ": all rewards of each group are equal" if is_dead else ""
    if newest and last_trained is None:
        unit = "step" if len(newest) == 1 else "steps"
        return f"Nothing was trained yet, in {len(newest)} {unit}{reason}."
    if newest:
        return f"Nothing was trained since step {last_trained}{reason}."
    return f"{len(idle_steps)} of {len(steps)} steps trained nothing{reason}."


def read_jobs(root: Path, folder: ModelFolder, registered_at: float) -> list[JobRow]:
    """The newest jobs of the model that was registered at this time, the newest first; none without the database of a server of
    this version."""
    file = root / ".server" / FILE
    if not file.exists():
        return []
    query = (
        f"SELECT {COLUMNS} FROM {JOBS} WHERE project = ? AND folder = ? AND registered_at = ? AND NOT is_deleted"
        " ORDER BY number DESC LIMIT ?"
    )
    values = (folder.project, folder.name, registered_at, MAX_JOBS)
    with contextlib.suppress(sqlite3.Error), opened(file) as database:
        return [read_job(row) for row in database.execute(query, values)]
    return []


def changed_from_defaults(config: dict[str, Any]) -> dict[str, Any]:
    """The settings of a configuration that differ from the defaults of its preset."""
    preset = config.get("preset", "grpo")
    with contextlib.suppress(ValueError):
        defaults = TrainConfig(preset=preset).model_dump()
        return {name: value for name, value in config.items() if name == "preset" or value != defaults.get(name)}
    return config


def notes(jobs: list[JobRow]) -> list[dict[str, Any]]:
    """Sentences about these jobs: their reports' notes, what the jobs left out and why they failed. A sentence appears once,
    with the number of its jobs and the first and the last of their steps. Of sentences that differ only in numbers, the
    newest appears, and has `has_older_numbers`."""
    notes_by_kind: dict[str, dict[str, Any]] = {}
    for job in jobs:
        for text, is_bad in _sentences(job):
            kind = re.sub(r"\d+", "#", text)
            new = {"text": text, "is_bad": is_bad, "count": 0, "first": None, "last": None, "has_older_numbers": False}
            note = notes_by_kind.setdefault(kind, new)
            note["count"] += 1
            note["has_older_numbers"] |= text != note["text"]
            if job.target_step is not None:
                note["first"] = job.target_step
                note["last"] = job.target_step if note["last"] is None else note["last"]
    return list(notes_by_kind.values())[:MAX_NOTES]


def _sentences(job: JobRow) -> Iterator[tuple[str, bool]]:
    """The sentences about one job. True beside a sentence: the sentence is a reason why the job trained nothing."""
    report = job.report
    if job.state == "failed" and job.last_error is not None:
        yield f"The job failed: {job.last_error.message}", True
    if job.state == "done" and not report.num_groups_trained:
        yield f"The step trained nothing: {left_out(report)}", True
    elif report.dropped:
        yield f"Left out: {left_out(report)}", False
    for sentence in (*report.differences, *report.notes):
        yield str(sentence), False


def left_out(report: JobReport) -> str:
    """What a job did not train, with the reasons."""
    return "; ".join(map(str, report.dropped)) or "no group had a token with an advantage"
