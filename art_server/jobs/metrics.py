"""The metrics of a row in history.jsonl, under ART's names, from the trajectories of a train or log call."""

import asyncio
import statistics
from collections.abc import Mapping, Sequence

from art.wire import LogReply, LogRequest, TrajectoryGroupBody
from art_server.errors import InvalidInput
from art_server.store.registry import Model


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


def step_metrics(tokens_of_steps: Mapping[int, int]) -> dict[str, float]:
    """The first and the last step that sampled tokens of a batch, and the step that sampled most of them. Empty if no
    token's step is known."""
    if not tokens_of_steps:
        return {}
    most = max(tokens_of_steps, key=lambda step: (tokens_of_steps[step], step))
    return {
        "sampled_step": float(most),
        "sampled_step_min": float(min(tokens_of_steps)),
        "sampled_step_max": float(max(tokens_of_steps)),
    }


async def write_log(model: Model, request: LogRequest) -> LogReply:
    """Writes the trajectories and metrics of a step to disk.

    Raises:
        InvalidInput: the step does not exist yet.
    """
    step = model.step if request.step is None else request.step
    if step > model.step:
        raise InvalidInput(
            f"model '{model.id}' has no step {step} yet: its newest is {model.step}; log for that step, or leave "
            "`step` out",
            code="step_beyond_newest",
            param="step",
        )
    metrics = trajectory_metrics(request.groups, request.split)
    metrics |= {
        key if "/" in key else f"{request.split}/{key}": value
        for key, value in request.metrics.items()
    }
    if request.groups:
        await asyncio.to_thread(
            model.folder.write_trajectories, request.split, step, request.groups
        )
    await asyncio.to_thread(model.folder.add_history, step, metrics)
    return LogReply(step=step, metrics=metrics)


def _means(rows: Sequence[dict[str, float | int | bool]], prefix: str) -> dict[str, float]:
    keys = {key for row in rows for key in row}
    return {
        prefix + key: statistics.fmean(float(row[key]) for row in rows if key in row)
        for key in sorted(keys)
    }
