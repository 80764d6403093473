"""A model at step 0, without weights."""

from collections.abc import Callable
from pathlib import Path

from art_protocol.wire import LoRAConfig
from art_server.shared.clock import REAL
from art_server.store.model_folder import CheckpointRecord, ModelRecord
from art_server.store.registry import RegisteredModel, Registry


def add_model(
    registry: Registry,
    name: str = "a",
    base_model: str = "base",
    *,
    project: str = "p",
    write: Callable[[Path], object] = lambda checkpoint: None,
) -> RegisteredModel:
    """`write` makes the files of its checkpoint."""
    folder = registry.folder(project, name)
    # The time of the registration tells a model from an earlier one of its name.
    record = ModelRecord(name=name, project=project, base_model=base_model, lora=LoRAConfig(), created_at=REAL.now())
    first = folder.new_checkpoint_dir()
    write(first)
    folder.commit_checkpoint(first, CheckpointRecord(step=0, optimizer_steps=0))
    folder.create(record, Path("engine.log"))
    return registry.add(folder, record)
