"""The commands `art finetune` and `art eval`. The last line of stderr names the reason and the remedy."""

import argparse
import asyncio
import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

EXIT_CODES = """\
exit codes: 0 trained, or complete already; 1 rollouts or training failed; 2 wrong file, data or flag; 3 no epoch had a group
with signal; 4 no server; 130 Ctrl-C"""
INTERRUPTED = 130


def add_commands(commands: Any) -> None:  # Any: argparse's class for it is private
    """Adds the two parsers."""
    finetune = commands.add_parser(
        "finetune",
        help="train an agent workflow",
        description="Trains a workflow from a file, or a function without one, or continues the run in its output folder.",
        epilog=EXIT_CODES,
    )
    finetune.add_argument("target", nargs="?", metavar="FILE", help="a YAML file, or path/file.py:function")
    _add_flag(finetune, "config_file", metavar="FILE", help="the same as FILE")
    _add_flag(finetune, "dataset", metavar="FILE", help="rows to train on: json, jsonl, csv or parquet")
    _add_flag(finetune, "validation_dataset", metavar="FILE", help="rows to evaluate on")
    _add_flag(finetune, "validation_interval", metavar="EPOCHS", type=int, help="epochs between two validations (5)")
    _add_flag(finetune, "reward", metavar="TYPE", help="without a file: the evaluator, such as agent.py:score")
    _add_flag(finetune, "base_model", metavar="NAME", help="the base model of the trained adapter")
    _add_flag(finetune, "num_epochs", metavar="N", type=int)
    _add_flag(finetune, "num_generations", metavar="N", type=int, help="rollouts of each row")
    _add_flag(finetune, "learning_rate", metavar="RATE", type=float)
    _add_flag(finetune, "output_dir", metavar="DIR")
    _add_override(finetune)
    finetune.add_argument("--check", action="store_true", help="check all, roll out and score one row; train nothing")
    finetune.add_argument("--fresh", action="store_true", help="rename the output folder to DIR.1 and begin again")
    finetune.add_argument("--schema", action="store_true", help="print the JSON schema of the file")
    finetune.set_defaults(run=run_finetune, extra="finetune")
    evaluate = commands.add_parser("eval", help="evaluate a finetuned workflow", epilog=EXIT_CODES)
    evaluate.add_argument("target", metavar="FILE", help="the file of `art finetune`")
    evaluate.add_argument("--step", metavar="K", help="a number, best or base (default: the newest)")
    evaluate.add_argument("--baseline", metavar="K", help="compare with this step, in pairs")
    evaluate.add_argument("--reps", metavar="N", type=int, help="rollouts of each row")
    _add_flag(evaluate, "validation_dataset", metavar="FILE", help="rows to evaluate on")
    _add_override(evaluate)
    evaluate.set_defaults(run=run_eval, extra="finetune")


def _add_flag(parser: argparse.ArgumentParser, name: str, **options: Any) -> None:
    """A flag with underscores, as the toolkit has it, or hyphens."""
    parser.add_argument(f"--{name}", f"--{name.replace('_', '-')}", dest=name, **options)


def _add_override(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        *("-o", "--override"),
        nargs=2,
        action="append",
        default=[],
        metavar=("KEY", "VALUE"),
        help="a dotted name and a value as YAML, which win over the file",
    )


def run_finetune(flags: argparse.Namespace) -> None:
    """Runs `art finetune`; it ends the process unless it trained."""
    from art.finetune import runs
    from art.finetune.errors import WrongInput
    from art.finetune.sections import Config

    if flags.schema:
        print(json.dumps(Config.model_json_schema(by_alias=True), indent=2))
        return

    async def call() -> None:
        if flags.target and flags.config_file:
            raise WrongInput([f"two files are given, {flags.target} and --config_file {flags.config_file}: give one"])
        given = flags.config_file or flags.target
        if given is None:
            raise WrongInput(
                ["no file is given: art finetune FILE, or art finetune agent.py:function --dataset FILE ..."]
            )
        file: Any = given
        if _is_function(given):
            file = _file_of(flags)
        elif flags.reward or flags.base_model:
            raise WrongInput(
                ["--reward and --base_model are for a function: a file names its evaluators and its base_model"]
            )
        overrides = _overrides(flags, has_file=not _is_function(given))
        if flags.check:
            await runs.check(file, overrides)
        else:
            await runs.run(file, overrides, fresh=flags.fresh)

    _end(call())


