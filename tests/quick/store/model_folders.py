"""Folders of models, without weights."""

from pathlib import Path

from art_protocol.wire import LoRAConfig
from art_server.store.model_folder import CheckpointRecord, ModelFolder, ModelRecord


def make_model(root: Path, project: str, name: str, steps: int = 1, created_at: float = 0.0) -> ModelFolder:
    folder = ModelFolder(root, project, name)
    for step in range(steps):
        commit(folder, step)
    record = ModelRecord(name=name, project=project, base_model="art/tiny", lora=LoRAConfig(), created_at=created_at)
    folder.create(record, root / "engine.log")
    return folder


def commit(folder: ModelFolder, step: int, job_id: str | None = None) -> None:
    temporary = folder.new_checkpoint_dir()
    (temporary / "optimizer.safetensors").write_bytes(b"state")
    folder.commit_checkpoint(temporary, CheckpointRecord(step=step, job_id=job_id))
