"""What a model's folder keeps of a log or train call: the metrics of a row of history.jsonl, under ART's names, and the
lines of a trajectories file. The server writes them, and `art_compat.offline_log` for models without a server.

A trajectories file is compressed JSONL. It holds each message of a trajectory once, and no tokens.
"""

import gzip
import hashlib
import io
import json
import statistics
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, cast

from art_protocol.wire import (
    BY_REFERENCE,
    TOKEN_FIELDS,
    HistoryBody,
    LogRequest,
    TrajectoryGroupBody,
)

LEFT_OUT = TOKEN_FIELDS | {BY_REFERENCE}
"""The fields of choices that are not stored. The step's record of tokens has the trained tokens."""
BEGINS_WITH = "begins_with"
"""The field of a stored history that begins like an earlier history of the same trajectory: `history` is the index of the
earlier history (0: the trajectory's own conversation), `entries` the number of its first entries, which the later history
leaves out."""


def trajectory_metrics(groups: Sequence[TrajectoryGroupBody], split: str) -> dict[str, float]:
    """Means under "SPLIT/": reward, exception_rate, each metric of trajectories and, as "group_NAME", of groups.
    reward_std_dev is the mean population standard deviation of the groups with more than one trajectory."""
    rewards: list[float] = []
    deviations: list[float] = []
    num_failed = 0
    for group in groups:
        group_rewards = [trajectory.reward for trajectory in group.trajectories]
        rewards += group_rewards
        num_failed += len(group.exceptions)
        if len(group_rewards) > 1:
            deviations.append(statistics.pstdev(group_rewards))
    metrics: dict[str, float] = {}
    if rewards:
        metrics[f"{split}/reward"] = statistics.fmean(rewards)
    if deviations:
        metrics[f"{split}/reward_std_dev"] = statistics.fmean(deviations)
    if rewards or num_failed:
        metrics[f"{split}/exception_rate"] = num_failed / (num_failed + len(rewards))
    of_trajectories = [trajectory.metrics for group in groups for trajectory in group.trajectories]
    metrics |= _means(of_trajectories, f"{split}/")
    return metrics | _means([group.metrics for group in groups], f"{split}/group_")


def without_texts(group: TrajectoryGroupBody) -> TrajectoryGroupBody:
    """A group without its texts, for `trajectory_metrics`."""
    empty: dict[str, Any] = {"messages_and_choices": [], "additional_histories": [], "tools": None}
    empty |= {"metadata": {}, "logs": [], "turn_targets": None}
    trajectories = [trajectory.model_copy(update=empty) for trajectory in group.trajectories]
    return group.model_copy(update={"trajectories": trajectories})


def log_metrics(request: LogRequest) -> dict[str, float]:
    """The metrics of a log call: the metrics of its trajectories, then the metrics in the request. The latter are under
    "SPLIT/" unless their names contain a "/"."""
    metrics = trajectory_metrics(request.groups, request.split)
    for name, value in request.metrics.items():
        metrics[name if "/" in name else f"{request.split}/{name}"] = value
    return metrics


def history_row(step: int, metrics: Mapping[str, float], recorded_at: str) -> dict[str, Any]:
    return {**metrics, "step": step, "training_step": step, "recorded_at": recorded_at}


def merged_row(row: Mapping[str, Any], later: Mapping[str, Any]) -> dict[str, Any]:
    """A step's row with values that came later. The time remains the step's."""
    return {**row, **later, "recorded_at": row.get("recorded_at", later["recorded_at"])}


def trajectory_row(
    group: TrajectoryGroupBody, turns: Sequence[Sequence[dict[str, Any]]] | None = None
) -> dict[str, Any]:
    """One line of a trajectories file, which `read_row` reads: ART's JSONL format, plus failed rollouts, the group's fields
    and, for a trained group, the `turns` of each trajectory (`jobs.turns.TurnTrace`)."""
    row = group.model_dump(mode="json", exclude={"trajectories"})
    row["trajectories"] = rows = list[dict[str, Any]]()
    for body in group.trajectories:
        left_out = {"messages_and_choices", "additional_histories", "turn_targets"}
        own, *others = _stored_histories([body, *body.additional_histories])
        fields = body.model_dump(mode="json", exclude=left_out)
        messages = own.pop("messages_and_choices")
        rows.append({"messages": messages, **fields, "additional_histories": others})
    if turns is not None:
        for trajectory, trajectory_turns in zip(rows, turns, strict=True):
            trajectory["turns"] = trajectory_turns
    return row


