"""The control routes: register, train, log, sessions, jobs, health. `art_protocol.wire` defines the bodies."""

import asyncio
import re
from collections.abc import AsyncIterator
from typing import Annotated, cast, get_args

from fastapi import APIRouter, Depends, Query, Request
from fastapi.responses import JSONResponse, Response, StreamingResponse

from art_protocol.wire import (
    DIGEST_HEADER,
    IDEMPOTENCY_HEADER,
    NDJSON,
    Health,
    JobInfo,
    JobList,
    JobState,
    LogReply,
    LogRequest,
    ModelInfo,
    ModelList,
    MoveJobRequest,
    RegisterRequest,
    SessionReply,
    TrainRequest,
)
from art_server.api.bodies import SmallBodies, described_body
from art_server.api.engine_args import no_effect, read_engine_args
from art_server.api.look import visible
from art_server.api.parameters import (
    Groups,
    PathJob,
    PathModel,
    TheCaller,
    TheService,
    TrainableModel,
)
from art_server.errors import InvalidInput, Unavailable
from art_server.jobs.rollouts import Rollouts
from art_server.service import Service

MAX_KEY_LENGTH = 200
DIGEST = re.compile("[0-9a-f]{64}")


router = APIRouter(route_class=SmallBodies)


@router.get("/health")
async def health(service: TheService, caller: TheCaller) -> Health:
    return visible(service.health(), caller)


@router.get("/ready")
async def ready(service: TheService, caller: TheCaller) -> JSONResponse:
    state = service.health()
    status = 200 if state.engine == "ready" and not state.faults else 503
    body = visible(state, caller).model_dump(mode="json")
    return JSONResponse(body, status_code=status)


@router.post("/api/models")
async def register(
    body: RegisterRequest,
    service: TheService,
    caller: TheCaller,
) -> ModelInfo:
    caller.check_project(body.project)
    requested, unknown = read_engine_args(body.engine_args, service.device)
    info = await service.register(body, requested)
    notes = no_effect(unknown) + service.ignored_args(requested)
    return info.model_copy(update={"notes": notes + info.notes})


@router.get("/api/models")
async def models(service: TheService, caller: TheCaller) -> ModelList:
    return ModelList(models=[service.info(m) for m in service.models(caller.projects)])


@router.get("/api/models/{project}/{name}")
async def model(model: PathModel, service: TheService) -> ModelInfo:
    return service.info(model)


async def idempotency_key(request: Request) -> str | None:
    """The key under which a repeated request finds its job.

    Raises:
        InvalidInput: the key is empty or too long.
    """
    key = request.headers.get(IDEMPOTENCY_HEADER)
    if key is not None and not 0 < len(key) <= MAX_KEY_LENGTH:
        raise InvalidInput(
            f"the idempotency key must have 1 to {MAX_KEY_LENGTH} characters",
            code="bad_key",
            param=IDEMPOTENCY_HEADER,
        )
    return key


async def first_digest(request: Request) -> str | None:
    """The digest of the body that a repeated request had at first.

    Raises:
        InvalidInput: it is no digest.
    """
    digest = request.headers.get(DIGEST_HEADER)
    if digest is not None and not DIGEST.fullmatch(digest):
        raise InvalidInput(
            "the digest of a request's first body has 64 hexadecimal digits",
            code="bad_digest",
            param=DIGEST_HEADER,
        )
    return digest


@router.post(
    "/api/models/{project}/{name}/train", openapi_extra=described_body(NDJSON, TrainRequest)
)
async def train(
    model: TrainableModel,
    key: Annotated[str | None, Depends(idempotency_key)],
    first: Annotated[str | None, Depends(first_digest)],
    body: Groups,
    service: TheService,
) -> Response:
    """Finds the exact tokens of each group as it arrives. The answer begins when the job is on disk with all of them."""
    if key is not None and await service.has_key(model, key):  # the request is repeated
        job = await service.find_job(model, key, first or await body.digest())
        if job is None:
            raise Unavailable(
                "the job of this key was deleted a moment ago: repeat the request",
                code="job_deleted",
            )
    else:
        request = await body.fields(TrainRequest)
        new = service.begin_job(model, request.config)
        async for group in body.groups():
            await new.resolve(group)
        job = await new.store(key, first or await body.digest(), request.expected_step)
    lines = event_lines(service, job.job_id)
    return StreamingResponse(lines, media_type=NDJSON)


@router.post("/api/models/{project}/{name}/log", openapi_extra=described_body(NDJSON, LogRequest))
async def log(model: PathModel, body: Groups, service: TheService) -> LogReply:
    request = await body.fields(LogRequest)
    rollouts = Rollouts()
    async for group in body.groups():
        await asyncio.to_thread(rollouts.add, group)
    return await service.log(model, request, rollouts)


@router.get("/api/models/{project}/{name}/sessions/{session}")
async def session(model: PathModel, session: str, service: TheService) -> SessionReply:
    return await asyncio.to_thread(service.session, model, session)


@router.get("/api/jobs")
async def jobs(
    service: TheService,
    caller: TheCaller,
    state: Annotated[str, Query(max_length=100)] = "queued,running",
    limit: Annotated[int, Query(ge=1, le=1000)] = 100,
) -> JobList:
    return JobList(jobs=await service.jobs(caller.projects, read_states(state), limit))


@router.get("/api/jobs/{job_id}")
async def job(job: PathJob, service: TheService) -> JobInfo:
    return await service.job_info(job.job_id)


@router.get("/api/jobs/{job_id}/events")
async def job_events(job: PathJob, service: TheService, after: int = -1) -> Response:
    lines = event_lines(service, job.job_id, after)
    return StreamingResponse(lines, media_type=NDJSON)


@router.delete("/api/jobs/{job_id}")
async def cancel_job(job: PathJob, service: TheService) -> JobInfo:
    await service.cancel_job(job.job_id)
    return await service.job_info(job.job_id)


@router.post("/api/jobs/{job_id}/move")
async def move_job(
    job: PathJob,
    body: MoveJobRequest,
    service: TheService,
    caller: TheCaller,
) -> JobList:
    if body.before is not None:
        caller.check_project((await service.job(body.before)).project)
    await service.move_job(job.job_id, body.before)
    return JobList(jobs=await service.jobs(caller.projects, ("queued",), 1000))


def read_states(text: str) -> list[JobState]:
    """The job states in a comma-separated list.

    Raises:
        InvalidInput: a state that no job has.
    """
    states = text.split(",")
    if unknown := set(states) - set(get_args(JobState)):
        raise InvalidInput(
            f"'{min(unknown)}' is not a job state: use one of {', '.join(get_args(JobState))}",
            code="bad_state",
            param="state",
        )
    return cast("list[JobState]", states)


async def event_lines(service: Service, job_id: str, after: int = -1) -> AsyncIterator[bytes]:
    async for event in service.follow(job_id, after):
        # ASCII, because httpx and Python's splitlines also end a line at U+2028 and U+0085.
        yield event.model_dump_json(exclude_none=True, ensure_ascii=True).encode() + b"\n"
