"""`art finetune FILE --sweep NAME=VALUE,VALUE`: a run for each value, side by side on one server, with one table and one plot.

Each run is a process of the same command, because an agent finds its model in variables of its process. A run has a folder and a
model of its own, with the value in their names. The same command continues all runs.
"""

import asyncio
import itertools
import json
import os
import re
import statistics
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import art
from art.estimates import Estimate
from art.files import write_whole
from art.finetune import runs
from art.finetune.errors import FinetuneError, WrongInput
from art.finetune.folder import STATE_FILE
from art.finetune.interfaces import CheckedFile, say
from art.finetune.run_record import EpochRow, State, ValidationRow
from art.finetune.sections import BuilderSection, Config, Finetuning

TABLE_FILE, PLOT_FILE = "sweep.md", "sweep.png"
COMMAND = "import sys; sys.argv[0] = 'art'; from art_watch.terminal.cli import main; main()"
END = re.compile(r"[\r\n]+")
BAR = re.compile(r"%\||it/s|s/it")
"""What only the line of a progress bar has."""
COMMA = re.compile(r",(?![^\[{]*[\]}])")
"""A comma between values, not in a list."""
SHARE = 5
"""The reward at the end of a run is the mean of the last fifth of its steps."""
HEAD = (
    "| run | trained | reward, first step | last fifth | best validation | of step | |\n|---|---|---|---|---|---|---|"
)


@dataclass(frozen=True, slots=True)
class Variant:
    """One run of a sweep."""

    label: str
    """`learning_rate=1e-5`, or several of them."""
    overrides: list[tuple[str, str]]
    folder: Path

    @property
    def log(self) -> Path:
        """The file with what the run prints."""
        return self.folder.with_name(f"{self.folder.name}.log")

    def add_to_log(self, chunk: bytes) -> None:
        with open(self.log, "ab") as log:
            log.write(chunk)


class SweepFailed(FinetuneError):
    """Runs of a sweep that were not trained. The exit code is the exit code of the first of them."""

    def __init__(self, message: str, exit_code: int) -> None:
        super().__init__(message)
        self.exit_code = exit_code


async def sweep(
    file: str | Path | Mapping[str, Any], overrides: runs.Overrides, sweeps: Sequence[str], arguments: Sequence[str]
) -> None:
    """Trains a run for each combination of values. `arguments` are those of the command without its sweeps.

    Raises:
        WrongInput: a sweep, or the file with a value, is wrong.
        SweepFailed: runs were not trained. The others were.
    """
    pairs = list(overrides.items() if isinstance(overrides, Mapping) else overrides)
    checked_file = runs.prepare(file, pairs)
    folder = checked_file.config.finetuning.output_dir
    variants = variants_of(checked_file, sweeps)
    for variant in variants:
        runs.checked(file, [*pairs, *variant.overrides])
    async with runs.serving(checked_file.config) as backend:
        # The server that this process has started, else the children find the server as this process would.
        own = {"ART_SERVER_URL": backend.base_url} if isinstance(backend, art.LocalBackend) else {}
        async with asyncio.TaskGroup() as group:
            tasks = [group.create_task(_train(variant, arguments, os.environ | own)) for variant in variants]
    codes = [task.result() for task in tasks]
    states = {variant.label: _read_state(variant) for variant in variants}
    write_results(folder, states, dict(zip(states, codes, strict=True)))
    if failed := [variant for variant, code in zip(variants, codes, strict=True) if code]:
        logs = ", ".join(str(variant.log) for variant in failed)
        first = next(code for code in codes if code)
        raise SweepFailed(f"{len(failed)} of {len(variants)} runs were not trained; their logs say why: {logs}", first)


