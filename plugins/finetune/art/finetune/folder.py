"""The output folder of a run: what is finished, and files about it.

`state.json` is the record of epochs and validations, `rollouts.jsonl` that of rollouts. Both are right whenever the process
dies. All other files are made from the record, and again at the next start. Drafts of files may remain under hidden names.
"""

import contextlib
import json
import re
from collections.abc import Callable, Generator, Iterator, Mapping
from io import BytesIO
from itertools import count
from pathlib import Path
from typing import Any, cast

from pydantic import ValidationError
from ruamel.yaml import YAML

from art.files import write_whole
from art.finetune.errors import WrongInput
from art.finetune.history import METRICS_FILE, REWARDS_FILE, RolloutRow, State, make_files

STATE_FILE = "state.json"
ROLLOUTS_FILE = "rollouts.jsonl"
CONFIG_FILE = "config.yml"
PLOT_FILE = "reward_plot.png"
LOCK_FILE = ".lock"
FREE_FIELDS = {"finetuning.num_epochs", "finetuning.output_dir"}
"""A run may get more epochs, and its folder another name."""
MAX_DIFFERENCES = 5
"""Fields that a refusal lists."""
REMEDY = "set another finetuning.output_dir, or add --fresh, which renames this folder"
SECRET = re.compile(
    r".*api_?key|.*password|.*secret.*|authorization|((access|api|auth|bearer|hf)_)?token", re.IGNORECASE
)
"""Names of fields that are never written. max_tokens and pad_token are not among them."""


class Folder:
    """A run's folder. Each method returns when its files are written."""

    def __init__(self, path: Path, state: State) -> None:
        self.path, self.state = path, state
        self.rollouts = _read_rollouts(path / ROLLOUTS_FILE, epoch=len(state.epochs))
        """What an earlier process finished of the unfinished epoch, by split, row and generation."""
        self.num_lost = 0
        """Of these, rollouts that had to be sampled anew."""
        write_whole(path / CONFIG_FILE, _yaml(state.config))
        self.save(epochs=state.epochs)

    def save(self, **fields: Any) -> None:
        """Replaces fields of the record, and writes the files that are made from its epochs and validations."""
        self.state = self.state.model_copy(update=fields)
        write_whole(self.path / STATE_FILE, self.state.model_dump_json(indent=1).encode())
        if fields.keys().isdisjoint({"epochs", "validations"}):
            return
        for name, content in make_files(self.state).items():
            write_whole(self.path / name, content)
        if self.state.epochs or self.state.validations:
            from art.finetune import plot  # matplotlib takes a second to load

            write_whole(self.path / PLOT_FILE, plot.draw(self.state))

    def add_rollout(self, row: RolloutRow) -> None:
        """Appends the row to its file. A process that dies later does not lose it; a machine may, which samples it again."""
        with open(self.path / ROLLOUTS_FILE, "ab") as file:
            file.write(row.model_dump_json().encode() + b"\n")

    def forget_failed_rollouts(self) -> None:
        """The next process tries them again."""
        self._keep_rollouts(lambda row: row.error is None)

    def forget_epoch(self) -> int:
        """Forgets the rollouts that the unfinished epoch would train, and that it was begun. Returns their number."""
        epoch, known = len(self.state.epochs), self.rollouts
        self.rollouts = {key: row for key, row in known.items() if row.split != "train"}
        self._keep_rollouts(lambda row: row.epoch != epoch or row.split != "train")
        self.save(step=None)
        return len(known) - len(self.rollouts)

    def _keep_rollouts(self, is_kept: Callable[[RolloutRow], bool]) -> None:
        lines = (self.path / ROLLOUTS_FILE).read_bytes().splitlines(keepends=True)
        kept = [line for line in lines if is_kept(RolloutRow.model_validate_json(line))]
        write_whole(self.path / ROLLOUTS_FILE, b"".join(kept))


@contextlib.contextmanager
def opened(path: Path, config: dict[str, Any], *, fresh: bool = False) -> Generator[Folder]:
    """Starts a run in a new folder, or continues the one that is there. Locks the folder until the block ends or the process
    dies. `fresh` renames an earlier one to DIR.1 first.

    `config` is the resolved file, as JSON values. Secrets in it are not kept.

    Raises:
        WrongInput: another process works there, the run there has another configuration or more epochs, the files there are
            those of another program, or they cannot be written.
    """
    path = path.absolute()
    config = _without_secrets(config)
    with contextlib.ExitStack() as locks:
        try:
            locks.enter_context(_locked(path))
            if fresh and any(file.name != LOCK_FILE for file in path.iterdir()):
                path.rename(_free_name(path))  # still locked, for a process that waits to open it
                locks.enter_context(_locked(path))
            folder = Folder(path, _state(path, config))
        except OSError as error:
            raise WrongInput(
                [f"finetuning.output_dir: {path} cannot be used ({error}): name a folder that can be written"]
            ) from error
        yield folder


