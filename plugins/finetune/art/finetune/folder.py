"""The output folder of a run: what is finished, and files about it.

`state.json` is the record of epochs, validations and notes, `rollouts.jsonl` that of rollouts. Both are right whenever the
process dies. All other files are made from the record, and at the next start again if one is missing or behind. Drafts
of files may remain under hidden names.
"""

import contextlib
import hashlib
import json
import logging
import os
import threading
import uuid
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, replace
from io import FileIO
from itertools import count
from pathlib import Path
from typing import IO, Any

from art.files import write_whole
from art.finetune import plot
from art.finetune.errors import WrongInput
from art.finetune.history import (
    CURRICULUM_FILE,
    METRICS_FILE,
    REWARDS_FILE,
    VALIDATIONS_FILE,
    EpochRow,
    RolloutRow,
    ValidationRow,
    make_files,
)
from art.finetune.recorded import find_differences, to_record, to_yaml

logger = logging.getLogger(__name__)

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


@dataclass(frozen=True, slots=True)
class _State:
    run_id: str
    config: dict[str, Any]
    epochs: list[EpochRow] = field(default_factory=list[EpochRow])
    validations: list[ValidationRow] = field(default_factory=list[ValidationRow])
    notes: dict[str, Any] = field(default_factory=dict[str, Any])


class Folder:
    """A run's folder, locked until it is closed or the process dies. Each method returns when its files are written.

    Of its methods, only `rollouts` and `add_rollout` may run in several threads.
    """

    def __init__(self, path: Path, state: _State, opened: contextlib.ExitStack) -> None:
        self.path = path
        self._can_draw = True
        self._save(state)
        self._rollouts = opened.enter_context(FileIO(path / ROLLOUTS_FILE, "ab"))
        self._rollouts.truncate(_whole_lines(path / ROLLOUTS_FILE))
        self._appending = threading.Lock()
        self._opened = opened.pop_all()

    @classmethod
    def open(cls, path: Path, config: Mapping[str, Any], num_epochs: int, *, fresh: bool = False) -> "Folder":
        """Starts a run in a new folder, or continues the one that is there. `fresh` renames its folder to DIR.1 first.

        `config` is the resolved file. Secrets in it are not kept.

        Raises:
            WrongInput: another process works there, the run there has another configuration or more epochs, the files
                there are those of another program, or they cannot be written.
        """
        path = path.absolute()
        recorded = to_record(config)
        try:
            with contextlib.ExitStack() as opened:
                lock = opened.enter_context(_lock(path))
                if fresh and any(file.name != LOCK_FILE for file in path.iterdir()):
                    path.rename(_free_name(path))
                    lock.close()
                    opened.enter_context(_lock(path))
                state = _read_state(path)
                if state is None:
                    state = _State(f"art_run_{uuid.uuid4().hex[:8]}", recorded)
                _check_same(path, state, recorded, num_epochs)
                return cls(path, replace(state, config=recorded), opened)
        except OSError as error:
            raise WrongInput(
                [f"finetuning.output_dir: {path} cannot be used ({error}): name a folder that can be written"]
            ) from error

    def __enter__(self) -> "Folder":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        self._opened.close()

    @property
    def run_id(self) -> str:
        """The same for all processes that continue the run."""
        return self._state.run_id

    @property
    def epochs(self) -> list[EpochRow]:
        """The finished epochs, from 0 without a gap."""
        return list(self._state.epochs)

    @property
    def validations(self) -> list[ValidationRow]:
        """At most one for each epoch, in their order."""
        return list(self._state.validations)

    def add_epoch(self, row: EpochRow) -> None:
        """Writes the row into the record and into the files for readers.

        Raises:
            ValueError: it is not the next epoch.
        """
        if row.epoch != len(self._state.epochs):
            raise ValueError(f"epoch {row.epoch} cannot be added: {len(self._state.epochs)} are done in {self.path}")
        self._save(replace(self._state, epochs=[*self._state.epochs, row]))

    def add_validation(self, row: ValidationRow) -> None:
        """Writes the row as `add_epoch` does. It replaces the one of the same epoch."""
        rows = {each.epoch: each for each in self._state.validations} | {row.epoch: row}
        self._save(replace(self._state, validations=[rows[epoch] for epoch in sorted(rows)]))

    def note(self, name: str, value: Any) -> None:
        """Keeps a JSON value under a name; None removes it."""
        notes = self._state.notes | {name: value}
        self._save(replace(self._state, notes={each: notes[each] for each in notes if notes[each] is not None}))

    def noted(self, name: str) -> Any:
        """The value kept under a name, or None."""
        return self._state.notes.get(name)

    def rollouts(self, epoch: int) -> list[RolloutRow]:
        """The finished rollouts of an epoch, in the order in which they were added; of two for the same row and
        generation, the last."""
        start = f'{{"epoch": {epoch}, '.encode()  # as `add_rollout` writes it: other lines need no parsing
        rows: dict[tuple[str, int], RolloutRow] = {}
        with self._appending, open(self.path / ROLLOUTS_FILE, "rb") as lines:
            for line in lines:
                if line.startswith(start):
                    row = RolloutRow(**json.loads(line))
                    rows[row.row, row.generation] = row
        return list(rows.values())

    def add_rollout(self, row: RolloutRow) -> None:
        """Appends the row to its file. Threads may call it at the same time."""
        line = json.dumps(asdict(row)).encode() + b"\n"
        with self._appending:
            end = self._rollouts.seek(0, os.SEEK_END)
            try:
                while line:
                    line = line[self._rollouts.write(line) :]
                os.fsync(self._rollouts.fileno())
            except BaseException:  # on a full disk, for example: the next line would continue this one
                self._rollouts.truncate(end)
                raise

    def _save(self, state: _State) -> None:
        """Writes the record, then all that is made from it."""
        self._write(STATE_FILE, json.dumps(asdict(state), indent=1).encode())
        self._state = state
        self._write(CONFIG_FILE, to_yaml(state.config))
        curriculum = state.config.get("finetuning", {}).get("curriculum_learning", {})
        files = make_files(state.run_id, state.epochs, state.validations, curriculum)
        for name, content in files.items():
            self._write(name, content)
        if state.epochs or state.validations:
            self._draw(files[REWARDS_FILE] + files.get(VALIDATIONS_FILE, b""))

    def _write(self, name: str, content: bytes) -> None:
        file = self.path / name
        if not file.exists() or file.read_bytes() != content:
            write_whole(file, content)

    def _draw(self, rewards: bytes) -> None:
        """Draws the plot, unless the one in the folder was drawn from the same rewards."""
        file = self.path / PLOT_FILE
        mark = hashlib.sha256(rewards).hexdigest()
        if not self._can_draw or (file.exists() and mark.encode() in file.read_bytes()):
            return
        try:
            write_whole(file, plot.draw(self._state.epochs, self._state.validations, mark))
        except ModuleNotFoundError as error:
            self._can_draw = False
            logger.warning(
                "%s is not drawn, because '%s' is not installed: pip install 'agent-reinforcement-trainer[finetune]'",
                file,
                error.name,
            )


