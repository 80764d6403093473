"""Reads history.jsonl: the metrics of a model's steps, as columns."""

import contextlib
import itertools
import json
import math
import os
import zlib
from array import array
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from art_server.store.model_folder import BEST_METRICS, rank_steps, step_means, step_name

NO_METRICS = ("step", "training_step")
NUMBER_TYPES = (float, int, bool)


@dataclass(frozen=True, slots=True)
class History:
    """The rows of history.jsonl, one for each step, in the order of the steps, as columns."""

    steps: list[int | None]
    recorded_at: list[str | None]
    metrics: "dict[str, array[float]]"
    """NaN where a row lacks the metric. A column ends with the last row that has the metric."""

    def copy(self) -> "History":
        columns = {name: column[:] for name, column in self.metrics.items()}
        return History(self.steps[:], self.recorded_at[:], columns)

    def add(self, row: dict[str, Any]) -> None:
        num, metrics = len(self.steps), self.metrics
        for name, value in row.items():
            if type(value) in NUMBER_TYPES and name not in NO_METRICS:
                column = metrics.get(name)
                if column is None:
                    column = metrics[name] = array("d")
                if len(column) < num:
                    column.extend(itertools.repeat(math.nan, num - len(column)))
                try:
                    column.append(value)
                except OverflowError:  # too large an integer
                    column.append(math.nan)
        step, time = row.get("step"), row.get("recorded_at")
        self.steps.append(step if isinstance(step, int) else None)
        self.recorded_at.append(time if isinstance(time, str) else None)

    def by_step(self) -> "History":
        """The rows in the order of their steps: a late evaluation of an early step is written last. A row without a step
        stays behind the row before it."""
        last, steps = 0, list[int]()
        for step in self.steps:
            last = last if step is None else step
            steps.append(last)
        order = sorted(range(len(steps)), key=steps.__getitem__)
        if order == list(range(len(steps))):
            return self
        found = History([self.steps[i] for i in order], [self.recorded_at[i] for i in order], {})
        for name, column in self.metrics.items():
            found.metrics[name] = moved = array("d")
            moved.extend(column[i] if i < len(column) else math.nan for i in order)
            while moved and math.isnan(moved[-1]):
                moved.pop()
        return found

    def names(self) -> list[str]:
        """The names of all metrics: columns that contain a number."""
        return sorted(self.metrics)

    def column(self, name: str) -> list[float | None]:
        """A metric's values; None where a row lacks it."""
        values = [number(value) for value in self.metrics.get(name, ())]
        return values + [None] * (len(self.steps) - len(values))

    def columns(self, names: Sequence[str]) -> dict[str, Any]:
        """Steps, times, and for each metric its values."""
        return {
            "steps": self.steps,
            "recorded_at": self.recorded_at,
            "metrics": {name: self.column(name) for name in names},
        }

    def last(self, name: str) -> float | None:
        """The newest value of a metric."""
        values = map(number, reversed(self.metrics.get(name, ())))
        return next((value for value in values if value is not None), None)

    def ranking(self) -> tuple[str | None, list[int]]:
        """The metric that the best step is judged by, and the steps that have it, the best first."""
        metric = next((name for name in BEST_METRICS if name in self.metrics), None)
        return metric, rank_steps(self._earned(metric)) if metric is not None else []

    def means(self, metric: str) -> dict[int, float]:
        """A metric's mean for each step that earned it."""
        return step_means(self._earned(metric))

    def _earned(self, metric: str) -> list[tuple[float, float]]:
        """Pairs of step and value. The rewards of training are those of the step that sampled."""
        named = self.column(step_name(metric))  # none for "step", which is no metric
        steps = [a if a is not None else b for a, b in zip(named, self.steps, strict=True)]
        values = zip(steps, self.column(metric), strict=True)
        return [(a, b) for a, b in values if a is not None and b is not None]


@dataclass(frozen=True, slots=True)
class HistoryFile:
    """A history.jsonl as far as it was read."""

    history: History
    """Its rows in the order of their steps."""
    rows: History
    """The same in the order of the file."""
    num_bytes: int
    checksum: int | None
    """Of these bytes; None if the last line has no end yet."""

    @staticmethod
    def read(file: Path, before: "HistoryFile | None" = None) -> "HistoryFile":
        """Reads a file; empty if there is none. Parses only what was appended to the bytes of `before`.

        One line at a time: a long call of the JSON library would block the event loop. Lines that a crash cut short are
        left out.
        """
        rows, num_bytes, checksum, line = History([], [], {}), 0, 0, b"\n"
        with contextlib.suppress(FileNotFoundError), file.open("rb") as lines:
            beginning = lines.read(before.num_bytes if before is not None else 0)
            if before is not None and before.checksum == (known := zlib.crc32(beginning)):
                rows, num_bytes, checksum = before.rows.copy(), before.num_bytes, known
            lines.seek(num_bytes)
            for line in lines:
                num_bytes, checksum = num_bytes + len(line), zlib.crc32(line, checksum)
                with contextlib.suppress(ValueError):
                    row = read_json(line)
                    if isinstance(row, dict):
                        rows.add(row)
        is_whole = line.endswith(b"\n")
        return HistoryFile(rows.by_step(), rows, num_bytes, checksum if is_whole else None)


def number(value: object) -> float | None:
    """A finite number as float; None for anything else."""
    try:
        found = float(value) if isinstance(value, int | float) else math.nan
    except OverflowError:
        return None
    return found if math.isfinite(found) else None


def file_mark(file: Path) -> tuple[int, int]:
    """Size and time of the last change; zeros without the file."""
    try:
        stat = os.stat(file)
    except OSError:
        return 0, 0
    return stat.st_size, stat.st_mtime_ns


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
