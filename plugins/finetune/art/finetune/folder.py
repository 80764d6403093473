"""The output folder of a run: the record of finished work, and files that are made from the record.

`state.json` is the record of epochs and validations, `rollouts.jsonl` is the record of rollouts. Both are right whenever the
process dies. All other files are made from the record, and made again at the next start. Drafts of files may remain under
hidden names.
"""

import contextlib
import fnmatch
import json
from collections.abc import Callable, Generator, Iterator, Mapping
from io import BytesIO
from itertools import count
from pathlib import Path
from typing import Any, cast

from filelock import FileLock, Timeout
from pydantic import ValidationError
from ruamel.yaml import YAML

from art.files import write_whole
from art.finetune import checking
from art.finetune.errors import WrongInput
from art.finetune.masking import without_secrets
from art.finetune.run_record import METRICS_FILE, REWARDS_FILE, Asked, RolloutRecord, State, make_files
from art.finetune.sections import Config

STATE_FILE = "state.json"
ROLLOUTS_FILE = "rollouts.jsonl"
CONFIG_FILE = "config.yml"
PLOT_FILE = "reward_plot.png"
LOCK_FILE = ".lock"
DATASET = "eval.general.dataset"
FREE_FIELDS = (
    *("finetuning.num_epochs", "finetuning.output_dir", "finetuning.enabled", "finetuning.max_exceptions"),
    *("finetuning.validation.dataset*", "finetuning.validation.interval", "finetuning.validation.patience"),
    *("finetuning.validation.reps", "finetuning.validation.reward*"),
    *("finetuning.trackers*", "eval.general.max_concurrency"),
    "eval.general.rollout_timeout_seconds",
    *("trainer_adapters.*.backend.url", "trainer_adapters.*.backend.ip", "trainer_adapters.*.backend.port"),
    *("trainer_adapters.*.backend.delete_old_checkpoints", "trainer_adapters.*.backend.engine_args.max_num_seqs"),
    *("trainer_adapters.*.backend.lora*", "trainer_adapters.*.backend.engine_args.gpu_memory_utilization"),
    "trainer_adapters.*.backend.engine_args.tensor_parallel_size",
    *("llms.*.base_url", "llms.*.timeout", "llms.*.request_timeout", "llms.*.max_retries"),
    *("eval.evaluators.*.base_url", "general.*"),
)
"""Fields that may change in a run, because they do not change what is trained: the run's length, limits, addresses, validations.
The LoRA is here too, because the server compares the LoRA with the model's."""
MAX_DIFFERENCES = 5
"""Fields that a refusal lists."""
REMEDY = "set another finetuning.output_dir, or add --fresh, which renames this folder and needs a new name for a trained model"


class Folder:
    """A run's folder. Each method returns when its files are written."""

    def __init__(self, path: Path, state: State) -> None:
        self.path, self.state = path, state
        self.rollouts = _read_rollouts(path / ROLLOUTS_FILE, number=len(state.epochs))
        """The rollouts that an earlier process finished for the unfinished batch and the next, by split, batch, row and
        generation."""
        self.num_lost = 0
        """The number of entries of `rollouts` that had to be sampled anew."""
        self.has_new_workflow = False
        """Whether the code of the workflow is not the code of the command before."""
        self.save(epochs=state.epochs)  # the record first: `_folder` refuses a folder with other files and no record
        write_whole(path / CONFIG_FILE, _yaml(state.config))

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

    def add_rollout(self, row: RolloutRecord) -> None:
        """Appends a row to the file of rollouts. A process that dies later does not lose the row. A machine that dies may lose
        the row: the rollout is then sampled again."""
        with open(self.path / ROLLOUTS_FILE, "ab") as file:
            file.write(row.model_dump_json().encode() + b"\n")

    def forget_failed_rollouts(self) -> None:
        """Removes failed rollouts from the file of rollouts, so that the next process tries them again."""
        self._keep_rollouts(lambda row: row.error is None)

    def num_known(self, split: str, number: int) -> int:
        """The number of a batch's rollouts in a split that an earlier process finished."""
        return sum(1 for row in self.rollouts.values() if (row.split, row.number) == (split, number))

    def forget_batch(self) -> int:
        """Forgets the training rollouts of the unfinished batch and the next, and that the batch has begun. Returns the number of
        forgotten rollouts."""
        num_rollouts = self.forget_split("train")
        self.save(step=None)
        return num_rollouts

    def forget_split(self, split: str) -> int:
        """Forgets the rollouts of the unfinished batch and the next in a split. Returns the number of forgotten rollouts."""
        number, known = len(self.state.epochs), self.rollouts
        self.rollouts = {key: row for key, row in known.items() if row.split != split}
        self._keep_rollouts(lambda row: row.number < number or row.split != split)
        return len(known) - len(self.rollouts)

    def _keep_rollouts(self, is_kept: Callable[[RolloutRecord], bool]) -> None:
        lines = (self.path / ROLLOUTS_FILE).read_bytes().splitlines(keepends=True)
        kept = [line for line in lines if is_kept(RolloutRecord.model_validate_json(line))]
        write_whole(self.path / ROLLOUTS_FILE, b"".join(kept))


