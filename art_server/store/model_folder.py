"""The folder of one model, `PATH/PROJECT/models/NAME`: its description, checkpoints, history and trajectories.

model.json               the registration
about.json               tags and notes that people gave it on its page
history.jsonl            a line for each train and log call, exported by `history.py`
history.rolled-back.jsonl    the lines that rollbacks removed
checkpoints/%04d/        a PEFT adapter, optimizer.safetensors (newest two steps and the best), checkpoint.json
checkpoints/%04d/replay/ all that the step was made from (`jobs/replay_record.py`)
checkpoints/.broken-%04d-HEX/, .rolled-back-%04d-HEX/    steps that were set aside; nothing deletes them
trajectories/SPLIT/%04d.jsonl.gz    the rollouts of a step
tokens/%04d.safetensors  for each token of a step, what the trainer computed
trajectories.rolled-back/, tokens.rolled-back/    files of steps that rollbacks removed
logs/vllm.log            a link to the engine's log
"""

import contextlib
import gzip
import json
import logging
import os
import uuid
from collections.abc import Collection, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, ValidationError

from art_protocol.wire import About, LoRAConfig
from art_server.errors import Conflict, NotFound
from art_server.shared import clock
from art_server.shared.trainer_messages import Probe
from art_server.store import files

logger = logging.getLogger(__name__)

CONFIG_FILE, ADAPTER_FILE = "adapter_config.json", "adapter_model.safetensors"
OPTIMIZER_FILE, DESCRIPTION_FILE = "optimizer.safetensors", "checkpoint.json"
ABOUT_FILE = "about.json"
TOKENS_FILE = "tokens.safetensors"
"""The record of a step's tokens (`trainer/token_record.py`), in a checkpoint that is not yet finished."""
CONTENT_FILES = (CONFIG_FILE, ADAPTER_FILE, OPTIMIZER_FILE)
"""The files of a checkpoint whose digests checkpoint.json holds."""
OPTIMIZER_STEPS_KEPT = 2
"""Optimizer state is kept for the newest two steps, one to continue from and one to roll back to, and for the best."""


class ModelRecord(BaseModel):
    """The content of model.json."""

    model_config = ConfigDict(extra="ignore", frozen=True)

    name: str
    project: str
    base_model: str
    lora: LoRAConfig
    always_logprobs: bool = False
    """Set for the ART wire, whose clients read a choice's log-probabilities without requesting them."""
    created_at: float = 0.0
    """Seconds since 1970. If the time differs from that of the server's database, the folder is another model's."""


class CheckpointRecord(BaseModel):
    """The content of checkpoint.json, which is written before the folder gets its final name."""

    model_config = ConfigDict(extra="ignore", frozen=True)

    step: int
    job_id: str | None = None
    """The job that made the step; a restarted server does not train this job again."""
    metrics: dict[str, float] = {}
    unchanged: bool = False
    optimizer_steps: int | None = None
    """Optimizer steps since step 0, from which the learning rate's schedule counts. None: another program made the
    checkpoint, and the steps of its optimizer state count."""
    notes: list[str] = []
    """Decisions that the trainer made by itself, as sentences."""
    losses: list[float] = []
    """The loss of each optimizer step of the job that made the step."""
    created_at: float = 0.0
    """Seconds since 1970; 0 until the commit, which sets its time."""
    probe: Probe | None = None
    """What the engine must reproduce before the step serves. A step without a probe serves unchecked."""
    environment: dict[str, str] = {}
    """The job's `trainer_messages.Done.environment`."""
    chat_template: str | None = None
    """The text of the server's `--chat-template` when the step was made; None: the base model's own template."""
    files: dict[str, str] = {}
    """SHA-256 of each file, by name. Empty in a checkpoint that was written without digests."""


SetAside = Literal["broken", "rolled-back"]


