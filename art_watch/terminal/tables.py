"""The tables of `art status`, `art runs`, `art checkpoints` and `art jobs`."""

import math
import time
from collections.abc import Iterator, Sequence
from datetime import datetime

from rich.console import Console
from rich.table import Table
from rich.text import Text

from art_watch.terminal.learn import learning_lines
from art_watch.terminal.sources import Row
from art_watch.terminal.tail import METRICS
from art_watch.terminal.text import NOTHING, age, number, size, small_bars, visible

NUMBERS = {"step", "reward", "val", "best", "size", "age", "#", "turns", "tokens"}
"""Columns that are aligned on the right."""
FREE = {"model", "base", "progress", "metrics", "text"}
"""Columns that are made narrower on a terminal that is too narrow: the widest first."""
BAR_WIDTH = 40
NUM_BARS = 12
MAX_JOBS, MAX_MODELS = 6, 10
"""How many of the first jobs and of the newest models `art status` shows."""
COLOURS = {
    "rollouts": "green",
    "training": "cyan",
    "swap": "yellow",
    "starting": "magenta",
    "waiting": "red",
}
STATES = {"ready": "green", "running": "green", "failed": "red", "starting": "yellow"}


def plain(value: object, style: str = "") -> Text:
    """A value that came from files or from a server, as text without markup and without a terminal's commands."""
    return Text(visible(value), style)


def beginning(value: object) -> Text:
    """Like `plain`, for a cell that shows one line: text that does not fit is left out."""
    return Text(visible(value).replace("\n", "⏎"), no_wrap=True, overflow="ellipsis")


def say(console: Console, text: Text) -> None:
    """Prints text in the terminal's width; into a pipe without new line breaks."""
    console.print(text, soft_wrap=not console.is_terminal)


def make_table(*columns: str) -> Table:
    table = Table(box=None, pad_edge=False, header_style="bold", padding=(0, 2, 0, 0))
    for name in columns:
        justify = "right" if name in NUMBERS else "left"
        table.add_column(name, justify=justify, no_wrap=name not in FREE, overflow="fold")
    return table


def print_runs(console: Console, models: Sequence[Row]) -> None:
    if not models:
        console.print("no models yet")
        return
    table = make_table("model", "base", "step", "reward", "trend", "val", "best", "age")
    for model in models:
        table.add_row(
            plain(model["id"]),
            beginning(model["base_model"] or NOTHING),
            plain(NOTHING if model["step"] is None else model["step"]),
            plain(number(model["reward"]) if model["loss"] is None else f"loss {number(model['loss'])}"),
            plain(small_bars((model["rewards"] or model["losses"])[-NUM_BARS:]), "cyan"),
            plain(number(model["val_reward"])),
            plain(NOTHING if model["best"] is None else model["best"]["step"]),
            plain(age(seconds_since(model["last_at"]))),
        )
    console.print(table)


def print_checkpoints(console: Console, checkpoints: Sequence[Row], *, is_served: bool) -> None:
    """A line for each kept step, the newest last."""
    if not checkpoints:
        console.print("no checkpoints yet")
        return
    newest = "serves" if is_served else "newest"
    table = make_table("step", "reward", "val", "size", "age", "")
    for row in checkpoints:
        marks = ["best"] if row["is_best"] else []
        marks += [newest] if row is checkpoints[-1] else []
        marks += ["weights as before"] if row["unchanged"] else []
        table.add_row(
            plain(row["step"]),
            plain(number(row["reward"])),
            plain(number(row["val_reward"])),
            plain(size(row["size_bytes"])),
            plain(age(time.time() - row["created_at"])),
            plain(", ".join(marks)),
        )
    console.print(table)


def print_model(console: Console, model: Row) -> None:
    """What a run is, what it has trained and cost, and what of it trained nothing."""
    step = NOTHING if model["step"] is None else model["step"]
    say(console, plain(f"{model['id']}, step {step}, base model {model['base_model'] or 'unknown'}", "bold"))
    best = "" if model["best"] is None else f", best step {model['best']['step']} by {model['best']['metric']}"
    if model["loss"] is None:
        say(console, plain(f"reward {number(model['reward'])}, val {number(model['val_reward'])}{best}"))
    else:
        say(console, plain(f"loss {number(model['loss'])}{best}"))
    for line in _cost_lines(model):
        say(console, plain(line))
    for row in (model["costs"] or {"unused": []})["unused"]:
        line = f"trained nothing: {row['num_rollouts']:,} rollouts, {row['num_tokens']:,} tokens: {row['reason']}"
        say(console, plain(line, "yellow"))
    if model["idle"]:
        say(console, plain(model["idle"], "yellow"))


def _cost_lines(model: Row) -> Iterator[str]:
    costs, about = model["costs"], model["about"]
    yield f"trained: {model['trained_tokens']:,.0f} tokens in {model['num_trained_steps']:,} of {model['num_jobs']:,} steps"
    if costs is not None:
        yield f"sampled for training: {costs['num_tokens']:,} tokens in {costs['num_rollouts']:,} rollouts"
        yield f"time in steps: {age(costs['step_seconds'])}"
    if model["price"] is None:
        yield "price: unknown; --price-per-hour X sets what an hour of the machines costs"
    else:
        yield f"price: {number(model['price'])} at {about['price_per_hour']:g} an hour"
    if model["logged_costs"]:
        yield f"logged costs: {number(model['logged_costs'])}"


