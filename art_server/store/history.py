"""The history: the metrics of each step of each model, as rows of the server's database.

A model's history.jsonl is the export of its rows, one line for each train and log call. A folder whose models are in no
table (a program without a server, `art view`) is read by importing these files.
"""

import contextlib
import json
import logging
import math
from collections.abc import Iterable, Iterator, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from art_protocol.history import history_row
from art_server.store.database import Database
from art_server.store.model_folder import ModelFolder

logger = logging.getLogger(__name__)

TABLES = ("steps", "metrics")
VALIDATION_LOSS = "val/loss"
"""The metric whose lowest value is the best."""
BEST_METRICS = ("val/reward", "train/reward", VALIDATION_LOSS)
"""The best step is judged by the first of these that the history has: a model that was trained by examples only has no rewards."""
NO_METRICS = ("step", "training_step")
# As in the exchange format and the routes: nine digits.
MAX_STEP = 10**9
Ranking = tuple[str | None, list[int]]


class HistoryTable:
    """The rows of all models. A model is named by its number."""

    def __init__(self, database: Database) -> None:
        self._database = database
        self._rankings: dict[int, Ranking] = {}
        """The ranking of each model, until the model's rows change: each request for "NAME@best" needs a ranking."""

    def of(self, model: int, folder: ModelFolder) -> "MetricHistory":
        """The history of one model."""
        return MetricHistory(self, model, folder)

    def import_missing(self, model: int, folder: ModelFolder) -> None:
        """Imports a model's history.jsonl if the model has no rows."""
        with self._database.changes("the history"):
            if not self.select("SELECT 1 FROM steps WHERE model = ? LIMIT 1", model):
                self.insert(model, read_history_file(folder.history_file))

    def replace(self, model: int, folder: ModelFolder) -> None:
        """Imports a model's history.jsonl in place of its rows."""
        with self.changes(model):
            self.delete(model)
            self.insert(model, read_history_file(folder.history_file))

    def select(self, query: str, *values: object) -> list[Any]:  # Any: rows of the query's columns
        return self._database.select(query, *values)

    def ranking(self, model: int) -> Ranking:
        """See `MetricHistory.ranking`. Waits for no change of the database, because the event loop calls this."""
        known = self._rankings.get(model)
        if known is not None:
            return known
        # While another thread holds the lock, it may be changing the rows: then the ranking is not kept.
        is_kept = self._database.lock.acquire(blocking=False)
        try:
            ranking = self._compute_ranking(model)
            if is_kept:
                self._rankings[model] = ranking
        finally:
            if is_kept:
                self._database.lock.release()
        return ranking

    def _compute_ranking(self, model: int) -> Ranking:
        for metric in BEST_METRICS:
            query, values = means_of(model, metric)
            if steps := [step for step, _ in self.select(query, *values)]:
                return metric, steps
        return None, []

    @contextlib.contextmanager
    def changes(self, model: int) -> Iterator[None]:
        """Inside the block all changes of a model's rows are one transaction.

        Raises:
            StorageFull: the disk is full, read-only or broken.
            Unavailable: another program locks the file.
        """
        with self._database.changes("the history"):
            yield
            self._rankings.pop(model, None)

    def delete(self, model: int, after: int = -1) -> None:
        """Deletes the rows of the steps behind `after`. Within `changes`."""
        for table in TABLES:
            self._database.connection.execute(f"DELETE FROM {table} WHERE model = ? AND step > ?", (model, after))

    def insert(self, model: int, rows: Iterable[dict[str, Any]]) -> None:
        """Adds rows as history.jsonl has them. Within `changes`."""
        connection = self._database.connection
        for row in rows:
            step = row["step"]
            job_id, recorded_at = _text(row.get("job_id")), _text(row.get("recorded_at"))
            if job_id is not None and self.job_of(model, step) not in (None, job_id):
                # An earlier job made a step of this number, which was lost: its metrics do not belong to this step.
                for table in TABLES:
                    connection.execute(f"DELETE FROM {table} WHERE model = ? AND step = ?", (model, step))
            connection.execute(
                "INSERT INTO steps VALUES (?, ?, ?, ?) ON CONFLICT DO UPDATE SET "
                "recorded_at = coalesce(recorded_at, excluded.recorded_at), job_id = coalesce(job_id, excluded.job_id)",
                (model, step, recorded_at, job_id),
            )
            connection.executemany(
                "INSERT INTO metrics VALUES (?, ?, ?, ?) ON CONFLICT DO UPDATE SET value = excluded.value",
                [
                    (model, name, step, finite_number(value))
                    for name, value in row.items()
                    if isinstance(value, int | float) and name not in NO_METRICS
                ],
            )

    def job_of(self, model: int, step: int) -> str | None:
        """The job that made a step. Within `changes`."""
        rows = self.select("SELECT job_id FROM steps WHERE model = ? AND step = ?", model, step)
        return rows[0][0] if rows else None


