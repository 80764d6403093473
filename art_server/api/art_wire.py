"""The routes of ART's own server, for its older clients and NVIDIA's plugin: a thin layer over what `control` serves.

What these clients send and nothing here has a use for is accepted, told once in the log, and noted in the job's report.
A train call that cannot be carried out ends its stream with one line `{"error": TEXT}`: these clients show what stands
in the stream, of a status they show the number only. ART's S3, fork and deployment routes are left out.
"""

import asyncio
import functools
import json
import logging
import re
from collections.abc import AsyncIterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from fastapi import APIRouter, FastAPI, Request
from fastapi.responses import Response, StreamingResponse
from pydantic import BaseModel, ConfigDict, Field, ValidationError

from art.options import apply_options
from art.wire import (
    DeleteCheckpointsRequest,
    ErrorDetail,
    HistoryBody,
    LogRequest,
    LoRAConfig,
    RegisterRequest,
    TrainConfig,
    TrainRequest,
    TrajectoryBody,
    TrajectoryGroupBody,
)
from art_server.api.bodies import parse_body, read_body
from art_server.api.control import MAX_SMALL_BODY_MB
from art_server.api.door import Caller
from art_server.api.errors import detail_of, invalid_body
from art_server.api.model_keys import ModelKeys
from art_server.errors import InvalidInput, ServerError
from art_server.jobs.queue import digest
from art_server.service import Service
from art_server.settings import ENGINE_ARGS, Device, EngineWishes
from art_server.store.registry import Model

logger = logging.getLogger(__name__)

NO_KEY = "default"
"""What stands for a key where none is configured."""
NO_EFFECT = "{} has no effect here"
MAX_NOTES = 50
CLIENT_SIDE = frozenset(
    {
        *("entity", "id", "run_id", "config", "trainable", "base_path", "report_metrics"),
        *("inference_api_key", "inference_base_url", "inference_model_name"),
    }
)
"""Fields of ART's models that are the client's own."""
ENGINE_VALUE = re.compile(r"[A-Za-z0-9][A-Za-z0-9_.+-]{0,63}")
"""Never begins with a dash: it becomes an argument of vLLM's command line."""

REMEDIES: Mapping[str, str] = {
    "no_trainable_turn": "Sample from this server, under the training run's name, with log-probabilities, and keep "
    "each choice with them",
    "out_of_memory": "Lower init_args.max_seq_length or shorten the trajectories, send fewer of them at once, or start "
    "the server with a smaller --engine-arg gpu_memory_utilization",
}
"""What a user of these clients can do, by the error's code."""


class ArtBody(BaseModel):
    """A body of ART's clients: what it holds beside the fields is kept, and told."""

    model_config = ConfigDict(extra="allow", frozen=True)

    def unknown(self, prefix: str = "") -> list[str]:
        """Notes on what was given and is no field."""
        extra = self.model_extra or {}
        return [NO_EFFECT.format(prefix + key) for key, value in extra.items() if value is not None]


class InitArgs(ArtBody):
    max_seq_length: int | None = Field(default=None, ge=16, le=2**24)


class InternalConfig(ArtBody):
    init_args: InitArgs | None = None
    engine_args: dict[str, Any] | None = None
    trainer_args: dict[str, Any] | None = None


class ModelBody(ArtBody):
    name: str
    project: str
    run_name: str | None = None
    base_model: str = ""
    lora: LoRAConfig | None = None
    internal_config: InternalConfig | None = Field(default=None, alias="_internal_config")


class PrepareBody(ArtBody):
    model: ModelBody
    config: dict[str, Any] | None = None


class DeleteFilesBody(ArtBody):
    model: ModelBody
    steps_to_keep: list[int]


class GroupsBody(ArtBody):
    model: ModelBody
    trajectory_groups: list[Any]
    split: str = "val"
    config: dict[str, Any] | None = None
    dev_config: dict[str, Any] | None = None
    verbose: bool | int = False


@dataclass(frozen=True, slots=True)
class ModelSettings:
    """What a model's `_internal_config` asks for."""

    wishes: EngineWishes
    trainer_args: dict[str, Any]
    notes: list[str]
    """On what has no effect."""


