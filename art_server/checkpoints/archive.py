"""The exchange format of a checkpoint: an uncompressed tar of its description and its files.

    checkpoint.json  adapter_config.json  adapter_model.safetensors  [optimizer.safetensors]

The description is the first member and holds the SHA-256 of every other file, so a receiver can verify that the
checkpoint is complete. The same checkpoint always gives the same bytes and the same ETag. A received tar is parsed
header by header, because a tar library would follow links, paths or extensions.
"""

import contextlib
import hashlib
import os
import tarfile
from collections.abc import Iterator
from pathlib import Path
from typing import BinaryIO

from pydantic import Field, ValidationError

from art_protocol.wire import FiniteFloat, LoRAConfig
from art_server.checkpoints.adapter import read_adapter
from art_server.errors import Conflict, InvalidInput, NotFound
from art_server.store import files
from art_server.store.model_folder import (
    ADAPTER_FILE,
    CONFIG_FILE,
    CONTENT_FILES,
    DESCRIPTION_FILE,
    CheckpointRecord,
    ModelFolder,
    ModelRecord,
    content_digests,
    content_fault,
    create_model,
)

BLOCK = tarfile.BLOCKSIZE
CHUNK_BYTES = 2**20
MAX_DESCRIPTION_BYTES = 2**20
MAX_CHECKPOINT_BYTES = 8 * 2**30
"""Limit for a received tar. An adapter of rank 64 on 32 billion parameters has 6.5 GB with its optimizer state."""
UPLOAD_ID = "x-upload-id"
"""Header of the requests of an upload in parts: only those with the same value continue each other."""


class Description(CheckpointRecord):
    """checkpoint.json in the exchange format: the record, plus base model and LoRA shape."""

    step: int = Field(ge=0, lt=10**9)
    created_at: FiniteFloat = 0.0
    base_model: str = Field(min_length=1, max_length=1024)
    lora: LoRAConfig

    def of_model(self, project: str, name: str) -> ModelRecord:
        return ModelRecord(name=name, project=project, base_model=self.base_model, lora=self.lora)

    def record(self) -> CheckpointRecord:
        """The part that a model's own checkpoint.json holds. Omits `job_id`: the job may have run on another server."""
        fields = self.model_dump(include=set(CheckpointRecord.model_fields) - {"job_id"})
        return CheckpointRecord.model_validate(fields)


def describe(folder: ModelFolder, record: ModelRecord, step: int) -> Description:
    """Returns the description of a kept step. Blocking: computes the digests if the step was written without them.

    Raises:
        NotFound: the model has no such step.
    """
    kept = folder.read_checkpoint(step)
    content = folder.checkpoint_dir(step)
    digests = kept.files or content_digests(content)
    return Description(
        **kept.model_dump(exclude={"files", "job_id"}),
        files={name: each for name, each in digests.items() if (content / name).exists()},
        base_model=record.base_model,
        lora=record.lora,
    )


def check_content(folder: Path, description: Description) -> None:
    """Checks that a folder holds the described files, unchanged, and a plain LoRA of the described rank and alpha.

    Raises:
        InvalidInput: a file is missing, changed or not described, or the adapter differs.
    """
    fault = content_fault(folder, description.files)
    unnamed = {
        name for name in CONTENT_FILES if (folder / name).exists()
    } - description.files.keys()
    if missing := {CONFIG_FILE, ADAPTER_FILE} - description.files.keys():
        fault = f"{DESCRIPTION_FILE} does not name {min(missing)}"
    elif unnamed:
        fault = f"{DESCRIPTION_FILE} does not name {min(unnamed)}"
    if fault is not None:
        raise InvalidInput(
            f"the checkpoint is incomplete or damaged: {fault}", code="broken_checkpoint"
        )
    lora, _ = read_adapter(folder)
    if (lora.rank, lora.alpha) != (description.lora.rank, description.lora.alpha):
        raise InvalidInput(
            f"{CONFIG_FILE} has rank {lora.rank} and alpha {lora.alpha:g}, {DESCRIPTION_FILE} has rank "
            f"{description.lora.rank} and alpha {description.lora.alpha:g}",
            code="broken_checkpoint",
        )


def read_description(data: bytes) -> Description:
    """Parses a checkpoint.json.

    Raises:
        InvalidInput: it is not a valid description.
    """
    try:
        description = Description.model_validate_json(data)
    except ValidationError as error:
        problem = error.errors(include_url=False, include_input=False)[0]
        place = ".".join(map(str, problem["loc"]))
        raise InvalidInput(
            f"{DESCRIPTION_FILE} is not a valid description of a checkpoint: {place}: {problem['msg']}",
            code="broken_checkpoint",
        ) from error
    if unknown := description.files.keys() - set(CONTENT_FILES):  # they become paths
        raise InvalidInput(
            f"{DESCRIPTION_FILE} names '{min(unknown)[:80]}', which is not a file of a checkpoint",
            code="broken_checkpoint",
        )
    return description


def place_checkpoint(
    folder: ModelFolder, description: Description, content: Path, engine_log: Path
) -> None:
    """Moves a checked checkpoint into a model's folder (blocking): as the first step of a new model, or as an older
    step that the model lacks. Does nothing if the model has the step with the same weights.

    Raises:
        Conflict: the model has the step with other weights, its newest step is older than this one, or its base model
            or LoRA shape differs.
    """
    if not folder.exists():
        record = description.of_model(folder.project, folder.name)
        return create_model(folder, record, engine_log, content, description.record())
    record, step, model_id = folder.read(), description.step, f"{folder.project}/{folder.name}"
    if (record.base_model, record.lora) != (description.base_model, description.lora):
        raise Conflict(
            f"model '{model_id}' has base model '{record.base_model}' and LoRA {record.lora}; the checkpoint has "
            f"'{description.base_model}' and {description.lora}: choose another name",
            code="lora_differs",
            param="name",
        )
    if step in folder.steps():
        kept = files.file_digest(folder.checkpoint_dir(step) / ADAPTER_FILE)
        if kept == description.files[ADAPTER_FILE]:
            return None
        raise Conflict(
            f"model '{model_id}' has a step {step}, with other content: choose another name",
            code="step_exists",
            param="step",
        )
    newest = folder.newest_step()
    if newest is not None and step > newest:
        raise Conflict(
            f"model '{model_id}' is at step {newest}, and the checkpoint of the newer step {step}: choose another name",
            code="step_beyond_newest",
            param="step",
        )
    folder.commit_checkpoint(content, description.record())