class ModelFolder:
    """Reads and writes one model's folder. Holds no state but its path."""

    def __init__(self, root: Path, project: str, name: str):
        self.project = project
        self.name = name
        self.path = root / project / "models" / name
        self.model_id = f"{project}/{name}"
        self.history_file = self.path / "history.jsonl"

    # --- the model ---

    def exists(self) -> bool:
        return (self.path / "model.json").exists()

    def has_history(self) -> bool:
        return self.history_file.exists()

    def create(self, record: ModelRecord, engine_log: Path) -> None:
        """Writes model.json, and a link to the engine's log at the path where ART's users expect it."""
        self.checkpoints_dir.mkdir(parents=True, exist_ok=True)
        logs = self.path / "logs"
        logs.mkdir(exist_ok=True)
        link = logs / "vllm.log"
        if not link.is_symlink():
            link.symlink_to(engine_log.resolve())
        files.write_json(self.path / "model.json", record.model_dump(mode="json"))

    def read(self) -> ModelRecord:
        """The registration, with the names of the folder's path: the model may have been renamed."""
        record = ModelRecord.model_validate_json((self.path / "model.json").read_text())
        return record.model_copy(update={"project": self.project, "name": self.name})

    def rename(self, name: str) -> "ModelFolder":
        """Gives the folder another name in its project, which no folder has. model.json keeps the name that was registered."""
        renamed = ModelFolder(self.path.parents[2], self.project, name)
        os.rename(self.path, renamed.path)
        files.sync(renamed.path.parent)
        return renamed

    def read_about(self) -> About:
        """The tags and notes; none if there is no file, or no readable one."""
        with contextlib.suppress(OSError, ValueError):
            return About.model_validate_json((self.path / ABOUT_FILE).read_bytes())
        return About()

    def write_about(self, about: About) -> None:
        files.write_json(self.path / ABOUT_FILE, about.model_dump())

    # --- checkpoints ---

    @property
    def checkpoints_dir(self) -> Path:
        return self.path / "checkpoints"

    def steps(self) -> list[int]:
        """The steps that have a checkpoint, oldest first."""
        if not self.checkpoints_dir.exists():
            return []
        names = (entry.name for entry in self.checkpoints_dir.iterdir())
        return sorted(int(name) for name in names if name.isdigit())

    def newest_step(self) -> int | None:
        steps = self.steps()
        return steps[-1] if steps else None

    def checkpoint_dir(self, step: int) -> Path:
        return self.checkpoints_dir / f"{step:04d}"

    def read_checkpoint(self, step: int) -> CheckpointRecord:
        """Reads a step's checkpoint.json.

        Raises:
            NotFound: the model has no such step; the message lists the kept steps.
        """
        file = self.checkpoint_dir(step) / DESCRIPTION_FILE
        if not file.exists():
            raise self.unknown_step(step)
        return CheckpointRecord.model_validate_json(file.read_text())

    def unknown_step(self, step: int) -> NotFound:
        kept = ", ".join(str(other) for other in self.steps() if other != step)
        return NotFound(
            f"model '{self.project}/{self.name}' has no step {step}; kept steps: {kept}",
            code="unknown_step",
            param="model",
        )

    def new_checkpoint_dir(self) -> Path:
        """Creates a temporary folder for the next checkpoint; `commit_checkpoint` gives it its final name."""
        folder = self.checkpoints_dir / f".{uuid.uuid4().hex}.tmp"
        with files.disk_errors("a checkpoint"):
            folder.mkdir(parents=True)
        return folder

    def new_first_checkpoint_dir(self) -> Path:
        """Creates a temporary folder for step 0 beside the model's own folder, which may not exist yet."""
        folder = self.path.with_name(f".{uuid.uuid4().hex}.tmp")
        with files.disk_errors("a checkpoint"):
            folder.mkdir(parents=True)
        return folder

    def commit_checkpoint(self, temporary: Path, record: CheckpointRecord) -> None:
        """Publishes a finished checkpoint: writes checkpoint.json with the digests of its files, renames the folder."""
        fields = {"files": content_digests(temporary), "created_at": record.created_at or clock.now()}
        described = record.model_copy(update=fields)
        files.write_json(temporary / DESCRIPTION_FILE, described.model_dump(mode="json"))
        files.publish_folder(temporary, self.checkpoint_dir(record.step))

    def prune_optimizer_state(self, best: int | None) -> None:
        """Deletes the optimizer state of all steps but the newest two and the best."""
        for step in self.steps()[:-OPTIMIZER_STEPS_KEPT]:
            if step != best:
                (self.checkpoint_dir(step) / OPTIMIZER_FILE).unlink(missing_ok=True)

    def fault(self, step: int) -> str | None:
        """What is wrong with a step's files; None if nothing is. Only the optimizer state may be missing."""
        folder = self.checkpoint_dir(step)
        try:
            record = CheckpointRecord.model_validate_json((folder / DESCRIPTION_FILE).read_bytes())
        except (OSError, ValidationError) as error:
            return f"{DESCRIPTION_FILE} cannot be read ({type(error).__name__})"
        if record.step != step:
            return f"{DESCRIPTION_FILE} is that of step {record.step}"
        return content_fault(folder, record.files)

    def newest_faults(self, steps: Sequence[int]) -> dict[int, str]:
        """The faults of those of `steps`, oldest first, that are newer than the newest whole step, by step, newest first. The
        files of a whole step match their digests."""
        faults: dict[int, str] = {}
        for step in reversed(steps):
            if (fault := self.fault(step)) is None:
                break
            faults[step] = fault
        return faults

    def set_broken_aside(self, faults: Mapping[int, str]) -> None:
        """Sets steps aside, with a line in the log for each."""
        for step, fault in faults.items():
            aside = self.set_aside(step, "broken")
            logger.error(
                "CHECKPOINT %s/%s@%d IS BROKEN: %s. It was moved to %s; the newest whole step before it serves",
                *(self.project, self.name, step, fault, aside),
            )

    def set_aside(self, step: int, why: SetAside) -> Path:
        """Renames a step's folder, so that it is no longer a checkpoint. Returns the new path."""
        aside = self.checkpoints_dir / f".{why}-{step:04d}-{uuid.uuid4().hex[:8]}"
        os.rename(self.checkpoint_dir(step), aside)
        files.sync(self.checkpoints_dir)
        return aside

    def remove_steps(self, steps: Iterable[int]) -> None:
        for step in steps:
            files.remove_folder(self.checkpoint_dir(step))

    def roll_back(self, step: int) -> None:
        """Sets the later steps, their lines of history.jsonl and rollouts aside. After a crash a second call completes
        the rollback."""
        rows = files.read_lines(self.history_file)
        later_rows = [row for row in rows if row.get("step", 0) > step]
        # Before they leave history.jsonl: a crash in between writes them twice, and loses none.
        for row in later_rows:
            files.append_line(self.path / "history.rolled-back.jsonl", row)
        if later_rows:
            kept = (json.dumps(row) + "\n" for row in rows if row.get("step", 0) <= step)
            files.write_file(self.history_file, "".join(kept).encode())
        for later in reversed(self.steps()):
            if later > step:
                self.set_aside(later, "rolled-back")
        for folder in ("trajectories", "tokens"):
            for file in (self.path / folder).rglob("*.*"):
                number, _, ending = file.name.partition(".")
                if number.isdecimal() and int(number) > step:
                    subfolder = file.relative_to(self.path / folder).parent
                    aside = self.path / f"{folder}.rolled-back" / subfolder
                    aside.mkdir(parents=True, exist_ok=True)
                    os.rename(file, aside / f"{number}.{uuid.uuid4().hex[:8]}.{ending}")

    def move_to_trash(self) -> Path:
        """Renames the model's folder and returns the new path, which the caller deletes."""
        return files.bury_folder(self.path)

    def clear_temporary(self) -> None:
        """Deletes unfinished checkpoints."""
        if self.checkpoints_dir.exists():
            files.clear_temporary(self.checkpoints_dir)

    # --- history and trajectories ---

    def append_history(self, row: dict[str, Any]) -> None:
        """Appends a line to history.jsonl."""
        files.append_line(self.history_file, row)

    def keep_tokens(self, step: int) -> None:
        """Moves the record of a step's tokens out of its checkpoint, so that it stays when the checkpoint is deleted."""
        source = self.checkpoint_dir(step) / TOKENS_FILE
        if source.exists():
            kept = self.tokens_file(step)
            kept.parent.mkdir(exist_ok=True)
            os.replace(source, kept)
            files.sync(kept.parent)

    def trajectories_file(self, split: str, step: int) -> Path:
        """The file of a step's rollouts, which may not exist: `art_protocol.history.read_rows` reads it."""
        return self.path / "trajectories" / split / f"{step:04d}.jsonl.gz"

    def rollout_steps(self, split: str) -> list[int]:
        """The steps that have rollouts in a split, in order."""
        names = (file.name for file in (self.path / "trajectories" / split).glob("*.jsonl.gz"))
        return sorted({int(n) for n in map(_number, names) if n is not None})

    def prune_rollouts(self, max_bytes: int) -> int:
        """Deletes the rollouts and token records of the oldest steps while all of them take more than `max_bytes`. The
        newest step's files stay. Returns the number of deleted files."""
        sizes: dict[int, dict[Path, int]] = {}
        for file in (*self.path.glob("trajectories/*/*.jsonl.gz"), *self.path.glob("tokens/*.*")):
            step = _number(file.name)
            with contextlib.suppress(FileNotFoundError):  # deleted meanwhile
                if step is not None:
                    sizes.setdefault(int(step), {})[file] = file.stat().st_size
        total = sum(sum(of_step.values()) for of_step in sizes.values())
        deleted = 0
        for step in sorted(sizes)[:-1]:
            if total <= max_bytes:
                break
            for file, size in sizes[step].items():
                file.unlink(missing_ok=True)
                total, deleted = total - size, deleted + 1
        if deleted:
            logger.info("%s/%s: %d files of old rollouts deleted", self.project, self.name, deleted)
        return deleted

    def forget_rollouts(self, step: int, ids: Collection[str], *, is_set_aside: bool) -> int:
        """Deletes the groups of a trained step's rollouts that contain one of these ids, and the step's record of tokens.
        `is_set_aside`: the step was rolled back. Returns the number of deleted groups."""
        rollouts, tokens = [self.trajectories_file("train", step)], [self.tokens_file(step)]
        if is_set_aside:
            rollouts = [*self.path.glob(f"trajectories.rolled-back/train/{step:04d}.*.jsonl.gz")]
            tokens = [*self.path.glob(f"tokens.rolled-back/{step:04d}.*")]
        for file in tokens:
            file.unlink(missing_ok=True)
        wanted = [choice.encode() for choice in ids]
        num_deleted = 0
        for file in rollouts:
            with contextlib.suppress(FileNotFoundError), gzip.open(file, "rb") as reader:
                lines = reader.readlines()
                kept = [line for line in lines if not any(choice in line for choice in wanted)]
                if len(kept) < len(lines):
                    files.write_file(file, gzip.compress(b"".join(kept), mtime=0))
                    num_deleted += len(lines) - len(kept)
        return num_deleted

    def checkpoint_dirs(self, step: int, *, is_set_aside: bool) -> list[Path]:
        """The folder of a step, or the folders of steps of this number that were rolled back."""
        aside = self.checkpoints_dir.glob(f".rolled-back-{step:04d}-*")
        return [*aside] if is_set_aside else [self.checkpoint_dir(step)]

    def tokens_file(self, step: int) -> Path:
        return self.path / "tokens" / f"{step:04d}.safetensors"

    def write_lines(self, split: str, step: int, packed: bytes) -> None:
        """Writes trajectories/SPLIT/%04d.jsonl.gz with the content of `pack_rows`. Replaces an existing file."""
        files.write_file(self.trajectories_file(split, step), packed)


