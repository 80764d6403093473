"""The parsers of the commands that show runs, which `run.py` implements, and of `art view`.

The implementation is imported when a command runs: `art --help` needs none of the packages of the implementation.
"""

import argparse
from collections.abc import Callable
from pathlib import Path
from typing import Any

SHOWN = ("status", "runs", "checkpoints", "show", "plot", "tail", "jobs")
"""The commands that show runs (`run.py`)."""
SERVED = ("rollback", "learn", "feedback")
"""The commands that change a model of a running server (`run.py`, `learn.py`)."""
FROM_WHERE = "without --url: the folder of a server (%(default)s), or the server that runs in it"
MODEL = "[PROJECT/]NAME"
VIEW_PORT = 7624


def add_commands(commands: Any) -> None:  # Any: argparse's class for it is private
    """Adds the parsers."""
    status = commands.add_parser("status", help="what a server does now, where its time goes, its jobs and models")
    status.add_argument(
        "model",
        nargs="?",
        metavar="MODEL",
        help=f"{MODEL}: what this run has trained and cost, and what of it was for nothing",
    )
    status.add_argument(
        "--price-per-hour",
        type=float,
        metavar="X",
        help="sets what an hour of the machines of MODEL costs, in any currency",
    )
    runs = commands.add_parser("runs", help="all models in one table")
    runs.add_argument(
        "--sort", choices=("name", "reward", "time"), default="name", help="order of the models (%(default)s)"
    )
    checkpoints = commands.add_parser(
        "checkpoints", help="the kept steps of a model: rewards, sizes, the best, the one that serves"
    )
    checkpoints.add_argument("model", metavar="MODEL", help=MODEL)
    _add_show(commands.add_parser("show", help="the rollouts of a step, as people read them"))
    _add_plot(commands.add_parser("plot", help="metrics by step, as charts"))
    tail = commands.add_parser("tail", help="the last ten events, then each step and each change of a job")
    tail.add_argument("model", nargs="?", metavar="MODEL", help=f"{MODEL}; default: all")
    jobs = commands.add_parser("jobs", help="the queue of a running server")
    jobs.add_argument("--all", action="store_true", help="also the newest jobs that have ended")
    jobs.add_argument("--cancel", metavar="JOB", help="cancel this job; the first digits are enough")
    for name in SHOWN:
        parser = commands.choices[name]
        parser.add_argument("--path", type=Path, default=Path(".art"), help=FROM_WHERE)
        parser.add_argument("--url", help="a running server; its key is read from ART_API_KEY")
        parser.add_argument("--json", action="store_true", help="JSON in place of tables")
        parser.set_defaults(run=run_shown, extra="terminal")
    rollback = commands.add_parser(
        "rollback", help="makes an earlier step the newest, which serves and is trained further"
    )
    rollback.add_argument("model", metavar="MODEL", help=MODEL)
    rollback.add_argument("step", metavar="STEP", help="the number of a kept step, or best (`art checkpoints MODEL`)")
    _add_learn(commands.add_parser("learn", help="has a server train a model from scores of its answers, and shows it"))
    feedback = commands.add_parser("feedback", help="sends scores of answers from a file")
    feedback.add_argument(
        "file",
        type=Path,
        metavar="FILE",
        help="a score on each line, or an export of Langfuse or Open WebUI (docs/learning-in-use.md)",
    )
    feedback.add_argument("--model", required=True, metavar="MODEL", help=MODEL)
    for name in SERVED:
        parser = commands.choices[name]
        parser.add_argument("--path", type=Path, default=Path(".art"), help=FROM_WHERE)
        parser.add_argument("--url", help="a running server; its key is read from ART_API_KEY")
        parser.set_defaults(run=run_shown, extra="terminal")
    page = commands.add_parser("view", help="the page over a folder, in a browser")
    page.add_argument(
        "dir", type=Path, nargs="?", default=Path(".art"), metavar="DIR", help="the folder of a server (%(default)s)"
    )
    page.add_argument("--port", type=integer(1, 65535), default=VIEW_PORT, help="port of the page (%(default)s)")
    page.add_argument("--no-browser", action="store_true", help="open no browser")
    page.set_defaults(run=run_view, extra="view")


