"""The exchange format of a checkpoint: an uncompressed tar of its description and its files.

    checkpoint.json  adapter_config.json  adapter_model.safetensors  [optimizer.safetensors]

The description holds the SHA-256 of every other file, so a receiver can verify that the checkpoint is complete. The same
checkpoint always gives the same bytes.
"""

import io
import os
import tarfile
from pathlib import Path
from typing import BinaryIO, Self

from pydantic import Field, ValidationError

from art_protocol.wire import FiniteFloat, LoRAConfig
from art_server.errors import Conflict, InvalidInput, NotFound
from art_server.shared import clock
from art_server.store import files
from art_server.store.adapter import read_lora
from art_server.store.adapter_tensors import BadCheckpoint, check_checkpoint
from art_server.store.base_models import BaseModel
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

MEMBERS = (DESCRIPTION_FILE, *CONTENT_FILES)
MAX_DESCRIPTION_BYTES = 2**20
MAX_CHECKPOINT_BYTES = 8 * 2**30
"""Limit for a received tar. An adapter of rank 64 on 32 billion parameters has 6.5 GB with its optimizer state."""


class Description(CheckpointRecord):
    """checkpoint.json in the exchange format: the record, plus base model and LoRA shape."""

    step: int = Field(ge=0, lt=10**9)
    created_at: FiniteFloat = 0.0
    base_model: str = Field(min_length=1, max_length=1024)
    lora: LoRAConfig

    def of_model(self, project: str, name: str) -> ModelRecord:
        made_at = clock.now()
        return ModelRecord(name=name, project=project, base_model=self.base_model, lora=self.lora, created_at=made_at)

    def record(self) -> CheckpointRecord:
        """The part that a model's own checkpoint.json holds. Omits `job_id`: the job may have run on another server."""
        fields = self.model_dump(include=set(CheckpointRecord.model_fields) - {"job_id"})
        return CheckpointRecord.model_validate(fields)


def describe_step(folder: ModelFolder, record: ModelRecord, step: int) -> Description:
    """Returns the description of a kept step. Blocking: computes the digests if the step was written without them.

    Raises:
        NotFound: the model has no such step.
    """
    kept = folder.read_checkpoint(step)
    content = folder.checkpoint_dir(step)
    digests = kept.files or content_digests(content)
    return Description(
        **kept.model_dump(exclude={"files", "job_id"}),
        files={name: digest for name, digest in digests.items() if (content / name).exists()},
        base_model=record.base_model,
        lora=record.lora,
    )


def check_content(folder: Path, description: Description) -> None:
    """Checks that a folder holds the described files, unchanged, and a plain LoRA of the described rank and alpha.

    Raises:
        InvalidInput: a file is missing, changed or not described, or the adapter differs.
    """
    fault = content_fault(folder, description.files)
    present = {name for name in CONTENT_FILES if (folder / name).exists()}
    if unnamed := (present | {CONFIG_FILE, ADAPTER_FILE}) - description.files.keys():
        fault = f"{DESCRIPTION_FILE} does not name {min(unnamed)}"
    if fault is not None:
        raise InvalidInput(f"the checkpoint is incomplete or damaged: {fault}", code="broken_checkpoint")
    lora, _ = read_lora(folder)
    if (lora.rank, lora.alpha) != (description.lora.rank, description.lora.alpha):
        raise InvalidInput(
            f"{CONFIG_FILE} has rank {lora.rank} and alpha {lora.alpha:g}, {DESCRIPTION_FILE} has rank "
            f"{description.lora.rank} and alpha {description.lora.alpha:g}",
            code="broken_checkpoint",
        )


def check_on_base(description: Description, base: BaseModel, content: Path, known: LoRAConfig | None) -> Description:
    """Checks that the adapter in `content` fits a base model (blocking). Returns the description with the base model's name, and
    with the layers as `known`, the LoRA of the model that gets the adapter, names them.

    Raises:
        InvalidInput: the adapter does not fit.
    """
    try:
        lora = check_checkpoint(base.facts.layers, description.lora, content, known)
    except BadCheckpoint as error:
        raise InvalidInput(
            f"the adapter does not fit base model '{base.name}': {error}", code="bad_checkpoint", param="adapter"
        ) from error
    return description.model_copy(update={"base_model": base.name, "lora": lora})