def _stored_histories(histories: Sequence[HistoryBody]) -> list[dict[str, Any]]:
    """The conversations of a trajectory. If a later conversation begins like an earlier one, the common entries are stored
    in the earlier one only."""
    prefixes: dict[bytes, tuple[int, int]] = {}  # digest of a history's first entries -> the history and their number
    stored: list[dict[str, Any]] = []
    for number, history in enumerate(histories):
        entries = [_without_tokens(entry) for entry in history.messages_and_choices]
        digest, begins_with = hashlib.sha256(), (0, 0)
        for count, entry in enumerate(entries, 1):
            digest.update(json.dumps(entry).encode() + b"\n")
            prefix = prefixes.setdefault(digest.digest(), (number, count))
            if prefix[0] != number:
                begins_with = prefix
        fields = history.model_dump(mode="json", include={"tools", "turn_rewards", "turn_advantages"})
        if begins_with[1]:
            reference = {"history": begins_with[0], "entries": begins_with[1]}
            fields = {BEGINS_WITH: reference, **fields}
        stored.append({"messages_and_choices": entries[begins_with[1] :], **fields})
    return stored


def _without_tokens(entry: dict[str, Any]) -> dict[str, Any]:
    if not isinstance(entry.get("message"), dict):
        return entry
    return {name: value for name, value in entry.items() if name not in LEFT_OUT}


def pack_rows(rows: Iterable[dict[str, Any]]) -> bytes:
    """The content of a trajectories file, or of a part of the file. Joined parts are a file, because gzip reads them in a
    row. Encodes one group at a time."""
    content = io.BytesIO()
    with gzip.GzipFile(fileobj=content, mode="wb", mtime=0) as packed:
        for row in rows:
            packed.write(json.dumps(row).encode() + b"\n")
    return content.getvalue()


def read_rows(file: Path) -> Iterator[dict[str, Any]]:
    """The groups of a trajectories file.

    Raises:
        FileNotFoundError: there is no such file.
        ValueError: a line is no JSON.
    """
    with gzip.open(file, "rb") as lines:
        yield from map(read_row, lines)


def read_row(line: bytes | str) -> Any:
    """The group of a line, with whole conversations.

    Raises:
        ValueError: the line is no JSON.
    """
    return whole_row(json.loads(line))


def whole_row(row: Any) -> Any:
    """A stored group, changed in place, with whole conversations. Any other JSON is returned as it is."""
    for trajectory in _dicts(row, "trajectories"):
        _make_whole(trajectory)
    return row


def _make_whole(trajectory: dict[str, Any]) -> None:
    """Puts the entries that later histories of a stored trajectory leave out (BEGINS_WITH) back into these histories."""
    whole: list[Any] = [trajectory.get("messages")]
    for history in _dicts(trajectory, "additional_histories"):
        begins_with: Any = history.pop(BEGINS_WITH, None)
        entries: Any = history.get("messages_and_choices")
        if isinstance(begins_with, dict) and isinstance(entries, list):
            reference = cast("dict[str, Any]", begins_with)
            number, count = reference.get("history"), reference.get("entries")
            is_known = isinstance(number, int) and 0 <= number < len(whole)
            earlier: Any = whole[cast(int, number)] if is_known else None
            if isinstance(earlier, list) and isinstance(count, int):
                entries = [*cast("list[Any]", earlier)[:count], *cast("list[Any]", entries)]
                history["messages_and_choices"] = entries
        whole.append(entries)


def _dicts(row: Any, name: str) -> list[dict[str, Any]]:
    values: Any = cast("dict[str, Any]", row).get(name) if isinstance(row, dict) else None
    entries: list[Any] = cast("list[Any]", values) if isinstance(values, list) else []
    return [cast("dict[str, Any]", entry) for entry in entries if isinstance(entry, dict)]


def _means(rows: Sequence[dict[str, float | int | bool]], prefix: str) -> dict[str, float]:
    values: dict[str, list[float]] = {}
    for row in rows:
        for key, value in row.items():
            values.setdefault(key, []).append(float(value))
    return {prefix + key: statistics.fmean(values[key]) for key in sorted(values)}
