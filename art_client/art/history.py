"""What a model's folder keeps of a log or train call: the metrics of a row of history.jsonl, under ART's names, and the
lines of a trajectories file. The server writes them, and `art.compat.unserved` for models without a server."""

import statistics
from collections.abc import Mapping, Sequence
from typing import Any

from art.wire import LogRequest, TrajectoryGroupBody


def trajectory_metrics(groups: Sequence[TrajectoryGroupBody], split: str) -> dict[str, float]:
    """Means under "SPLIT/": reward, exception_rate, each metric of trajectories and, as "group_NAME", of groups.
    reward_std_dev is the mean population standard deviation of the groups with more than one trajectory."""
    trajectories = [trajectory for group in groups for trajectory in group.trajectories]
    num_failed = sum(len(group.exceptions) for group in groups)
    metrics: dict[str, float] = {}
    if trajectories:
        metrics[f"{split}/reward"] = statistics.fmean(t.reward for t in trajectories)
    deviations = [
        statistics.pstdev(t.reward for t in group.trajectories)
        for group in groups
        if len(group.trajectories) > 1
    ]
    if deviations:
        metrics[f"{split}/reward_std_dev"] = statistics.fmean(deviations)
    if trajectories or num_failed:
        metrics[f"{split}/exception_rate"] = num_failed / (num_failed + len(trajectories))
    metrics |= _means([t.metrics for t in trajectories], f"{split}/")
    return metrics | _means([group.metrics for group in groups], f"{split}/group_")


def log_metrics(request: LogRequest) -> dict[str, float]:
    """The metrics of a log call: those of its trajectories, then the given ones, under "SPLIT/" unless their name has a
    "/" already."""
    return trajectory_metrics(request.groups, request.split) | {
        key if "/" in key else f"{request.split}/{key}": value
        for key, value in request.metrics.items()
    }


def history_row(step: int, metrics: Mapping[str, float], recorded_at: str) -> dict[str, Any]:
    return {**metrics, "step": step, "training_step": step, "recorded_at": recorded_at}


def merged_row(row: Mapping[str, Any], later: Mapping[str, Any]) -> dict[str, Any]:
    """A step's row with values that came later. Its time remains that of the step."""
    return {**row, **later, "recorded_at": row.get("recorded_at", later["recorded_at"])}


def trajectory_row(
    group: TrajectoryGroupBody, turns: Sequence[Sequence[dict[str, Any]]] | None = None
) -> dict[str, Any]:
    """One line of a trajectories file: ART's JSONL format, plus failed rollouts, the group's fields and, for a trained
    group, `turns` of its trajectories (`jobs.turns.TurnTrace`)."""
    row = group.model_dump(mode="json", exclude={"trajectories"})
    row["trajectories"] = [
        {"messages": body.pop("messages_and_choices"), **body}
        for body in (trajectory.model_dump(mode="json") for trajectory in group.trajectories)
    ]
    for trajectory, of_turns in zip(row["trajectories"], turns or (), strict=turns is not None):
        trajectory["turns"] = of_turns
    return row


def _means(rows: Sequence[dict[str, float | int | bool]], prefix: str) -> dict[str, float]:
    keys = {key for row in rows for key in row}
    return {
        prefix + key: statistics.fmean(float(row[key]) for row in rows if key in row)
        for key in sorted(keys)
    }