def variants_of(checked_file: CheckedFile, sweeps: Sequence[str]) -> list[Variant]:
    """A run for each combination of values.

    Raises:
        WrongInput: a sweep has no name, no values or the same value twice, or there is a single run.
    """
    config, choices = checked_file.config, list[list[tuple[str, str, str]]]()
    for text in sweeps:
        name, _, values = text.partition("=")
        texts = [value.strip() for value in COMMA.split(values)]
        if not name or not all(texts) or len(set(texts)) < len(texts):
            raise WrongInput([f"--sweep {text}: write NAME=VALUE,VALUE with different values"])
        field = field_of(name, config)
        choices.append([(name, field, value) for value in texts])
    variants = [_variant(checked_file, chosen) for chosen in itertools.product(*choices)]
    if len(variants) < 2:
        raise WrongInput([f"--sweep {' '.join(sweeps)}: give at least two values, such as learning_rate=1e-5,1e-4"])
    if len({variant.folder for variant in variants}) < len(variants):
        raise WrongInput([f"--sweep {' '.join(sweeps)}: two values would have the same folder: write them otherwise"])
    return variants


def field_of(name: str, config: Config) -> str:
    """The dotted name of a field. The last part is enough for fields of training, LoRA, builder and `finetuning`.

    Raises:
        WrongInput: no such field has this name.
    """
    finetuning = config.finetuning
    adapter = f"trainer_adapters.{finetuning.trainer_adapter}"
    sections = {
        f"{adapter}.training": art.TrainConfig,
        f"{adapter}.backend.lora": art.LoRAConfig,
        f"trajectory_builders.{finetuning.trajectory_builder}": BuilderSection,
        "finetuning": Finetuning,
    }
    if "." in name:
        return name
    for section, kind in sections.items():
        if name in kind.model_fields:
            return f"{section}.{name}"
    raise WrongInput(
        [
            f"--sweep {name}: no such field: write a name of docs/train-config.md, or a dotted name such as {adapter}.training.beta"
        ]
    )


def _variant(checked_file: CheckedFile, chosen: Sequence[tuple[str, str, str]]) -> Variant:
    config = checked_file.config
    label = ",".join(f"{name}={value}" for name, _, value in chosen)
    slug = "-".join(f"{name.rpartition('.')[2]}-{value}" for name, _, value in chosen)
    slug = re.sub(r"[^\w.-]+", "-", slug, flags=re.ASCII).strip("-")
    folder = config.finetuning.output_dir / slug
    backend = config.adapter.backend
    own = {
        "finetuning.output_dir": str(folder),
        f"trainer_adapters.{config.finetuning.trainer_adapter}.backend.name": f"{backend.name}-{slug}",
    }
    if checked_file.policy is not None:  # the policy may be found by the model's name, which is another one here
        own["finetuning.target_model"] = checked_file.policy
    overrides = [(field, value) for _, field, value in chosen]
    overrides += [(field, json.dumps(text)) for field, text in own.items()]
    return Variant(label, overrides, folder)


async def _train(variant: Variant, arguments: Sequence[str], environment: Mapping[str, str]) -> int:
    """Runs the command of a variant, and prints its lines with the label. Returns the exit code."""
    flags = itertools.chain.from_iterable(("-o", field, value) for field, value in variant.overrides)
    variant.log.parent.mkdir(parents=True, exist_ok=True)
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-c", COMMAND, *arguments, *flags),
        stdin=asyncio.subprocess.DEVNULL,
        stdout=asyncio.subprocess.DEVNULL,
        stderr=asyncio.subprocess.PIPE,
        env=environment,
        start_new_session=True,  # Ctrl-C reaches only this process, which then stops the others
    )
    assert process.stderr is not None, "stderr is a pipe"
    try:
        rest = ""
        while chunk := await process.stderr.read(2**16):
            variant.add_to_log(chunk)
            *lines, rest = END.split(rest + chunk.decode(errors="replace"))
            for line in lines:
                if line.strip() and not BAR.search(line):
                    say(f"{variant.label}: {line.rstrip()}")
        return await process.wait()
    finally:
        if process.returncode is None:
            process.terminate()
            variant.add_to_log(await process.stderr.read())
            await process.wait()


def _read_state(variant: Variant) -> State | None:
    file = variant.folder / STATE_FILE
    return State.model_validate_json(file.read_bytes()) if file.exists() else None


