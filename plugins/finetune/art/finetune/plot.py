"""The plot of a run's rewards: mean, mean of what was trained, and validation with its interval."""

import io
from collections.abc import Sequence
from typing import Any

from art.finetune.history import EpochRow, ValidationRow

# The page's colours of lines (art_watch/page/style.css), on white.
MEAN, TRAINED, VALIDATION = "#b3541e", "#2d7d5a", "#8a3f8f"


def draw(epochs: Sequence[EpochRow], validations: Sequence[ValidationRow], mark: str) -> bytes:
    """A PNG file that contains `mark` as text, so that a reader sees what it was drawn from.

    Raises:
        ModuleNotFoundError: matplotlib is not installed.
    """
    # Imported here: matplotlib comes with the extra `finetune`, and takes a second to load.
    from matplotlib.figure import Figure
    from matplotlib.ticker import MaxNLocator

    figure: Any = Figure(figsize=(9, 5.25), layout="constrained")  # Any: matplotlib declares options as unknown
    axes = figure.subplots()
    means = {row.epoch: row.avg_reward for row in epochs if row.avg_reward is not None}
    trained = {row.epoch: row.filtered_avg_reward for row in epochs if row.filtered_avg_reward is not None}
    if means:
        axes.plot(*_points(means), color=MEAN, marker="o", label="mean reward of all rollouts")
    if trained:
        axes.plot(*_points(trained), color=TRAINED, marker="s", ls="--", label="mean reward of trained rollouts")
    _add_validations(axes, validations)
    axes.set_xlabel("epoch")
    axes.set_ylabel("reward")
    axes.xaxis.set_major_locator(MaxNLocator(integer=True, min_n_ticks=1))
    axes.grid(alpha=0.3)
    if axes.get_legend_handles_labels()[0]:
        axes.legend()
    picture = io.BytesIO()
    figure.savefig(picture, format="png", dpi=200, metadata={"Description": mark})
    return picture.getvalue()


def _add_validations(axes: Any, validations: Sequence[ValidationRow]) -> None:
    means = {row.epoch: row.avg_reward for row in validations if row.avg_reward is not None}
    if not means:
        return
    axes.plot(*_points(means), color=VALIDATION, marker="D", label="validation, 95% interval")
    ends = {row.epoch: row.interval for row in validations if row.interval is not None}
    lows = [ends[epoch][0] for epoch in ends]
    highs = [ends[epoch][1] for epoch in ends]
    axes.fill_between(list(ends), lows, highs, color=VALIDATION, alpha=0.12, lw=0)
    axes.vlines(list(ends), lows, highs, color=VALIDATION, lw=1.5)  # a single validation has no area


def _points(values: dict[int, float]) -> tuple[list[int], list[float]]:
    return list(values), list(values.values())
