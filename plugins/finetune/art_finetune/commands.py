"""The commands `art finetune`, `art eval` and `art sft`. The last line of stderr names the reason and the remedy."""

import argparse
import asyncio
import contextlib
import json
import logging
import os
import re
import shlex
import shutil
import signal
import sys
import threading
import time
from collections.abc import Coroutine, Generator, Sequence
from pathlib import Path
from typing import Any

EXIT_CODES = """\
exit codes: 0 trained, or complete already; 1 rollouts or training failed; 2 wrong file, data or flag; 3 no epoch had a group
with signal; 4 no server; 5 below --at_least or
--at_least_difference; 130 Ctrl-C, 143 SIGTERM, 129 SIGHUP"""
SIGNALLED = 128
"""The exit code of a stopped command is this number plus the signal's number, as in shells."""
AGAIN = "This begins again"
"""What a command does after a stop that keeps nothing."""
LEAVE_SECONDS = 5.0
"""The limit for the end of the loop, and then for the end of the process."""
DATASET = "eval.general.dataset"
OF_FILES = {
    "validation_dataset": "finetuning.validation.dataset",
    "validation_share": "finetuning.validation.share",
    "validation_interval": "finetuning.validation.interval",
    "validation_reps": "finetuning.validation.reps",
    "patience": "finetuning.validation.patience",
    "num_epochs": "finetuning.num_epochs",
    "rows_per_step": "finetuning.rows_per_step",
    "output_dir": "finetuning.output_dir",
    "question_key": f"{DATASET}.structure.question_key",
    "answer_key": f"{DATASET}.structure.answer_key",
    "limit": f"{DATASET}.limit",
    "id": f"{DATASET}.ids",
}
"""Flags that set a field of a file."""
OF_FUNCTIONS = {
    "reward": "eval.evaluators.reward._type",
    "judge_model": "eval.evaluators.reward.judge_model",
    "judge_url": "eval.evaluators.reward.base_url",
    "base_model": "trainer_adapters.adapter.backend.base_model",
    "name": "trainer_adapters.adapter.backend.name",
    "num_generations": "trajectory_builders.builder.num_generations",
    "learning_rate": "trainer_adapters.adapter.training.learning_rate",
}
"""Flags that set a field of the file that `_input` makes for a command without a file."""
NEEDED = ("dataset", "reward", "base_model")
"""Flags that a command without a file needs."""
OF_TASKS = {
    "rows": "art.harbor.finetuning:rows",
    "workflow": "art.harbor.finetuning:play",
    "reward": "art.harbor.finetuning:reward",
}
"""What a command with `--tasks` runs, by its part of the file."""


OF_ROLLOUTS = ("step", "baseline", "reps", "results", "compare", "validation_dataset", "validation_share")
"""Flags of `art eval` that have no effect on given answers."""
REFUSED = {
    "endpoint": "the workflow runs in this process: one behind HTTP is a function that passes the rollout's address on "
    "(docs/finetune.md, Workflows)",
    "endpoint_timeout": "set eval.general.rollout_timeout_seconds",
    "result_json_path": "return the part that is scored from the workflow, or take it from `output` in the evaluator",
    "validation_config_file": "set finetuning.validation (dataset, interval, reps, reward), or run `art eval` with the other "
    "file",
}
"""Flags of the toolkit, with what to do instead."""


class _Refuse(argparse.Action):
    def __call__(self, parser: argparse.ArgumentParser, _: object, __: object, option: str | None = None) -> None:
        parser.error(f"{option} is refused: {REFUSED[self.dest]}")


