"""`art plot`: metrics by step, as charts of braille dots in the terminal or as a file."""

import math
from collections.abc import Mapping, Sequence
from pathlib import Path

from rich.console import Console
from rich.text import Text

from art_server.errors import UsageError
from art_server.terminal.sources import Row
from art_server.terminal.tables import plain
from art_server.terminal.text import number, visible

MAX_WIDTH, HEIGHT = 100, 8
"""Of a chart, in characters. Each has 2 by 4 dots."""
LABEL_WIDTH = 10
DOTS = ((0x01, 0x08), (0x02, 0x10), (0x04, 0x20), (0x40, 0x80))
"""The bit of each dot of a braille character, by row and column (Unicode, block 2800)."""
COLOURS = ("cyan", "yellow", "green", "magenta", "blue", "red")
Point = tuple[float, float]


def print_plot(console: Console, models: Mapping[str, Row], metrics: Sequence[str]) -> None:
    """One chart for each metric and model. The charts of a metric have the same axes."""
    for metric in metrics:
        curves = {model: found for model, row in models.items() if (found := points(row, metric))}
        every = [point for curve in curves.values() for point in curve]
        width = min(console.width, MAX_WIDTH) - LABEL_WIDTH
        for index, (model, curve) in enumerate(curves.items()):
            best = max(curve, key=lambda point: point[1])
            console.print()
            console.print(plain(f"{model} {metric}", "bold"))
            steps, values = [x for x, _ in every], [y for _, y in every]
            box = (min(steps), max(steps), min(values), max(values))
            colour = COLOURS[index % len(COLOURS)]
            for line, row in enumerate(draw(curve, box, width, HEIGHT)):
                label = {0: box[3], HEIGHT - 1: box[2]}.get(line)
                text = "" if label is None else number(label)
                console.print(Text.assemble(f"{text:>{LABEL_WIDTH - 2}}  ", (row, colour)))
            console.print(f"{'step':>{LABEL_WIDTH - 2}}  {box[0]:.0f} to {box[1]:.0f}", end="")
            console.print(
                f", last {number(curve[-1][1])}, highest {number(best[1])} at step {best[0]:.0f}"
            )


def points(history: Row, metric: str) -> list[Point]:
    """Steps and values of a metric, where both are known and finite."""
    columns = zip(history["steps"], history["metrics"].get(metric, []), strict=False)
    return [
        (float(step), value)
        for step, value in columns
        if step is not None and value is not None and math.isfinite(value)
    ]


def draw(
    curve: Sequence[Point], box: tuple[float, float, float, float], width: int, height: int
) -> list[str]:
    """Lines of characters with the curve inside the box (lowest and highest step, lowest and highest value)."""
    cells = [[0] * width for _ in range(height)]
    columns, rows = 2 * width - 1, 4 * height - 1
    left, right, low, high = box
    dots = [
        ((x - left) / ((right - left) or 1) * columns, (high - y) / ((high - low) or 1) * rows)
        for x, y in curve
    ]
    for (x0, y0), (x1, y1) in zip(dots, dots[1:] or dots, strict=False):
        num = max(1, math.ceil(max(abs(x1 - x0), abs(y1 - y0))))
        for part in range(num + 1):
            x = round(x0 + (x1 - x0) * part / num)
            y = round(y0 + (y1 - y0) * part / num)
            cells[y // 4][x // 2] |= DOTS[y % 4][x % 2]
    return ["".join(chr(0x2800 + cell) for cell in row).rstrip(chr(0x2800)) for row in cells]


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

    figure = make_subplots(
        rows=len(metrics), shared_xaxes=True, subplot_titles=[visible(each) for each in metrics]
    )
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
