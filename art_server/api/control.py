"""The control routes: register, train, log, sessions, jobs, health. `art_protocol.wire` defines the bodies."""

import asyncio
import re
from collections import Counter
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
from art_server.api.auth import visible_health
from art_server.api.bodies import SmallBodies, described_body
from art_server.api.engine_args import no_effect, requested_engine_args
from art_server.api.parameters import (
    Groups,
    LoadedModel,
    PathJob,
    PathModel,
    TheCaller,
    TheDevices,
    TheFleet,
    TheLedger,
    ThePolicies,
    TheRefusedNames,
    TheRegistration,
    TheRegistry,
    TheReports,
    TheRunner,
    TheStatus,
    TheTrainRequests,
)
from art_server.errors import InvalidInput, Unavailable
from art_server.jobs.logs import write_log
from art_server.jobs.received_trajectories import ReceivedTrajectories
from art_server.jobs.runner import JobRunner
from art_server.jobs.train_requests import NewJob
from art_server.ledger.sessions import read_session

MAX_KEY_LENGTH = 200
DIGEST = re.compile("[0-9a-f]{64}")


router = APIRouter(route_class=SmallBodies)


@router.head("/health", include_in_schema=False)
@router.get("/health")
async def health(status: TheStatus, caller: TheCaller) -> Health:
    return visible_health(status, caller)


@router.head("/ready", include_in_schema=False)
@router.get("/ready")
async def ready(status: TheStatus, caller: TheCaller) -> JSONResponse:
    state = status.health()
    is_ready = state.engine == "ready" and not state.faults
    body = visible_health(status, caller).model_dump(mode="json")
    return JSONResponse(body, status_code=200 if is_ready else 503)


@router.post("/api/models")
async def register(
    body: RegisterRequest,
    registration: TheRegistration,
    fleet: TheFleet,
    devices: TheDevices,
    caller: TheCaller,
) -> ModelInfo:
    caller.check_project(body.project)
    requested, unknown = requested_engine_args(body.engine_args, devices.engines)
    info = await registration.register(body, requested)
    notes = no_effect(unknown) + fleet.ignored_args(requested)
    return info.model_copy(update={"notes": notes + info.notes})


@router.get("/api/models")
async def models(registry: TheRegistry, registration: TheRegistration, caller: TheCaller) -> ModelList:
    return ModelList(models=[registration.info(m) for m in registry.all(caller.projects)])


@router.get("/api/models/{project}/{name}")
async def model(model: PathModel, registration: TheRegistration) -> ModelInfo:
    return registration.info(model)


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
    """The digest of the body that a repeated request had when it was sent first.

    Raises:
        InvalidInput: the header contains no digest.
    """
    digest = request.headers.get(DIGEST_HEADER)
    if digest is not None and not DIGEST.fullmatch(digest):
        raise InvalidInput(
            "the digest of a request's first body has 64 hexadecimal digits",
            code="bad_digest",
            param=DIGEST_HEADER,
        )
    return digest


@router.post("/api/models/{project}/{name}/train", openapi_extra=described_body(NDJSON, TrainRequest))
async def train(
    model: LoadedModel,
    key: Annotated[str | None, Depends(idempotency_key)],
    first: Annotated[str | None, Depends(first_digest)],
    body: Groups,
    registration: TheRegistration,
    requests: TheTrainRequests,
    runner: TheRunner,
    policies: ThePolicies,
) -> Response:
    """Finds the exact tokens of each group when the group arrives. The answer begins when the job is on disk with all tokens."""
    if key is not None and await runner.is_repeated(model, key):  # the request is repeated
        job = await runner.find_repeated(model, key, first or await body.digest())
        if job is None:
            raise Unavailable(
                "the job of this key was deleted a moment ago: repeat the request",
                code="job_deleted",
            )
    else:
        await asyncio.to_thread(policies.check_own_jobs, model)
        request = await body.fields(TrainRequest)
        new: NewJob = requests.begin(model, request.config, registration.limits(model))
        async for group in body.groups():
            await new.resolve_turns(group)
        # A request that is sent again with its choices whole has another body, and brings the digest of its first body.
        job = await new.store_job(key, first or await body.digest(), request.expected_step)
    lines = event_lines(runner, job.job_id)
    return StreamingResponse(lines, media_type=NDJSON)


