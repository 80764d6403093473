"""The history of a model that no server keeps, written by the program itself: of a prompted model, and of one that is not
registered. The layout is that of a server's folder:

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
        ValueError: they cannot be written, the message names the field; or the folder belongs to a model of a server,
            which alone may write there.
    """
    fields, *groups = build_log_request(trajectories, split, metrics, step).split(b"\n")
    request = LogRequest.model_validate_json(fields)
    bodies = [TrajectoryGroupBody.model_validate_json(group) for group in groups]
    return _write(folder, request.model_copy(update={"groups": bodies}))


_writing = threading.Lock()
"""A history is read and written whole, by threads of concurrent calls."""


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
        row = history_row(step, metrics, datetime.now(UTC).isoformat())
        same = next((each for each in rows if each.get("step") == step), None)
        if same is None:
            rows.append(row)
        else:
            same |= merged_row(same, row)
        text = "".join(json.dumps(each) + "\n" for each in rows)
        write_whole(folder / "history.jsonl", text.encode())
    return metrics


def sums(folder: Path) -> dict[str, float]:
    """The newest sums over the run ("costs/cum/all") in a model's history. Blocks on the disk."""
    return {key: value for row in _rows(folder) for key, value in row.items() if "/cum/" in key}


def _rows(folder: Path) -> list[dict[str, Any]]:
    history = folder / "history.jsonl"
    rows: list[dict[str, Any]] = []
    for line in history.read_bytes().splitlines() if history.exists() else ():
        with contextlib.suppress(ValueError):  # a server that was killed may have left half a line
            rows.append(json.loads(line))
    return rows
