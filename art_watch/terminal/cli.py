"""The command `art`: the commands that show runs, `art run`, and the commands of annexes (entry points `art.commands`)."""

import argparse
import os
import sys
from collections.abc import Callable, Sequence
from importlib.metadata import entry_points

from art_server.errors import NotFound, ServerError, Unavailable, UsageError, missing_extra
from art_server.parser import Parser
from art_watch.terminal import commands

NOTHING_TO_COPY = 3
"""Exit code of `art copy` if its source is an address without a checkpoint, which programs tell from a failure."""


def main(arguments: Sequence[str] | None = None) -> None:
    """Runs the command `art`, as users of ART know it. Without arguments it lists all commands. Exits with 2 after an error,
    with 1 if there is nothing of this name to show or no server, with 3 if there is no checkpoint to copy, and with 130
    after Ctrl-C."""
    words = sys.argv[1:] if arguments is None else arguments
    if words[:1] == ["run"]:
        from art_server import cli

        return cli.main(words[1:])
    parser = make_parser()
    if not words:
        return parser.print_help()
    command = parser.parse_args(words)
    try:
        run(command)
    except KeyboardInterrupt:
        sys.exit(130)
    except BrokenPipeError:  # the program that reads the output has ended, such as `head`
        # Python flushes stdout once more at its exit, and would report the same error.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        sys.exit(1)
    except (UsageError, ServerError, OSError) as error:
        text = f"{error.filename}: {error.strerror}" if isinstance(error, OSError) and error.filename else str(error)
        print(f"art: {text}", file=sys.stderr)
        sys.exit(exit_status(error, command.command))


def make_parser() -> argparse.ArgumentParser:
    """The parser of `art`. An annex adds commands by a function of the group `art.commands`. The function gets argparse's
    subparsers, and sets two defaults for each parser: `run`, a function of the parsed flags, and `extra`, the extra with the
    packages that the command needs (None: the server's packages)."""
    parser = Parser(prog="art", description="Train LLM agents with reinforcement learning.")
    parser.other_words = {"train": "finetune"}
    added = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    added.add_parser("run", help="run a server: the same as art-server")
    commands.add_commands(added)
    for entry in entry_points(group="art.commands"):
        entry.load()(added)
    return parser


def run(flags: argparse.Namespace) -> None:
    """Runs a parsed command.

    Raises:
        ServerError, UsageError: the command failed; the message has the reason and the remedy.
    """
    command: Callable[[argparse.Namespace], None] = flags.run
    try:
        command(flags)
    except ModuleNotFoundError as error:
        raise missing_extra(error, flags.extra) from error


def exit_status(error: Exception, command: str) -> int:
    """The exit status of a command that ended with an error."""
    if isinstance(error, NotFound) and error.code == "no_checkpoint":
        return NOTHING_TO_COPY
    is_missing = isinstance(error, NotFound | Unavailable)
    return 1 if is_missing and command in commands.SHOWN else 2
