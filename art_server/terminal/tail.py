"""`art tail`: an event for each step that is finished or gets new numbers, and for each change of a job."""

import contextlib
import math
from collections.abc import Generator, Iterator
from typing import Any

from art_server.errors import NotFound, Unavailable
from art_server.terminal.addresses import need_server
from art_server.terminal.sources import Row, Source

COUNTS = {
    "train/reward": "reward",
    "val/reward": "val",
    "loss/logprob_gap_mean": "gap",
    "data/step_num_groups_submitted": "groups",
    "data/step_num_groups_dead": "without signal",
}
SECONDS = {
    f"time/job_{each}_s": each for each in ("engine", "check", "pause", "train", "save", "load")
}
"""Metrics of an event, with their names in its line. Seconds are those of a job's phases."""


class Tail:
    """The events of a source. Holds the rows and jobs that were seen."""

    def __init__(self, source: Source, model: str | None):
        self._source = source
        self._only = model
        self._marks: dict[str, str] = {}
        self._rows: dict[str, list[Row]] = {}
        self._jobs: dict[str, Any] | None = None

    def events(self) -> Generator[Row]:
        """Yields the newest step of each model and the queue, then each event, without an end."""
        for marks in self._source.marks():
            for model, mark in marks["models"].items():
                if self._only in (None, model) and self._marks.get(model) != mark:
                    # A model may be deleted meanwhile, and a server that went away sends its marks again.
                    with contextlib.suppress(NotFound, Unavailable):
                        yield from self._new_steps(model)
                        self._marks[model] = mark
            if "jobs" in marks:
                with contextlib.suppress(Unavailable):
                    yield from self._job_changes({each[0]: each for each in marks["jobs"]})

    def _new_steps(self, model: str) -> Iterator[Row]:
        """The history's rows that are new or changed; at the first look the newest one."""
        found = self._source.history(model, (*COUNTS, *SECONDS))
        columns = found["metrics"].items()
        rows = [
            {
                "event": "step",
                "model": model,
                "step": step,
                "recorded_at": recorded_at,
                "metrics": {name: v[index] for name, v in columns if is_known(v[index])},
            }
            for index, (step, recorded_at) in enumerate(
                zip(found["steps"], found["recorded_at"], strict=True)
            )
        ]
        seen = self._rows.get(model, rows[:-1])
        self._rows[model] = rows
        known = {(row["step"], row["recorded_at"]): row for row in seen}
        yield from (row for row in rows if known.get((row["step"], row["recorded_at"])) != row)

    def _job_changes(self, now: dict[str, Any]) -> Iterator[Row]:
        server = need_server(self._source)
        if self._jobs is None:
            jobs = server.jobs(with_ended=False)
        else:
            changed = [key for key in {**self._jobs, **now} if self._jobs.get(key) != now.get(key)]
            jobs = []
            for each in changed:
                with contextlib.suppress(NotFound):  # the queue has forgotten it
                    jobs.append(server.job(each))
        self._jobs = now
        for job in jobs:
            model = f"{job['project']}/{job['name']}"
            if self._only in (None, model):
                kept = (
                    "job_id",
                    "state",
                    "phase",
                    "completed",
                    "total",
                    "step",
                    "waits_for",
                    "error",
                )
                yield {"event": "job", "model": model} | {name: job[name] for name in kept}


def is_known(value: float | None) -> bool:
    return value is not None and math.isfinite(value)
