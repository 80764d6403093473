"""Charts of a table of rollouts (`load_trajectories`), as matplotlib figures."""

from collections.abc import Sequence
from typing import Any

import matplotlib.pyplot as plt
import polars as pl
from matplotlib.figure import Figure

from art.utils.benchmarking.filter_model_split import filter_rename_model_split
from art.utils.benchmarking.types import BenchmarkModelKey
from art_compat.aliases import alias

Models = Sequence[str | BenchmarkModelKey]
DPI = 200


def training_progress_chart(
    df: pl.DataFrame,
    metric_name: str,
    models: Models | None = None,
    title: str | None = None,
    x_label: str | None = None,
    y_label: str | None = None,
    perfect_score: float | None = None,
    legend_loc: str | None = "lower right",
) -> Figure:
    """A metric's mean by step: a curve for each trained model, a horizontal line for each model with one step.

    `metric_name` is a column, or a metric_* column without its prefix. `models` chooses the models and their order;
    a name means the model's split "val".

    Raises:
        ValueError: the table has no such column, or no rows of these models.
    """
    means = _means(df, metric_name, models)
    steps = [step for curve in means.values() for step in curve]
    figure, axes = _subplots(6.0)
    _show_perfect(axes, perfect_score)
    for name, values in means.items():
        if len(values) == 1:
            flat = next(iter(values.values()))
            axes.plot([min(steps), max(steps)], [flat, flat], linestyle="--", label=name)
        else:
            axes.plot(list(values), list(values.values()), marker="o", markersize=3, label=name)
    axes.set(title=title or metric_name, xlabel="Step" if x_label is None else x_label)
    axes.set_ylabel(y_label or "")
    axes.legend(loc=legend_loc)
    return _finished(figure, axes)


def percentage_comparison_bar_chart(
    df: pl.DataFrame,
    metric_name: str,
    models: Models | None = None,
    title: str | None = None,
    y_label: str | None = None,
    perfect_score: float | None = None,
    num_decimals: int = 0,
) -> Figure:
    """A metric's mean in percent: a bar for each model's newest step, with a hatched part for the change since the first step.

    Raises:
        ValueError: as in `training_progress_chart`.
    """
    means = _means(df, metric_name, models)
    figure, axes = _subplots(1.5 + 1.1 * len(means))
    _show_perfect(axes, None if perfect_score is None else 100 * perfect_score)
    for position, values in enumerate(means.values()):
        first, last = (100 * values[step] for step in (min(values), max(values)))
        low, color = min(first, last), f"C{position % 10}"
        axes.bar(position, low, color=color)
        axes.bar(position, abs(last - first), bottom=low, hatch="///", alpha=0.5, color=color)
        axes.annotate(f"{last:.{num_decimals}f}%", (position, max(first, last)), ha="center", va="bottom")
    axes.set_xticks(range(len(means)), list(means), rotation=20, ha="right")
    axes.set(title=title or metric_name, ylabel=y_label or "")
    return _finished(figure, axes)


def _means(df: pl.DataFrame, metric_name: str, models: Models | None) -> dict[str, dict[int, float]]:
    """For each model, the metric's mean by step. Without `models`, the models with several steps come first."""
    column = metric_name if metric_name in df.columns else f"metric_{metric_name}"
    if column not in df.columns:
        numbers = [name for name in df.columns if df[name].dtype == pl.Float64]
        raise ValueError(f"the table has no metric '{metric_name}'; it has {', '.join(numbers)}")
    if models is not None:
        keys = [model if isinstance(model, BenchmarkModelKey) else BenchmarkModelKey(model) for model in models]
        df = filter_rename_model_split(df, keys)
    rows = df.group_by("model", "step").agg(pl.col(column).mean()).drop_nulls().sort("step")
    means: dict[str, dict[int, float]] = {}
    for name, step, value in rows.select("model", "step", column).iter_rows():
        means.setdefault(name, {})[step] = value
    if not means:
        raise ValueError("the table has no rows of these models and splits")
    if models is None:
        order = sorted(means, key=lambda name: (len(means[name]) == 1, name))
    else:
        order = [str(model) for model in models]
    return {name: means[name] for name in order if name in means}


def _subplots(width: float) -> tuple[Figure, Any]:
    """A figure and its axes. Any: matplotlib declares its options as unknown."""
    pyplot: Any = plt
    figure: Figure = pyplot.figure(figsize=(width, 4.0), dpi=DPI)
    return figure, figure.add_subplot()


def _show_perfect(axes: Any, score: float | None) -> None:
    if score is not None:
        axes.axhline(score, color="dimgray", linewidth=1)
        at = (0.01, score)
        kind = ("axes fraction", "data")
        axes.annotate("Perfect score", at, xycoords=kind, va="top", color="dimgray")


def _finished(figure: Figure, axes: Any) -> Figure:
    axes.spines[["top", "right"]].set_visible(False)
    figure.tight_layout()
    return figure


alias(__name__, f"{__name__}.training_progress_chart")
alias(__name__, f"{__name__}.percentage_comparison_bar_chart")