def add_commands(commands: Any) -> None:  # Any: argparse's class for it is private
    """Adds the parsers of `art finetune`, `art eval` and `art sft`."""
    _add_sft(commands)
    finetune = commands.add_parser(
        "finetune",
        help="train an agent workflow",
        description="Trains a workflow from a file, or a function without one, or continues the run in its output folder.",
        epilog=EXIT_CODES,
    )
    finetune.add_argument("target", nargs="?", metavar="FILE", help="a YAML file, or path/file.py:function")
    _add_flag(finetune, "config_file", metavar="FILE", help="the same as FILE")
    _add_flag(finetune, "patience", metavar="N", type=int, help="end after N validations without a better one")
    _add_flag(finetune, "validation_interval", metavar="EPOCHS", type=float, help="epochs between two validations (5)")
    _add_flag(finetune, "validation_reps", metavar="N", type=int, help="rollouts of each held-out row (1)")
    _add_flag(finetune, "num_epochs", metavar="N", type=int, help="passes over the rows (a function: 10)")
    _add_flag(finetune, "rows_per_step", metavar="N", type=int, help="rows that a step trains (all)")
    _add_flag(finetune, "num_generations", metavar="N", type=int, help="of a function: rollouts of each row (8)")
    _add_flag(finetune, "learning_rate", metavar="RATE", type=float, help="of a function (5e-6, low for a small model)")
    finetune.add_argument("--check", action="store_true", help="check all, roll out and score one row; train nothing")
    finetune.add_argument("--fresh", action="store_true", help="rename the output folder to DIR.1, begin from the base")
    finetune.add_argument(
        "--sweep",
        action="append",
        default=[],
        metavar="NAME=V,V",
        help="a run for each value, such as learning_rate=1e-5,1e-4; repeated: for each combination",
    )
    finetune.add_argument("--schema", action="store_true", help="print the JSON schema of the file")
    for name in REFUSED:
        _add_flag(finetune, name, action=_Refuse, nargs="?", help=argparse.SUPPRESS)
    finetune.set_defaults(run=run_finetune)
    evaluate = commands.add_parser(
        "eval",
        help="evaluate a function or workflow, compare, gate CI",
        description="Evaluates a function or workflow, compares two evaluations, gates CI (--at_least).",
        epilog=EXIT_CODES,
    )
    evaluate.add_argument(
        "target",
        nargs="?",
        metavar="FILE",
        help="the file of `art finetune`, path/file.py:function, or results to --compare",
    )
    evaluate.add_argument("--step", metavar="K", help="a number, best or base (default: the newest)")
    evaluate.add_argument("--baseline", metavar="K", help="compare with this step, in pairs")
    evaluate.add_argument("--reps", metavar="N", type=int, help="rollouts of each row")
    _add_flag(
        evaluate,
        "at_least",
        metavar="X",
        type=float,
        help="fail unless the lower end of the 95%% interval is at least X",
    )
    _add_flag(
        evaluate,
        "at_least_difference",
        metavar="X",
        type=float,
        help="the same for the difference from --baseline or --compare",
    )
    evaluate.add_argument("--results", metavar="FILE", help="rollouts as JSONL (default: eval_results.jsonl)")
    evaluate.add_argument("--compare", metavar="FILE", help="show the differences from these results in eval.html")
    evaluate.add_argument("--labels", metavar="FILE", help="compare the reward with labels of given answers")
    evaluate.set_defaults(run=run_eval, config_file=None, sweep=[], check=False, fresh=False)
    for parser in (finetune, evaluate):
        _add_flag(
            parser,
            "dataset",
            type=Path,
            metavar="FILE",
            help="rows of the file, or of a function: json, jsonl, csv, tsv, parquet, or hub:OWNER/NAME[/SUBSET][:SPLIT]",
        )
        _add_flag(parser, "question_key", metavar="COLUMN", help="the column with the question (question)")
        _add_flag(parser, "answer_key", metavar="COLUMN", help="the column with the right answer (answer)")
        _add_flag(parser, "output_dir", type=Path, metavar="DIR", help="folder of the run, which a run continues")
        _add_flag(parser, "reward", metavar="TYPE", help="of a function: its evaluator, such as agent.py:score")
        _add_flag(parser, "judge_model", metavar="NAME", help="of a function whose reward is judge: the judge")
        _add_flag(parser, "judge_url", metavar="URL", help="of a function: the judge's address, such as http://HOST/v1")
        _add_flag(parser, "base_model", metavar="NAME", help="of a function: the base model of the trained adapter")
        _add_flag(
            parser,
            "name",
            metavar="NAME",
            help="of a function: the trained model (`finetune`: from function and folder; `eval`: the base)",
        )
        _add_flag(parser, "validation_dataset", type=Path, metavar="FILE", help="rows to evaluate on")
        _add_flag(
            parser,
            "validation_share",
            metavar="X",
            type=float,
            help="share of the rows that training holds out, such as 0.2; `eval` evaluates these rows",
        )
        parser.add_argument("--tasks", type=Path, metavar="DIR", help="tasks in Harbor's format, for --agent")
        parser.add_argument("--agent", metavar="COMMAND", help="of --tasks: the command, with {instruction}")
        parser.add_argument(
            "--mount",
            action="append",
            default=[],
            metavar="DIR:PATH",
            help="of --tasks: a folder of the agent's programs at a path in its box, read-only; several times",
        )
        parser.add_argument("--limit", metavar="N", type=int, help="only the first N rows")
        parser.add_argument(
            "--id", metavar="ID", action="append", help="only the row with this id; several times: these rows"
        )
        parser.add_argument(
            *("-o", "--override"),
            nargs=2,
            action="append",
            default=[],
            metavar=("KEY", "VALUE"),
            help="a dotted name and a value as YAML, which win over the file",
        )
        parser.set_defaults(extra="finetune")


