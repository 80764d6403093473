"""What routes receive: parts of the server, the caller, the named model or job, and bodies of many groups. Parameters are
resolved in order, so no group is read of a request that is refused because of its path or caller."""

import contextlib
from collections.abc import AsyncIterator, Callable
from typing import Annotated, Any

from fastapi import Depends, Request

from art_server.api.auth import TheCaller
from art_server.api.bodies import GroupLines
from art_server.engine.device.computing import ComputingDevices
from art_server.engine.fleet import Fleet
from art_server.errors import ServerError
from art_server.jobs.job_row import JobRow
from art_server.jobs.reports import Reports
from art_server.jobs.runner import JobRunner
from art_server.jobs.train_requests import TrainRequests
from art_server.learning.collector import Collector
from art_server.learning.deletion import Deletion
from art_server.learning.feedback import FeedbackIntake
from art_server.learning.policies import Policies
from art_server.learning.releasing import Releasing
from art_server.learning.scores import Scores
from art_server.ledger.ledger import Ledger
from art_server.models.base_loader import BaseLoader
from art_server.models.checkpoints import Checkpoints
from art_server.models.registration import Registration
from art_server.models.uploads import Uploads
from art_server.server import Server
from art_server.settings import ServerConfig
from art_server.shared.refusals import Refusals
from art_server.status.status import Status
from art_server.store.registry import RegisteredModel, Registry


def part(find: Callable[[Server], object]) -> Any:
    """A route's parameter that is a part of the server."""

    async def find_part(request: Request) -> object:
        return find(request.app.state.server)

    return Depends(find_part)


TheServer = Annotated[Server, part(lambda server: server)]
TheConfig = Annotated[ServerConfig, part(lambda server: server.config)]
TheDevices = Annotated[ComputingDevices, part(lambda server: server.devices)]
TheReports = Annotated[Reports, part(lambda server: server.reports)]
TheLedger = Annotated[Ledger, part(lambda server: server.ledger)]
TheRefusedNames = Annotated[Refusals, part(lambda server: server.proxy.refused_names)]
TheFleet = Annotated[Fleet, part(lambda server: server.fleet)]
TheRegistry = Annotated[Registry, part(lambda server: server.registry)]
TheBase = Annotated[BaseLoader, part(lambda server: server.base)]
TheRegistration = Annotated[Registration, part(lambda server: server.registration)]
TheCheckpoints = Annotated[Checkpoints, part(lambda server: server.checkpoints)]
TheUploads = Annotated[Uploads, part(lambda server: server.uploads)]
TheRunner = Annotated[JobRunner, part(lambda server: server.runner)]
TheTrainRequests = Annotated[TrainRequests, part(lambda server: server.train_requests)]
TheScores = Annotated[Scores, part(lambda server: server.scores)]
ThePolicies = Annotated[Policies, part(lambda server: server.policies)]
TheFeedback = Annotated[FeedbackIntake, part(lambda server: server.feedback)]
TheCollector = Annotated[Collector, part(lambda server: server.collector)]
TheDeletion = Annotated[Deletion, part(lambda server: server.deletion)]
TheReleasing = Annotated[Releasing, part(lambda server: server.releasing)]
TheStatus = Annotated[Status, part(lambda server: server.status)]


async def _model(project: str, name: str, registry: TheRegistry, caller: TheCaller) -> RegisteredModel:
    caller.check_project(project)
    return await registry.get_whole(project, name)


async def _job(job_id: str, runner: TheRunner, caller: TheCaller) -> JobRow:
    job = await runner.get(job_id)
    caller.check_project(job.project)
    return job


PathModel = Annotated[RegisteredModel, Depends(_model)]
PathJob = Annotated[JobRow, Depends(_job)]


async def _trainable(model: PathModel, base: TheBase, registration: TheRegistration) -> RegisteredModel:
    await base.wait_found()
    registration.check_trainable(model)
    return model


LoadedModel = Annotated[RegisteredModel, Depends(_trainable)]
"""The model of the path, whose base model is loaded."""


async def _groups(request: Request, config: TheConfig) -> AsyncIterator[GroupLines]:
    lines = GroupLines(request, config.max_body_mb)
    try:
        yield lines
    except ServerError:
        # Clients read an answer only when they have sent their body.
        with contextlib.suppress(ServerError):
            await lines.digest()
        raise


Groups = Annotated[GroupLines, Depends(_groups)]
"""A body of trajectory groups, read while they arrive."""