def _number(name: str) -> str | None:
    """The step in a file's name: `0012.jsonl.gz` -> `0012`; None if the name has no step."""
    number = name.partition(".")[0]
    return number if number.isascii() and number.isdecimal() else None


def content_digests(folder: Path) -> dict[str, str]:
    """SHA-256 of each checkpoint file in a folder, by name. Blocking: reads the files."""
    present = (name for name in CONTENT_FILES if (folder / name).exists())
    return {name: files.file_digest(folder / name) for name in present}


def content_fault(folder: Path, digests: dict[str, str]) -> str | None:
    """What is wrong with a checkpoint's files; None if nothing is. Only the optimizer state may be missing."""
    for name, digest in digests.items():
        if name not in CONTENT_FILES:
            return f"'{name[:80]}' is not a file of a checkpoint"
        if not (folder / name).is_file():
            if name == OPTIMIZER_FILE:
                continue
            return f"{name} is missing"
        if files.file_digest(folder / name) != digest:
            return f"{name} was changed after it was written (SHA-256 differs)"
    return None


def list_model_folders(root: Path, *, unserved: bool = False) -> list[ModelFolder]:
    """The folders of all models under the server's path; with `unserved` also folders in which a program keeps the history
    of a model without a server."""
    model_files = [*root.glob("*/models/*/model.json")]
    if unserved:
        model_files += root.glob("*/models/*/history.jsonl")
    return [
        ModelFolder(root, path.parent.parent.name, path.name)
        for path in sorted({file.parent for file in model_files})
        if not path.name.startswith(".")
    ]


def create_model(
    folder: ModelFolder,
    record: ModelRecord,
    engine_log: Path,
    content: Path,
    checkpoint: CheckpointRecord,
) -> None:
    """Creates a model, in one rename, whose first step is the checkpoint in `content`. Moves the folder `content`.

    Raises:
        Conflict: the model's path exists already.
    """
    models = folder.path.parent
    if folder.path.exists():
        raise Conflict(
            f"{folder.path} exists already, but no model is registered under it: choose another name, or move the "
            "folder away",
            code="model_exists",
            param="name",
        )
    temporary = ModelFolder(models.parent.parent, folder.project, f".{uuid.uuid4().hex}.tmp")
    temporary.create(record, engine_log)
    temporary.commit_checkpoint(content, checkpoint)
    files.publish_folder(temporary.path, folder.path)


def copy_content(source: Path, target: Path) -> None:
    """Copies a checkpoint's files into a new folder and fsyncs them."""
    target.mkdir(parents=True)
    for name in CONTENT_FILES:
        if (source / name).exists():
            files.copy_file(source / name, target / name)
