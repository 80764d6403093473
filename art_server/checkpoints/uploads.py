"""Checkpoints that come in over HTTP: received in parts, checked, and made a model's step.

The parts of a tar are appended to one file, so an upload continues where it was interrupted. The whole is unpacked beside
the models, checked against its own digests, as a plain LoRA, and by the trainer against the base model; then it gets its
place in one rename.
"""

import asyncio
import contextlib
import hashlib
import os
import shutil
import time
import uuid
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

from art_server.base_models import BaseModel
from art_server.checkpoints.archive import (
    MAX_CHECKPOINT_BYTES,
    Description,
    place_checkpoint,
    unpack,
)
from art_server.engine.engine import Engine
from art_server.errors import Conflict, InvalidInput, TooLarge, Unavailable
from art_server.jobs.trainer import Trainer
from art_server.jobs.trainer_process import TrainerError
from art_server.shared.tasks import CheckTask
from art_server.store import files
from art_server.store.registry import Model, Registry

WRITE_BYTES = 2**20
"""Gathered before they are written."""
KEPT_SECONDS = 86400.0
"""How long the beginning of an upload waits for the rest."""


@dataclass(frozen=True, slots=True)
class ByteRange:
    """Which bytes of the whole a request carries: those from `start` on, of `total`. Without a total the request is the
    whole."""

    start: int = 0
    total: int | None = None
    is_question: bool = False
    """It carries none and asks how many there are."""


class Uploads:
    """Receives tars and takes them in."""

    def __init__(
        self,
        registry: Registry,
        engine: Engine,
        trainer: Trainer,
        making: asyncio.Lock,
        incoming: Path,
        max_rank: int,
        load_base: Callable[[str], Awaitable[BaseModel]],
    ):
        self._registry = registry
        self._engine = engine
        self._trainer = trainer
        self._making = making
        """Held while a model is made or deleted."""
        self._incoming = incoming
        """A folder for what is not yet a checkpoint; empty at start."""
        self._max_rank = max_rank
        self._load_base = load_base
        self._busy: set[Path] = set()

    def part(self, owner: str, project: str, name: str, step: int) -> Path:
        """The file in which an upload gathers; another caller's is another file."""
        key = hashlib.sha256(f"{owner} {project}/{name}@{step}".encode()).hexdigest()
        return self._incoming / f"{key[:32]}.part"

    async def receive(self, part: Path, byte_range: ByteRange, body: AsyncIterator[bytes]) -> int:
        """Append a request's bytes. Returns how many there are; a connection that breaks leaves what has arrived.

        Raises:
            TooLarge: above what a checkpoint may have.
            Conflict: the bytes before `byte_range.start` are not there.
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
        """Make the whole that was received a step: of a new model its first, of a known one an older one that it lacks. The
        same checkpoint again changes nothing.

        Raises:
            InvalidInput: it is not a whole checkpoint, or does not fit the base model.
            Conflict: the step is there with other content, is newer than the model's newest, or of another base or shape.
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
            async with self._making:
                return await self._place(project, name, description, content)
        finally:
            await asyncio.to_thread(shutil.rmtree, content, ignore_errors=True)

    async def _check_on_base(self, description: Description, content: Path) -> None:
        lora = description.lora
        if lora.rank > self._max_rank:
            raise InvalidInput(
                f"the adapter's rank {lora.rank} is above the engine's maximum of {self._max_rank}: start the server with "
                "a larger --max-lora-rank",
                code="rank_too_high",
                param="lora.rank",
            )
        try:
            await self._trainer.run(CheckTask(lora=lora, folder=str(content)))
        except TrainerError as error:
            if error.retryable:
                raise Unavailable(error.message, code=error.code) from error
            raise InvalidInput(
                f"the adapter does not fit base model '{description.base_model}': {error.message}",
                code=error.code,
                param="adapter",
            ) from error

    async def _place(
        self, project: str, name: str, description: Description, content: Path
    ) -> Model:
        model = self._registry.find(project, name)
        folder = self._registry.folder(project, name)
        log = self._engine.log_path
        await asyncio.to_thread(place_checkpoint, folder, description, content, log)
        if model is None:
            return self._registry.add(folder, description.of_model(project, name))
        await (
            self._engine.forget_prompts()
        )  # the step may have been another one before it was deleted
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
    """Write a body into the part file from `byte_range.start` on, and drop what stood behind. Returns the file's length."""
    limit = MAX_CHECKPOINT_BYTES if byte_range.total is None else byte_range.total
    written, waiting = byte_range.start, bytearray()
    try:
        async for piece in body:
            waiting += piece
            if written + len(waiting) > limit:
                raise too_large(limit)
            if len(waiting) >= WRITE_BYTES:
                await asyncio.to_thread(write_at, part, written, bytes(waiting))
                written += len(waiting)
                waiting.clear()
    finally:
        write_at(part, written, bytes(waiting))  # what has arrived stays when the connection breaks
    return written + len(waiting)


def write_at(part: Path, start: int, data: bytes) -> None:
    opened = os.open(part, os.O_RDWR | os.O_CREAT, 0o600)
    with files.disk_errors("the upload"), open(opened, "r+b") as file:
        file.truncate(start)
        file.seek(start)
        file.write(data)


def num_received(part: Path) -> int:
    return part.stat().st_size if part.exists() else 0


def unpack_part(part: Path, content: Path) -> Description:
    """Unpack a whole upload, whose file goes: one that was refused has to come anew."""
    try:
        with open(part, "rb") as tar:
            return unpack(tar, content)
    finally:
        part.unlink(missing_ok=True)


def clear_old_parts(incoming: Path) -> None:
    """Make the folder, and delete what nobody continued."""
    incoming.mkdir(parents=True, exist_ok=True)
    for part in incoming.glob("*.part"):
        if time.time() - part.stat().st_mtime > KEPT_SECONDS:
            part.unlink()


def too_large(limit: int) -> TooLarge:
    return TooLarge(
        f"the upload has more than {limit} bytes: a checkpoint may have {MAX_CHECKPOINT_BYTES}, and no more than the "
        "content-range names",
        code="checkpoint_too_large",
        param="body",
    )