def write_results(folder: Path, states: Mapping[str, State | None], codes: Mapping[str, int]) -> None:
    """Prints the table, and writes table and plot into the sweep's folder."""
    from art.finetune import plot  # matplotlib takes a second to load

    base = _base(states.values())
    rows = [] if base is None else [f"| base | | | | {base} | 0 | |"]
    table = "\n".join([HEAD, *rows, *(_row(label, state, codes[label]) for label, state in states.items())])
    print(table)
    write_whole(folder / TABLE_FILE, f"{table}\n".encode())
    begun = {label: state for label, state in states.items() if state is not None and state.epochs}
    if begun:
        write_whole(folder / PLOT_FILE, plot.draw_sweep(begun, base))
        say(f"{_verdict(begun, base)}; table and plot are in {folder}")


def _base(states: Iterable[State | None]) -> Estimate | None:
    """The validation of the untrained model, which is the same model in all runs: the means over the runs of the reward and of the
    ends of its interval. None: no run has such a validation."""
    starts = [state.start.estimate for state in states if state is not None and state.start is not None]
    if not starts:
        return None
    return Estimate(
        mean=statistics.fmean(start.mean for start in starts),
        num_scenarios=min(start.num_scenarios for start in starts),
        standard_error=statistics.fmean(start.standard_error for start in starts),
        interval=(
            statistics.fmean(start.interval[0] for start in starts),
            statistics.fmean(start.interval[1] for start in starts),
        ),
    )


def _best(state: State) -> ValidationRow | None:
    """The best validation of a trained step."""
    return max(state.validations_of_trained, key=lambda row: row.estimate.mean, default=None)


def _verdict(states: Mapping[str, State], base: Estimate | None) -> str:
    """The best run in words, or why no run is the best. The untrained model, which all runs share, does not count for a run."""
    trained = {label: state for label, state in states.items() if any(row.filtered_groups for row in state.epochs)}
    if not trained:
        return "no run was trained"
    validated = {label: row.estimate for label, state in trained.items() if (row := _best(state)) is not None}
    if not validated:
        last = {label: reward for label, state in trained.items() if (reward := _last_reward(state)) is not None}
        best = max(last, key=lambda label: last[label])
        return (
            f"the best run is {best}, by the rewards of its training; --validation_share 0.2 compares on held-out rows"
        )
    best = max(validated, key=lambda label: validated[label].mean)
    if base is not None and validated[best].mean <= base.mean:
        return f"no run is better than the base: {base} of the base, {validated[best]} of {best}"
    others = {"the base": base, **validated} if base is not None else validated
    low = validated[best].interval[0]
    close = [name for name, estimate in others.items() if name != best and estimate.interval[1] >= low]
    if close:
        return (
            f"not decided: the intervals overlap of {best}, which has the highest validation, and {', '.join(close)}. More "
            "held-out rows or --validation_reps 4 make the intervals narrower"
        )
    return f"the best run is {best}"


def _last_reward(state: State) -> float | None:
    rows = state.epochs[-max(1, len(state.epochs) // SHARE) :]
    rewards = [row.avg_reward for row in rows if row.avg_reward is not None]
    return statistics.fmean(rewards) if rewards else None


def _row(label: str, state: State | None, code: int) -> str:
    """The run's row of the table."""
    return f"| {' | '.join([label, *_cells(state), f'exit code {code}' if code else ''])} |"


def _trained(epochs: Sequence[EpochRow]) -> str:
    """The number of steps that were trained: `"2 epochs"`, `"1 step, 3 without signal"`, `"no signal"`."""
    num_trained, unit = sum(1 for row in epochs if row.filtered_groups), "epoch" if epochs[-1].batch is None else "step"
    if not num_trained:
        return "no signal"
    trained = f"{num_trained} {unit}" if num_trained == 1 else f"{num_trained} {unit}s"
    return trained if num_trained == len(epochs) else f"{trained}, {len(epochs) - num_trained} without signal"


def _cells(state: State | None) -> Iterator[str]:
    if state is None or not state.epochs:
        yield from ("", "", "", "", "")
        return
    yield _trained(state.epochs)
    for reward in (state.epochs[0].avg_reward, _last_reward(state)):
        yield "" if reward is None else f"{reward:.4f}"
    best = _best(state)
    yield "" if best is None else str(best.estimate)
    yield "" if best is None else str(best.step)