@contextlib.contextmanager
def opened(path: Path, config: dict[str, Any], *, fresh: bool = False, **digests: Any) -> Generator[Folder]:
    """Starts a run in a new folder, or continues the run in an existing folder. Locks the folder until the block ends or the
    process dies. `fresh` first renames an existing folder to DIR.1.

    `config` is the resolved file, as JSON values; the folder keeps no secrets of the file. `digests` are the other fields of
    `Asked`.

    Raises:
        WrongInput: another process works in the folder, the run in the folder has another configuration, other rows,
            another reward or more epochs, the folder has files of another program, or files cannot be written.
    """
    path = path.absolute()
    asked = Asked(config=without_secrets(config), **digests)
    with contextlib.ExitStack() as locks:
        try:
            locks.enter_context(_locked(path))
            if fresh and any(file.name != LOCK_FILE for file in path.iterdir()):
                path.rename(_free_name(path))  # the renamed folder stays locked, for a process that waits to open it
                locks.enter_context(_locked(path))
            folder = _folder(path, asked)
        except OSError as error:
            raise WrongInput(
                [
                    f"finetuning.output_dir: {path} cannot be used ({error.strerror or error}): name a folder that can be written"
                ]
            ) from error
        yield folder


def _locked(path: Path) -> contextlib.AbstractContextManager[object]:
    """The locked folder, for a `with` block."""
    path.mkdir(parents=True, exist_ok=True)
    try:
        return FileLock(path / LOCK_FILE).acquire(blocking=False)
    except Timeout as error:
        raise WrongInput(
            [f"another process trains in {path}: stop it, or set another finetuning.output_dir"]
        ) from error


def model_name_in(path: Path) -> str | None:
    """The name of the model that the run in a folder trains; None without a run."""
    state = state_in(path)
    return None if state is None else Config.model_validate(state.config).adapter.backend.name


def state_in(path: Path) -> State | None:
    """The record of the run in a folder; None without a run."""
    try:
        state = State.model_validate_json((path / STATE_FILE).read_bytes())
        Config.model_validate(state.config)
    except (OSError, ValueError):
        return None
    return state


def _free_name(path: Path) -> Path:
    """The folder's name with the first free number: `out -> out.1`."""
    names = (path.with_name(f"{path.name}.{number}") for number in count(1))
    return next(name for name in names if not name.exists())


def _folder(path: Path, asked: Asked) -> Folder:
    """The folder with its record, or with a new record.

    Raises:
        WrongInput: the folder has a run that is trained otherwise, or files of another program.
    """
    file = path / STATE_FILE
    if not file.exists():
        for name in (CONFIG_FILE, METRICS_FILE, REWARDS_FILE):
            if (path / name).exists():
                raise WrongInput([f"{path / name} is not of a run that can be continued: {REMEDY}"])
        return Folder(path, State(**dict(asked)))
    try:
        state = State.model_validate_json(file.read_bytes())
    except ValidationError as error:
        raise WrongInput([f"{file} is not the record of a run ({error}): {REMEDY}"]) from error
    if differences := _differences(state, asked):
        if not (state.epochs or state.validations or state.is_submitted or _read_rollouts(path / ROLLOUTS_FILE, 0)):
            return Folder(path, State(**dict(asked)))  # nothing was done in the folder
        more = [f"and {len(differences) - MAX_DIFFERENCES} more"] if len(differences) > MAX_DIFFERENCES else []
        problem = f"{path} has a run with another configuration, other rows or another reward: {REMEDY}"
        raise WrongInput([*differences[:MAX_DIFFERENCES], *more, problem])
    folder = Folder(path, state.model_copy(update={"config": asked.config, "rows": asked.rows}))
    folder.has_new_workflow = bool(state.workflow and asked.workflow) and state.workflow != asked.workflow
    if state.validation not in ("", asked.validation):
        folder.forget_split("val")
    if _changed_rewards(state, asked):
        folder.forget_batch()
    folder.save(validation=asked.validation, workflow=asked.workflow, rewards=asked.rewards)
    return folder


