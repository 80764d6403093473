"""The plot of a run's rewards: the mean of all rollouts, the mean of trained rollouts, and validations with their intervals. The plot
of a sweep: the mean reward and the validations of each run, by rollouts."""

import io
import itertools
from collections.abc import Mapping
from typing import Any

from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator

from art.estimates import Estimate
from art.finetune.run_record import State

# The page's colours of lines (art_watch/page/style.css), on white.
MEAN, TRAINED, VALIDATION = "#b3541e", "#2d7d5a", "#8a3f8f"


def draw(state: State) -> bytes:
    """The plot as a PNG file."""
    # Not of pyplot, which keeps each figure in memory until the figure is closed.
    figure: Any = Figure(figsize=(9, 5.25), layout="constrained")  # Any: matplotlib declares options as unknown
    axes = figure.subplots()
    means = {row.number: row.avg_reward for row in state.epochs if row.avg_reward is not None}
    trained = {row.number: row.filtered_avg_reward for row in state.epochs if row.filtered_avg_reward is not None}
    validations = {row.number: row.avg_reward for row in state.validations if row.avg_reward is not None}
    for values, label, look in (
        (means, "mean reward of all rollouts", {"color": MEAN, "marker": "o"}),
        (trained, "mean reward of trained rollouts", {"color": TRAINED, "marker": "s", "ls": "--"}),
        (validations, "validation, 95% interval", {"color": VALIDATION, "marker": "D"}),
    ):
        if values:
            axes.plot(list(values), list(values.values()), label=label, **look)
    intervals = {row.number: row.interval for row in state.validations if row.interval is not None}
    if intervals:
        lows, highs = zip(*intervals.values(), strict=True)
        axes.fill_between(list(intervals), lows, highs, color=VALIDATION, alpha=0.12, lw=0)
        axes.vlines(list(intervals), lows, highs, color=VALIDATION, lw=1.5)  # a single validation has no area
    has_batches = any(row.batch is not None for row in (*state.epochs, *state.validations))
    axes.set_xlabel("step" if has_batches else "epoch")
    axes.set_ylabel("reward")
    axes.xaxis.set_major_locator(MaxNLocator(integer=True, min_n_ticks=1))
    return _png(figure, axes)


def draw_sweep(states: Mapping[str, State], base: Estimate | None) -> bytes:
    """The plot of several runs as a PNG file, with their labels. The validation of the untrained model is one line for all."""
    figure: Any = Figure(figsize=(9, 5.25), layout="constrained")  # Any: matplotlib declares options as unknown
    axes = figure.subplots()
    for index, (label, state) in enumerate(states.items()):
        counts = [row.num_trajectories + row.num_failed for row in state.epochs]
        rollouts = [0, *itertools.accumulate(counts)]
        """The rollouts before each epoch or step, and in the end."""
        means = {rollouts[row.number]: row.avg_reward for row in state.epochs if row.avg_reward is not None}
        validations = {rollouts[row.number]: row.avg_reward for row in state.validations_of_trained}
        axes.plot(list(means), list(means.values()), label=label, color=f"C{index}", marker=".")
        if validations:
            name = f"{label}, validation"
            axes.plot(list(validations), list(validations.values()), "--D", label=name, color=f"C{index}")
    if base is not None:
        axes.axhline(base.mean, label="base, validation", color="gray", ls=":")
    axes.set_xlabel("rollouts")
    axes.set_ylabel("reward")
    return _png(figure, axes)


def _png(figure: Any, axes: Any) -> bytes:
    axes.grid(alpha=0.3)
    if axes.get_legend_handles_labels()[0]:
        axes.legend()
    picture = io.BytesIO()
    figure.savefig(picture, format="png", dpi=200)
    return picture.getvalue()
