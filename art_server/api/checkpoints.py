"""The checkpoint routes: list, delete, fork, roll back, download, upload. `art_protocol.wire` defines the bodies."""

import re

from fastapi import APIRouter, Request
from fastapi.responses import JSONResponse, Response, StreamingResponse
from starlette.datastructures import Headers
from starlette.requests import ClientDisconnect
from starlette.types import Receive, Scope, Send

from art_protocol.wire import (
    CheckpointList,
    DeleteCheckpointsReply,
    DeleteCheckpointsRequest,
    ForkRequest,
    ModelInfo,
    RollbackRequest,
    UploadReply,
)
from art_server.api.bodies import SmallBodies
from art_server.api.parameters import (
    PathModel,
    TheCaller,
    TheCheckpoints,
    TheRegistration,
    TheUploads,
)
from art_server.checkpoints.archive import UPLOAD_ID, CheckpointTar, describe
from art_server.checkpoints.uploads import ByteRange
from art_server.errors import InvalidInput, Unavailable
from art_server.store.registry import check_name

TAR = {
    "requestBody": {
        "content": {"application/x-tar": {"schema": {"type": "string", "format": "binary"}}}
    }
}
MAX_STEP_DIGITS = 9
RANGE = re.compile(r"bytes=(\d{1,15})-(\d{0,15})")
CONTENT_RANGE = re.compile(r"bytes (?:(\d{1,15})-\d{1,15}|\*)/(\d{1,15})")


router = APIRouter(prefix="/api/models/{project}/{name}", route_class=SmallBodies)


@router.delete("")
async def delete_model(
    model: PathModel, checkpoints: TheCheckpoints, registration: TheRegistration
) -> ModelInfo:
    await checkpoints.delete_model(model)
    return registration.info(model)


@router.post("/fork")
async def fork(
    source: PathModel,
    body: ForkRequest,
    checkpoints: TheCheckpoints,
    registration: TheRegistration,
    caller: TheCaller,
) -> ModelInfo:
    caller.check_project(body.project)
    return registration.info(await checkpoints.fork(source, body))


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
def download(model: PathModel, step: str, request: Request) -> Response:
    number = read_step(step)
    if number in model.deleting:
        raise model.folder.unknown_step(number)
    description = describe(model.folder, model.record, number)
    return tar_response(
        CheckpointTar(model.folder.checkpoint_dir(number), description), request.headers
    )


@router.put("/checkpoints/{step}.tar", openapi_extra=TAR)
async def upload(
    project: str,
    name: str,
    step: str,
    request: Request,
    uploads: TheUploads,
    registration: TheRegistration,
    caller: TheCaller,
    base_model: str | None = None,
) -> Response:
    caller.check_project(check_name(project, "project"))
    number = read_step(step)
    byte_range = read_byte_range(request.headers)
    upload_id = request.headers.get(UPLOAD_ID, "")
    part = uploads.part(caller.owner, project, check_name(name, "name"), number, upload_id)
    try:
        received = await uploads.receive(part, byte_range, request.stream())
    except ClientDisconnect as error:
        raise Unavailable(
            "the connection closed; the received bytes are kept: continue the upload",
            code="upload_interrupted",
        ) from error
    reply, status = UploadReply(received_bytes=received), 202
    if not byte_range.is_question and received == (byte_range.total or received):
        model = await uploads.take_in(part, project, name, number, base_model)
        reply, status = reply.model_copy(update={"model": registration.info(model)}), 201
    return JSONResponse(reply.model_dump(mode="json"), status_code=status)


def read_step(text: str) -> int:
    """Reads the number of a step.

    Raises:
        InvalidInput: the text is not a step's number.
    """
    if not text.isdecimal() or not text.isascii() or len(text) > MAX_STEP_DIGITS:
        raise InvalidInput(
            f"'{text[:80]}' is not a step: write a number", code="bad_step", param="step"
        )
    return int(text)


def read_byte_range(headers: Headers) -> ByteRange:
    """Which bytes of an upload a request carries.

    Raises:
        InvalidInput: the Content-Range header has another form.
    """
    text = headers.get("content-range")
    if text is None:
        return ByteRange()
    found = CONTENT_RANGE.fullmatch(text)
    if found is None or int(found[2]) < 1:
        raise InvalidInput(
            "content-range must be 'bytes START-END/TOTAL', or 'bytes */TOTAL' to query how many bytes have arrived",
            code="bad_range",
            param="content-range",
        )
    return ByteRange(int(found[1] or 0), int(found[2]), is_question=found[1] is None)


def tar_response(tar: CheckpointTar, headers: Headers) -> Response:
    """The tar, or the part that `Range` requests if the tar has not changed (`If-Range`)."""
    answer = {"etag": tar.etag, "accept-ranges": "bytes"}
    wanted = RANGE.fullmatch(headers.get("range", ""))
    start, stop = 0, tar.size
    is_part = wanted is not None and headers.get("if-range", tar.etag) == tar.etag
    if wanted is not None and is_part:
        start = int(wanted[1])
        stop = min(int(wanted[2] or tar.size) + 1, tar.size)
        if start >= stop:
            tar.close()
            return Response(
                status_code=416, headers=answer | {"content-range": f"bytes */{tar.size}"}
            )
        answer["content-range"] = f"bytes {start}-{stop - 1}/{tar.size}"
    length = {"content-length": str(stop - start)}
    return TarResponse(tar, start, stop, 206 if is_part else 200, answer | length)


class TarResponse(StreamingResponse):
    """Closes the tar's files when sending ends, also after an error."""

    def __init__(
        self, tar: CheckpointTar, start: int, stop: int, status: int, headers: dict[str, str]
    ):
        content = tar.read(start, stop)
        super().__init__(content, status, headers, media_type="application/x-tar")
        self._tar = tar

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            await super().__call__(scope, receive, send)
        finally:
            self._tar.close()
