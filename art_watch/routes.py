"""The routes that show runs to people: the page, and the JSON that it and the command `art` read.

They read the folder in threads, and change nothing. `art view` serves them over finished runs, without a server and
without the packages that a server needs.
"""

import asyncio
import json
import time
from collections.abc import AsyncIterator, Sequence
from importlib import resources
from pathlib import Path
from typing import Annotated, Any, Protocol

from fastapi import APIRouter, Depends, Query, Request
from fastapi import Path as PathParameter
from fastapi.responses import FileResponse, Response, StreamingResponse

from art_protocol.learning import LearningInfo
from art_protocol.wire import JobInfo, JobState
from art_server.api.auth import PAGE, Caller, HealthSource, TheCaller, visible_health
from art_server.errors import Forbidden, NotFound
from art_server.status import machine
from art_server.store.model_folder import ModelFolder
from art_server.store.registry import check_name
from art_watch import context, rollouts, scores, tokens
from art_watch.runs import Runs

LOOK_SECONDS = 1.0
"""The time between two checks for changes."""
KEEP_ALIVE_SECONDS = 10.0
"""The longest time without a line in the stream of events."""
MAX_METRICS, MAX_JOBS = 64, 100
PENDING: Sequence[JobState] = ("queued", "running")
CHARTS = "plotly.min.js"
ASSETS = resources.files("art_watch") / "page"
SECURITY_HEADERS = {
    "content-security-policy": "default-src 'self'; style-src 'self' 'unsafe-inline'; img-src 'self' data: blob:; "
    "frame-ancestors 'none'; base-uri 'none'; form-action 'none'",
    "x-content-type-options": "nosniff",
    "referrer-policy": "no-referrer",
    "cache-control": "no-cache",
}
"""Plotly sets styles in elements; everything else comes from this server."""

router = APIRouter()


class Live(Protocol):
    """A running server, as the page shows it (`server.Server`)."""

    @property
    def status(self) -> "LiveStatus": ...
    @property
    def runner(self) -> "LiveJobs": ...
    @property
    def collector(self) -> "LiveLearning": ...


class LiveStatus(HealthSource, Protocol):
    def activity(self) -> dict[str, Any]: ...
    def memory(self) -> dict[str, Any]: ...


class LiveJobs(Protocol):
    async def jobs(self, projects: frozenset[str] | None, states: Sequence[JobState], limit: int) -> list[JobInfo]: ...


class LiveLearning(Protocol):
    async def learners(
        self, projects: frozenset[str] | None = None, only: str | None = None
    ) -> dict[str, LearningInfo]: ...


# Dependencies are `async`, because FastAPI runs others in threads.
async def _runs(request: Request) -> Runs:
    return request.app.state.runs


async def _live(request: Request) -> Live | None:
    return request.app.state.server


TheRuns = Annotated[Runs, Depends(_runs)]
MaybeLive = Annotated[Live | None, Depends(_live)]
"""None: the folder has no running server."""


async def _folder(project: str, name: str, runs: TheRuns, caller: TheCaller) -> ModelFolder:
    caller.check_project(project)
    return await asyncio.to_thread(runs.folder, project, name)


async def _split(split: str) -> str:
    return check_name(split, "split")


TheFolder = Annotated[ModelFolder, Depends(_folder)]
TheSplit = Annotated[str, Depends(_split)]
PathNumber = Annotated[int, PathParameter(ge=0, lt=10**9)]


@router.head("/", include_in_schema=False)
@router.get("/", include_in_schema=False)
async def page() -> Response:
    """The page. Claude Code asks with HEAD whether its base URL answers."""
    return await asset("index.html")


