"""Runs the commands that `commands.py` parsed: reads from a source, and prints tables or JSON."""

import argparse
import contextlib
import difflib
import io
import json
import math
import sys
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from art_server.errors import NotFound, UsageError
from art_server.store.registry import check_name
from art_watch.terminal.addresses import (
    find_job,
    find_model,
    find_step,
    listed,
    need_server,
    open_source,
    parse_step,
)
from art_watch.terminal.sources import SAMPLED_STEP, HttpSource, Row, Source

if TYPE_CHECKING:
    from rich.console import Console

REWARDS = ("train/reward", "val/reward")
LOSSES = ("loss/train", "val/loss", "val/reward")
"""In place of rewards, if no model was given any."""
PLAIN_WIDTH = 10_000
"""The width of tables that no terminal shows, in which nothing is cut off."""
PLAIN_CHART_WIDTH = 80


def run_command(flags: argparse.Namespace) -> None:
    """See `commands.run_command`."""
    if isinstance(sys.stdout, io.TextIOWrapper):  # a locale without these characters
        sys.stdout.reconfigure(errors="backslashreplace")
    with contextlib.closing(open_source(flags.url, flags.path)) as source:
        COMMANDS[flags.command](source, flags)


def status(source: Source, flags: argparse.Namespace) -> None:
    if flags.model is not None:
        return status_of_model(source, flags)
    if flags.price_per_hour is not None:
        raise UsageError("--price-per-hour is of a run: name its MODEL")
    overview = source.overview()
    if flags.json:
        return print_json(overview)
    from art_watch.terminal import tables

    tables.print_status(make_console(), source.where, overview)


def status_of_model(source: Source, flags: argparse.Namespace) -> None:
    """What a run is, what it has trained and cost. Sets the price of an hour of its machines first, if the flag gives one.

    Raises:
        NotFound: there is no such model, or no running server whose run can be changed.
        UsageError: a step is named.
    """
    model = whole_model(source, flags.model)
    if flags.price_per_hour is not None:
        server = need_server(source, "runs whose price can be set")
        server.set_about(model["id"], source.context(model["id"])["about"] | {"price_per_hour": flags.price_per_hour})
    document = model | source.context(model["id"])
    if flags.json:
        return print_json(document)
    from art_watch.terminal import tables

    tables.print_model(make_console(), document)


def checkpoints(source: Source, flags: argparse.Namespace) -> None:
    model = whole_model(source, flags.model)
    rows = source.checkpoints(model["id"])
    if flags.json:
        return print_json({"model": model["id"], "checkpoints": rows})
    from art_watch.terminal import tables

    tables.print_checkpoints(make_console(), rows, is_served=isinstance(source, HttpSource))


def rollback(source: Source, flags: argparse.Namespace) -> None:
    """Makes an earlier step of a model the newest.

    Raises:
        NotFound: there is no such model, step or running server.
        UsageError: the text is no step.
    """
    server = need_server(source, "models that can be rolled back")
    model = whole_model(source, flags.model)
    if flags.step == "best" and model["best"] is not None:
        step = model["best"]["step"]
    else:
        step = parse_step(flags.step, f"`art checkpoints {model['id']}` lists the steps")
    server.roll_back(model["id"], step)
    print(
        f"{model['id']}: step {step} is the newest, serves, and is trained further; later steps are kept under other names"
    )


def whole_model(source: Source, text: str) -> Row:
    """The summary of a model.

    Raises:
        NotFound: there is no such model.
        UsageError: the text names a step.
    """
    model, step = find_model(source, text)
    if step:
        raise UsageError(f"this command is about a whole model: write {model['id']} without '@{step}'")
    return model


def runs(source: Source, flags: argparse.Namespace) -> None:
    models = sorted(source.overview()["models"], key=lambda model: model["id"])
    if flags.sort == "time":
        models.sort(key=lambda model: model["last_at"] or "", reverse=True)
    elif flags.sort == "reward":
        models.sort(key=_reward, reverse=True)
    if flags.json:
        return print_json({"models": models})
    from art_watch.terminal import tables

    tables.print_runs(make_console(), models)


def _reward(row: Mapping[str, Any]) -> float:
    return -math.inf if row["reward"] is None else row["reward"]


def jobs(source: Source, flags: argparse.Namespace) -> None:
    server = need_server(source)
    if flags.cancel is not None:
        rows = [server.cancel(find_job(server, flags.cancel))]
    else:
        rows = server.jobs(with_ended=flags.all)
    if flags.json:
        return print_json({"jobs": rows})
    from art_watch.terminal import tables

    tables.print_jobs(make_console(), rows)


def show(source: Source, flags: argparse.Namespace) -> None:
    if flags.group is None and flags.rollout is not None:
        raise UsageError("--rollout shows one rollout of a group in full: add --group G")
    document = session_document(source, flags) if flags.session else show_document(source, flags)
    if flags.json:
        return print_json(document)
    from art_watch.terminal.show import print_session, print_show

    (print_session if flags.session else print_show)(make_console(), document)