class MetricHistory:
    """The history of one model."""

    def __init__(self, table: HistoryTable, model: int, folder: ModelFolder) -> None:
        self._table, self._model, self._folder = table, model, folder

    # --- changes ---

    def add(self, step: int, metrics: dict[str, float], job_id: str | None = None) -> None:
        """Adds the metrics of a train or log call to a step. A later value of a metric replaces an earlier one. Does
        nothing if a row says that job `job_id` made the step: a killed attempt has recorded the metrics.

        Raises:
            StorageFull, Unavailable: nothing was added.
        """
        row = history_row(step, metrics, datetime.now(UTC).isoformat())
        if job_id is not None:
            row["job_id"] = job_id
        with self._table.changes(self._model):
            if job_id is not None and self._table.job_of(self._model, step) == job_id:
                return
            self._table.insert(self._model, [row])
            # Before the commit: a call that dies in between is repeated, and the export has its line twice.
            self._folder.append_history(row)

    def roll_back(self, step: int) -> None:
        """Deletes the rows of later steps."""
        with self._table.changes(self._model):
            self._table.delete(self._model, after=step)

    # --- what it has ---

    def names(self) -> list[str]:
        """The names of all metrics."""
        query = "SELECT DISTINCT name FROM metrics WHERE model = ? ORDER BY name"
        return [name for (name,) in self._table.select(query, self._model)]

    def columns(self, names: Sequence[str]) -> dict[str, Any]:
        """The steps in order, the time of each, and for each metric its values; None where a step lacks it."""
        query = "SELECT step, recorded_at FROM steps WHERE model = ? ORDER BY step"
        steps = self._table.select(query, self._model)
        indices = {step: index for index, (step, _) in enumerate(steps)}
        metrics: dict[str, list[float | None]] = {name: [None] * len(steps) for name in names}
        query = f"SELECT name, step, value FROM metrics WHERE model = ? AND name IN ({_marks(names)})"
        for name, step, value in self._table.select(query, self._model, *names):
            if step in indices:  # if not, the row was added between the two queries
                metrics[name][indices[step]] = value
        return {
            "steps": [step for step, _ in steps],
            "recorded_at": [time for _, time in steps],
            "metrics": metrics,
        }

    def newest(self, name: str, number: int) -> list[float]:
        """The newest values of a metric, the newest last."""
        query = (
            "SELECT value FROM metrics WHERE model = ? AND name = ? AND value IS NOT NULL ORDER BY step DESC LIMIT ?"
        )
        return [value for (value,) in self._table.select(query, self._model, name, number)][::-1]

    def newest_jobs(self, number: int) -> list[str]:
        """The jobs that made the newest steps, the newest last."""
        query = "SELECT job_id FROM steps WHERE model = ? AND job_id IS NOT NULL ORDER BY step DESC LIMIT ?"
        return [job_id for (job_id,) in self._table.select(query, self._model, number)][::-1]

    def total(self, name: str) -> float:
        """The sum of a metric over all steps."""
        # total, because sum is NULL without rows.
        query = "SELECT total(value) FROM metrics WHERE model = ? AND name = ?"
        return self._table.select(query, self._model, name)[0][0]

    def span(self) -> tuple[int, str | None, str | None]:
        """The number of steps, and the first and the last time."""
        query = "SELECT count(*), min(recorded_at), max(recorded_at) FROM steps WHERE model = ?"
        return tuple(self._table.select(query, self._model)[0])

    def values(self, steps: Sequence[int]) -> dict[int, dict[str, float]]:
        """The metrics of these steps."""
        query = (
            "SELECT step, name, value FROM metrics WHERE model = ? AND value IS NOT NULL "
            f"AND step IN ({_marks(steps)}) ORDER BY name"
        )
        metrics: dict[int, dict[str, float]] = {step: {} for step in steps}
        for step, name, value in self._table.select(query, self._model, *steps):
            metrics[step][name] = value
        return metrics

    # --- the best step ---

    def means(self, metric: str) -> dict[int, float]:
        """The mean of a metric for each step that earned it: the best mean first, and of equal means the earlier step first.
        A reward of training belongs to the step that sampled, where the row names this step."""
        query, values = means_of(self._model, metric)
        return dict(self._table.select(query, *values))

    def ranking(self) -> Ranking:
        """The metric that the best step is judged by, and the steps that have it, the best first."""
        return self._table.ranking(self._model)

    def best_step(self, metric: str | None = None) -> int | None:
        """The best kept step; None if none has the metric. Without `metric` by the ranking."""
        ranked = self.ranking()[1] if metric is None else self.means(metric)
        kept = set(self._folder.steps())
        return next((step for step in ranked if step in kept), None)