def _add_sft(commands: Any) -> None:  # Any: argparse's class for it is private
    parser = commands.add_parser(
        "sft",
        help="train on the examples of a file",
        description="Trains on rows with `messages`, or with a question and an answer, or continues after an earlier end.",
        epilog="exit codes: 0 trained; 1 training failed; 2 wrong file or flag; 4 no server",
    )
    parser.add_argument(
        "examples", metavar="FILE", help="json, jsonl, csv, parquet, or hub:OWNER/NAME[/SUBSET][:SPLIT]"
    )
    parser.add_argument("--model", required=True, metavar="PROJECT/NAME", help="the trained model")
    _add_flag(parser, "base_model", required=True, metavar="NAME", help="the base model of the trained adapter")
    _add_flag(parser, "validation_share", metavar="X", type=float, help="share of the rows that is held out")
    _add_flag(parser, "validation_dataset", metavar="FILE", help="held-out rows, in place of a share")
    _add_flag(
        parser,
        "eval_steps",
        metavar="N",
        type=int,
        help="optimizer steps of a step of the model, which is saved and validated (an epoch)",
    )
    _add_flag(parser, "patience", metavar="N", type=int, help="end after N validations without a better one")
    _add_flag(parser, "num_epochs", metavar="N", type=int, default=3, help="passes over the rows (%(default)s)")
    _add_flag(parser, "batch_size", metavar="N", type=int, default=8, help="rows of an optimizer step (%(default)s)")
    _add_flag(
        parser, "learning_rate", metavar="RATE", type=float, default=1e-4, help="the highest, on a cosine (%(default)s)"
    )
    _add_flag(parser, "rank", metavar="N", type=int, help="of a new model's LoRA (8)")
    _add_flag(parser, "question_key", metavar="COLUMN", default="question", help="without `messages` (%(default)s)")
    _add_flag(parser, "answer_key", metavar="COLUMN", default="answer", help="without `messages` (%(default)s)")
    parser.add_argument(
        "--tracker", dest="trackers", metavar="NAME", action="append", default=[], help="such as wandb; several times"
    )
    parser.set_defaults(run=run_sft, extra="finetune")


def run_sft(flags: argparse.Namespace) -> None:
    """Runs `art sft`. Ends the process unless the model was trained."""
    from art.finetune import supervised

    _end(supervised.train(supervised.settings_of(flags)), again="Finished steps are kept; this continues")


