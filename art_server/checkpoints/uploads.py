"""Receives checkpoint uploads: collects the parts of a tar, checks the checkpoint, stores it as a step of a model.

The parts are appended to one file, so an interrupted upload can be resumed. The complete tar is unpacked into a
temporary folder. Its digests and LoRA are checked, and the trainer checks that it fits the base model. One rename then
makes it a step.
"""

import asyncio
import contextlib
import hashlib
import os
import shutil
import time
import uuid
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

from art_server.base_models import BaseModel
from art_server.checkpoints.archive import (
    MAX_CHECKPOINT_BYTES,
    Description,
    place_checkpoint,
    unpack,
)
from art_server.checkpoints.manage import Checkpoints
from art_server.engine.engine import Engine
from art_server.errors import Conflict, InvalidInput, TooLarge, Unavailable
from art_server.jobs.trainer import Trainer
from art_server.jobs.trainer_process import TrainerError
from art_server.shared.tasks import CheckTask
from art_server.store import files
from art_server.store.registry import Model, Registry, check_rank

WRITE_BYTES = 2**20
"""Size of the write buffer."""
KEPT_SECONDS = 86400.0
"""An unfinished upload that got no data for this long is deleted."""


@dataclass(frozen=True, slots=True)
class ByteRange:
    """The bytes of an upload that a request carries: from `start` on, of `total`. Without a total, all of them."""

    start: int = 0
    total: int | None = None
    is_question: bool = False
    """The request carries no bytes; the reply has the number of received ones."""


@dataclass(eq=False)
class Uploads:
    """Receives tars and stores them as steps."""

    _registry: Registry
    _engine: Engine
    _trainer: Trainer
    _checkpoints: Checkpoints
    _incoming: Path
    """Folder for unfinished checkpoints; empty at start."""
    _max_rank: int
    _load_base: Callable[[str], Awaitable[BaseModel]]
    _busy: set[Path] = field(init=False, default_factory=set)

    def part(self, owner: str, project: str, name: str, step: int, upload_id: str) -> Path:
        """The file that collects an upload. Each caller and each content has a separate one."""
        key = hashlib.sha256(f"{owner} {project}/{name}@{step} {upload_id}".encode()).hexdigest()
        return self._incoming / f"{key[:32]}.part"

    async def receive(self, part: Path, byte_range: ByteRange, body: AsyncIterator[bytes]) -> int:
        """Appends a request's bytes and returns how many the upload has. A broken connection keeps what arrived.

        Raises:
            TooLarge: the upload exceeds the size limit.
            Conflict: bytes before `byte_range.start` are missing.
            Unavailable: another request writes to the same upload.
        """
        if (byte_range.total or 0) > MAX_CHECKPOINT_BYTES:
            raise too_large(MAX_CHECKPOINT_BYTES)
        with self._claimed(part):
            await asyncio.to_thread(clear_old_parts, self._incoming)
            received = await asyncio.to_thread(num_received, part)
            if byte_range.is_question:
                return received
            if byte_range.start > received:
                raise Conflict(
                    f"this upload has {received} bytes so far, and the request begins at {byte_range.start}: send the rest "
                    f"from byte {received}",
                    code="upload_gap",
                    param="content-range",
                )
            return await append(part, byte_range, body)

    async def take_in(
        self, part: Path, project: str, name: str, step: int, base_model: str | None
    ) -> Model:
        """Stores a complete upload as the first step of a new model, or as an older step that a model lacks. Does
        nothing if the model has the step with the same weights.

        Raises:
            InvalidInput: the checkpoint is incomplete, or does not fit the base model.
            Conflict: the model has the step with other weights, its newest step is older, or base model or LoRA differ.
        """
        content = self._incoming / uuid.uuid4().hex
        try:
            with self._claimed(part):
                description = await asyncio.to_thread(unpack_part, part, content)
            if description.step != step:
                raise InvalidInput(
                    f"this is the checkpoint of step {description.step}: send it to .../checkpoints/{description.step}.tar",
                    code="other_step",
                    param="step",
                )
            model = self._registry.find(project, name)
            base = base_model or (model.record.base_model if model else description.base_model)
            description = description.model_copy(
                update={"base_model": (await self._load_base(base)).name}
            )
            await self._check_on_base(description, content)
            async with self._checkpoints.changed(f"{project}/{name}"):
                return await self._store(project, name, description, content)
        finally:
            await asyncio.to_thread(shutil.rmtree, content, ignore_errors=True)

    async def _check_on_base(self, description: Description, content: Path) -> None:
        check_rank(description.lora, self._max_rank)
        try:
            await self._trainer.run(CheckTask(lora=description.lora, folder=str(content)))
        except TrainerError as error:
            what = f"the adapter does not fit base model '{description.base_model}'"
            raise error.for_client(what, "adapter") from error

    async def _store(
        self, project: str, name: str, description: Description, content: Path
    ) -> Model:
        model = self._registry.find(project, name)
        folder = self._registry.folder(project, name)
        log = self._engine.log_path
        await asyncio.to_thread(place_checkpoint, folder, description, content, log)
        if model is None:
            return self._registry.add(folder, description.of_model(project, name))
        # The cache may hold prompts of a deleted step with this number.
        self._engine.forget_prompts()
        return model

    @contextlib.contextmanager
    def _claimed(self, part: Path) -> Iterator[None]:
        if part in self._busy:
            raise Unavailable(
                "another request writes to this upload: repeat this one when it has ended",
                code="upload_in_progress",
            )
        self._busy.add(part)
        try:
            yield
        finally:
            self._busy.remove(part)


async def append(part: Path, byte_range: ByteRange, body: AsyncIterator[bytes]) -> int:
    """Writes a body into the part file from `byte_range.start` on, drops later bytes and returns the file's length."""
    limit = MAX_CHECKPOINT_BYTES if byte_range.total is None else byte_range.total
    written, waiting = byte_range.start, bytearray()
    try:
        async for piece in body:
            waiting += piece
            if written + len(waiting) > limit:
                del waiting[limit - written :]
                raise too_large(limit)
            if len(waiting) >= WRITE_BYTES:
                await asyncio.to_thread(write_at, part, written, bytes(waiting))
                written += len(waiting)
                waiting.clear()
    finally:
        write_at(part, written, bytes(waiting))  # keeps what arrived before the connection broke
    return written + len(waiting)


def write_at(part: Path, start: int, data: bytes) -> None:
    with files.disk_errors("the upload"):
        opened = os.open(part, os.O_RDWR | os.O_CREAT, 0o600)
        with open(opened, "r+b") as file:
            file.truncate(start)
            file.seek(start)
            file.write(data)


def num_received(part: Path) -> int:
    return part.stat().st_size if part.exists() else 0


def unpack_part(part: Path, content: Path) -> Description:
    """Unpacks a complete upload and deletes its file: a refused upload has to be sent again."""
    try:
        with open(part, "rb") as tar:
            return unpack(tar, content)
    finally:
        part.unlink(missing_ok=True)


def clear_old_parts(incoming: Path) -> None:
    """Creates the folder, and deletes uploads that nobody continued."""
    incoming.mkdir(parents=True, exist_ok=True)
    for part in incoming.glob("*.part"):
        if time.time() - part.stat().st_mtime > KEPT_SECONDS:
            part.unlink()


def too_large(limit: int) -> TooLarge:
    return TooLarge(
        f"the upload has more than {limit} bytes: at most {MAX_CHECKPOINT_BYTES} are allowed, and no more than the "
        "content-range declares",
        code="checkpoint_too_large",
        param="body",
    )