def _changed_rewards(state: State, asked: Asked) -> list[str]:
    """The functions of the training reward whose source is another one than in the folder."""
    return [name for name, source in asked.rewards.items() if state.rewards.get(name, source) != source]


def _read_rollouts(file: Path, number: int) -> dict[tuple[str, int, str, int], RolloutRecord]:
    """The rollouts from a batch on, by split, batch, row and generation; the last, if the file has several for the same key.

    Cuts the file off at the first line that is not whole: a kill may leave such a line at the end.
    """
    rows: dict[tuple[str, int, str, int], RolloutRecord] = {}
    end = 0
    with open(file, "a+b") as lines:
        lines.seek(0)
        for line in lines:
            try:
                row = RolloutRecord.model_validate_json(line)
            except ValidationError:
                break
            if not line.endswith(b"\n"):
                break
            end += len(line)
            if row.number >= number:
                rows[row.split, row.number, row.row, row.generation] = row
        lines.truncate(end)
    return rows


# --- configurations -----------------------------------------------------------------------------------------------


def _yaml(config: Mapping[str, Any]) -> bytes:
    text = BytesIO()
    writer: Any = YAML()  # Any: ruamel.yaml declares parts of its methods as unknown
    writer.default_flow_style = False
    writer.dump(config, text)
    return text.getvalue()


def _differences(state: State, asked: Asked) -> list[str]:
    """A line for each difference that changes what is trained. A default counts as set. Null, an empty mapping or list, and a field
    that is not there are the same."""
    free, trees = list(FREE_FIELDS), [state.config, asked.config]
    with contextlib.suppress(ValidationError):  # the configuration in the folder may be of an earlier version
        configs = [Config.model_validate(tree) for tree in trees]
        trees = [config.model_dump(mode="json", by_alias=True) for config in configs]
        unused = [name for config in configs for name in checking.without_effect(config)]
        for name in (*unused, *_untrained_evaluators(configs)):
            free += [name, f"{name}.*"]
    if state.rows == asked.rows:
        free.append(f"{DATASET}.*")
    before, now = (dict(_leaves(tree)) for tree in trees)
    lines: list[str] = []
    for name in dict.fromkeys([*before, *now]):
        values = before.get(name), now.get(name)
        if values[0] != values[1] and not any(fnmatch.fnmatchcase(name, pattern) for pattern in free):
            there, here = ("not set" if value is None else json.dumps(value)[:80] for value in values)
            lines.append(f"{name}: {there} in the folder, {here} here")
    if state.rows not in ("", asked.rows):
        lines.append(f"{DATASET}: its rows are not those that the run in the folder began with")
    if state.epochs or state.is_submitted:  # else nothing was trained on rewards of the earlier code
        for name in _changed_rewards(state, asked):
            lines.append(f"{name}: the code of this reward is not the code that the run in the folder began with")
    num_epochs = asked.config["finetuning"].get("num_epochs", 1)
    num_done = state.epochs[-1].epoch + 1 if state.epochs else 0
    if num_epochs < num_done:
        lines.append(f"finetuning.num_epochs: {num_done} are done in the folder, {num_epochs} here")
    return lines


def _untrained_evaluators(configs: list[Config]) -> list[str]:
    """The evaluators that no training reward uses."""
    rewards = [config.finetuning.reward_function for config in configs]
    trained = {name for reward in rewards for name in reward.names}
    known = {name for config in configs for name in config.eval.evaluators}
    return [f"eval.evaluators.{name}" for name in known - trained]


def _leaves(value: Any, prefix: str = "") -> Iterator[tuple[str, Any]]:
    """The values of a tree with their dotted names: `{"a": {"b": [7]}}` has `("a.b.0", 7)`."""
    if isinstance(value, list):
        value = dict(enumerate(cast(list[Any], value)))
    if not isinstance(value, dict):
        yield prefix, value
        return
    for name, entry in cast(dict[Any, Any], value).items():
        yield from _leaves(entry, f"{prefix}.{name}" if prefix else str(name))
