"""A checkpoint that travels: its description, and an uncompressed tar of its files.

    checkpoint.json  adapter_config.json  adapter_model.safetensors  [optimizer.safetensors]

The description comes first and holds the digest of every other file, so whoever has all that it names has the whole.
The same checkpoint always makes the same bytes, under the same ETag. A tar that comes in is read header by header, never
by a library that follows links, paths or extensions.
"""

import contextlib
import hashlib
import os
import tarfile
from collections.abc import Iterator
from pathlib import Path
from typing import BinaryIO

from pydantic import Field, ValidationError

from art.wire import FiniteFloat, LoRAConfig
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
"""Of a tar that comes in: rank 64 on a model of 32 billion parameters, with its optimizer's state, is 6.5 GB."""


class Description(CheckpointRecord):
    """checkpoint.json of a checkpoint that travels: what it belongs to as well."""

    step: int = Field(ge=0, lt=10**9)
    created_at: FiniteFloat = 0.0
    base_model: str = Field(min_length=1, max_length=1024)
    lora: LoRAConfig

    def of_model(self, project: str, name: str) -> ModelRecord:
        return ModelRecord(name=name, project=project, base_model=self.base_model, lora=self.lora)

    def record(self) -> CheckpointRecord:
        """What a model's own checkpoint.json holds. The job that made it stays behind: it was another server's."""
        fields = self.model_dump(include=set(CheckpointRecord.model_fields) - {"job_id"})
        return CheckpointRecord.model_validate(fields)


def describe(folder: ModelFolder, record: ModelRecord, step: int) -> Description:
    """A kept step as it travels (blocking: one that was written without digests is read through).

    Raises:
        NotFound: no such step.
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
    """See that a folder holds what its description names: every file, unchanged, and a plain LoRA adapter of its shape.

    Raises:
        InvalidInput: it does not.
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
        raise InvalidInput(f"the checkpoint is not whole: {fault}", code="broken_checkpoint")
    lora, _ = read_adapter(folder)
    if (lora.rank, lora.alpha) != (description.lora.rank, description.lora.alpha):
        raise InvalidInput(
            f"{CONFIG_FILE} says rank {lora.rank} and alpha {lora.alpha:g}, {DESCRIPTION_FILE} says "
            f"{description.lora.rank} and {description.lora.alpha:g}",
            code="broken_checkpoint",
        )


def read_description(data: bytes) -> Description:
    """
    Raises:
        InvalidInput: it is none.
    """
    try:
        return Description.model_validate_json(data)
    except ValidationError as error:
        problem = error.errors(include_url=False, include_input=False)[0]
        place = ".".join(map(str, problem["loc"]))
        raise InvalidInput(
            f"{DESCRIPTION_FILE} is no description of a checkpoint: {place}: {problem['msg']}",
            code="broken_checkpoint",
        ) from error


def place_checkpoint(
    folder: ModelFolder, description: Description, content: Path, engine_log: Path
) -> None:
    """Move a checked checkpoint to its place: as a new model's first step, or as an older one that the model lacks. One that
    is there already, with the same weights, changes nothing (blocking).

    Raises:
        Conflict: it is there with other content, is newer than the model's newest, or of another base or shape.
    """
    if not folder.exists():
        record = description.of_model(folder.project, folder.name)
        return create_model(folder, record, engine_log, content, description.record())
    record, step, model_id = folder.read(), description.step, f"{folder.project}/{folder.name}"
    if (record.base_model, record.lora) != (description.base_model, description.lora):
        raise Conflict(
            f"model '{model_id}' adapts '{record.base_model}' with {record.lora}; the checkpoint adapts "
            f"'{description.base_model}' with {description.lora}: take another name",
            code="lora_differs",
            param="name",
        )
    if step in folder.steps():
        kept = folder.read_checkpoint(step).files.get(ADAPTER_FILE)
        if kept == description.files[ADAPTER_FILE]:
            return None
        raise Conflict(
            f"model '{model_id}' has a step {step}, with other content: take another name",
            code="step_exists",
            param="step",
        )
    newest = folder.newest_step()
    if newest is not None and step > newest:
        raise Conflict(
            f"model '{model_id}' is at step {newest}, and step {step} is newer: take another name",
            code="step_beyond_newest",
            param="step",
        )
    folder.commit_checkpoint(content, description.record())


# --- writing ------------------------------------------------------------------------------------------------------


class CheckpointTar:
    """A checkpoint as a tar, made while it is read. Its files are open from the start: deleting the step spoils nothing."""

    def __init__(self, content: Path, description: Description):
        """
        Raises:
            NotFound: a file went meanwhile; the same request may be repeated.
        """
        data = description.model_dump_json().encode()
        self.etag = f'"{hashlib.sha256(data).hexdigest()}"'
        self._opened = contextlib.ExitStack()
        self._parts: list[tuple[int, bytes | BinaryIO]] = []
        self._add(DESCRIPTION_FILE, len(data), data)
        try:
            for name in sorted(description.files):
                file = self._opened.enter_context(open(content / name, "rb"))  # noqa: SIM115 - it is one
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
        """The bytes from `start` to before `stop`, in pieces; closes the files at the end."""
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
    """Write the members of a checkpoint's tar into a new folder, and check that they are the whole checkpoint. On return
    they are on the disk.

    Raises:
        InvalidInput: no tar of a checkpoint; what was written stays in the folder.
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
            raise _bad_tar(f"'{member.name[:80]}' does not belong there, or comes twice")
        else:
            _write_member(tar, member.size, folder / member.name)
        _read_exactly(tar, -member.size % BLOCK)
    if description is None:
        raise _bad_tar("it is empty")
    check_content(folder, description)
    return description


def _next_member(tar: BinaryIO) -> tarfile.TarInfo | None:
    """The next header, None at the end. Plain files only: no links, folders, sparse files or extended headers."""
    block = _read_exactly(tar, BLOCK)
    if not any(block):
        return None
    try:
        member = tarfile.TarInfo.frombuf(block, "utf-8", "strict")
    except (tarfile.TarError, ValueError) as error:
        raise _bad_tar(f"a header cannot be read ({error})") from error
    if member.type not in (tarfile.REGTYPE, tarfile.AREGTYPE):
        raise _bad_tar(f"'{member.name[:80]}' is no plain file (write the tar with `--format=gnu`)")
    if not 0 <= member.size <= MAX_CHECKPOINT_BYTES:
        raise _bad_tar(f"'{member.name[:80]}' claims {member.size} bytes")
    return member


def _read_exactly(tar: BinaryIO, size: int) -> bytes:
    data = tar.read(size)
    if len(data) != size:
        raise _bad_tar("it ends in the middle")
    return data


def _write_member(tar: BinaryIO, size: int, path: Path) -> None:
    with files.disk_errors(path.name), open(path, "xb") as file:
        for offset in range(0, size, CHUNK_BYTES):
            file.write(_read_exactly(tar, min(CHUNK_BYTES, size - offset)))
        file.flush()
        os.fsync(file.fileno())


def _bad_tar(problem: str) -> InvalidInput:
    return InvalidInput(f"this is no checkpoint's tar: {problem}", code="bad_tar", param="body")