def run_shown(flags: argparse.Namespace) -> None:
    """Runs one of SHOWN.

    Raises:
        ServerError, UsageError: the command failed; the message has the reason and the remedy.
        ModuleNotFoundError: the extra is not installed.
    """
    from art_watch.terminal.run import run_command

    run_command(flags)


def run_view(flags: argparse.Namespace) -> None:
    """Runs `art view`. Raises as `run_shown` does."""
    from art_server.cli import open_port
    from art_watch import view

    # For a port that is in use, this error has the remedy. uvicorn would log the error and exit.
    open_port("127.0.0.1", flags.port, "--port", "from 1 to 65535").close()
    view.view(flags.dir, flags.port, opens_browser=not flags.no_browser)


def _add_learn(learn: argparse.ArgumentParser) -> None:
    learn.add_argument("model", metavar="MODEL", help=MODEL)
    learn.add_argument(
        "--policy", type=Path, metavar="FILE", help="JSON with the fields of a policy (docs/learning-in-use.md)"
    )
    learn.add_argument("--batch", type=integer(2), metavar="N", help="scored answers that a step trains")
    learn.add_argument("--every-hours", type=float, metavar="H", help="after so many hours a step trains fewer")
    learn.add_argument("--user-share", type=float, metavar="S", help="largest share of a batch that one user may have")
    learn.add_argument("--learning-rate", type=float, metavar="LR", help="of the steps")
    learn.add_argument(
        "--release",
        choices=("direct", "canary"),
        help="how a step comes to serve: behind the guard, or by its users' scores",
    )
    learn.add_argument("--share", type=float, metavar="S", help="part of the users that a canary answers")
    learn.add_argument("--steps-per-release", type=integer(1), metavar="N", help="steps between two canaries")
    actions = learn.add_mutually_exclusive_group()
    actions.add_argument("--pause", dest="action", action="store_const", const="pause", help="train no further batch")
    actions.add_argument("--resume", dest="action", action="store_const", const="resume", help="go on")
    actions.add_argument("--now", dest="action", action="store_const", const="train", help="train the scores that wait")
    actions.add_argument(
        "--promote", dest="action", action="store_const", const="promote", help="the newest guarded step serves"
    )
    actions.add_argument(
        "--rollback", dest="action", action="store_const", const="rollback", help="set the open release's steps aside"
    )
    actions.add_argument(
        "--off", dest="action", action="store_const", const="off", help="end it; scores are still taken"
    )
    learn.add_argument("--json", action="store_true", help="JSON in place of text")


def _add_show(show: argparse.ArgumentParser) -> None:
    show.add_argument(
        "model",
        metavar="MODEL[@k]",
        help=f"{MODEL}; @k, @best or @latest selects a step (default: the newest with rollouts)",
    )
    show.add_argument("--split", default="train", help="default: %(default)s")
    show.add_argument("--group", type=integer(0), metavar="G", help="show this group in full")
    show.add_argument("--rollout", type=integer(0), metavar="I", help="only this one of the group")
    show.add_argument(
        "--sort",
        choices=("reward", "-reward"),
        help="the highest reward of a group first, or (--sort=-reward) the lowest",
    )
    show.add_argument("--below", type=float, metavar="R", help="only rollouts with a reward below this number")
    show.add_argument(
        "--session", metavar="S", help="a rollout by its session, also a failed one; needs a running server"
    )
    show.add_argument("--limit", type=integer(1), metavar="N", help="this number of rollouts of each group")
    show.add_argument("--text", default="", help="only rollouts that contain this text, in messages, calls or metadata")


def _add_plot(plot: argparse.ArgumentParser) -> None:
    plot.add_argument("models", nargs="+", metavar="MODEL", help=MODEL)
    plot.add_argument(
        "--metric", metavar="NAME,NAME", help="default: train/reward (without rewards loss/train, val/loss), val/reward"
    )


def integer(lowest: int, highest: int | None = None) -> Callable[[str], int]:
    """A parser of integers in a range."""

    def number(text: str) -> int:
        value = int(text)
        if value < lowest or (highest is not None and value > highest):
            allowed = f"at least {lowest}" if highest is None else f"from {lowest} to {highest}"
            raise argparse.ArgumentTypeError(f"{value} must be {allowed}")
        return value

    return number