def _add_flag(parser: argparse.ArgumentParser, name: str, **options: Any) -> None:
    """A flag with underscores, as the toolkit has it, or hyphens."""
    spellings = dict.fromkeys((f"--{name}", f"--{name.replace('_', '-')}"))
    parser.add_argument(*spellings, dest=name, **options)


def run_finetune(flags: argparse.Namespace) -> None:
    """Runs `art finetune`. Ends the process unless the run was trained."""
    from art.finetune import runs, sweeping
    from art.finetune.schema import make_schema

    if flags.schema:
        return print(json.dumps(make_schema(), indent=2))

    async def call() -> None:
        _take_tasks(flags)
        file, overrides = _input(flags)
        with _typed_flags(flags):
            if flags.sweep:
                await sweeping.sweep(file, overrides, flags.sweep, _without_sweeps(sys.argv[1:]))
            elif flags.check:
                await runs.check(file, overrides)
            else:
                await runs.run(file, overrides, fresh=flags.fresh)

    _end(call(), again=AGAIN if flags.check else "Finished rollouts are kept; this continues")


@contextlib.contextmanager
def _typed_flags(flags: argparse.Namespace) -> Generator[None]:
    """Problems of the block name the flag that was typed, not the field that the flag sets.

    Raises:
        WrongInput: the input of the block is wrong.
    """
    from art.finetune.errors import WrongInput

    typed = {
        f"-o {field}: ": f"--{name}: " for name, field in (OF_FILES | OF_FUNCTIONS).items() if _is_set(flags, name)
    }
    try:
        yield
    except WrongInput as error:
        problems: list[str] = []
        for problem in error.problems:
            prefix = next((prefix for prefix in typed if problem.startswith(prefix)), "")
            problems.append(typed.get(prefix, "") + problem.removeprefix(prefix))
        raise WrongInput(problems) from error


def _is_set(flags: argparse.Namespace, name: str) -> bool:
    return getattr(flags, name, None) is not None


def run_eval(flags: argparse.Namespace) -> None:
    """Runs `art eval`. Ends the process unless the evaluation succeeds, and is not below `--at_least`."""

    _end(evaluate_flags(flags))


async def evaluate_flags(flags: argparse.Namespace) -> None:
    """Runs `art eval`.

    Raises:
        FinetuneError: the evaluation failed, or is below `--at_least` or `--at_least_difference`.
    """
    from art.finetune import evaluating, results
    from art.finetune.errors import WrongInput

    _take_tasks(flags)
    if flags.target is None:
        raise WrongInput(["give one file: art eval FILE, or art eval agent.py:function --dataset FILE ..."])
    if flags.labels is not None and (unused := [name for name in OF_ROLLOUTS if getattr(flags, name) is not None]):
        raise WrongInput([f"--labels asks no policy: leave out {', '.join(f'--{name}' for name in unused)}"])
    if flags.at_least_difference is not None and flags.baseline is None and flags.compare is None:
        raise WrongInput(["--at_least_difference needs --baseline K or --compare FILE"])
    if flags.target.endswith(".jsonl"):
        return _evaluate_results(flags)
    step = flags.step
    if _is_function(flags.target) and flags.name is None:
        if unused := [name for name in ("step", "baseline") if getattr(flags, name) not in (None, "base")]:
            raise WrongInput(
                [f"--{unused[0]} needs --name NAME, the trained model: without a name the base model is evaluated"]
            )
        step = "base"
    file, overrides = _input(flags)
    if flags.validation_dataset is not None:  # also in place of a share of the training rows
        overrides = [(OF_FILES["validation_share"], None), *overrides]
    rows: dict[str, Any] = {"limit": flags.limit, "ids": flags.id or []}
    if flags.labels is not None:
        agreement = await evaluating.measure_agreement(file, flags.labels, overrides, **rows)
        print(agreement)
        results.check_at_least("the agreement", agreement.share, flags.at_least)
    else:
        steps: dict[str, Any] = {"step": step, "baseline": flags.baseline, "reps": flags.reps}
        files: dict[str, Any] = {"results": flags.results, "compare": flags.compare}
        with _typed_flags(flags):
            evaluation = await evaluating.evaluate(file, overrides, **steps, **rows, **files)
        print(evaluation if evaluation.comparison is None else f"{evaluation.comparison}; {evaluation.page}")
        if flags.id:
            print(results.shown(evaluation.records))
        results.check_at_least(f"the reward of {evaluation.name}", evaluation.reward, flags.at_least)
        _check_difference(evaluation.comparison, flags)


