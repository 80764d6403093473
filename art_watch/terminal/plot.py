"""`art plot`: metrics by step, as charts in the terminal."""

import math
from collections.abc import Mapping, Sequence
from typing import NamedTuple

import plotext
from rich.console import Console

from art_watch.terminal.sources import SAMPLED_STEP, Row
from art_watch.terminal.tables import plain
from art_watch.terminal.text import number, visible

MAX_WIDTH, HEIGHT = 100, 13
"""The size of a chart, in characters."""
MAX_TICKS = 6
"""Steps of the numbers below a chart."""


class Curve(NamedTuple):
    steps: list[float]
    values: list[float]


def print_plot(console: Console, models: Mapping[str, Row], metrics: Sequence[str]) -> None:
    """One chart for each metric and model. The charts of a metric have the same axes."""
    for metric in metrics:
        curves: dict[str, Curve] = {}
        all_points = Curve([], [])
        for model, row in models.items():
            curve = read_curve(row, metric)
            if curve.steps:
                curves[model] = curve
                all_points.steps.extend(curve.steps)
                all_points.values.extend(curve.values)
        for model, curve in curves.items():
            console.print()
            console.print(plain(draw(f"{model} {metric}", curve, all_points, min(console.width, MAX_WIDTH))))
            highest = max(curve.values)
            step = curve.steps[curve.values.index(highest)]
            earned = _earned_by(models[model], metric, step)
            console.print(f"last {number(curve.values[-1])}, highest {number(highest)} at step {step:.0f}{earned}")


def _earned_by(history: Row, metric: str, step: float) -> str:
    """Which step sampled the rollouts of a training metric, in words: `art checkpoints` has the reward at that step. Empty if
    unknown, or of other metrics."""
    sampled = dict(zip(history["steps"], history["metrics"].get(SAMPLED_STEP, []), strict=False)).get(step)
    return f" (earned by step {int(sampled)})" if sampled is not None and metric.startswith("train/") else ""


def read_curve(history: Row, metric: str) -> Curve:
    """Steps and values of a metric, where both are known and finite."""
    curve = Curve([], [])
    for step, value in zip(history["steps"], history["metrics"].get(metric, []), strict=False):
        if step is not None and value is not None and math.isfinite(value):
            curve.steps.append(float(step))
            curve.values.append(value)
    return curve


def draw(title: str, curve: Curve, all_points: Curve, width: int) -> str:
    """A chart of the curve, whose axes span `all_points`."""
    figure = plotext.figure.clear()
    figure.draw(figure.signal(curve.steps, curve.values).lines())
    figure.title(visible(title).replace("\n", "⏎")).plot_size(width, HEIGHT)
    left, right = _span(all_points.steps)
    steps = figure.ruler("x").lim(left, right)
    ticks = {round(left + (right - left) * index / MAX_TICKS) for index in range(MAX_TICKS + 1)}
    steps.ticks([tick for tick in sorted(ticks) if left <= tick <= right])
    figure.ruler("y").lim(*_span(all_points.values))
    return figure.build().string(colorless=True).rstrip()


def _span(values: Sequence[float]) -> tuple[float, float]:
    low, high = min(values), max(values)
    return (low, high) if low < high else (low - 0.5, high + 0.5)