def session_document(source: Source, flags: argparse.Namespace) -> Row:
    """What a model answered in a session, also of a rollout that failed.

    Raises:
        NotFound: there is no such model or session, or no running server.
    """
    server = need_server(source)
    model, _ = find_model(source, flags.model)
    session = check_name(flags.session, "--session")
    document = server.session(model["id"], session)
    if not document["histories"]:
        raise NotFound(
            f"session {session} has no answer of {model['id']} that can be trained: {'; '.join(document['logs']) or 'no request named it'}",
            code="unknown_session",
        )
    return {"model": model["id"], "session": session} | document


def show_document(source: Source, flags: argparse.Namespace) -> Row:
    """A step's groups with one line for each rollout. With `--group` also `rollouts`, the rollouts of this group in full.

    Raises:
        NotFound: there is no such model, step, group or rollout.
    """
    model, text = find_model(source, flags.model)
    split = check_name(flags.split, "--split")
    step = find_step(source, model, text, split)
    groups = source.groups(model["id"], split, step, flags.text)
    document: Row = {"model": model["id"], "split": split, "step": step, "groups": groups}
    if flags.group is not None:
        groups = document["groups"] = [group for group in groups if group["index"] == flags.group]
    for group in groups:
        if flags.sort is not None:
            group["rollouts"].sort(key=_reward, reverse=flags.sort == "reward")
        chosen = [rollout for rollout in group["rollouts"] if flags.rollout in (None, rollout["index"])]
        if flags.below is not None:
            chosen = [rollout for rollout in chosen if _reward(rollout) < flags.below]
        group["rollouts"] = chosen[: flags.limit]
    if flags.below is not None:
        document["groups"] = groups = [group for group in groups if group["rollouts"]]
    if flags.group is None:
        return document
    if not groups or not groups[0]["rollouts"]:
        what = f"group {flags.group}" + ("" if flags.rollout is None else f", rollout {flags.rollout}")
        filters = [" with this text"] if flags.text else []
        if flags.below is not None:
            filters.append(f" below {flags.below:g}")
        raise NotFound(
            f"step {step} of {model['id']} has no {what}{''.join(filters)}: `art show {model['id']}@{step} --split {split}` lists "
            "what there is",
            code="unknown_group",
        )
    indices = [rollout["index"] for rollout in groups[0]["rollouts"]]
    document["rollouts"] = [
        {"group": flags.group, "index": index} | source.rollout(model["id"], split, step, flags.group, index)
        for index in indices
    ]
    return document


def plot(source: Source, flags: argparse.Namespace) -> None:
    summaries: list[Row] = []
    for text in flags.models:
        model, step = find_model(source, text)
        if step:
            raise UsageError(f"a chart shows all steps: write {model['id']} without '@{step}'")
        summaries.append(model)
    wanted = REWARDS if any(model["loss"] is None for model in summaries) else LOSSES
    if flags.metric:
        wanted = flags.metric.split(",")
    models: dict[str, Row] = {}
    names: set[str] = set()
    for model in summaries:
        history = source.history(model["id"], wanted if flags.json else [*wanted, SAMPLED_STEP])
        names |= set(history.pop("names"))
        models[model["id"]] = history
    metrics = [metric for metric in wanted if metric in names]
    if not metrics or (flags.metric and len(metrics) < len(wanted)):
        missing = next(metric for metric in wanted if metric not in names)
        close = difflib.get_close_matches(missing, names) or sorted(names)
        raise NotFound(
            f"{listed(list(models))}: no metric '{missing}'; metrics: {listed(close)}",
            code="unknown_metric",
        )
    if flags.json:
        print_json({"models": models, "metrics": metrics})
    else:
        from art_watch.terminal.plot import print_plot

        print_plot(make_console(PLAIN_CHART_WIDTH), models, metrics)


def tail(source: Source, flags: argparse.Namespace) -> None:
    from art_watch.terminal.tail import Tail, with_days

    model = find_model(source, flags.model)[0]["id"] if flags.model else None
    events = Tail(source, model).events()
    if flags.json:
        for event in events:
            print_json(event)
        return
    from art_watch.terminal import tables

    console = make_console()
    for day, at, event in with_days(events):
        tables.print_event(console, day, at, event)


def learn_command(source: Source, flags: argparse.Namespace) -> None:
    from art_watch.terminal import learn

    learn.learn(source, flags)


def feedback_command(source: Source, flags: argparse.Namespace) -> None:
    from art_watch.terminal import learn

    learn.feedback(source, flags)


COMMANDS = {
    "status": status,
    "runs": runs,
    "checkpoints": checkpoints,
    "rollback": rollback,
    "show": show,
    "plot": plot,
    "tail": tail,
    "jobs": jobs,
    "learn": learn_command,
    "feedback": feedback_command,
}


def make_console(plain_width: int = PLAIN_WIDTH) -> "Console":
    """A console that writes to the terminal in the terminal's width. Into a pipe it writes no colours, and breaks no line."""
    from rich.console import Console  # comes with the extra `terminal`; JSON needs none

    console = Console(highlight=False, markup=False, emoji=False)
    if not console.is_terminal:
        console.width = plain_width
    return console


def print_json(document: Row) -> None:
    """Prints one JSON document in one line. Numbers that JSON cannot hold are null."""
    print(json.dumps(_finite(document), allow_nan=False), flush=True)


def _finite(value: Any) -> Any:  # Any: JSON
    if isinstance(value, dict):
        return {key: _finite(entry) for key, entry in value.items()}
    if isinstance(value, list):
        return [_finite(entry) for entry in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value
