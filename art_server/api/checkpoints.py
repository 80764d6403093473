"""The routes of checkpoints: list, delete, fork, roll back, download, upload. Bodies are those of `art.wire`."""

import re

from fastapi import APIRouter, FastAPI, Request
from fastapi.responses import JSONResponse, Response, StreamingResponse
from starlette.datastructures import Headers
from starlette.requests import ClientDisconnect
from starlette.types import Receive, Scope, Send

from art.wire import (
    CheckpointList,
    DeleteCheckpointsReply,
    DeleteCheckpointsRequest,
    ForkRequest,
    ModelInfo,
    RollbackRequest,
    UploadReply,
)
from art_server.api.bodies import parse_body, read_body
from art_server.api.door import Caller
from art_server.checkpoints.archive import CheckpointTar, describe
from art_server.checkpoints.uploads import ByteRange
from art_server.errors import InvalidInput, Unavailable
from art_server.service import Service
from art_server.store.registry import Model, check_name

MAX_BODY_MB = 4
MAX_STEP_DIGITS = 9
RANGE = re.compile(r"bytes=(\d{1,15})-(\d{0,15})")
CONTENT_RANGE = re.compile(r"bytes (?:(\d{1,15})-\d{1,15}|\*)/(\d{1,15})")


def install(app: FastAPI, service: Service) -> None:
    """Add the routes."""
    router = APIRouter(prefix="/api/models/{project}/{name}")

    def model_of(request: Request, project: str, name: str) -> Model:
        caller: Caller = request.state.caller
        caller.check_project(project)
        return service.model(project, name)

    @router.delete("")
    async def delete_model(request: Request, project: str, name: str) -> ModelInfo:
        model = model_of(request, project, name)
        await service.delete_model(model)
        return service.info(model)

    @router.post("/fork")
    async def fork(request: Request, project: str, name: str) -> ModelInfo:
        source = model_of(request, project, name)
        body = await parse_body(await read_body(request, MAX_BODY_MB), ForkRequest)
        request.state.caller.check_project(body.project)
        return service.info(await service.fork(source, body))

    @router.post("/rollback")
    async def roll_back(request: Request, project: str, name: str) -> ModelInfo:
        model = model_of(request, project, name)
        body = await parse_body(await read_body(request, MAX_BODY_MB), RollbackRequest)
        await service.roll_back(model, body.step)
        return service.info(model)

    @router.get("/checkpoints")
    async def list_checkpoints(request: Request, project: str, name: str) -> CheckpointList:
        return await service.checkpoints(model_of(request, project, name))

    @router.post("/checkpoints/delete")
    async def delete_checkpoints(
        request: Request, project: str, name: str
    ) -> DeleteCheckpointsReply:
        model = model_of(request, project, name)
        body = await read_body(request, MAX_BODY_MB)
        return await service.delete_checkpoints(
            model, await parse_body(body or b"{}", DeleteCheckpointsRequest)
        )

    @router.get("/checkpoints/{step}.tar")
    def download(request: Request, project: str, name: str, step: str) -> Response:
        model = model_of(request, project, name)
        number = read_step(step)
        if number in model.going:
            raise model.folder.unknown_step(number)
        description = describe(model.folder, model.record, number)
        return tar_response(
            CheckpointTar(model.folder.checkpoint_dir(number), description), request.headers
        )

    @router.put("/checkpoints/{step}.tar")
    async def upload(
        request: Request, project: str, name: str, step: str, base_model: str | None = None
    ) -> Response:
        caller: Caller = request.state.caller
        caller.check_project(check_name(project, "project"))
        number = read_step(step)
        byte_range = read_byte_range(request.headers)
        part = service.upload_part(caller.owner, project, check_name(name, "name"), number)
        try:
            received = await service.receive_upload(part, byte_range, request.stream())
        except ClientDisconnect as error:
            raise Unavailable(
                "the connection ended; what has arrived is kept", code="upload_interrupted"
            ) from error
        reply, status = UploadReply(received_bytes=received), 202
        if not byte_range.is_question and received == (byte_range.total or received):
            model = await service.take_in_upload(part, project, name, number, base_model)
            reply, status = reply.model_copy(update={"model": service.info(model)}), 201
        return JSONResponse(reply.model_dump(mode="json"), status_code=status)

    app.include_router(router)


def read_step(text: str) -> int:
    """
    Raises:
        InvalidInput: not a step's number.
    """
    if not text.isdecimal() or not text.isascii() or len(text) > MAX_STEP_DIGITS:
        raise InvalidInput(
            f"'{text[:80]}' is not a step: write a number", code="bad_step", param="step"
        )
    return int(text)


def read_byte_range(headers: Headers) -> ByteRange:
    """Which bytes of an upload a request carries.

    Raises:
        InvalidInput: a Content-Range of another form.
    """
    text = headers.get("content-range")
    if text is None:
        return ByteRange()
    found = CONTENT_RANGE.fullmatch(text)
    if found is None or int(found[2]) < 1:
        raise InvalidInput(
            "content-range must be 'bytes START-END/TOTAL', or 'bytes */TOTAL' to ask how much has arrived",
            code="bad_range",
            param="content-range",
        )
    return ByteRange(int(found[1] or 0), int(found[2]), is_question=found[1] is None)


def tar_response(tar: CheckpointTar, headers: Headers) -> Response:
    """The tar, or the rest of it that `Range` asks for while it is still the same (`If-Range`)."""
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
    """Closes the tar's files however the sending ends."""

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
