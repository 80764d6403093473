"""The routes of a model and its checkpoints: list, delete, rename, note, fork, roll back, download, upload. `art_protocol.wire` defines the bodies."""

import asyncio
import contextlib
import os
import tempfile
from typing import IO

from fastapi import APIRouter, Request
from fastapi.responses import StreamingResponse
from starlette.requests import ClientDisconnect
from starlette.types import Receive, Scope, Send

from art_protocol.wire import (
    About,
    CheckpointList,
    DeleteCheckpointsReply,
    DeleteCheckpointsRequest,
    ForkRequest,
    ModelInfo,
    RenameRequest,
    RollbackRequest,
)
from art_server.api.bodies import SmallBodies, declared_size
from art_server.api.parameters import (
    PathModel,
    TheCaller,
    TheCheckpoints,
    TheRegistration,
    TheUploads,
)
from art_server.errors import InvalidInput, Unavailable
from art_server.models.checkpoints import schedule_notes
from art_server.models.uploads import upload_too_large
from art_server.store import files
from art_server.store.archive import MAX_CHECKPOINT_BYTES, describe_step, write_tar
from art_server.store.registry import check_name

TAR = {"requestBody": {"content": {"application/x-tar": {"schema": {"type": "string", "format": "binary"}}}}}
MAX_STEP_DIGITS = 9
CHUNK_BYTES = 2**20

router = APIRouter(prefix="/api/models/{project}/{name}", route_class=SmallBodies)


class TarResponse(StreamingResponse):
    """Sends a tar, and closes the tar when the answer ends, also with an error."""

    def __init__(self, tar: IO[bytes]):
        size = tar.seek(0, os.SEEK_END)
        tar.seek(0)
        pieces = iter(lambda: tar.read(CHUNK_BYTES), b"")
        super().__init__(pieces, headers={"content-length": str(size)}, media_type="application/x-tar")
        self._tar = tar

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        with self._tar:
            await super().__call__(scope, receive, send)


@router.delete("")
async def delete_model(model: PathModel, checkpoints: TheCheckpoints, registration: TheRegistration) -> ModelInfo:
    await checkpoints.delete_model(model)
    return registration.info(model)


@router.post("/rename")
async def rename(
    model: PathModel, body: RenameRequest, checkpoints: TheCheckpoints, registration: TheRegistration
) -> ModelInfo:
    return registration.info(await checkpoints.rename(model, body.name))


@router.put("/about")
async def set_about(model: PathModel, body: About, checkpoints: TheCheckpoints) -> About:
    """Replaces the tags and notes of a run."""
    return await checkpoints.set_about(model, body)


@router.post("/fork")
async def fork(
    source: PathModel,
    body: ForkRequest,
    checkpoints: TheCheckpoints,
    registration: TheRegistration,
    caller: TheCaller,
) -> ModelInfo:
    caller.check_project(body.project)
    model = await checkpoints.fork(source, body)
    notes = await asyncio.to_thread(schedule_notes, model)
    return registration.info(model).model_copy(update={"notes": notes})


@router.post("/rollback")
async def roll_back(
    model: PathModel,
    body: RollbackRequest,
    checkpoints: TheCheckpoints,
    registration: TheRegistration,
) -> ModelInfo:
    await checkpoints.roll_back(model, body.step)
    return registration.info(model)


@router.get("/checkpoints")
async def list_checkpoints(model: PathModel, checkpoints: TheCheckpoints) -> CheckpointList:
    return await checkpoints.overview(model)


@router.post("/checkpoints/delete")
async def delete_checkpoints(
    model: PathModel,
    checkpoints: TheCheckpoints,
    body: DeleteCheckpointsRequest | None = None,
) -> DeleteCheckpointsReply:
    return await checkpoints.delete(model, body or DeleteCheckpointsRequest())


@router.get("/checkpoints/{step}.tar")
def download(model: PathModel, step: str) -> TarResponse:
    # No coroutine, so FastAPI runs this in a thread: it reads the whole checkpoint.
    number = parse_step(step)
    if number in model.deleting:
        raise model.folder.unknown_step(number)
    description = describe_step(model.folder, model.record, number)
    # A file without a name: the file is gone when the answer ends, also with an error.
    with contextlib.ExitStack() as opened:
        with files.disk_errors("the tar"):
            tar = opened.enter_context(tempfile.TemporaryFile(dir=model.folder.checkpoints_dir))
        write_tar(model.folder.checkpoint_dir(number), description, tar)
        opened.pop_all()
    return TarResponse(tar)


@router.put("/checkpoints/{step}.tar", status_code=201, openapi_extra=TAR)
async def upload(
    project: str,
    name: str,
    step: str,
    request: Request,
    uploads: TheUploads,
    registration: TheRegistration,
    caller: TheCaller,
    base_model: str | None = None,
) -> ModelInfo:
    caller.check_project(check_name(project, "project"))
    check_name(name, "name")
    number = parse_step(step)
    if declared_size(request) > MAX_CHECKPOINT_BYTES:
        raise upload_too_large()
    try:
        model = await uploads.receive(project, name, number, base_model, request.stream())
    except ClientDisconnect as error:
        raise Unavailable(
            "the connection closed before the whole tar arrived: send it again",
            code="upload_interrupted",
        ) from error
    return registration.info(model)


def parse_step(text: str) -> int:
    """Reads the number of a step.

    Raises:
        InvalidInput: the text is not a step's number.
    """
    if not text.isdecimal() or not text.isascii() or len(text) > MAX_STEP_DIGITS:
        raise InvalidInput(f"'{text[:80]}' is not a step: write a number", code="bad_step", param="step")
    return int(text)
