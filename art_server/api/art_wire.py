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
from typing import Any, TypeVar

from fastapi import APIRouter, FastAPI, Request
from fastapi.responses import Response, StreamingResponse
from pydantic import BaseModel, ConfigDict, Field, ValidationError

from art.compat.options import ART_RATIO, apply_options
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
from art_server.api.bodies import beside, parse_body, read_body
from art_server.api.control import MAX_SMALL_BODY_MB
from art_server.api.door import Caller
from art_server.api.errors import detail_of, invalid_body
from art_server.api.keys import Keys
from art_server.api.model_keys import ModelKeys
from art_server.errors import InvalidInput, ServerError
from art_server.jobs.queue import digest
from art_server.service import Service
from art_server.settings import ENGINE_ARGS, Device
from art_server.store.registry import Model

logger = logging.getLogger(__name__)

T = TypeVar("T", bound=BaseModel)

NO_KEY = "default"
"""What stands for a key where none is configured."""
DEFAULT_BENCHMARK = "val/reward"
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
ENGINE_VALUES = {"max_seq_length": re.compile(r"[1-9][0-9]{2,7}")}
NESTED: Mapping[str, type[BaseModel]] = {
    "trajectory_groups": TrajectoryGroupBody,
    "trajectories": TrajectoryBody,
    "additional_histories": HistoryBody,
}
NO_TRAJECTORIES = (
    "no trajectories were collected, so there is nothing to train (trajectory_groups is empty). Look whether the workflow "
    "ran (its log), whether target_functions names its functions, whether the evaluator gave rewards, and whether the "
    "model was asked for log-probabilities"
)

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

    def unknown(self) -> list[str]:
        """What was given and is no field."""
        return list(given(self.model_extra))


class InternalConfig(ArtBody):
    init_args: dict[str, Any] | None = None
    engine_args: dict[str, Any] | None = None
    trainer_args: dict[str, Any] | None = None


class ModelBody(ArtBody):
    name: str
    project: str
    run_name: str | None = None
    base_model: str = ""
    lora: LoRAConfig | None = None
    internal_config: InternalConfig | None = Field(default=None, alias="_internal_config")


class CallBody(ArtBody):
    """What is asked of a model; each route has its own fields."""

    model: ModelBody
    config: dict[str, Any] | None = None
    dev_config: dict[str, Any] | None = None
    trajectory_groups: list[dict[str, Any]] = []
    split: str = "val"
    verbose: bool | int = False


class DeleteFilesBody(ArtBody):
    model: ModelBody
    steps_to_keep: list[int]


def install(
    app: FastAPI,
    service: Service,
    keys: Keys,
    model_keys: ModelKeys,
    inference_port: int | None,
    max_mb: int,
) -> None:
    """Add the routes, which the door lists as `ART_PATHS`."""
    router = APIRouter()

    def model_of(request: Request, body: ModelBody) -> Model:
        caller: Caller = request.state.caller
        caller.check_project(body.project)
        return service.model(body.project, body.run_name or body.name)

    async def read_model(request: Request) -> Model:
        body = await parse_body(await read_body(request, MAX_SMALL_BODY_MB), ModelBody)
        return model_of(request, body)

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
        asked = checked(
            RegisterRequest,
            name=body.run_name or body.name,
            project=body.project,
            base_model=body.base_model,
            lora=body.lora,
        )
        requested, notes = read_settings(body, service.device)
        info = await service.register(asked, requested, always_logprobs=True)
        notes += service.ignored_args(requested)
        tell(info.inference_name, notes)
        return {"notes": notes}

    @router.post("/_get_step")
    async def get_step(request: Request) -> int:
        return (await read_model(request)).step

    @router.post("/_prepare_backend_for_training")
    async def prepare(request: Request) -> list[str]:
        body = await parse_body(await read_body(request, MAX_SMALL_BODY_MB), CallBody)
        model = model_of(request, body.model)
        tell(model.id, no_effect([f"config.{key}" for key in given(body.config)]))
        await service.wait_ready()
        port = request.url.port if inference_port is None else inference_port
        caller: Caller = request.state.caller
        key = model_keys.make(model.id, caller.owner) if keys else NO_KEY
        return [str(request.url.replace(port=port, path="/v1", query="")), key]

    @router.post("/_train_model")
    async def train_model(request: Request) -> Response:
        """The job is accepted before the answer begins, so that it outlives a client that goes away."""
        raw = await read_body(request, max_mb)
        body = await parse_body(raw, CallBody)
        model = model_of(request, body.model)
        owner = request.state.caller.owner
        try:
            asked, notes = await asyncio.to_thread(read_train_request, body, service.device)
            tell(model.id, notes)
            raw_digest = await beside(digest, raw)
            job = await service.submit(
                model, owner, None, raw_digest, lambda accept: accept(asked), notes
            )
        except ServerError as error:
            return Response(error_line(detail_of(error)), media_type="application/x-ndjson")
        return StreamingResponse(
            metric_lines(service, job.job_id), media_type="application/x-ndjson"
        )

    @router.post("/_log")
    async def log(request: Request) -> None:
        body = await parse_body(await read_body(request, max_mb), CallBody)
        model = model_of(request, body.model)
        tell(model.id, no_effect(body.unknown()))
        groups, _ = known_fields(body.trajectory_groups, "trajectory_groups")
        await service.log(model, checked(LogRequest, groups=groups, split=body.split))

    @router.post("/_delete_checkpoint_files")
    async def delete_checkpoint_files(request: Request) -> None:
        body = await parse_body(await read_body(request, MAX_SMALL_BODY_MB), DeleteFilesBody)
        model = model_of(request, body.model)
        await service.delete_checkpoints(model, DeleteCheckpointsRequest(keep=body.steps_to_keep))

    @router.post("/_delete_checkpoints")
    async def delete_checkpoints(
        request: Request, benchmark: str = DEFAULT_BENCHMARK, benchmark_smoothing: float = 1.0
    ) -> None:
        model = await read_model(request)
        if benchmark_smoothing != 1.0:
            tell(model.id, no_effect(["benchmark_smoothing"]))
        # These clients send the default always, also for models without a val split.
        metric = None if benchmark == DEFAULT_BENCHMARK else benchmark
        await service.delete_checkpoints(
            model, checked(DeleteCheckpointsRequest, best_metric=metric)
        )

    app.include_router(router)


