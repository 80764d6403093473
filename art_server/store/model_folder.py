"""The folder of one model, `PATH/PROJECT/models/NAME`: its description, checkpoints, history and trajectories.

model.json               what it was registered with
history.jsonl            one row per step
checkpoints/%04d/        a PEFT adapter, optimizer.safetensors (newest two steps), checkpoint.json
trajectories/SPLIT/%04d.jsonl
logs/vllm.log            the engine's log
"""

import json
import threading
import uuid
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from pydantic import BaseModel, ConfigDict

from art.wire import LoRAConfig, TrajectoryGroupBody
from art_server.errors import NotFound
from art_server.store import files

OPTIMIZER_FILE = "optimizer.safetensors"
OPTIMIZER_STEPS_KEPT = 2
"""Optimizer state is kept for the newest two steps: the newest to go on from, one more to go back to."""


class ModelRecord(BaseModel):
    """What model.json holds."""

    model_config = ConfigDict(extra="ignore", frozen=True)

    name: str
    project: str
    base_model: str
    lora: LoRAConfig
    always_logprobs: bool = False
    """Registered by the ART wire, whose clients read a choice's log-probabilities without having asked for them."""


class CheckpointRecord(BaseModel):
    """What checkpoint.json holds: written with the adapter, before the folder gets its name."""

    model_config = ConfigDict(extra="ignore", frozen=True)

    step: int
    job_id: str | None = None
    """The job that made it; a restarted server knows by it that the job is done."""
    metrics: dict[str, float] = {}
    unchanged: bool = False
    notes: list[str] = []
    """What the trainer decided by itself."""
    created_at: float = 0.0


_history_lock = threading.Lock()
"""A row is read, changed and written back, by the requests of programs and by the job runner."""


class ModelFolder:
    """Reads and writes one model's folder. Holds no state but its path."""

    def __init__(self, root: Path, project: str, name: str):
        self.project = project
        self.name = name
        self.path = root / project / "models" / name

    # --- the model ---

    def exists(self) -> bool:
        return (self.path / "model.json").exists()

    def create(self, record: ModelRecord, engine_log: Path) -> None:
        """Write model.json, and a link to the engine's log where ART's users look for it."""
        self.checkpoints_dir.mkdir(parents=True, exist_ok=True)
        logs = self.path / "logs"
        logs.mkdir(exist_ok=True)
        link = logs / "vllm.log"
        if not link.is_symlink():
            link.symlink_to(engine_log.resolve())
        files.write_json(self.path / "model.json", record.model_dump(mode="json"))

    def read(self) -> ModelRecord:
        return ModelRecord.model_validate_json((self.path / "model.json").read_text())

    # --- checkpoints ---

    @property
    def checkpoints_dir(self) -> Path:
        return self.path / "checkpoints"

    def steps(self) -> list[int]:
        """The whole checkpoints, oldest first."""
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
        """
        Raises:
            NotFound: no such step; the message lists those that are kept.
        """
        file = self.checkpoint_dir(step) / "checkpoint.json"
        if not file.exists():
            kept = ", ".join(map(str, self.steps()))
            raise NotFound(
                f"model '{self.project}/{self.name}' has no step {step}; kept steps: {kept}",
                code="unknown_step",
                param="model",
            )
        return CheckpointRecord.model_validate_json(file.read_text())

    def new_checkpoint_dir(self) -> Path:
        """A folder to write the next checkpoint into; `commit_checkpoint` gives it its name."""
        folder = self.checkpoints_dir / f".{uuid.uuid4().hex}.tmp"
        with files.disk_errors("a checkpoint"):
            folder.mkdir(parents=True)
        return folder

    def commit_checkpoint(self, temporary: Path, record: CheckpointRecord) -> None:
        """Make a finished checkpoint visible, in one rename, and drop optimizer state that is no longer needed."""
        files.write_json(temporary / "checkpoint.json", record.model_dump(mode="json"))
        files.publish_folder(temporary, self.checkpoint_dir(record.step))
        for step in self.steps()[:-OPTIMIZER_STEPS_KEPT]:
            (self.checkpoint_dir(step) / OPTIMIZER_FILE).unlink(missing_ok=True)

    def delete_checkpoints(self, keep: set[int]) -> list[int]:
        """Delete all steps but `keep` and the newest. Returns what was deleted."""
        deleted = [step for step in self.steps()[:-1] if step not in keep]
        for step in deleted:
            files.remove_folder(self.checkpoint_dir(step))
        return deleted

    def best_step(self, metric: str) -> int | None:
        """The kept step with the highest mean of `metric` in the history, None when it was never logged. What was measured
        on training rollouts counts for the step that sampled them."""
        name = "sampled_step" if metric.startswith("train/") else "step"
        values: dict[int, list[float]] = {}
        for row in self.history():
            step = row.get(name, row.get("step"))
            if isinstance(row.get(metric), int | float) and isinstance(step, int | float):
                values.setdefault(int(step), []).append(float(row[metric]))
        kept = {step: sum(v) / len(v) for step, v in values.items() if step in set(self.steps())}
        return max(kept, key=lambda step: (kept[step], step)) if kept else None

    def clear_temporary(self) -> None:
        """Remove what a killed process left behind."""
        if self.checkpoints_dir.exists():
            files.clear_temporary(self.checkpoints_dir)

    # --- history and trajectories ---

    def history(self) -> list[dict[str, Any]]:
        return files.read_lines(self.path / "history.jsonl")

    def add_history(self, step: int, metrics: dict[str, float], job_id: str | None = None) -> None:
        """Write metrics into the step's row, which the first call appends; the latest value of a metric stands. With a job
        id, what an earlier, killed attempt wrote is not written again."""
        row: dict[str, Any] = {**metrics, "step": step, "training_step": step}
        row["recorded_at"] = datetime.now(UTC).isoformat()
        if job_id is not None:
            row["job_id"] = job_id
        file = self.path / "history.jsonl"
        with _history_lock:
            rows = self.history()
            if job_id is not None and any(each.get("job_id") == job_id for each in rows):
                return
            places = [place for place, each in enumerate(rows) if each.get("step") == step]
            if not places:
                files.append_line(file, row)
                return
            rows[places[-1]] |= row
            lines = "".join(json.dumps(each) + "\n" for each in rows)
            files.write_file(file, lines.encode())

    def write_trajectories(self, split: str, step: int, groups: list[TrajectoryGroupBody]) -> None:
        """Write trajectories/SPLIT/%04d.jsonl, one group a line, replacing what the step had."""
        lines = (json.dumps(trajectory_row(group)).encode() + b"\n" for group in groups)
        self.write_lines(split, step, b"".join(lines))

    def write_lines(self, split: str, step: int, lines: bytes) -> None:
        """The same, of lines that are made already."""
        files.write_file(self.path / "trajectories" / split / f"{step:04d}.jsonl", lines)


def trajectory_row(group: TrajectoryGroupBody) -> dict[str, Any]:
    """One line of a trajectories file: ART's JSONL form, with failures and group fields beside."""
    row = group.model_dump(mode="json", exclude={"trajectories"})
    row["trajectories"] = [
        {"messages": body.pop("messages_and_choices"), **body}
        for body in (trajectory.model_dump(mode="json") for trajectory in group.trajectories)
    ]
    return row


def list_model_folders(root: Path) -> list[ModelFolder]:
    """Every model under the server's path."""
    return [
        ModelFolder(root, file.parent.parent.parent.name, file.parent.name)
        for file in sorted(root.glob("*/models/*/model.json"))
    ]
