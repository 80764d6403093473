"""Receives checkpoint uploads: one request with one tar becomes a step of a model, or changes nothing.

The tar is written to a file and unpacked into a temporary folder. The digests, the adapter's configuration and its tensors are
checked. One rename then makes the folder a step.
"""

import asyncio
import shutil
import uuid
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path

from art_server.engine.fleet import Fleet
from art_server.errors import InvalidInput, TooLarge
from art_server.models.checkpoints import Checkpoints
from art_server.store import files
from art_server.store.archive import (
    MAX_CHECKPOINT_BYTES,
    Description,
    check_on_base,
    place_checkpoint,
    read_tar,
)
from art_server.store.base_models import BaseModel
from art_server.store.registry import RegisteredModel, Registry, check_rank


class Uploads:
    """Receives tars and stores them as steps."""

    def __init__(
        self,
        *,
        registry: Registry,
        fleet: Fleet,
        checkpoints: Checkpoints,
        incoming: Path,
        max_lora_rank: int,
        load_base: Callable[[str], Awaitable[BaseModel]],
    ):
        """`incoming` is the folder for unfinished checkpoints; empty at start."""
        self._registry = registry
        self._fleet = fleet
        self._checkpoints = checkpoints
        self._incoming = incoming
        self._max_lora_rank = max_lora_rank
        self._load_base = load_base

    async def receive(
        self,
        project: str,
        name: str,
        step: int,
        base_model: str | None,
        body: AsyncIterator[bytes],
    ) -> RegisteredModel:
        """Stores a tar as the first step of a new model, or as an older step that a model lacks. Does nothing if the
        model has the step with the same weights.

        Raises:
            TooLarge: the tar exceeds the size limit.
            InvalidInput: the checkpoint is incomplete, or does not fit the base model.
            Conflict: the model has the step with other weights, its newest step is older, or base model or LoRA differ.
            StorageFull: the disk has no room.
        """
        content = self._incoming / uuid.uuid4().hex
        tar = content.with_suffix(".tar")
        try:
            await write_body(body, tar)
            description = await asyncio.to_thread(unpack_tar, tar, content)
            if description.step != step:
                raise InvalidInput(
                    f"this is the checkpoint of step {description.step}: send it to .../checkpoints/{description.step}.tar",
                    code="other_step",
                    param="step",
                )
            model = await self._registry.find_whole(project, name)
            base = await self._load_base(
                base_model or (model.record.base_model if model is not None else description.base_model)
            )
            check_rank(description.lora, self._max_lora_rank)
            known = None if model is None else model.record.lora
            description = await asyncio.to_thread(check_on_base, description, base, content, known)
            async with self._checkpoints.changed(f"{project}/{name}"):
                return await self._store(project, name, description, content)
        finally:
            await asyncio.to_thread(clear, tar, content)

    async def _store(self, project: str, name: str, description: Description, content: Path) -> RegisteredModel:
        model = self._registry.find(project, name)
        folder = self._registry.folder(project, name) if model is None else model.folder
        log = self._fleet.log_path
        await asyncio.to_thread(place_checkpoint, folder, description, content, log)
        if model is None:
            return await asyncio.to_thread(self._registry.add, folder, folder.read())
        # The cache may hold prompts of a deleted step with this number.
        self._fleet.forget_prompts()
        return model


async def write_body(body: AsyncIterator[bytes], tar: Path) -> None:
    """Writes a request's body to a new file.

    Raises:
        TooLarge: the body exceeds the size limit.
        StorageFull: the disk has no room.
    """
    num_bytes = 0
    with files.disk_errors("the upload"):
        tar.parent.mkdir(parents=True, exist_ok=True)
        # Opened here, not in a thread: if this task is cancelled meanwhile, nobody would close the thread's file.
        with open(tar, "xb") as file:  # noqa: ASYNC230
            async for piece in body:
                num_bytes += len(piece)
                if num_bytes > MAX_CHECKPOINT_BYTES:
                    raise upload_too_large()
                await asyncio.to_thread(file.write, piece)


def unpack_tar(tar: Path, content: Path) -> Description:
    with open(tar, "rb") as file:
        return read_tar(file, content)


def clear(tar: Path, content: Path) -> None:
    tar.unlink(missing_ok=True)
    shutil.rmtree(content, ignore_errors=True)


def upload_too_large() -> TooLarge:
    return TooLarge(
        f"the upload has more than {MAX_CHECKPOINT_BYTES} bytes",
        code="checkpoint_too_large",
        param="body",
    )