@router.get(PAGE + "{file}", include_in_schema=False)
async def asset(file: str) -> Response:
    """A file of the page. The chart library comes from its Python package."""
    if file == CHARTS:
        return FileResponse(chart_library(), headers=SECURITY_HEADERS | {"cache-control": "max-age=86400"})
    known = {Path(str(entry)).name for entry in ASSETS.iterdir()}
    if file not in known:
        raise NotFound(f"the page has no file '{file[:80]}'", code="unknown_route")
    return FileResponse(str(ASSETS / file), headers=SECURITY_HEADERS)


def chart_library() -> Path:
    """The browser bundle of plotly.

    Raises:
        NotFound: plotly is not installed.
    """
    try:
        bundle = resources.files("plotly") / "package_data" / CHARTS
    except ModuleNotFoundError as error:
        raise NotFound("charts need plotly: pip install plotly", code="no_charts") from error
    return Path(str(bundle))


@router.get("/api/look/overview")
async def overview(runs: TheRuns, live: MaybeLive, caller: TheCaller) -> dict[str, Any]:
    """All models in one line each and, on a running server, what it does now."""

    def summaries() -> list[dict[str, Any]]:
        return [runs.summary(folder) for folder in runs.folders(caller.projects)]

    models = await asyncio.to_thread(summaries)
    state = None if live is None else await live_state(live, caller)
    if live is not None and state is not None and caller.projects is None:
        state["machine"] = await asyncio.to_thread(live.status.memory)
    return {"models": models, "time": time.time(), "live": state}


async def live_state(live: Live, caller: Caller) -> dict[str, Any]:
    """What the server does now, as far as the caller's projects are concerned."""
    jobs = await live.runner.jobs(caller.projects, PENDING, MAX_JOBS)
    learners = await live.collector.learners(caller.projects)
    return {
        "health": visible_health(live.status, caller).model_dump(mode="json"),
        "activity": live.status.activity(),
        "jobs": [job.model_dump(mode="json") for job in jobs],
        "learning": {model: info.model_dump(mode="json") for model, info in learners.items()},
    }


@router.get("/api/look/models/{project}/{name}/context")
async def run_context(folder: TheFolder, runs: TheRuns, live: MaybeLive) -> dict[str, Any]:
    """What the run is: base, times, trained tokens, the configuration in force, notes of its jobs, and what people noted.
    `can_change`: whether a running server has the model, and has routes that change the model."""
    fields = await asyncio.to_thread(context.context, runs, folder)
    return fields | {"can_change": live is not None and folder.exists()}


@router.get("/api/look/models/{project}/{name}/learning")
async def learning(folder: TheFolder, live: MaybeLive) -> dict[str, Any]:
    """A model's scores by day, name and step, their delays, and the releases. `info`: how it learns at this moment, on a running
    server. Both are null without scores and learning."""
    reading = asyncio.to_thread(scores.report, folder)
    if live is None:
        return {"info": None, "scores": await reading}
    report, infos = await asyncio.gather(reading, live.collector.learners(only=folder.model_id))
    info = infos.get(folder.model_id)
    return {"info": None if info is None else info.model_dump(mode="json"), "scores": report}


@router.get("/api/look/models/{project}/{name}/scores")
async def scores_of(
    folder: TheFolder,
    choice: Annotated[tuple[str, ...], Query(max_length=scores.MAX_CHOICES)] = (),
    session: Annotated[str | None, Query(max_length=200)] = None,
) -> dict[str, Any]:
    """The scores of each `choice`, and of a session."""
    return {"scores": await asyncio.to_thread(scores.of_choices, folder, choice, session)}


@router.get("/api/look/models/{project}/{name}/history")
async def history(
    folder: TheFolder,
    runs: TheRuns,
    metric: Annotated[tuple[str, ...], Query(max_length=MAX_METRICS)] = (),
) -> dict[str, Any]:
    """The history's columns of each `metric`. `names` lists all metrics."""

    def read() -> dict[str, Any]:
        rows = runs.history(folder)
        return rows.columns(metric) | {"names": rows.names()}

    return await asyncio.to_thread(read)