# --- writing ------------------------------------------------------------------------------------------------------


class CheckpointTar:
    """A checkpoint as a tar, made while it is read. Its files are open from the start, so the step can be deleted."""

    def __init__(self, content: Path, description: Description):
        """Opens the files; computes size and ETag.

        Raises:
            NotFound: a file was deleted meanwhile; the request may be repeated.
        """
        data = description.model_dump_json().encode()
        self.etag = f'"{hashlib.sha256(data).hexdigest()}"'
        self._opened = contextlib.ExitStack()
        self._parts: list[tuple[int, bytes | BinaryIO]] = []
        self._add(DESCRIPTION_FILE, len(data), data)
        try:
            for name in sorted(description.files):
                file = self._opened.enter_context(open(content / name, "rb"))  # noqa: SIM115 - the stack closes it
                self._add(name, os.fstat(file.fileno()).st_size, file)
        except FileNotFoundError as error:
            self.close()
            raise NotFound(
                f"{Path(error.filename).name} of step {description.step} was deleted meanwhile: repeat the request",
                code="unknown_step",
            ) from error
        self._parts.append((2 * BLOCK, bytes(2 * BLOCK)))
        self.size = sum(length for length, _ in self._parts)

    def _add(self, name: str, size: int, content: bytes | BinaryIO) -> None:
        header = tarfile.TarInfo(name)
        header.size, header.mode = size, 0o644
        self._parts.append((BLOCK, header.tobuf(tarfile.GNU_FORMAT)))
        self._parts.append((size, content))
        self._parts.append((-size % BLOCK, bytes(-size % BLOCK)))

    def close(self) -> None:
        self._opened.close()

    def read(self, start: int = 0, stop: int | None = None) -> Iterator[bytes]:
        """Yields the bytes [start, stop) in pieces, and closes the files at the end."""
        stop = self.size if stop is None else stop
        with self._opened:
            begin = 0
            for length, content in self._parts:
                first, last = max(start - begin, 0), min(stop - begin, length)
                begin += length
                if first >= last:
                    continue
                if isinstance(content, bytes):
                    yield content[first:last]
                    continue
                content.seek(first)
                for offset in range(first, last, CHUNK_BYTES):
                    yield content.read(min(CHUNK_BYTES, last - offset))


# --- reading ------------------------------------------------------------------------------------------------------


def unpack(tar: BinaryIO, folder: Path) -> Description:
    """Writes the members of a checkpoint tar into a new folder, fsyncs them and checks that the checkpoint is complete.

    Raises:
        InvalidInput: the tar is not a valid checkpoint; the members written so far stay in the folder.
    """
    folder.mkdir(parents=True)
    description: Description | None = None
    while (member := _next_member(tar)) is not None:
        if description is None:
            if member.name != DESCRIPTION_FILE or member.size > MAX_DESCRIPTION_BYTES:
                raise _bad_tar(
                    f"its first member must be {DESCRIPTION_FILE}, of at most {MAX_DESCRIPTION_BYTES} bytes"
                )
            description = read_description(_read_exactly(tar, member.size))
        elif member.name not in CONTENT_FILES or (folder / member.name).exists():
            raise _bad_tar(f"'{member.name[:80]}' is not a file of a checkpoint, or occurs twice")
        else:
            _write_member(tar, member.size, folder / member.name)
        _read_exactly(tar, -member.size % BLOCK)
    if description is None:
        raise _bad_tar("it is empty")
    check_content(folder, description)
    return description


def _next_member(tar: BinaryIO) -> tarfile.TarInfo | None:
    """Returns the next header, None at the end. Accepts plain files only: no links, folders or extended headers."""
    block = _read_exactly(tar, BLOCK)
    if not any(block):
        return None
    try:
        member = tarfile.TarInfo.frombuf(block, "utf-8", "strict")
    except (tarfile.TarError, ValueError) as error:
        raise _bad_tar(f"a header cannot be read ({error})") from error
    if member.type not in (tarfile.REGTYPE, tarfile.AREGTYPE):
        raise _bad_tar(
            f"'{member.name[:80]}' is not a plain file (write the tar with `--format=gnu`)"
        )
    if not 0 <= member.size <= MAX_CHECKPOINT_BYTES:
        raise _bad_tar(
            f"'{member.name[:80]}' has {member.size} bytes, which is negative or above the limit"
        )
    return member


def _read_exactly(tar: BinaryIO, size: int) -> bytes:
    data = tar.read(size)
    if len(data) != size:
        raise _bad_tar("it ends too early")
    return data


def _write_member(tar: BinaryIO, size: int, path: Path) -> None:
    with files.disk_errors(path.name), open(path, "xb") as file:
        for offset in range(0, size, CHUNK_BYTES):
            file.write(_read_exactly(tar, min(CHUNK_BYTES, size - offset)))
        files.finish(file)


def _bad_tar(problem: str) -> InvalidInput:
    return InvalidInput(f"this is not a checkpoint tar: {problem}", code="bad_tar", param="body")