def _evaluate_results(flags: argparse.Namespace) -> None:
    """Compares or gates the results of an earlier evaluation. No server is asked."""
    from art.finetune import evaluating, results
    from art.finetune.errors import WrongInput

    if flags.compare is not None:
        compared = evaluating.compare_files(flags.compare, flags.target)
        print(f"{compared}; {evaluating.page_of(flags.target)}")
        results.check_at_least("the reward", compared.rewards[1], flags.at_least)
        return _check_difference(compared, flags)
    if flags.at_least is None:
        raise WrongInput([f"{flags.target}: these are results of an evaluation; add --compare FILE, or --at_least X"])
    reward = results.mean_reward(results.read_results(Path(flags.target)))
    print(f"reward {reward}")
    results.check_at_least("the reward", reward, flags.at_least)


def _check_difference(comparison: Any, flags: argparse.Namespace) -> None:
    from art.finetune import results
    from art.finetune.errors import BelowTarget

    if comparison is None or flags.at_least_difference is None:
        return
    if comparison.difference is None:
        raise BelowTarget("no row has a reward in both evaluations, so there is no difference")
    results.check_at_least("the difference", comparison.difference, flags.at_least_difference, "--at_least_difference")


def _end(call: Coroutine[Any, Any, None], again: str = AGAIN) -> None:
    """Runs a command. `again` says what the same command does after a stop. An error goes to stderr, and the error's exit code becomes the exit code of the process."""
    try:
        from art.finetune.errors import FinetuneError
    except ModuleNotFoundError:  # without the extra; a coroutine that nobody awaits is a warning
        call.close()
        raise

    code = 0
    if logging.lastResort is not None:  # warnings, unless the workflow's modules configure logging
        logging.lastResort.setFormatter(_WithoutSecrets())
    runner = asyncio.Runner()
    try:
        if stopped_by := _run(runner, call):
            code = SIGNALLED + stopped_by
            command = continuing_command(sys.argv[1:])
            print(f"\nart: stopped. {again}: {command}", file=sys.stderr)
    except FinetuneError as error:
        code = error.exit_code
        print(f"art: {error}", file=sys.stderr)
    finally:
        closed = _end_soon(code)
        runner.close()
        closed.set()
    if code:
        sys.exit(code)


def _run(runner: asyncio.Runner, call: Coroutine[Any, Any, None]) -> int | None:
    """Runs a command until its end. Returns the number of the signal that stopped the command (Ctrl-C, SIGTERM or SIGHUP), else
    None. Programs and connections of the command's workflow are closed then."""
    received: list[int] = []

    async def run() -> None:
        loop, task = asyncio.get_running_loop(), asyncio.current_task()
        assert task is not None, "a coroutine runs in a task"

        def stop(number: int) -> None:
            received.append(number)
            task.cancel()

        for number in (signal.SIGTERM, signal.SIGHUP):
            if signal.getsignal(number) is signal.SIG_DFL:  # under `nohup` SIGHUP stays ignored
                loop.add_signal_handler(number, stop, number)
        await call

    try:
        runner.run(run())
    except KeyboardInterrupt:
        return signal.SIGINT
    except asyncio.CancelledError:
        if not received:
            raise
        return received[0]
    return None


class _WithoutSecrets(logging.Formatter):
    def format(self, record: logging.LogRecord) -> str:
        from art.finetune.masking import masked

        return masked(super().format(record))