@router.get("/api/look/models/{project}/{name}/checkpoints")
async def checkpoints(folder: TheFolder, runs: TheRuns) -> dict[str, Any]:
    return {"checkpoints": await asyncio.to_thread(runs.checkpoints, folder)}


@router.get("/api/look/models/{project}/{name}/rollouts")
async def splits(folder: TheFolder, runs: TheRuns) -> dict[str, Any]:
    """The steps that have rollouts, by split."""
    return {"splits": await asyncio.to_thread(runs.splits, folder)}


@router.get("/api/look/models/{project}/{name}/rollouts/{split}/{step}")
async def groups(
    folder: TheFolder,
    split: TheSplit,
    step: PathNumber,
    text: Annotated[str, Query(max_length=1000)] = "",
) -> dict[str, Any]:
    """The groups of a step; with `text`, only the rollouts that contain the text."""
    return {"groups": await asyncio.to_thread(rollouts.groups, folder, split, step, text)}


@router.get("/api/look/models/{project}/{name}/rollouts/{split}/{step}/{group}/{rollout}")
async def rollout(
    folder: TheFolder, split: TheSplit, step: PathNumber, group: PathNumber, rollout: PathNumber
) -> dict[str, Any]:
    row = await asyncio.to_thread(rollouts.rollout, folder, split, step, group, rollout)
    return row | {"scores": await asyncio.to_thread(scores.of_rollout, folder, row)}


@router.get("/api/look/models/{project}/{name}/trees/{step}/{group}")
async def tree(folder: TheFolder, step: PathNumber, group: PathNumber) -> dict[str, Any]:
    return await asyncio.to_thread(tokens.tree, folder, step, group)


@router.get("/api/look/logs/{log}")
async def log(
    log: Annotated[str, PathParameter(pattern=r"^(server|trainer|engine(-[0-9]{1,3})?)$")],
    runs: TheRuns,
    caller: TheCaller,
    lines: Annotated[int, Query(ge=1, le=machine.MAX_LINES)] = 200,
) -> dict[str, str]:
    """The end of a log file. Logs name models of all projects."""
    if caller.projects is not None:
        raise Forbidden("logs need a key for all projects", code="forbidden")
    return {"text": await asyncio.to_thread(machine.log_tail, runs.root / "logs", log, lines)}


@router.get("/api/look/events", include_in_schema=False)
async def events(request: Request, runs: TheRuns, live: MaybeLive, caller: TheCaller) -> Response:
    """Server-sent events: an event with the marks of all models and jobs, and another whenever a mark changes."""

    async def lines() -> AsyncIterator[bytes]:
        sent, sent_at = "", 0.0
        while not request.app.state.is_stopping:
            text = json.dumps(await marks(runs, live, caller))
            if text != sent:
                sent, sent_at = text, time.monotonic()
                yield f"event: marks\ndata: {text}\n\n".encode()
            elif time.monotonic() - sent_at > KEEP_ALIVE_SECONDS:
                sent_at = time.monotonic()
                yield b": alive\n\n"
            await asyncio.sleep(LOOK_SECONDS)

    headers = {"cache-control": "no-cache"}
    return StreamingResponse(lines(), media_type="text/event-stream", headers=headers)


async def marks(runs: Runs, live: Live | None, caller: Caller) -> dict[str, Any]:
    """Values that change whenever something changes that the page shows."""
    current: dict[str, Any] = {"models": await asyncio.to_thread(runs.marks, caller.projects)}
    if live is not None:
        jobs = await live.runner.jobs(caller.projects, PENDING, MAX_JOBS)
        # The text of `waits_for` counts seconds down, and would be a change at each look.
        current["jobs"] = [[job.job_id, job.state, job.waits_for is not None] for job in jobs]
        health = live.status.health(names_model=False)
        current["engine"] = health.engine
        current["replicas"] = [replica.engine for replica in health.replicas]
    return current