def print_jobs(console: Console, jobs: Sequence[Row]) -> None:
    if not jobs:
        console.print("no jobs")
        return
    table = make_table("job", "state", "model", "step", "age", "progress")
    for job in jobs:
        table.add_row(
            plain(job["job_id"][:8]),
            plain(job["state"], STATES.get(job["state"], "")),
            plain(f"{job['project']}/{job['name']}"),
            plain(NOTHING if job["step"] is None else job["step"]),
            plain(age(time.time() - job["created_at"])),
            plain(job_progress(job)),
        )
    console.print(table)


def job_progress(job: Row) -> str:
    """What a job waits for, how far the job is, or why the job failed. While a repeated job runs, the error of its last
    attempt is not shown."""
    if job["waits_for"] is not None:
        return f"waits for {job['waits_for']}"
    if job["error"] is not None and job["state"] != "running":
        return job["error"]["message"]
    if job["state"] != "running":
        return ""
    of = f" {job['completed']} of {job['total']}" if job["total"] else ""
    return f"{job['phase']}{of}"


def print_status(console: Console, where: str, status: Row) -> None:
    """One screen: the server, its time, jobs and memory, and the newest models."""
    live = status["live"]
    if live is None:
        say(console, plain(f"{where}: no server runs here"))
    else:
        _print_server(console, where, live)
    newest = sorted(status["models"], key=lambda model: model["last_at"] or "", reverse=True)
    console.print()
    print_runs(console, newest[:MAX_MODELS])
    if len(newest) > MAX_MODELS:
        console.print(f"and {len(newest) - MAX_MODELS} older models: art runs")
    _print_learning(console, {} if live is None else live["learning"])


def _print_learning(console: Console, learners: dict[str, Row]) -> None:
    """The models that learn from scores."""
    if learners:
        console.print()
    for model, info in learners.items():
        for line in learning_lines(model, info):
            say(console, plain(line, "yellow" if info["state"] == "paused" else ""))


def _print_server(console: Console, where: str, live: Row) -> None:
    health, activity = live["health"], live["activity"]
    say(console, plain(f"art-server {health['version']} at {where}", "bold"))
    engine = plain(health["engine"], STATES.get(health["engine"], ""))
    base = plain(f", base model {health['base_model'] or 'none'}")
    say(console, Text.assemble("engine ", engine, base))
    replicas = [replica for replica in health["replicas"] if replica["engine"] != "ready"]
    lines: list[tuple[str, object]] = [
        ("engine", health["detail"]),
        *((replica["name"], replica["detail"] or replica["engine"]) for replica in replicas),
        ("requests wait for", health["waits_for"]),
        *((f"fault of {name}", text) for name, text in health["faults"].items()),
    ]
    for name, value in lines:
        if value:
            say(console, plain(f"{name}: {value}", "yellow"))
    _print_shares(console, activity["shares"])
    say(console, plain(activity["sentence"]))
    if "machine" in live:
        used = live["machine"]["resident_bytes"]
        memory = ", ".join(f"{name} {size(used[name])}" for name in sorted(used))
        free = size(live["machine"]["disk_free_bytes"])
        say(console, plain(f"memory: {memory}; free on disk: {free}"))
    console.print()
    print_jobs(console, live["jobs"][:MAX_JOBS])
    if len(live["jobs"]) > MAX_JOBS:
        console.print(f"and {len(live['jobs']) - MAX_JOBS} more jobs: art jobs")


def _print_shares(console: Console, shares: dict[str, float]) -> None:
    """The share of each activity. With separate devices the activities overlap, and the bar is longer."""
    bar, legend = Text(), Text()
    for name, share in shares.items():
        if share > 0:
            style = COLOURS.get(name, "bright_black")
            bar.append(("░" if name == "idle" else "█") * math.ceil(share * BAR_WIDTH), style)
            legend.append(f"{visible(name)} {share:.0%}  ", style)
    say(console, bar)
    say(console, legend)


def print_event(console: Console, day: str | None, at: datetime | None, event: Row) -> None:
    """An event of `Tail` in one line, below its date where the day changes."""
    if day is not None:
        say(console, plain(day, "bold"))
    head = ["--:--:--" if at is None else f"{at:%H:%M:%S}", event["model"]]
    step = [] if event["step"] is None else [f"step {event['step']}"]
    if event["event"] == "job":
        words = [*head, "job", event["job_id"][:8], event["state"], *step, job_progress(event)]
        return say(console, plain(" ".join(words).rstrip(), STATES.get(event["state"], "bright_black")))
    numbers = [f"{METRICS[name]} {value:.3g}" for name, value in event["metrics"].items() if name in METRICS]
    say(console, plain("  ".join([" ".join([*head, *step]), *numbers])))


def seconds_since(recorded_at: str | None) -> float | None:
    if recorded_at is None:
        return None
    return time.time() - datetime.fromisoformat(recorded_at).timestamp()
