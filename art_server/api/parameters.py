"""What routes receive beside the path: the service, the caller, the named model or job, and bodies of many groups. A route
that is refused because of its path or caller reads no group: parameters are resolved in order."""

import contextlib
from collections.abc import AsyncIterator
from typing import Annotated

from fastapi import Depends, Request

from art_server.api.auth import TheCaller
from art_server.api.bodies import GroupLines
from art_server.errors import ServerError
from art_server.jobs.queue import Job
from art_server.service import Service
from art_server.store.registry import Model


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


async def _groups(request: Request) -> AsyncIterator[GroupLines]:
    lines = GroupLines(request, request.app.state.config.max_body_mb)
    try:
        yield lines
    except ServerError:
        # Clients read an answer only when they have sent their body.
        with contextlib.suppress(ServerError):
            await lines.digest()
        raise


Groups = Annotated[GroupLines, Depends(_groups)]
"""A body of trajectory groups, read while they arrive."""
