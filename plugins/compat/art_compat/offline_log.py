"""The history of a model that no server keeps: a prompted model, or a model that is not registered. The program itself
writes the history, with the layout of a server's folder:

    BASE_PATH/PROJECT/models/NAME/history.jsonl
    BASE_PATH/PROJECT/models/NAME/trajectories/SPLIT/0000.jsonl.gz
"""

import contextlib
import json
import threading
from collections.abc import Iterable
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from art.bodies import build_log_request
from art.files import write_whole
from art.trajectories import Trajectory, TrajectoryGroup
from art_protocol.history import history_row, log_metrics, merged_row, pack_rows, trajectory_row
from art_protocol.wire import LogRequest, TrajectoryGroupBody


def log(
    folder: Path,
    trajectories: Iterable[Trajectory | BaseException] | Iterable[TrajectoryGroup],
    split: str,
    metrics: dict[str, float],
    step: int | None,
) -> dict[str, float]:
    """Writes the trajectories and metrics of a step to a model's folder, and returns the metrics. Blocks on the disk.

    Raises:
        ValueError: a trajectory or metric cannot be written, and the message names the field; or the folder belongs to a
            server's model, and only the server may write there.
    """
    fields, *groups = build_log_request(trajectories, split, metrics, step).split(b"\n")
    request = LogRequest.model_validate_json(fields)
    bodies = [TrajectoryGroupBody.model_validate_json(group) for group in groups]
    return _write(folder, request.model_copy(update={"groups": bodies}))


_writing = threading.Lock()
"""Held while a history is read and written whole. Concurrent calls of `log` run in threads."""


def _write(folder: Path, request: LogRequest) -> dict[str, float]:
    if (folder / "model.json").exists():
        raise ValueError(
            f"{folder} belongs to a model on an art-server: call `await model.register(backend)` before `log`, or use "
            "another name or base_path"
        )
    step, metrics = request.step or 0, log_metrics(request)
    if request.groups:
        file = folder / "trajectories" / request.split / f"{step:04d}.jsonl.gz"
        write_whole(file, pack_rows(map(trajectory_row, request.groups)))
    with _writing:
        rows = _rows(folder)
        new_row = history_row(step, metrics, datetime.now(UTC).isoformat())
        earlier_row = next((row for row in rows if row.get("step") == step), None)
        if earlier_row is None:
            rows.append(new_row)
        else:
            earlier_row |= merged_row(earlier_row, new_row)
        text = "".join(json.dumps(row) + "\n" for row in rows)
        write_whole(folder / "history.jsonl", text.encode())
    return metrics


def sums(folder: Path) -> dict[str, float]:
    """The newest sums over the run ("costs/cum/all") in a model's history. Blocks on the disk."""
    newest: dict[str, float] = {}
    for row in _rows(folder):
        newest |= {key: value for key, value in row.items() if "/cum/" in key}
    return newest


def _rows(folder: Path) -> list[dict[str, Any]]:
    history = folder / "history.jsonl"
    rows: list[dict[str, Any]] = []
    for line in history.read_bytes().splitlines() if history.exists() else ():
        with contextlib.suppress(ValueError):  # a server that was killed may have left half a line
            rows.append(json.loads(line))
    return rows