def read_description(data: bytes) -> Description:
    """Parses a checkpoint.json.

    Raises:
        InvalidInput: the data are not a valid description.
    """
    try:
        description = Description.model_validate_json(data)
    except ValidationError as error:
        problem = error.errors(include_url=False, include_input=False)[0]
        location = ".".join(map(str, problem["loc"]))
        raise InvalidInput(
            f"{DESCRIPTION_FILE} is not a valid description of a checkpoint: {location}: {problem['msg']}",
            code="broken_checkpoint",
        ) from error
    if unknown := description.files.keys() - set(CONTENT_FILES):  # they become paths
        raise InvalidInput(
            f"{DESCRIPTION_FILE} names '{min(unknown)[:80]}', which is not a file of a checkpoint",
            code="broken_checkpoint",
        )
    return description


def place_checkpoint(folder: ModelFolder, description: Description, content: Path, engine_log: Path) -> None:
    """Moves a checked checkpoint into a model's folder (blocking): as the first step of a new model, or as an older
    step that the model lacks. Does nothing if the model has the step with the same weights.

    Raises:
        Conflict: the model has the step with other weights, its newest step is older than this step, or its base model
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


# --- the tar ------------------------------------------------------------------------------------------------------


def write_tar(content: Path, description: Description, tar: BinaryIO) -> None:
    """Writes a checkpoint as a tar.

    Raises:
        NotFound: a file was deleted meanwhile; the request may be repeated.
        StorageFull: the disk has no room.
    """
    data = description.model_dump_json().encode()
    with (
        files.disk_errors("the tar"),
        # Python's default, PAX, can write extended headers, which `read_tar` refuses.
        tarfile.open(fileobj=tar, mode="w", format=tarfile.GNU_FORMAT) as members,
    ):
        _add(members, DESCRIPTION_FILE, len(data), io.BytesIO(data))
        for name in sorted(description.files):
            try:
                with open(content / name, "rb") as file:
                    _add(members, name, os.fstat(file.fileno()).st_size, file)
            except FileNotFoundError as error:
                raise NotFound(
                    f"{name} of step {description.step} was deleted meanwhile: repeat the request",
                    code="unknown_step",
                ) from error


def _add(members: tarfile.TarFile, name: str, size: int, content: BinaryIO) -> None:
    header = tarfile.TarInfo(name)  # without owner and time
    header.size = size
    members.addfile(header, content)


def read_tar(tar: BinaryIO, folder: Path) -> Description:
    """Writes the members of a checkpoint's tar into a new folder, fsyncs them and checks that the checkpoint is complete.

    Raises:
        InvalidInput: the tar is not a valid checkpoint; the members written so far stay in the folder.
        StorageFull: the disk has no room.
    """
    folder.mkdir(parents=True)
    try:
        with (
            files.disk_errors("the checkpoint"),
            tarfile.open(fileobj=tar, mode="r:", tarinfo=_Member) as members,
        ):
            # As `filter="data"`, which Python before 3.11.4 (Debian 12) lacks; `_Member` alone lets no path escape either.
            members.extraction_filter = getattr(tarfile, "data_filter", None)
            for member in members:
                if (folder / member.name).exists():
                    raise _bad_tar(f"'{member.name}' occurs twice")
                # Without the modes of the tar: files of the server are private.
                members.extract(member, folder, set_attrs=False)
    except tarfile.TarError as error:
        raise _bad_tar(str(error)) from error
    for path in [*folder.iterdir(), folder]:
        files.sync(path)
    try:
        file = folder / DESCRIPTION_FILE
        if file.stat().st_size > MAX_DESCRIPTION_BYTES:
            raise _bad_tar(f"{DESCRIPTION_FILE} has more than {MAX_DESCRIPTION_BYTES} bytes")
        description = read_description(file.read_bytes())
    except FileNotFoundError as error:
        raise _bad_tar(f"it has no {DESCRIPTION_FILE}") from error
    check_content(folder, description)
    return description


class _Member(tarfile.TarInfo):
    """A header of a checkpoint's tar. Only plain files with the names of a checkpoint pass. `tarfile` would read an
    extended header of any length into memory, and repeat one of a negative length for ever."""

    @classmethod
    def frombuf(cls, buf: bytes | bytearray, encoding: str, errors: str) -> Self:
        member = super().frombuf(buf, encoding, errors)
        if member.type not in (tarfile.REGTYPE, tarfile.AREGTYPE) or member.name not in MEMBERS:
            raise _bad_tar(
                f"{member.name[:80]!a} is not a plain file of a checkpoint (write the tar with `--format=gnu`)"
            )
        if not 0 <= member.size <= MAX_CHECKPOINT_BYTES:
            raise _bad_tar(f"'{member.name}' has {member.size} bytes")
        return member


def _bad_tar(problem: str) -> InvalidInput:
    return InvalidInput(f"this is not a checkpoint tar: {problem}", code="bad_tar", param="body")