# --- what was asked for -------------------------------------------------------------------------------------------


def read_settings(body: ModelBody, device: Device) -> tuple[dict[str, str], list[str]]:
    """What a model asks of the engine, with notes on what of its settings has no effect.

    Raises:
        InvalidInput: a value that cannot become an engine's argument.
    """
    config = body.internal_config or InternalConfig()
    init_args, engine_args = given(config.init_args), given(config.engine_args)
    requested: dict[str, str] = {}
    unknown = [key for key in body.unknown() if key not in CLIENT_SIDE]
    unknown += [f"_internal_config.{key}" for key in config.unknown()]
    unknown += [f"init_args.{key}" for key in init_args if key != "max_seq_length"]
    for key, value in (engine_args | {"max_seq_length": init_args.get("max_seq_length")}).items():
        text = str(value).lower() if isinstance(value, bool) else str(value)
        is_known = key in ENGINE_ARGS or key == "max_seq_length"
        if not is_known or (device == "cpu" and key == "gpu_memory_utilization"):
            unknown.append(f"engine_args.{key}")
        elif value is not None and not ENGINE_VALUES.get(key, ENGINE_VALUE).fullmatch(text):
            raise InvalidInput(
                f"_internal_config: {key} cannot be {text[:80]!r}", code="invalid_body", param=key
            )
        elif value is not None:
            requested[key] = text
    return requested, no_effect(unknown)


def read_train_request(body: CallBody, device: Device) -> tuple[TrainRequest, list[str]]:
    """What to train and how, with notes on what has no effect. The model's `trainer_args` win over the configuration,
    for NVIDIA's plugin loses them on its own way there.

    Raises:
        InvalidInput: no trajectories, or values that do not fit.
    """
    if not body.trajectory_groups:
        raise InvalidInput(NO_TRAJECTORIES, code="no_trajectories", param="trajectory_groups")
    unknown = body.unknown()
    config = TrainConfig(**ART_RATIO)
    settings = {"config": body.config, "dev_config": body.dev_config}
    if body.model.internal_config is not None:
        settings["trainer_args"] = body.model.internal_config.trainer_args
    for name, options in settings.items():
        try:
            config, ignored = apply_options(config, options or {})
        except ValidationError as error:
            raise invalid_body(error) from error
        unknown += [f"{name}.{key}" for key in ignored]
    groups, more = known_fields(body.trajectory_groups, "trajectory_groups")
    notes = read_settings(body.model, device)[1] + no_effect([*unknown, *more])
    return checked(TrainRequest, groups=groups, config=config), notes


def known_fields(values: Any, field: str) -> tuple[Any, list[str]]:
    """The records under a field without what we do not know of them, and the names of that; whether the rest fits is
    checked elsewhere."""
    if not isinstance(values, list) or not all(isinstance(value, dict) for value in values):
        return values, []
    fields = NESTED[field].model_fields
    unknown = {
        f"{field}[].{key}" for value in values for key in value.keys() - fields if value[key]
    }
    made = [{key: value[key] for key in fields if key in value} for value in values]
    for value in made:
        for key in value.keys() & NESTED.keys():
            value[key], more = known_fields(value[key], key)
            unknown |= set(more)
    return made, sorted(unknown)


def given(options: Mapping[str, Any] | None) -> dict[str, Any]:
    """The options that were set."""
    return {key: value for key, value in (options or {}).items() if value is not None}


def no_effect(names: Sequence[str]) -> list[str]:
    return [f"{name[:200]} has no effect here" for name in names[:MAX_NOTES]]


def checked(kind: type[T], **fields: Any) -> T:
    """
    Raises:
        InvalidInput: naming the fields that do not fit.
    """
    try:
        return kind.model_validate(fields)
    except ValidationError as error:
        raise invalid_body(error) from error


def tell(model_id: str, notes: Sequence[str]) -> None:
    """Write each note into the log, once a model."""
    for note in notes:
        _tell_once(model_id, note)


@functools.lru_cache(maxsize=4096)
def _tell_once(model_id: str, note: str) -> None:
    logger.warning("%s: %r", model_id, note)  # a client's text: no line breaks of its own


# --- what is answered ---------------------------------------------------------------------------------------------


async def metric_lines(service: Service, job_id: str) -> AsyncIterator[bytes]:
    """The stream of a train call: one line of numbers for the one step, or one that tells the error. Meanwhile blanks,
    which JSON allows before a value, keep the connection alive."""
    async for event in service.follow(job_id):
        if event.event == "done":
            steps = event.metrics.get("data/step_num_gradient_steps", 1.0)
            row = {"num_gradient_steps": steps, **event.metrics}
            yield json.dumps(row).encode() + b"\n"
        elif event.event == "error":
            yield error_line(event.error or ErrorDetail(message=f"job {job_id} failed"))
        else:
            yield b" "


def error_line(error: ErrorDetail) -> bytes:
    """Cause and remedy, as the one line that these clients show."""
    remedy = REMEDIES.get(error.code)
    text = f"{error.message.rstrip('.')}. {remedy}" if remedy else error.message
    return json.dumps({"error": text}).encode() + b"\n"