def continuing_command(arguments: Sequence[str]) -> str:
    """The shell command that continues the command with these arguments. `--fresh` is left out, because `--fresh` would begin
    again. An override with a secret is only named, without its value."""
    from art.finetune.masking import is_secret, masked

    words, hidden = ["art"], list[str]()
    rest = iter(arguments)
    for word in rest:
        if word == "--fresh":
            continue
        if word not in ("-o", "--override"):
            words.append(masked(word))
            continue
        key, value = next(rest, ""), next(rest, "")
        if is_secret(key.rpartition(".")[2]) or masked(value) != value:
            hidden.append(key)
        else:
            words += [word, key, value]
    return shlex.join(words) + (f" with -o {' and -o '.join(hidden)} as before" if hidden else "")


def _end_soon(code: int) -> threading.Event:
    """Ends the process some seconds after its last work, even if threads or tasks of a workflow continue, for which Python would
    wait. The caller sets the returned event when the loop is closed."""
    closed = threading.Event()

    def watch() -> None:
        if closed.wait(LEAVE_SECONDS):
            threading.main_thread().join()  # Python waits for other threads only after the main thread's end
            time.sleep(LEAVE_SECONDS)
        sys.stderr.flush()
        os._exit(code)

    sys.stdout.flush()
    threading.Thread(target=watch, name="end", daemon=True).start()
    return closed


def _take_tasks(flags: argparse.Namespace) -> None:
    """Makes a command with `--tasks` a command without a file, whose function and reward are those of `art.harbor`.

    Raises:
        WrongInput: flags are missing, or do not fit `--tasks`.
    """
    from art.finetune.errors import WrongInput

    if flags.tasks is None:
        if unused := [name for name in ("agent", "mount") if getattr(flags, name)]:
            raise WrongInput([f"--{unused[0]} needs --tasks DIR"])
        return
    unused = [f"--{name}" for name in ("dataset", "reward", "question_key", "answer_key") if _is_set(flags, name)]
    if flags.target is not None or flags.config_file is not None or unused:
        others = ", ".join([*([flags.target or "the file"] if flags.target or flags.config_file else []), *unused])
        raise WrongInput([f"--tasks has rows, agent and reward of its own: leave out {others}"])
    if flags.agent is None:
        raise WrongInput(["--tasks needs --agent COMMAND, such as --agent 'bash /opt/agents/agent.sh {instruction}'"])
    if wrong := [mount for mount in flags.mount if not all(mount.partition(":")[::2])]:
        raise WrongInput([f"--mount {wrong[0]}: write a folder and a path in the box, such as ~/agents:/opt/agents"])
    flags.target, flags.reward = OF_TASKS["workflow"], OF_TASKS["reward"]


def _rows_of_tasks(flags: argparse.Namespace) -> dict[str, Any]:
    """The data set of a command with `--tasks`."""
    mounts = {path: folder for folder, _, path in (mount.partition(":") for mount in flags.mount)}
    arguments = {"folder": str(flags.tasks), "agent": flags.agent, "mounts": mounts}
    return {"_type": "custom", "function": OF_TASKS["rows"], "kwargs": arguments}


