"""Rollouts on disk as a table with one row for each trajectory. Reads the files of ART's servers (Parquet, JSONL) and of
art-servers (JSONL)."""

import json
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, cast

import polars as pl
from tqdm.auto import tqdm

from art.utils.output_dirs import get_models_dir
from art.utils.s3 import pull_model_from_s3
from art.utils.trajectory_logging import read_rows
from art_compat.aliases import alias
from art_compat.models import Model

TEXT = pl.String()
FUNCTION = pl.Struct({"name": TEXT, "arguments": TEXT})
MESSAGE = pl.Struct(
    {
        "role": TEXT,
        "content": TEXT,
        "tool_calls": pl.List(pl.Struct({"function": FUNCTION})),
        "trainable": pl.Boolean(),
    }
)
ENDINGS = ("jsonl.gz", "jsonl", "parquet")
COLUMNS: dict[str, Any] = {
    "model": TEXT,
    "split": TEXT,
    "step": pl.Int64(),
    "reward": pl.Float64(),
    "group_number": pl.Int64(),
    "messages": pl.List(MESSAGE),
    "logs": pl.List(TEXT),
    "group_logs": pl.List(TEXT),
}


async def load_trajectories(
    project_name: str,
    models: Sequence[str] | None = None,
    debug: bool = False,
    art_path: str | None = None,
) -> pl.DataFrame:
    """The rollouts of a project's models (None: all), under `art_path` (".art").

    Columns: model, split, step, reward, group_number (unique in the table), messages, logs, group_logs; where rollouts
    have them, metric_*, group_metric_* (floats), metadata_*, group_metadata_* (texts). No rollouts: a table without columns.
    """
    root = Path(get_models_dir(project_name, art_path))
    files = [file for file in _files(root) if models is None or file.parents[2].name in models]
    rows: list[dict[str, Any]] = []
    num_groups = 0
    for file in tqdm(files, desc="Loading trajectories", unit="file", disable=not debug):
        model, split = file.parents[2].name, file.parent.name
        for group in read_rows(file):
            num_groups += 1
            of_group = {"model": model, "split": split, "step": _step(file)}
            of_group |= {"group_number": num_groups, **_group_columns(group)}
            rows += [of_group | _columns(trajectory) for trajectory in group["trajectories"]]
    names: dict[str, None] = {}
    for row in rows:
        names |= {name: None for name in row if name not in COLUMNS}
    numbers = ("metric_", "group_metric_")
    extra = {name: pl.Float64() if name.startswith(numbers) else TEXT for name in names}
    # Without a schema polars takes the types from the first 100 rows.
    return pl.DataFrame(rows, schema={**COLUMNS, **extra}) if rows else pl.DataFrame()


async def pull_model_trajectories(model: Model) -> None:
    """Copies a model's rollouts and history from the bucket BACKUP_BUCKET. `art copy` and the methods of backends put
    checkpoints there only: `art show --url` reads the rollouts of a server."""
    await pull_model_from_s3(model.name, model.project, exclude=["checkpoints"])


def _files(root: Path) -> list[Path]:
    return sorted(file for file in root.glob("*/trajectories/*/*") if _step(file) is not None)


def _step(file: Path) -> int | None:
    """The step of a file's rollouts; None for other files."""
    name, _, ending = file.name.partition(".")
    return int(name) if name.isdecimal() and ending in ENDINGS else None


def _columns(trajectory: Mapping[str, Any]) -> dict[str, Any]:
    return {
        "reward": float(trajectory["reward"]),
        "messages": [_message(entry) for entry in trajectory["messages"]],
        "logs": trajectory.get("logs") or [],
        **_numbers("metric_", trajectory.get("metrics")),
        **_texts("metadata_", trajectory.get("metadata")),
    }


def _group_columns(group: Mapping[str, Any]) -> dict[str, Any]:
    return {
        "group_logs": group.get("logs") or [],
        **_numbers("group_metric_", group.get("metrics")),
        **_texts("group_metadata_", group.get("metadata")),
    }


def _numbers(prefix: str, values: Mapping[str, Any] | None) -> dict[str, float]:
    return {f"{prefix}{name}": float(value) for name, value in (values or {}).items()}


def _texts(prefix: str, values: Mapping[str, Any] | None) -> dict[str, str | None]:
    return {f"{prefix}{name}": None if value is None else str(value) for name, value in (values or {}).items()}


def _message(entry: Mapping[str, Any]) -> dict[str, Any]:
    """A row's message. A choice has its message inside."""
    message = entry.get("message", entry)
    content = message.get("content")
    return {
        "role": message.get("role"),
        "content": content if isinstance(content, str | None) else json.dumps(content),
        "tool_calls": list(_calls(message.get("tool_calls"))),
        "trainable": bool(entry.get("trainable", "message" in entry)),
    }


def _calls(calls: Any) -> Iterator[dict[str, Any]]:  # Any: arbitrary JSON
    for call in cast(list[Any], calls or []):
        function: dict[str, Any] = call.get("function") or {}
        names = ("name", "arguments")
        yield {"function": {name: function.get(name) for name in names}}


alias(__name__, "art.utils.benchmarking.pull_model_trajectories")