def install(app: FastAPI, service: Service, keys: ModelKeys, inference_port: int | None) -> None:
    """Add the routes, which the door lists as `ART_PATHS`."""
    router = APIRouter()
    max_mb = service.config.max_body_mb

    def model_of(request: Request, body: ModelBody) -> Model:
        caller: Caller = request.state.caller
        caller.check_project(body.project)
        return service.registry.get(body.project, body.run_name or body.name)

    async def read_model(request: Request) -> tuple[Model, ModelBody]:
        body = await parse_body(await read_body(request, MAX_SMALL_BODY_MB), ModelBody)
        return model_of(request, body), body

    @router.get("/healthcheck")
    async def healthcheck() -> dict[str, str]:
        return {"status": "ok"}

    @router.post("/close")
    async def close() -> None:
        """A client goes; the server stays."""

    @router.post("/register")
    async def register(request: Request) -> dict[str, list[str]]:
        body = await parse_body(await read_body(request, MAX_SMALL_BODY_MB), ModelBody)
        caller: Caller = request.state.caller
        caller.check_project(body.project)
        try:
            asked = RegisterRequest(
                name=body.run_name or body.name,
                project=body.project,
                base_model=body.base_model,
                lora=body.lora,
            )
        except ValidationError as error:
            raise invalid_body(error) from error
        settings = read_settings(body, service.device)
        info = await service.register(asked, settings.wishes, always_logprobs=True)
        notes = settings.notes + service.engine.unmet(settings.wishes)
        tell(info.inference_name, notes)
        return {"notes": notes}

    @router.post("/_get_step")
    async def get_step(request: Request) -> int:
        model, _ = await read_model(request)
        return model.step

    @router.post("/_prepare_backend_for_training")
    async def prepare(request: Request) -> list[str]:
        body = await parse_body(await read_body(request, MAX_SMALL_BODY_MB), PrepareBody)
        model = model_of(request, body.model)
        tell(model.id, [NO_EFFECT.format(f"config.{key}") for key in given(body.config)])
        await service.engine.wait_ready(service.config.wait_limit_seconds)
        port = request.url.port if inference_port is None else inference_port
        caller: Caller = request.state.caller
        key = keys.make(model.id, caller.owner) if service.config.api_keys else NO_KEY
        return [str(request.url.replace(port=port, path="/v1", query="")), key]

    @router.post("/_train_model")
    async def train_model(request: Request) -> Response:
        """The job is accepted before the answer begins, so that it outlives a client that goes away."""
        raw = await read_body(request, max_mb)
        body = await parse_body(raw, GroupsBody)
        model = model_of(request, body.model)
        owner = request.state.caller.owner
        try:
            asked, notes = await asyncio.to_thread(read_train_request, body, service.device)
            tell(model.id, notes)
            limits = service.limits(model)
            job = await service.runner.accept(model, asked, owner, None, digest(raw), limits, notes)
        except ServerError as error:
            return Response(error_line(detail_of(error)), media_type="application/x-ndjson")
        return StreamingResponse(
            metric_lines(service, job.job_id), media_type="application/x-ndjson"
        )

    @router.post("/_log")
    async def log(request: Request) -> None:
        body = await parse_body(await read_body(request, max_mb), GroupsBody)
        model = model_of(request, body.model)
        notes = body.unknown()
        groups = known_groups(body, notes)
        tell(model.id, notes)
        try:
            row = LogRequest.model_validate({"groups": groups, "split": body.split})
        except ValidationError as error:
            raise invalid_body(error) from error
        await service.log(model, row)

    @router.post("/_delete_checkpoint_files")
    async def delete_checkpoint_files(request: Request) -> None:
        body = await parse_body(await read_body(request, MAX_SMALL_BODY_MB), DeleteFilesBody)
        model = model_of(request, body.model)
        await service.delete_checkpoints(model, DeleteCheckpointsRequest(keep=body.steps_to_keep))

    @router.post("/_delete_checkpoints")
    async def delete_checkpoints(
        request: Request, benchmark: str = "val/reward", benchmark_smoothing: float = 1.0
    ) -> None:
        model, _ = await read_model(request)
        if benchmark_smoothing != 1.0:
            tell(model.id, [NO_EFFECT.format("benchmark_smoothing")])
        await service.delete_checkpoints(model, DeleteCheckpointsRequest(best_metric=benchmark))

    app.include_router(router)


# --- what was asked for -------------------------------------------------------------------------------------------


def read_settings(body: ModelBody, device: Device) -> ModelSettings:
    """What a model asks of engine and trainer.

    Raises:
        InvalidInput: a value that cannot become an engine's argument.
    """
    config = body.internal_config or InternalConfig()
    init_args = config.init_args or InitArgs()
    notes = [note for note in body.unknown() if note.split()[0] not in CLIENT_SIDE]
    notes += config.unknown("_internal_config.") + init_args.unknown("init_args.")
    engine_args: dict[str, str] = {}
    for key, value in given(config.engine_args).items():
        text = str(value).lower() if isinstance(value, bool) else str(value)
        if key not in ENGINE_ARGS:
            notes.append(NO_EFFECT.format(f"engine_args.{key}"))
        elif device == "cpu" and key == "gpu_memory_utilization":
            notes.append(f"engine_args.{key}: on a CPU --kv-cache-gb decides")
        elif ENGINE_VALUE.fullmatch(text):
            engine_args[key] = text
        else:
            raise InvalidInput(
                f"engine_args.{key} must be a number, a truth value or a name",
                code="invalid_body",
                param=f"_internal_config.engine_args.{key}",
            )
    wishes = EngineWishes(max_seq_length=init_args.max_seq_length, engine_args=engine_args)
    return ModelSettings(wishes, given(config.trainer_args), notes)