def _input(flags: argparse.Namespace) -> tuple[Any, list[tuple[str, Any]]]:
    """The file, or the file that is made for a function, and the overrides. `-o` comes last and wins.

    Raises:
        WrongInput: flags are missing, or do not fit each other.
    """
    from art.finetune.errors import WrongInput
    from art.finetune.reading import dataset_of_file

    if flags.sweep and flags.check:
        raise WrongInput(["--check checks one run: leave --sweep out"])
    if (flags.target is None) == (flags.config_file is None):
        raise WrongInput(["give one file: art finetune FILE, or art finetune agent.py:function --dataset FILE ..."])
    target: str = flags.target or flags.config_file
    if " " in target and shutil.which(target.split()[0]):
        raise WrongInput(
            [
                f"{target!r} is a command line, which a file names (`_type: command`): docs/howto/javascript.md has a whole file"
            ]
        )
    of_files = {
        name: field for name, field in OF_FILES.items() if flags.command != "eval" or name not in ("limit", "id")
    }
    overrides = [*_dataset(flags), *_overrides_from(flags, of_files), *flags.override]
    if not _is_function(target):
        if misplaced := [f"--{name}" for name in OF_FUNCTIONS if _is_set(flags, name)]:
            raise WrongInput(
                [f"{', '.join(misplaced)} belong to a function without a file: set them with -o KEY VALUE"]
            )
        return target, overrides
    needed = NEEDED if flags.tasks is None else ("base_model",)
    if missing := [f"--{name}" for name in needed if getattr(flags, name) is None]:
        raise WrongInput([f"{target} without a file needs {', '.join(missing)}"])
    try:
        dataset = dataset_of_file(flags.dataset) if flags.tasks is None else _rows_of_tasks(flags)
    except ValueError as error:
        raise WrongInput([f"--dataset {flags.dataset}: {error}"]) from error
    where, _, name = target.rpartition(":")
    if flags.tasks is not None:
        where, name = "harbor", re.sub(r"[^\w.-]+", "-", flags.tasks.absolute().name, flags=re.ASCII)
    agent_name = f"{Path(where).stem}-{name}".replace("_", "-")
    run_name = flags.name or _model_name(agent_name, flags)
    file: dict[str, Any] = {
        "workflow": {"_type": target},
        "eval": {
            "general": {"max_concurrency": 32, "dataset": dataset},
            "evaluators": {"reward": {}},
        },
        "trajectory_builders": {"builder": {"_type": "openpipe_art_traj_builder", "num_generations": 8}},
        "trainer_adapters": {
            "adapter": {
                "_type": "openpipe_art_trainer_adapter",
                "backend": {"name": run_name, "project": "finetune"},
                "training": {},
            }
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
    return file, [*_overrides_from(flags, OF_FUNCTIONS), *overrides]


def _is_function(target: str) -> bool:
    """Whether a command has a function in place of a file."""
    return ":" in target and not Path(target).exists()


def _model_name(agent_name: str, flags: argparse.Namespace) -> str:
    """The model of a command without a file and without `--name`: the model of the run in the output folder, else a model that is
    named for the function and the folder."""
    from art.finetune.folder import model_name_in

    if flags.output_dir is None:
        return agent_name
    known = None if flags.fresh else model_name_in(flags.output_dir)
    folder_name = re.sub(r"[^\w.-]+", "-", flags.output_dir.absolute().name, flags=re.ASCII).strip("-.")
    return known or (agent_name if folder_name in ("", agent_name) else f"{agent_name}-{folder_name}")


def _without_sweeps(arguments: Sequence[str]) -> list[str]:
    """The arguments of a command for one run of its sweep."""
    words, rest = list[str](), iter(arguments)
    for word in rest:
        flag, equals, _ = word.partition("=")
        if not ("--sweep".startswith(flag) and len(flag) > 3):  # argparse takes the beginning of a flag
            words.append(word)
        elif not equals:
            next(rest)
    return words


def _dataset(flags: argparse.Namespace) -> list[tuple[str, Any]]:
    """The fields of the training data set that `--dataset` sets. A file keeps the file's own kind."""
    from art.finetune.reading import dataset_of_text

    if flags.dataset is None:
        return []
    section = dataset_of_text(flags.dataset)
    if section["_type"] != "hub":
        return [(f"{DATASET}.file_path", flags.dataset)]
    return [(f"{DATASET}.file_path", None), *((f"{DATASET}.{name}", value) for name, value in section.items())]


def _overrides_from(flags: argparse.Namespace, fields: dict[str, str]) -> list[tuple[str, Any]]:
    """The fields of a file that flags set, each with its value."""
    return [(field, getattr(flags, name)) for name, field in fields.items() if _is_set(flags, name)]