def run_eval(flags: argparse.Namespace) -> None:
    """Runs `art eval`; it ends the process unless it succeeds."""
    from art.finetune import evaluating

    async def call() -> None:
        overrides: list[tuple[str, Any]] = [(key, value) for key, value in flags.override]
        if flags.validation_dataset:
            overrides.insert(0, ("finetuning.validation.dataset", Path(flags.validation_dataset)))
        found = await evaluating.evaluate(
            flags.target,
            overrides,
            step=flags.step,
            baseline=flags.baseline,
            reps=flags.reps,
        )
        print(found)

    _end(call())


def _end(call: Any) -> None:
    """Runs a command's coroutine. An error's last line goes to stderr, and its code is the process's."""
    from art.finetune.errors import FinetuneError

    try:
        asyncio.run(call)
    except FinetuneError as error:
        print(f"art: {error}", file=sys.stderr)
        sys.exit(error.exit_code)
    except KeyboardInterrupt:
        command = " ".join(["art", *sys.argv[1:]])
        print(f"\nart: stopped. Finished rollouts are kept; this continues: {command}", file=sys.stderr)
        sys.exit(INTERRUPTED)


def _is_function(given: str) -> bool:
    """Whether it is `path/file.py:name` or `package.module:name`, and no file."""
    return ":" in given and not Path(given).exists()


def _path(name: str | None) -> Path | None:
    return None if name is None else Path(name)


def _overrides(flags: argparse.Namespace, *, has_file: bool) -> list[tuple[str, Any]]:
    """What flags set in the file. `-o` comes last and wins."""
    named: list[tuple[str, Any]] = [
        ("eval.general.dataset.file_path", _path(flags.dataset) if has_file else None),
        ("finetuning.validation.dataset", _path(flags.validation_dataset)),
        ("finetuning.validation.interval", flags.validation_interval),
        ("finetuning.num_epochs", flags.num_epochs),
        ("finetuning.output_dir", _path(flags.output_dir)),
    ]
    if has_file and (flags.num_generations or flags.learning_rate):
        from art.finetune.errors import WrongInput

        raise WrongInput(["--num_generations and --learning_rate are for a function: with a file use -o KEY VALUE"])
    given: list[tuple[str, Any]] = [(name, value) for name, value in named if value is not None]
    pairs: Sequence[Sequence[str]] = flags.override
    return [*given, *((key, value) for key, value in pairs)]


def _file_of(flags: argparse.Namespace) -> dict[str, Any]:
    """The file that a command without one stands for.

    Raises:
        WrongInput: a flag is missing.
    """
    from art.finetune.errors import WrongInput

    missing = [f"--{name}" for name in ("dataset", "reward", "base_model") if getattr(flags, name) is None]
    if missing:
        raise WrongInput([f"{flags.target or flags.config_file} without a file needs {', '.join(missing)}"])
    target: str = flags.config_file or flags.target
    where, _, name = target.rpartition(":")
    run_name = f"{Path(where).stem}-{name}".replace("_", "-")
    kind = Path(flags.dataset).suffix.removeprefix(".")
    builder: dict[str, Any] = {"_type": "openpipe_art_traj_builder", "num_generations": flags.num_generations or 8}
    training = {} if flags.learning_rate is None else {"learning_rate": flags.learning_rate}
    backend = {"name": run_name, "project": "finetune", "base_model": flags.base_model}
    return {
        "workflow": {"_type": target},
        "eval": {
            "general": {"max_concurrency": 32, "dataset": {"_type": kind, "file_path": flags.dataset}},
            "evaluators": {"reward": {"_type": flags.reward}},
        },
        "trajectory_builders": {"builder": builder},
        "trainer_adapters": {
            "adapter": {"_type": "openpipe_art_trainer_adapter", "backend": backend, "training": training}
        },
        "trainers": {"trainer": {"_type": "openpipe_art_trainer"}},
        "finetuning": {
            "enabled": True,
            "trainer": "trainer",
            "trajectory_builder": "builder",
            "trainer_adapter": "adapter",
            "reward_function": {"name": "reward"},
            "num_epochs": 10,
            "output_dir": f".tmp/art/{run_name}",
        },
    }
