"""The metrics of a row in history.jsonl: ART's names, from the trajectories of a train or log call."""

import statistics
from collections.abc import Mapping, Sequence

from art.wire import TrajectoryGroupBody


def trajectory_metrics(groups: Sequence[TrajectoryGroupBody], split: str) -> dict[str, float]:
    """Means over trajectories, under "SPLIT/": reward, reward_std_dev (mean over groups of more than one trajectory of
    the population standard deviation), exception_rate, and each metric that trajectories or groups carry."""
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


def step_metrics(tokens_of_steps: Mapping[int, int]) -> dict[str, float]:
    """The steps that sampled a batch: the one that most tokens came from, and the first and the last. Nothing where no
    record tells."""
    if not tokens_of_steps:
        return {}
    most = max(tokens_of_steps, key=lambda step: (tokens_of_steps[step], step))
    return {
        "sampled_step": float(most),
        "sampled_step_min": float(min(tokens_of_steps)),
        "sampled_step_max": float(max(tokens_of_steps)),
    }


def _means(rows: Sequence[dict[str, float | int | bool]], prefix: str) -> dict[str, float]:
    keys = {key for row in rows for key in row}
    return {
        prefix + key: statistics.fmean(float(row[key]) for row in rows if key in row)
        for key in sorted(keys)
    }