def read_train_request(body: GroupsBody, device: Device) -> tuple[TrainRequest, list[str]]:
    """What to train and how, with notes on what has no effect. The model's `trainer_args` win over the configuration,
    for NVIDIA's plugin loses them on its own way there.

    Raises:
        InvalidInput: no trajectories, or values that do not fit.
    """
    if not body.trajectory_groups:
        raise InvalidInput(
            "trajectory_groups is empty: no trajectories were collected, so there is nothing to train. Look whether "
            "the workflow ran (its log), whether target_functions names its functions, whether the evaluator gave "
            "rewards, and whether the model was asked for log-probabilities",
            code="no_trajectories",
            param="trajectory_groups",
        )
    settings = read_settings(body.model, device)
    notes = body.unknown() + settings.notes
    sources = {
        "config": body.config,
        "dev_config": body.dev_config,
        "trainer_args": settings.trainer_args,
    }
    config = TrainConfig()
    try:
        for source, options in sources.items():
            config, idle, missing = apply_options(config, given(options))
            notes += [NO_EFFECT.format(f"{source}.{key}") for key in idle + missing]
        groups = known_groups(body, notes)
        return TrainRequest.model_validate({"groups": groups, "config": config}), notes
    except ValidationError as error:
        raise invalid_body(error) from error


NESTED: Mapping[str, type[BaseModel]] = {
    "trajectory_groups": TrajectoryGroupBody,
    "trajectories": TrajectoryBody,
    "additional_histories": HistoryBody,
}


def known_fields(values: Any, field: str, unknown: set[str]) -> Any:
    """The records under a field without what we do not know of them, which goes into `unknown`; whether they fit is
    checked elsewhere."""
    if not isinstance(values, list) or not all(isinstance(value, dict) for value in values):
        return values
    fields = NESTED[field].model_fields
    for value in values:
        unknown.update(f"{field}[].{key}" for key in value.keys() - fields if value[key])
    made = [{key: value[key] for key in fields if key in value} for value in values]
    for value in made:
        for key in value.keys() & NESTED.keys():
            value[key] = known_fields(value[key], key, unknown)
    return made


def known_groups(body: GroupsBody, notes: list[str]) -> Any:
    unknown: set[str] = set()
    groups = known_fields(body.trajectory_groups, "trajectory_groups", unknown)
    notes += [NO_EFFECT.format(name) for name in sorted(unknown)]
    return groups


def given(options: Mapping[str, Any] | None) -> dict[str, Any]:
    """The options that were set."""
    return {key: value for key, value in (options or {}).items() if value is not None}


def tell(model_id: str, notes: Sequence[str]) -> None:
    """Write each note into the log, once a model."""
    for note in notes[:MAX_NOTES]:
        _tell_once(model_id, note[:300])


@functools.lru_cache(maxsize=4096)
def _tell_once(model_id: str, note: str) -> None:
    logger.warning("%s: %s", model_id, note)


# --- what is answered ---------------------------------------------------------------------------------------------


async def metric_lines(service: Service, job_id: str) -> AsyncIterator[bytes]:
    """The stream of a train call: one line of numbers for the one step, or one that tells the error. Meanwhile blanks,
    which JSON allows before a value, keep the connection alive."""
    async for event in service.runner.follow(job_id):
        if event.event == "done":
            steps = event.metrics.get("data/step_num_gradient_steps", 1.0)
            counts = {"num_gradient_steps": steps, "data/step_num_gradient_steps": steps}
            yield json.dumps(event.metrics | counts).encode() + b"\n"
        elif event.event == "error":
            yield error_line(event.error or ErrorDetail(message=f"job {job_id} failed"))
        else:
            yield b" "


def error_line(error: ErrorDetail) -> bytes:
    """Cause and remedy, as the one line that these clients show."""
    remedy = REMEDIES.get(error.code)
    text = f"{error.message.rstrip('.')}. {remedy}" if remedy else error.message
    return json.dumps({"error": text}).encode() + b"\n"
