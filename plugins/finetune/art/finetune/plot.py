"""The plot of a run's rewards: the mean of all rollouts, the mean of trained rollouts, and validations with their intervals."""

import io
from typing import Any

from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator

from art.finetune.run_record import State

# The page's colours of lines (art_watch/page/style.css), on white.
MEAN, TRAINED, VALIDATION = "#b3541e", "#2d7d5a", "#8a3f8f"


def draw(state: State) -> bytes:
    """The plot as a PNG file."""
    # Not of pyplot, which keeps each figure in memory until the figure is closed.
    figure: Any = Figure(figsize=(9, 5.25), layout="constrained")  # Any: matplotlib declares options as unknown
    axes = figure.subplots()
    means = {row.epoch: row.avg_reward for row in state.epochs if row.avg_reward is not None}
    trained = {row.epoch: row.filtered_avg_reward for row in state.epochs if row.filtered_avg_reward is not None}
    validations = {row.epoch: row.avg_reward for row in state.validations if row.avg_reward is not None}
    for values, label, look in (
        (means, "mean reward of all rollouts", {"color": MEAN, "marker": "o"}),
        (trained, "mean reward of trained rollouts", {"color": TRAINED, "marker": "s", "ls": "--"}),
        (validations, "validation, 95% interval", {"color": VALIDATION, "marker": "D"}),
    ):
        if values:
            axes.plot(list(values), list(values.values()), label=label, **look)
    intervals = {row.epoch: row.interval for row in state.validations if row.interval is not None}
    if intervals:
        lows, highs = zip(*intervals.values(), strict=True)
        axes.fill_between(list(intervals), lows, highs, color=VALIDATION, alpha=0.12, lw=0)
        axes.vlines(list(intervals), lows, highs, color=VALIDATION, lw=1.5)  # a single validation has no area
    axes.set_xlabel("epoch")
    axes.set_ylabel("reward")
    axes.xaxis.set_major_locator(MaxNLocator(integer=True, min_n_ticks=1))
    axes.grid(alpha=0.3)
    if axes.get_legend_handles_labels()[0]:
        axes.legend()
    picture = io.BytesIO()
    figure.savefig(picture, format="png", dpi=200)
    return picture.getvalue()