@router.post("/api/models/{project}/{name}/log", openapi_extra=described_body(NDJSON, LogRequest))
async def log(model: PathModel, body: Groups, reports: TheReports) -> LogReply:
    request = await body.fields(LogRequest)
    rollouts = ReceivedTrajectories()
    async for group in body.groups():
        await asyncio.to_thread(rollouts.add, group)
    return await write_log(model, request, rollouts, reports)


@router.get("/api/models/{project}/{name}/sessions/{session}")
async def session(
    model: PathModel,
    session: str,
    ledger: TheLedger,
    registry: TheRegistry,
    refused_names: TheRefusedNames,
    caller: TheCaller,
    request: Request,
) -> SessionReply:
    reply = await asyncio.to_thread(read_session, ledger, model.number, model.record.project, session, caller.owner)
    if reply.num_choices or reply.unused:
        return reply
    answers = await asyncio.to_thread(ledger.count_answers, session)
    others = {
        number: count
        for (owner, number), count in answers.items()
        if number is not None and (caller.projects is None or owner in caller.projects)
    }
    other_models: Counter[str] = Counter()
    for number, count in others.items():
        other_models[await asyncio.to_thread(registry.table.name_of, number)] += count
    return reply.model_copy(
        update={
            "other_models": dict(other_models),
            "num_base_answers": answers.get((caller.owner, None), 0),
            "unknown_models": refused_names.of_session(caller.owner, session),
            "refused_keys": request.app.state.refused_keys.of_session(session),
        }
    )


@router.get("/api/jobs")
async def jobs(
    runner: TheRunner,
    caller: TheCaller,
    state: Annotated[str, Query(max_length=100)] = "queued,running",
    limit: Annotated[int, Query(ge=1, le=1000)] = 100,
) -> JobList:
    """The first `limit` jobs in the states of `state`, separated by commas: queued, running, done, failed, cancelled. Without
    `state` the jobs that have not ended, in the order in which they run. Ended jobs come last, the latest first."""
    return JobList(jobs=await runner.jobs(caller.projects, read_states(state), limit))


@router.get("/api/jobs/{job_id}")
async def job(job: PathJob, runner: TheRunner) -> JobInfo:
    return await runner.info(job.job_id)


@router.get("/api/jobs/{job_id}/events")
async def job_events(job: PathJob, runner: TheRunner, after: int = -1) -> Response:
    lines = event_lines(runner, job.job_id, after)
    return StreamingResponse(lines, media_type=NDJSON)


@router.delete("/api/jobs/{job_id}")
async def cancel_job(job: PathJob, runner: TheRunner) -> JobInfo:
    await runner.cancel(job.job_id)
    return await runner.info(job.job_id)


@router.post("/api/jobs/{job_id}/move")
async def move_job(
    job: PathJob,
    body: MoveJobRequest,
    runner: TheRunner,
    caller: TheCaller,
) -> JobList:
    if body.before is not None:
        caller.check_project((await runner.get(body.before)).project)
    await runner.move(job.job_id, body.before)
    return JobList(jobs=await runner.jobs(caller.projects, ("queued",), 1000))


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


async def event_lines(runner: JobRunner, job_id: str, after: int = -1) -> AsyncIterator[bytes]:
    async for event in runner.follow(job_id, after):
        # ASCII, because httpx and Python's splitlines also end a line at U+2028 and U+0085.
        yield event.model_dump_json(exclude_none=True, ensure_ascii=True).encode() + b"\n"