def _lock(path: Path) -> IO[str]:
    """Makes the folder and locks it. The lock ends when the file is closed.

    Raises:
        WrongInput: another process holds the lock.
    """
    import fcntl  # which other systems than Linux and macOS lack: `--check` needs no folder

    path.mkdir(parents=True, exist_ok=True)
    file = open(path / LOCK_FILE, "a+", encoding="utf-8")  # noqa: SIM115  the caller closes it
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError as error:
        with file:
            file.seek(0)
            raise WrongInput(
                [f"process {file.read()} trains in {path}: stop it, or set another finetuning.output_dir"]
            ) from error
    if not _is_same_file(file, path / LOCK_FILE):  # another process with --fresh renamed the folder just now
        file.close()
        return _lock(path)
    file.truncate(0)
    file.write(str(os.getpid()))
    file.flush()
    return file


def _is_same_file(file: IO[str], path: Path) -> bool:
    with contextlib.suppress(FileNotFoundError):
        return os.path.samestat(os.fstat(file.fileno()), path.stat())
    return False


def _free_name(path: Path) -> Path:
    """DIR.1, or the first number that is not there."""
    names = (path.with_name(f"{path.name}.{number}") for number in count(1))
    return next(name for name in names if not name.exists())


def _read_state(path: Path) -> _State | None:
    """The record of a folder, or None for a new folder.

    Raises:
        WrongInput: the record cannot be read, or there are files of another program that a run would replace.
    """
    file = path / STATE_FILE
    if not file.exists():
        for name in (CONFIG_FILE, PLOT_FILE, METRICS_FILE, REWARDS_FILE, VALIDATIONS_FILE, CURRICULUM_FILE):
            if (path / name).exists():
                raise WrongInput([f"{path / name} is not of a run that can be continued: {REMEDY}"])
        return None
    try:
        record = json.loads(file.read_bytes())
        return _State(
            run_id=record["run_id"],
            config=record["config"],
            epochs=[EpochRow(**row) for row in record["epochs"]],
            validations=[ValidationRow(**row) for row in record["validations"]],
            notes=record["notes"],
        )
    except (ValueError, LookupError, TypeError) as error:
        raise WrongInput([f"{file} is not the record of a run ({error}): {REMEDY}"]) from error


def _check_same(path: Path, state: _State, config: dict[str, Any], num_epochs: int) -> None:
    """
    Raises:
        WrongInput: the configurations differ. It lists the first fields that do.
    """
    differences = [text for name, text in find_differences(state.config, config) if name not in FREE_FIELDS]
    if num_epochs < len(state.epochs):
        differences.append(f"finetuning.num_epochs: {len(state.epochs)} are done in the folder, {num_epochs} here")
    if differences:
        num_more = len(differences) - MAX_DIFFERENCES
        more = [f"and {num_more} more"] if num_more > 0 else []
        problem = f"{path} has a run with another configuration: {REMEDY}"
        raise WrongInput([problem, *differences[:MAX_DIFFERENCES], *more])


def _whole_lines(file: Path) -> int:
    """The length of a file in bytes without its last line, if that was cut short."""
    with open(file, "rb") as lines:
        return sum(len(line) for line in lines if line.endswith(b"\n"))
