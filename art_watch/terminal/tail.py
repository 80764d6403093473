"""`art tail`: the last events, then each new one: steps that are finished or get new numbers, and changes of jobs."""

import contextlib
import time
from collections.abc import Callable, Iterator
from datetime import UTC, datetime
from typing import Any

from art_server.errors import NotFound, Unavailable
from art_watch.terminal.sources import HttpSource, Row, Source

NUM_FIRST = 10
"""Number of past events before the new events."""
LOOK_SECONDS = 2.0
METRICS = {
    "train/reward": "reward",
    "val/reward": "val",
    "loss/logprob_gap_mean": "gap",
    "data/step_num_groups_submitted": "groups",
    "data/step_num_groups_dead": "dead",
    "time/job_train_s": "seconds of training",
}
"""Metrics of an event, with their names in its line."""
JOB_FIELDS = ("job_id", "state", "step", "phase", "completed", "total", "waits_for", "error")


class Tail:
    """The events of a source, of one model or of all models. Holds the steps of the models, and reads a model's steps again
    only when the model's summary changes."""

    def __init__(
        self, source: Source, model: str | None, wait: Callable[[], object] = lambda: time.sleep(LOOK_SECONDS)
    ):
        self._source, self._only, self._wait = source, model, wait
        self._summaries: dict[str, Row] = {}
        self._steps: dict[str, dict[Any, Row]] = {}

    def events(self) -> Iterator[Row]:
        """Yields the last events in the order of their times, then each new one, without an end. `at` is an event's
        time, in ISO format."""
        seen = self._look()
        yield from sorted(seen.values(), key=lambda event: event["at"])[-NUM_FIRST:]
        while True:
            self._wait()
            current = seen
            with contextlib.suppress(NotFound, Unavailable):  # a model was deleted meanwhile, or the server is away
                current = self._look()
            new = [event for key, event in current.items() if without_time(seen.get(key)) != without_time(event)]
            yield from sorted(new, key=lambda event: event["at"])
            seen = current

    def _look(self) -> dict[Any, Row]:
        """All events now, by the model and step or by the job that an event is about."""
        overview = self._source.overview()
        summaries = [summary for summary in overview["models"] if self._only in (None, summary["id"])]
        for summary in summaries:
            if self._summaries.get(summary["id"]) != summary:
                self._steps[summary["id"]] = dict(self._steps_of(summary["id"]))
                self._summaries[summary["id"]] = summary
        events: dict[Any, Row] = {}
        for summary in summaries:
            events |= self._steps[summary["id"]]
        if isinstance(self._source, HttpSource) and overview["live"] is not None:
            events |= {job["job_id"]: job_event(job) for job in self._source.jobs(with_ended=True)}
        return {key: event for key, event in events.items() if self._only in (None, event["model"])}

    def _steps_of(self, model: str) -> Iterator[tuple[Any, Row]]:
        history = self._source.history(model, tuple(METRICS))
        for index, (step, recorded_at) in enumerate(zip(history["steps"], history["recorded_at"], strict=True)):
            values = {name: column[index] for name, column in history["metrics"].items()}
            metrics = {name: value for name, value in values.items() if value is not None}
            event = {"event": "step", "model": model, "step": step, "metrics": metrics, "at": recorded_at or ""}
            yield (model, step), event


def job_event(job: Row) -> Row:
    # A job has no time of its newest change.
    at = job["finished_at"] or (job["created_at"] if job["state"] == "queued" else time.time())
    model = f"{job['project']}/{job['name']}"
    kept = {name: job[name] for name in JOB_FIELDS}
    return {"event": "job", "model": model, **kept, "at": datetime.fromtimestamp(at, UTC).isoformat()}


def without_time(event: Row | None) -> Row | None:
    """The parts of an event that make a new event if they differ. A job's progress is not among them."""
    left_out = ("at", "completed", "total")
    return event and {name: value for name, value in event.items() if name not in left_out}


def with_days(events: Iterator[Row]) -> Iterator[tuple[str | None, datetime | None, Row]]:
    """Each event with its local time and, where the day changes, the date."""
    before = None
    for event in events:
        at = None
        with contextlib.suppress(ValueError):  # a row without a time
            at = datetime.fromisoformat(event["at"]).astimezone()
        day = before if at is None else f"{at:%A, %Y-%m-%d}"
        yield (day if day != before else None), at, event
        before = day