def means_of(model: int, metric: str) -> tuple[str, tuple[object, ...]]:
    """The query of `MetricHistory.means`, and its values."""
    order = "ASC" if metric == VALIDATION_LOSS else "DESC"
    query = f"""
        SELECT CAST(coalesce(sampled.value, metrics.step) AS INTEGER) AS earned_by, avg(metrics.value) AS mean
        FROM metrics LEFT JOIN metrics AS sampled
        ON sampled.model = metrics.model AND sampled.step = metrics.step AND sampled.name = ?
        WHERE metrics.model = ? AND metrics.name = ? AND metrics.value IS NOT NULL
        GROUP BY earned_by ORDER BY mean {order}, earned_by
    """
    sampled = "sampled_step" if metric.startswith("train/") else None
    return query, (sampled, model, metric)


def read_history_file(file: Path) -> Iterator[dict[str, Any]]:
    """The rows of a history.jsonl, which may not exist. Lines that a crash cut short, and lines without a step, are left
    out and counted in the log. One line at a time: a long call of the JSON library would block the event loop."""
    num_left_out = 0
    with contextlib.suppress(FileNotFoundError), file.open("rb") as lines:
        for line in lines:
            with contextlib.suppress(ValueError):
                row = read_json(line)
                if isinstance(row, dict) and is_step(row.get("step")):
                    yield row
                    continue
            if line.strip():
                num_left_out += 1
    if num_left_out:
        logger.warning("%s: %d lines are no rows of a step, and are left out", file, num_left_out)


def is_step(value: object) -> bool:
    return type(value) is int and 0 <= value < MAX_STEP


def finite_number(value: object) -> float | None:
    """A finite number as float; None for anything else."""
    try:
        number = float(value) if isinstance(value, int | float) else math.nan
    except OverflowError:
        return None
    return number if math.isfinite(number) else None


def _text(value: object) -> str | None:
    """The value if it is a text; None for anything else."""
    return value if isinstance(value, str) else None


def read_json(line: bytes) -> Any:
    """The value of a JSON line. Halves of characters, which no answer can contain, become question marks.

    Raises:
        ValueError: the line is not JSON, or nested too deeply.
    """
    try:
        value = json.loads(line)
        if b"\\ud" in line.lower():
            text = json.dumps(value, ensure_ascii=False)
            value = json.loads(text.encode("utf-8", "replace"))
    except RecursionError as error:
        raise ValueError("nested too deeply") from error
    return value


def _marks(values: Sequence[object]) -> str:
    return ",".join("?" * len(values))
