"""The control routes: register, train, log, jobs, health. Bodies are those of `art.wire`."""

import asyncio
import functools
from collections.abc import AsyncIterator
from typing import Annotated, cast, get_args

from fastapi import APIRouter, FastAPI, Query, Request
from fastapi.responses import JSONResponse, Response, StreamingResponse

from art.wire import (
    IDEMPOTENCY_HEADER,
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
from art_server.api.bodies import GroupBodies, beside, parse_body, read_body
from art_server.api.door import STRANGER, Caller
from art_server.errors import InvalidInput
from art_server.jobs.queue import Job, digest
from art_server.service import Service
from art_server.store.registry import Model

MAX_SMALL_BODY_MB = 4
MAX_KEY_LENGTH = 200


def install(app: FastAPI, service: Service, max_mb: int) -> None:
    """Add the control routes."""
    router = APIRouter()
    bodies = GroupBodies()

    def model_of(request: Request, project: str, name: str) -> Model:
        caller: Caller = request.state.caller
        caller.check_project(project)
        return service.model(project, name)

    def job_of(request: Request, job: Job) -> Job:
        caller: Caller = request.state.caller
        caller.check_project(job.project)
        return job

    def shown(state: Health, caller: Caller) -> Health:
        """Strangers see the engine's state only: the rest may name files and hold lines of the log."""
        return Health(engine=state.engine) if caller is STRANGER else state

    @router.get("/health")
    async def health(request: Request) -> Health:
        return shown(service.health(), request.state.caller)

    @router.get("/ready")
    async def ready(request: Request) -> JSONResponse:
        state = service.health()
        status = 200 if state.engine == "ready" and not state.faults else 503
        body = shown(state, request.state.caller).model_dump(mode="json")
        return JSONResponse(body, status_code=status)

    @router.post("/api/models")
    async def register(request: Request) -> ModelInfo:
        body = await parse_body(await read_body(request, MAX_SMALL_BODY_MB), RegisterRequest)
        caller: Caller = request.state.caller
        caller.check_project(body.project)
        return await service.register(body)

    @router.get("/api/models")
    async def models(request: Request) -> ModelList:
        caller: Caller = request.state.caller
        return ModelList(models=[service.info(m) for m in service.models(caller.projects)])

    @router.get("/api/models/{project}/{name}")
    async def model(request: Request, project: str, name: str) -> ModelInfo:
        return service.info(model_of(request, project, name))

    @router.post("/api/models/{project}/{name}/train")
    async def train(request: Request, project: str, name: str) -> Response:
        model = model_of(request, project, name)
        caller: Caller = request.state.caller
        key = request.headers.get(IDEMPOTENCY_HEADER)
        if key is not None and not 0 < len(key) <= MAX_KEY_LENGTH:
            raise InvalidInput(
                f"the idempotency key must have 1 to {MAX_KEY_LENGTH} characters",
                code="bad_key",
                param=IDEMPOTENCY_HEADER,
            )
        body = await read_body(request, max_mb)
        body_digest = await beside(digest, body)
        read = functools.partial(bodies.read, body, TrainRequest)
        job = await service.submit(model, caller.owner, key, body_digest, read)
        return StreamingResponse(
            event_lines(service, job.job_id), media_type="application/x-ndjson"
        )

    @router.post("/api/models/{project}/{name}/log")
    async def log(request: Request, project: str, name: str) -> LogReply:
        model = model_of(request, project, name)
        body = await read_body(request, max_mb)
        return await bodies.read(body, LogRequest, functools.partial(service.log, model))

    @router.get("/api/models/{project}/{name}/sessions/{session}")
    async def session(request: Request, project: str, name: str, session: str) -> SessionReply:
        model_of(request, project, name)
        return await asyncio.to_thread(service.session, project, name, session)

    @router.get("/api/jobs")
    async def jobs(
        request: Request,
        state: Annotated[str, Query(max_length=100)] = "queued,running",
        limit: Annotated[int, Query(ge=1, le=1000)] = 100,
    ) -> JobList:
        states = read_states(state)
        return JobList(jobs=await service.jobs(projects_of(request), states, limit))

    @router.get("/api/jobs/{job_id}")
    async def job(request: Request, job_id: str) -> JobInfo:
        job_of(request, await service.job(job_id))
        return await service.job_info(job_id)

    @router.get("/api/jobs/{job_id}/events")
    async def job_events(request: Request, job_id: str, after: int = -1) -> Response:
        job_of(request, await service.job(job_id))
        lines = event_lines(service, job_id, after)
        return StreamingResponse(lines, media_type="application/x-ndjson")

    @router.delete("/api/jobs/{job_id}")
    async def cancel_job(request: Request, job_id: str) -> JobInfo:
        job_of(request, await service.job(job_id))
        await service.cancel_job(job_id)
        return await service.job_info(job_id)

    @router.post("/api/jobs/{job_id}/move")
    async def move_job(request: Request, job_id: str) -> JobList:
        job_of(request, await service.job(job_id))
        body = await parse_body(await read_body(request, MAX_SMALL_BODY_MB), MoveJobRequest)
        if body.before is not None:
            job_of(request, await service.job(body.before))
        await service.move_job(job_id, body.before)
        return JobList(jobs=await service.jobs(projects_of(request), ("queued",), 1000))

    app.include_router(router)


def projects_of(request: Request) -> frozenset[str] | None:
    caller: Caller = request.state.caller
    return caller.projects


def read_states(text: str) -> list[JobState]:
    """
    Raises:
        InvalidInput: a state that no job has.
    """
    states = text.split(",")
    if unknown := set(states) - set(get_args(JobState)):
        raise InvalidInput(
            f"state '{min(unknown)}' is none of {', '.join(get_args(JobState))}",
            code="bad_state",
            param="state",
        )
    return cast("list[JobState]", states)


async def event_lines(service: Service, job_id: str, after: int = -1) -> AsyncIterator[bytes]:
    async for event in service.follow(job_id, after):
        yield event.model_dump_json(exclude_none=True).encode() + b"\n"
