"""`art plot`: metrics by step, as charts in the terminal (plotext) or as a file (matplotlib, plotly)."""

import math
from collections.abc import Mapping, Sequence
from pathlib import Path

import plotext
from rich.console import Console

from art_server.errors import UsageError
from art_watch.terminal.sources import Row
from art_watch.terminal.tables import plain
from art_watch.terminal.text import number, visible

MAX_WIDTH, HEIGHT = 100, 13
"""Of a chart, in characters."""
MAX_TICKS = 6
"""Numbers below a chart."""
Point = tuple[float, float]


def print_plot(console: Console, models: Mapping[str, Row], metrics: Sequence[str]) -> None:
    """One chart for each metric and model. The charts of a metric have the same axes."""
    for metric in metrics:
        curves = {model: found for model, row in models.items() if (found := points(row, metric))}
        every = [point for curve in curves.values() for point in curve]
        for model, curve in curves.items():
            best = max(curve, key=lambda point: point[1])
            chart = draw(f"{model} {metric}", curve, every, min(console.width, MAX_WIDTH))
            console.print()
            console.print(plain(chart))
            console.print(f"last {number(curve[-1][1])}, highest {number(best[1])} at step {best[0]:.0f}")


def points(history: Row, metric: str) -> list[Point]:
    """Steps and values of a metric, where both are known and finite."""
    columns = zip(history["steps"], history["metrics"].get(metric, []), strict=False)
    return [
        (float(step), value)
        for step, value in columns
        if step is not None and value is not None and math.isfinite(value)
    ]


def draw(title: str, curve: Sequence[Point], every: Sequence[Point], width: int) -> str:
    """A chart of the curve, whose axes span the points of `every`."""
    (left, right), (low, high) = (_span(values) for values in zip(*every, strict=True))
    figure = plotext.figure.clear()
    figure.draw(figure.signal([x for x, _ in curve], [y for _, y in curve]).lines())
    figure.title(visible(title).replace("\n", "⏎")).plot_size(width, HEIGHT)
    steps = figure.ruler("x").lim(left, right)
    ticks = {round(left + (right - left) * place / MAX_TICKS) for place in range(MAX_TICKS + 1)}
    steps.ticks([tick for tick in sorted(ticks) if left <= tick <= right])
    figure.ruler("y").lim(low, high)
    return figure.build().string(colorless=True).rstrip()


def _span(values: Sequence[float]) -> tuple[float, float]:
    low, high = min(values), max(values)
    return (low, high) if low < high else (low - 0.5, high + 0.5)


def save_plot(models: Mapping[str, Row], metrics: Sequence[str], file: Path) -> None:
    """Writes the charts to a file: with plotly if it is HTML, else with matplotlib.

    Raises:
        UsageError: the package for this kind of file is not installed.
    """
    is_page = file.suffix.lower() == ".html"
    try:
        (_save_page if is_page else _save_picture)(models, metrics, file)
    except ModuleNotFoundError as error:
        extra = "view" if is_page else "server"
        raise UsageError(
            f"{file.suffix} files need '{error.name}': pip install 'agent-reinforcement-trainer[{extra}]'"
        ) from error


def _save_picture(models: Mapping[str, Row], metrics: Sequence[str], file: Path) -> None:
    # Imported here: matplotlib and plotly come with other extras, and take a second to load.
    import matplotlib
    from matplotlib.figure import Figure

    # A dollar sign in a name begins no formula.
    with matplotlib.rc_context({"text.parse_math": False}):
        figure = Figure(figsize=(8, 3 * len(metrics)), layout="constrained")
        for axes, metric in zip(figure.subplots(len(metrics), squeeze=False), metrics, strict=True):
            for model, row in models.items():
                curve = points(row, metric)
                axes[0].plot([x for x, _ in curve], [y for _, y in curve], label=visible(model))
            axes[0].set_ylabel(visible(metric))
            axes[0].legend(fontsize=8)
        figure.supxlabel("step", fontsize=9)
        figure.savefig(file, dpi=150)


def _save_page(models: Mapping[str, Row], metrics: Sequence[str], file: Path) -> None:
    from plotly.subplots import make_subplots

    figure = make_subplots(rows=len(metrics), shared_xaxes=True, subplot_titles=[visible(each) for each in metrics])
    for place, metric in enumerate(metrics, 1):
        for model, row in models.items():
            curve = points(row, metric)
            figure.add_scatter(
                x=[x for x, _ in curve],
                y=[y for _, y in curve],
                name=visible(f"{model} {metric}"),
                row=place,
                col=1,
            )
    figure.update_xaxes(title_text="step", row=len(metrics), col=1)
    figure.write_html(file, include_plotlyjs=True)
