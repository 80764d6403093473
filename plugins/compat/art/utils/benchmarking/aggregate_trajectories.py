"""Means of rollouts for each model, split and step."""

from collections.abc import Sequence

import polars as pl

from art.utils.benchmarking.load_trajectories import load_trajectories

STEP = ["model", "split", "step"]


async def load_aggregated_trajectories(
    project_name: str,
    models: Sequence[str] | None = None,
    metrics: Sequence[str] | None = None,
    art_path: str | None = None,
) -> pl.DataFrame:
    """A row for each model, split and step. `reward` and the columns metric_* are means of the groups' means, and
    `reward_std_dev` is the mean of the groups' sample standard deviations. `metrics` chooses the metrics (None: all)."""
    table = await load_trajectories(project_name, models, art_path=art_path)
    if table.is_empty():
        return table
    wanted = None if metrics is None else {f"metric_{name}" for name in metrics}
    names = [name for name in table.columns if name.startswith("metric_") and (wanted is None or name in wanted)]
    means = [pl.col(name).mean() for name in ("reward", *names)]
    groups = table.group_by([*STEP, "group_number"]).agg(*means, pl.col("reward").std().alias("reward_std_dev"))
    return groups.group_by(STEP).agg(*means, pl.col("reward_std_dev").mean()).sort(STEP)


async def load_latest_metrics(
    project_name: str,
    models: Sequence[str] | None = None,
    split: str = "val",
    metrics: Sequence[str] | None = None,
    art_path: str | None = None,
) -> pl.DataFrame:
    """The row of each model's newest step of a split."""
    table = await load_aggregated_trajectories(project_name, models, metrics, art_path)
    if table.is_empty():
        return table
    of_split = table.filter(pl.col("split") == split)
    # The table is sorted by step, so the last row of a model is of its newest step.
    return of_split.group_by("model", maintain_order=True).last().sort("model")
