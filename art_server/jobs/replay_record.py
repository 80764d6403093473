"""The record of a step, in the folder `replay` of its checkpoint: `scripts/replay.py` makes the step again from it.

record.json        configuration, seed, versions, thread count, and the digests of everything below and of the result
batch.json.zlib    the job's `trainer_messages.Batch`, compressed
start/             adapter and optimizer state before the step; as hard links, which need no room while the checkpoint
                   before the step exists
"""

import contextlib
import functools
import hashlib
import os
import uuid
import zlib
from pathlib import Path

from pydantic import BaseModel, ConfigDict

from art_protocol.wire import LoRAConfig, TrainConfig
from art_server.store import files
from art_server.store.model_folder import CONTENT_FILES, ModelFolder, content_digests

FOLDER, RECORD_FILE, BATCH_FILE, START = "replay", "record.json", "batch.json.zlib", "start"

RECORDS_KEPT = 10
"""Newest steps of a model that keep their record. A record takes three times the room of an adapter, for the optimizer state."""
NUM_BLOCKS, BLOCK_BYTES = 64, 2**20
"""Blocks of a large file that its digest covers."""


class ReplayRecord(BaseModel):
    """The content of record.json. Digests of files are by name."""

    model_config = ConfigDict(extra="ignore", frozen=True)

    model: str
    """PROJECT/NAME."""
    step: int
    start_step: int
    base_model: str
    """As registered."""
    base_files: dict[str, str]
    """The result of `base_digests`."""
    lora: LoRAConfig
    config: TrainConfig
    seed: int
    environment: dict[str, str]
    """`trainer_messages.Done.environment`."""
    batch: str = ""
    """SHA-256 of the batch's JSON."""
    start_files: dict[str, str] = {}
    result_files: dict[str, str] = {}


def write_record(folder: ModelFolder, record: ReplayRecord, packed_batch: bytes) -> None:
    """Writes a step's record into the step's checkpoint; does nothing if the record exists. The record appears whole. Fills
    in the digests of the batch, the start and the result. Blocking: reads the files."""
    checkpoint = folder.checkpoint_dir(record.step)
    if (checkpoint / FOLDER).exists():
        return
    start = folder.checkpoint_dir(record.start_step)
    files.clear_temporary(checkpoint)  # left by a server that was killed here
    temporary = checkpoint / f".{uuid.uuid4().hex}.tmp"
    with files.disk_errors("the record of a step"):
        (temporary / START).mkdir(parents=True)
        for name in CONTENT_FILES:
            if (start / name).exists():
                _link(start / name, temporary / START / name)
    files.write_file(temporary / BATCH_FILE, packed_batch)
    digests = {
        "batch": hashlib.sha256(zlib.decompress(packed_batch)).hexdigest(),
        "start_files": content_digests(temporary / START),
        "result_files": content_digests(checkpoint),
    }
    described = record.model_copy(update=digests).model_dump(mode="json")
    files.write_json(temporary / RECORD_FILE, described)
    files.publish_folder(temporary, checkpoint / FOLDER)
    for step in folder.steps()[:-RECORDS_KEPT]:
        if (old := folder.checkpoint_dir(step) / FOLDER).exists():
            files.remove_folder(old)


def remove_records(folder: ModelFolder, step: int, *, is_set_aside: bool) -> None:
    """Deletes a step's record, which has the tokens of its batch; with `is_set_aside` those of rolled-back steps of this number."""
    for checkpoint in folder.checkpoint_dirs(step, is_set_aside=is_set_aside):
        with contextlib.suppress(FileNotFoundError):  # the step has no record, or was deleted
            files.remove_folder(checkpoint / FOLDER)


def _link(source: Path, target: Path) -> None:
    """A hard link, or a copy where the file system has none."""
    with contextlib.suppress(OSError):
        os.link(source, target)
        return
    files.copy_file(source, target)


def base_digests(folder: Path) -> dict[str, str]:
    """A digest of each of a base model's files with configuration or weights, by name."""
    base_files = [folder / "config.json", *sorted(folder.glob("*.safetensors"))]
    return {file.name: _digest(file, file.stat().st_size, file.stat().st_mtime_ns) for file in base_files}


@functools.cache
def _digest(file: Path, size: int, changed_at: int) -> str:
    """SHA-256 of a file. Of a large file only blocks at equal distances are read, because the whole file would take minutes:
    weights that were trained further differ everywhere."""
    del changed_at  # a changed file has another digest
    if size <= NUM_BLOCKS * BLOCK_BYTES:
        return files.file_digest(file)
    digest = hashlib.sha256(str(size).encode())
    with file.open("rb") as opened:
        for number in range(NUM_BLOCKS):
            opened.seek(number * (size - BLOCK_BYTES) // (NUM_BLOCKS - 1))
            digest.update(opened.read(BLOCK_BYTES))
    return f"blocks:{digest.hexdigest()}"