@contextlib.contextmanager
def _locked(path: Path) -> Generator[None]:
    import fcntl  # which other systems than Linux and macOS lack: `--check` needs no folder

    path.mkdir(parents=True, exist_ok=True)
    with open(path / LOCK_FILE, "a") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            raise WrongInput(
                [f"another process trains in {path}: stop it, or set another finetuning.output_dir"]
            ) from error
        yield


def _free_name(path: Path) -> Path:
    """DIR.1, or the first number that is not there."""
    names = (path.with_name(f"{path.name}.{number}") for number in count(1))
    return next(name for name in names if not name.exists())


def _state(path: Path, config: dict[str, Any]) -> State:
    """The record that the folder has, or else a new one, with the given configuration.

    Raises:
        WrongInput: the folder has another configuration, or files of another program.
    """
    file = path / STATE_FILE
    if not file.exists():
        for name in (CONFIG_FILE, METRICS_FILE, REWARDS_FILE):
            if (path / name).exists():
                raise WrongInput([f"{path / name} is not of a run that can be continued: {REMEDY}"])
        return State(config=config)
    try:
        state = State.model_validate_json(file.read_bytes())
    except ValidationError as error:
        raise WrongInput([f"{file} is not the record of a run ({error}): {REMEDY}"]) from error
    differences = _differences(state.config, config)
    num_epochs = config["finetuning"].get("num_epochs", 1)
    if num_epochs < len(state.epochs):
        differences.append(f"finetuning.num_epochs: {len(state.epochs)} are done in the folder, {num_epochs} here")
    if differences:
        more = [f"and {len(differences) - MAX_DIFFERENCES} more"] if len(differences) > MAX_DIFFERENCES else []
        problem = f"{path} has a run with another configuration: {REMEDY}"
        raise WrongInput([problem, *differences[:MAX_DIFFERENCES], *more])
    return state.model_copy(update={"config": config})


def _read_rollouts(file: Path, epoch: int) -> dict[tuple[str, str, int], RolloutRow]:
    """An epoch's rollouts by split, row and generation; of two for the same, the last.

    The file is cut off at the first line that is not whole: a kill may leave such a line at its end.
    """
    rows: dict[tuple[str, str, int], RolloutRow] = {}
    end = 0
    with open(file, "a+b") as lines:
        lines.seek(0)
        for line in lines:
            try:
                row = RolloutRow.model_validate_json(line)
            except ValidationError:
                break
            if not line.endswith(b"\n"):
                break
            end += len(line)
            if row.epoch == epoch:
                rows[row.split, row.row, row.generation] = row
        lines.truncate(end)
    return rows


# --- configurations -----------------------------------------------------------------------------------------------


def _without_secrets(value: Any) -> Any:
    if isinstance(value, list):
        return [_without_secrets(each) for each in cast(list[Any], value)]
    if not isinstance(value, dict):
        return value
    fields = cast(dict[str, Any], value)
    return {name: _without_secrets(each) for name, each in fields.items() if not SECRET.fullmatch(name)}


def _yaml(config: Mapping[str, Any]) -> bytes:
    text = BytesIO()
    writer: Any = YAML()  # Any: ruamel.yaml declares parts of its methods as unknown
    writer.default_flow_style = False
    writer.dump(config, text)
    return text.getvalue()


def _differences(old: Mapping[str, Any], new: Mapping[str, Any]) -> list[str]:
    """A line for each field that differs. Null, an empty mapping or list, and a field that is not there are the same."""
    before, now = dict(_leaves(old)), dict(_leaves(new))
    lines: list[str] = []
    for name in dict.fromkeys([*before, *now]):
        values = [before.get(name), now.get(name)]
        if values[0] != values[1] and name not in FREE_FIELDS:
            there, here = ("not set" if each is None else json.dumps(each)[:80] for each in values)
            lines.append(f"{name}: {there} in the folder, {here} here")
    return lines


def _leaves(value: Any, place: str = "") -> Iterator[tuple[str, Any]]:
    """The values of a tree with their dotted names."""
    if isinstance(value, list):
        value = dict(enumerate(cast(list[Any], value)))
    if not isinstance(value, dict):
        yield place, value
        return
    for name, each in cast(dict[Any, Any], value).items():
        yield from _leaves(each, f"{place}.{name}" if place else str(name))
