"""Files of trajectory groups: JSONL as servers write it, and ART's Parquet (extra `plotting`)."""

import io
import json
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from art.files import write_whole
from art.trajectories import Trajectory, TrajectoryGroup
from art.utils.strip_logprobs import strip_logprobs
from art_protocol.history import read_row
from art_protocol.history import read_rows as read_lines

if TYPE_CHECKING:
    import polars as pl

VERSION = 2
VERSION_KEY = "art.trajectory_parquet.version"


def serialize_trajectory_groups(trajectory_groups: Iterable[TrajectoryGroup]) -> str:
    """The groups as JSONL, one line for each group, without log-probabilities, for `deserialize_trajectory_groups`."""
    return "\n".join(json.dumps(trajectory_group_to_dict(group)) for group in trajectory_groups)


def deserialize_trajectory_groups(serialized: str) -> list[TrajectoryGroup]:
    """The groups of `serialize_trajectory_groups`, or of the lines of a server's trajectories file.

    Raises:
        ValueError: a line is not JSON, or its trajectories are invalid.
    """
    # Not `splitlines`, which also cuts at U+2028 in a text.
    rows = [read_row(line) for line in serialized.split("\n") if line.strip()]
    return [_to_group(row) for row in rows]


def trajectory_group_to_dict(trajectory_group: TrajectoryGroup) -> dict[str, Any]:
    """A group's fields. Failed rollouts are left out."""
    fields = trajectory_group.model_dump(mode="json", exclude={"trajectories", "exceptions"})
    return fields | {"trajectories": [trajectory_to_dict(trajectory) for trajectory in trajectory_group]}


def trajectory_to_dict(trajectory: Trajectory) -> dict[str, Any]:
    """A trajectory's fields, without log-probabilities."""
    return strip_logprobs(trajectory.model_dump(mode="json"))


def write_trajectory_groups_parquet(trajectory_groups: Iterable[TrajectoryGroup], path: str | Path) -> None:
    """Writes the groups as ART's Parquet, version 2: a row for each trajectory, with the record as `trajectory_json` and
    the record's parts as columns. The file is complete or absent."""
    import polars as pl

    rows = [
        _row(group_index, group, trajectory_index, trajectory)
        for group_index, group in enumerate(trajectory_groups)
        for trajectory_index, trajectory in enumerate(group)
    ]
    content = io.BytesIO()
    table = pl.DataFrame(rows, schema=_schema())
    table.write_parquet(content, compression="zstd", metadata={VERSION_KEY: str(VERSION)})
    write_whole(Path(path), content.getvalue())


def read_trajectory_groups_parquet(path: str | Path) -> list[TrajectoryGroup]:
    """The groups of a Parquet file of ART's servers or of `write_trajectory_groups_parquet`.

    Raises:
        ValueError: the trajectories are invalid.
    """
    return [_to_group(group) for group in read_rows(Path(path))]


def read_rows(file: Path) -> Iterator[dict[str, Any]]:
    """The groups of a Parquet or JSONL file as dictionaries, with `messages` in their trajectories. ART's servers do not
    compress their JSONL."""
    if file.suffix != ".parquet":
        lines = read_lines(file) if file.suffix == ".gz" else map(read_row, file.read_bytes().splitlines())
        for group in lines:
            yield group | {"trajectories": [_with_messages(trajectory) for trajectory in group["trajectories"]]}
        return
    import polars as pl

    groups: dict[int, dict[str, Any]] = {}
    for row in pl.read_parquet(file).iter_rows(named=True):
        group = json.loads(row.get("group_json") or "{}")
        known = groups.setdefault(row.get("group_index", 0), group | {"trajectories": []})
        known["trajectories"].append(_from_row(row))
    yield from groups.values()


def _schema() -> "dict[str, pl.DataType]":
    import polars as pl

    text, number = pl.String(), pl.Int64()
    names = ("role", "content", "tool_calls", "tool_call_id")
    message = pl.Struct({**dict.fromkeys(names, text), "trainable": pl.Boolean()})
    return {
        **dict.fromkeys(("format_version", "group_index", "trajectory_index"), number),
        **dict.fromkeys(("group_json", "trajectory_json", "group_metadata", "group_metrics"), text),
        "group_logs": pl.List(text),
        "reward": pl.Float64(),
        **dict.fromkeys(("metrics", "metadata", "tools"), text),
        "logs": pl.List(text),
        "messages": pl.List(message),
    }


def _row(group_index: int, group: TrajectoryGroup, trajectory_index: int, trajectory: Trajectory) -> dict[str, Any]:
    fields = trajectory.model_dump(mode="json")
    of_group = group.model_dump(mode="json", exclude={"trajectories"})
    return {
        "format_version": VERSION,
        "group_index": group_index,
        "trajectory_index": trajectory_index,
        "group_json": json.dumps(of_group),
        "trajectory_json": json.dumps(fields),
        "group_metadata": json.dumps(of_group["metadata"]),
        "group_metrics": json.dumps(of_group["metrics"]),
        "group_logs": of_group["logs"],
        "reward": fields["reward"],
        "metrics": json.dumps(fields["metrics"]),
        "metadata": json.dumps(fields["metadata"]),
        "tools": json.dumps(fields["tools"]) if fields["tools"] else None,
        "logs": fields["logs"],
        "messages": [_message(entry) for entry in fields["messages_and_choices"]],
    }


def _message(entry: Mapping[str, Any]) -> dict[str, Any]:
    message = entry.get("message", entry)
    content, calls = message.get("content"), message.get("tool_calls")
    return {
        "role": message.get("role"),
        "content": content if isinstance(content, str | None) else json.dumps(content),
        "tool_calls": json.dumps(calls) if calls else None,
        "tool_call_id": message.get("tool_call_id"),
        "trainable": "message" in entry,
    }


def _from_row(row: Mapping[str, Any]) -> dict[str, Any]:
    """A trajectory from the record in a row, or, in files of version 1, from the row's columns."""
    if row.get("trajectory_json"):
        return _with_messages(json.loads(row["trajectory_json"]))
    messages = [_from_columns(columns) for columns in row["messages"] or ()]
    texts = {name: json.loads(row.get(name) or "{}") for name in ("metrics", "metadata")}
    tools = json.loads(row["tools"]) if row.get("tools") else None
    logs: list[str] = row.get("logs") or []
    return {"reward": row["reward"], "messages": messages, "tools": tools, "logs": logs, **texts}


def _from_columns(columns: Mapping[str, Any]) -> dict[str, Any]:
    message = {name: columns.get(name) for name in ("role", "content", "tool_call_id")}
    message = {name: value for name, value in message.items() if value is not None}
    if columns.get("tool_calls"):
        message["tool_calls"] = json.loads(columns["tool_calls"])
    return message


def _with_messages(trajectory: Mapping[str, Any]) -> dict[str, Any]:
    """A trajectory whose turns are `messages`, as in servers' files; in records they are `messages_and_choices`."""
    fields = dict(trajectory)
    if "messages_and_choices" in fields:
        fields["messages"] = fields.pop("messages_and_choices")
    return fields


def _to_group(group: Mapping[str, Any]) -> TrajectoryGroup:
    kept = {name: group[name] for name in ("metadata", "metrics", "logs") if group.get(name)}
    return TrajectoryGroup([_to_trajectory(trajectory) for trajectory in group["trajectories"]], **kept)


def _to_trajectory(fields: Mapping[str, Any]) -> Trajectory:
    fields = _with_messages(fields)
    named = {name: value for name, value in fields.items() if name in Trajectory.model_fields}
    return Trajectory.model_validate({**named, "messages_and_choices": fields["messages"]})
