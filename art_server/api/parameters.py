"""What routes receive beside the path: the service, the caller, the named model or job, and the body.

Bodies are read up to a limit, parsed in a thread if they are large, and validated here; `openapi.py` reads their types
from the routes. A route that is refused because of its path or caller reads no body: parameters are resolved in order.
"""

import functools
from collections.abc import Awaitable, Callable
from typing import Annotated, Any, TypeVar

from fastapi import Depends, Request
from pydantic import BaseModel

from art_protocol.wire import LogRequest, TrainRequest
from art_server.api.auth import TheCaller
from art_server.api.bodies import (
    GroupBodies,
    HasGroups,
    beside,
    parse_body,
    read_body,
    read_request,
)
from art_server.jobs.queue import Job, request_digest
from art_server.service import Service
from art_server.settings import ServerConfig
from art_server.store.registry import Model

SMALL_MB = 4

G = TypeVar("G", bound=HasGroups)
R = TypeVar("R")


async def _service(request: Request) -> Service:
    return request.app.state.service


TheService = Annotated[Service, Depends(_service)]


async def _model(project: str, name: str, service: TheService, caller: TheCaller) -> Model:
    caller.check_project(project)
    return service.model(project, name)


async def _job(job_id: str, service: TheService, caller: TheCaller) -> Job:
    job = await service.job(job_id)
    caller.check_project(job.project)
    return job


PathModel = Annotated[Model, Depends(_model)]
PathJob = Annotated[Job, Depends(_job)]


async def _trainable(model: PathModel, service: TheService) -> Model:
    await service.wait_base()
    service.check_trainable(model)
    return model


TrainableModel = Annotated[Model, Depends(_trainable)]
"""The model of the path, whose base model is loaded."""


class JsonBody:
    """A body of a few megabytes, parsed as a `kind`."""

    limit = f"{SMALL_MB} MB"

    def __init__(self, kind: type[BaseModel], *, may_be_empty: bool = False):
        self.kind = kind
        self._may_be_empty = may_be_empty

    async def __call__(self, request: Request) -> Any:  # Any: a `kind`
        body = await read_body(request, SMALL_MB)
        return await parse_body(body or b"{}" if self._may_be_empty else body, self.kind)


class LargeBody:
    """A body of up to `--max-body-mb`, not yet parsed: a `RawBody`."""

    limit = f"`--max-body-mb` ({ServerConfig.model_fields['max_body_mb'].default})"

    def __init__(self, kind: type[BaseModel]):
        self.kind = kind

    async def __call__(self, request: Request) -> "RawBody":
        state = request.app.state
        return RawBody(await read_body(request, state.config.max_body_mb), state.bodies)


class RawBody:
    """The bytes of a large body."""

    def __init__(self, content: bytes, bodies: GroupBodies):
        self._content = content
        self._bodies = bodies

    async def digest(self) -> str:
        return await beside(request_digest, self._content)

    async def read(self, parse: Callable[[bytes], G], use: Callable[[G], Awaitable[R]]) -> R:
        """The result of `use` for the request that `parse` makes of the body."""
        return await self._bodies.read(self._content, parse, use)

    async def train(self, use: Callable[[TrainRequest], Awaitable[R]]) -> R:
        """The result of `use` for the train request that the body contains."""
        return await self.read(functools.partial(read_request, kind=TrainRequest), use)

    async def log(self, use: Callable[[LogRequest], Awaitable[R]]) -> R:
        """The result of `use` for the log request that the body contains."""
        return await self.read(functools.partial(read_request, kind=LogRequest), use)
