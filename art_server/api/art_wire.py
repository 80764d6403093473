"""The routes of ART's own server, for its older clients and NVIDIA's plugin: a thin layer over the control operations.

Options without effect on this server are accepted, logged once for each model, and listed in the job's report. A train
call that fails ends its stream with one line `{"error": TEXT}`, because these clients show the stream's text, but only
the number of an HTTP status. ART's S3, fork and deployment routes are left out.
"""

import asyncio
import functools
import json
import logging
from collections.abc import AsyncIterator, Mapping, Sequence, Set
from typing import Annotated, Any, NamedTuple, TypeVar

import msgspec
from fastapi import APIRouter, Depends, Request
from fastapi.responses import Response, StreamingResponse
from pydantic import BaseModel, ConfigDict, Field, ValidationError

from art_protocol.art_options import ART_RATIO, apply_options
from art_protocol.wire import (
    DeleteCheckpointsRequest,
    ErrorDetail,
    HistoryBody,
    LogRequest,
    LoRAConfig,
    RegisterRequest,
    TrainConfig,
    TrajectoryBody,
    TrajectoryGroupBody,
)
from art_server.api.auth import Caller
from art_server.api.bodies import SmallBodies, beside, decode, described_body, is_large, read_body
from art_server.api.engine_args import no_effect, requested_engine_args
from art_server.api.error_responses import detail_of, invalid_body, too_deep
from art_server.api.parameters import (
    TheBase,
    TheCaller,
    TheCheckpoints,
    TheConfig,
    TheDevices,
    TheFleet,
    ThePolicies,
    TheRegistration,
    TheRegistry,
    TheReports,
    TheRunner,
    TheTrainRequests,
)
from art_server.errors import Forbidden, InvalidInput, NotFound, ServerError
from art_server.jobs.logs import write_log
from art_server.jobs.received_trajectories import ReceivedTrajectories
from art_server.jobs.runner import JobRunner
from art_server.settings import Device
from art_server.store.registry import RegisteredModel, Registry

logger = logging.getLogger(__name__)

T = TypeVar("T", bound=BaseModel)

NO_KEY = "default"
"""The key that clients receive if the server has none configured."""
DEFAULT_BENCHMARK = "val/reward"
CLIENT_SIDE = frozenset(
    {
        *("entity", "id", "run_id", "config", "trainable", "base_path", "report_metrics"),
        *("inference_api_key", "inference_base_url", "inference_model_name"),
    }
)
"""Fields of ART's models that only the client uses."""
GROUPS = "trajectory_groups"
INSIDE: Mapping[str, type[BaseModel]] = {
    GROUPS: TrajectoryGroupBody,
    "trajectories": TrajectoryBody,
    "additional_histories": HistoryBody,
}
"""The class of the records in a list of a call, by the list's field."""
NO_TRAJECTORIES = (
    "no trajectories were collected, so there is nothing to train (trajectory_groups is empty). Check that the "
    "workflow ran (see its log), that target_functions names its functions, that the evaluator returned rewards, and "
    "that the model was called with log-probabilities"
)

REMEDIES: Mapping[str, str] = {
    "no_trainable_turn": "Sample from this server, with the training run's name as model and with log-probabilities, "
    "and keep them in each choice",
    "out_of_memory": "Lower init_args.max_seq_length or shorten the trajectories, send fewer of them at once, or start "
    "the server with a smaller --engine-arg gpu_memory_utilization",
}
"""How a user of these clients can fix an error, by its code."""


class ArtBody(BaseModel):
    """A body that ART's clients send. Unknown fields are accepted and reported."""

    model_config = ConfigDict(extra="allow", frozen=True)

    def unknown(self) -> list[str]:
        """The names of unknown fields that are set."""
        return list(without_none(self.model_extra))


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
    """A call that concerns one model. Each route reads its own fields."""

    model: ModelBody
    config: dict[str, Any] | None = None
    dev_config: dict[str, Any] | None = None
    split: str = "val"
    verbose: bool | int = False


class CallWithGroups(NamedTuple):
    """A call with trajectory groups, which are not parsed yet."""

    body: CallBody
    groups: list[msgspec.Raw]


class DeleteFilesBody(ArtBody):
    model: ModelBody
    steps_to_keep: list[int]


router = APIRouter(route_class=SmallBodies)
LARGE_CALL = described_body("application/json", CallBody)


async def _model(body: ModelBody, registry: TheRegistry, caller: TheCaller) -> RegisteredModel:
    return await model_of_body(body, registry, caller)


BodyModel = Annotated[RegisteredModel, Depends(_model)]
"""The model that the body names."""


async def model_of_body(body: ModelBody, registry: Registry, caller: Caller) -> RegisteredModel:
    caller.check_project(body.project)
    return await registry.get_whole(body.project, body.run_name or body.name)


@router.get("/healthcheck")
async def healthcheck() -> dict[str, str]:
    return {"status": "ok"}


@router.post("/close")
async def close() -> None:
    """A client closes its backend. The server continues to run."""


@router.post("/register")
async def register(
    body: ModelBody,
    registration: TheRegistration,
    fleet: TheFleet,
    devices: TheDevices,
    caller: TheCaller,
) -> dict[str, list[str]]:
    caller.check_project(body.project)
    wanted = checked(
        RegisterRequest,
        name=body.run_name or body.name,
        project=body.project,
        base_model=body.base_model,
        lora=body.lora,
    )
    requested, notes = read_settings(body, devices.engines)
    info = await registration.register(wanted, requested, always_logprobs=True)
    notes += fleet.ignored_args(requested) + info.notes
    log_notes(info.inference_name, notes)
    return {"notes": notes}


@router.post("/_get_step")
async def get_step(model: BodyModel) -> int:
    return model.step


@router.post("/_prepare_backend_for_training")
async def prepare(
    request: Request,
    body: CallBody,
    registry: TheRegistry,
    fleet: TheFleet,
    config: TheConfig,
    caller: TheCaller,
) -> list[str]:
    model = await model_of_body(body.model, registry, caller)
    log_notes(model.id, no_effect([f"config.{key}" for key in without_none(body.config)]))
    await fleet.wait_ready(config.wait_limit_seconds)
    state, port = request.app.state, request.url.port
    # HTTPS ends at a proxy, whose port serves /v1 as well.
    if state.inference_port is not None and request.url.scheme == "http":
        port = state.inference_port
    key = state.model_keys.make(model.id, caller.owner) if state.keys.are_needed("infer") else NO_KEY
    return [str(request.url.replace(port=port, path="/v1", query="")), key]


@router.post("/_train_model", openapi_extra=LARGE_CALL)
async def train_model(
    request: Request,
    config: TheConfig,
    devices: TheDevices,
    registry: TheRegistry,
    base: TheBase,
    registration: TheRegistration,
    requests: TheTrainRequests,
    runner: TheRunner,
    policies: ThePolicies,
    caller: TheCaller,
) -> Response:
    """The job is accepted before the answer begins, so it continues after the client disconnects."""
    text = await read_body(request, config.max_body_mb)
    try:
        call = await beside(is_large(text), read_call, text)
        model = await model_of_body(call.body.model, registry, caller)
        settings, notes = read_train_config(call, devices.engines)
        await base.wait_found()
        await asyncio.to_thread(policies.check_own_jobs, model)
        new = requests.begin(model, settings, registration.limits(model))
        dropped: set[str] = set()
        async for group in parse_groups(call, dropped):
            await new.resolve_turns(group)
        notes += no_effect(sorted(dropped))
        log_notes(model.id, notes)
        job = await new.store_job(None, "", notes=notes)
    except (Forbidden, NotFound):
        raise
    except ServerError as error:
        return Response(error_line(detail_of(error)), media_type="application/x-ndjson")
    return StreamingResponse(metric_lines(runner, job.job_id), media_type="application/x-ndjson")


@router.post("/_log", openapi_extra=LARGE_CALL)
async def log(
    request: Request,
    config: TheConfig,
    registry: TheRegistry,
    reports: TheReports,
    caller: TheCaller,
) -> None:
    body = await read_body(request, config.max_body_mb)
    call = await beside(is_large(body), read_call, body)
    model = await model_of_body(call.body.model, registry, caller)
    rollouts, dropped = ReceivedTrajectories(), set[str]()
    async for group in parse_groups(call, dropped):
        await asyncio.to_thread(rollouts.add, group)
    log_notes(model.id, no_effect([*call.body.unknown(), *sorted(dropped)]))
    await write_log(model, checked(LogRequest, split=call.body.split), rollouts, reports)


@router.post("/_delete_checkpoint_files")
async def delete_checkpoint_files(
    body: DeleteFilesBody,
    registry: TheRegistry,
    checkpoints: TheCheckpoints,
    caller: TheCaller,
) -> None:
    model = await model_of_body(body.model, registry, caller)
    await checkpoints.delete(model, DeleteCheckpointsRequest(keep=body.steps_to_keep))


@router.post("/_delete_checkpoints")
async def delete_checkpoints(
    model: BodyModel,
    checkpoints: TheCheckpoints,
    benchmark: str = DEFAULT_BENCHMARK,
    benchmark_smoothing: float = 1.0,
) -> None:
    if benchmark_smoothing != 1.0:
        log_notes(model.id, no_effect(["benchmark_smoothing"]))
    # These clients always send the default, also for models without a val split.
    metric = None if benchmark == DEFAULT_BENCHMARK else benchmark
    await checkpoints.delete(model, checked(DeleteCheckpointsRequest, best_metric=metric))


# --- requests -----------------------------------------------------------------------------------------------------


def read_settings(body: ModelBody, devices: Set[Device]) -> tuple[dict[str, str], list[str]]:
    """The engine arguments that a model requests, and a note for each of its settings that has no effect.

    Raises:
        InvalidInput: a value cannot be an engine argument.
    """
    config = body.internal_config or InternalConfig()
    init_args, engine_args = without_none(config.init_args), without_none(config.engine_args)
    unknown = [key for key in body.unknown() if key not in CLIENT_SIDE]
    unknown += [f"_internal_config.{key}" for key in config.unknown()]
    unknown += [f"init_args.{key}" for key in init_args if key != "max_seq_length"]
    length = {"max_seq_length": init_args.get("max_seq_length")}
    requested, others = requested_engine_args(engine_args | length, devices)
    return requested, no_effect([*unknown, *others])


def read_call(text: bytes) -> CallWithGroups:
    """A call of a route that takes trajectories.

    Raises:
        InvalidInput: the body is not JSON, or a field is invalid.
    """
    try:
        fields = msgspec.json.decode(text, type=dict[str, msgspec.Raw])
        groups = msgspec.json.decode(fields.pop(GROUPS, b"[]"), type=list[msgspec.Raw])
    except RecursionError as error:
        raise too_deep() from error
    except msgspec.ValidationError as error:
        raise InvalidInput(f"{GROUPS}: {error}", code="invalid_body", param=GROUPS) from error
    except msgspec.DecodeError as error:
        raise InvalidInput(f"the body is not JSON: {error}", code="invalid_body") from error
    try:
        return CallWithGroups(CallBody.model_validate_json(msgspec.json.encode(fields)), groups)
    except ValidationError as error:
        raise invalid_body(error) from error


async def parse_groups(call: CallWithGroups, dropped: set[str]) -> AsyncIterator[TrajectoryGroupBody]:
    """The groups of a call, each parsed in a thread. `dropped` gets the names of unknown fields that were set.

    Raises:
        InvalidInput: invalid fields, which the message names.
    """
    for index, text in enumerate(call.groups):
        yield await asyncio.to_thread(parse_group, bytes(text), index, dropped)


def parse_group(text: bytes, index: int, dropped: set[str]) -> TrajectoryGroupBody:
    value = known_fields(decode(text), GROUPS, dropped)
    try:
        return TrajectoryGroupBody.model_validate(value)
    except ValidationError as error:
        raise invalid_body(error, (GROUPS, index)) from error


def read_train_config(call: CallWithGroups, devices: Set[Device]) -> tuple[TrainConfig, list[str]]:
    """The configuration of a train call, and a note for each option that has no effect. The model's `trainer_args`
    override the configuration, because NVIDIA's plugin drops them from the configuration that it sends.

    Raises:
        InvalidInput: no trajectories, or invalid values.
    """
    if not call.groups:
        raise InvalidInput(NO_TRAJECTORIES, code="no_trajectories", param=GROUPS)
    body = call.body
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
    return config, read_settings(body.model, devices)[1] + no_effect(unknown)


def known_fields(value: Any, name: str, dropped: set[str]) -> Any:
    """A record of the list `name` without unknown fields, also in the records inside it. The record is not validated yet. The
    names of unknown fields that are set are added to `dropped`."""
    if not isinstance(value, dict):
        return value
    known = {key: value[key] for key in INSIDE[name].model_fields if key in value}
    dropped.update(f"{name}[].{key}" for key in value.keys() - known if value[key])
    for inner in INSIDE.keys() & known:
        if isinstance(known[inner], list):
            known[inner] = [known_fields(record, inner, dropped) for record in known[inner]]
    return known


def without_none(options: Mapping[str, Any] | None) -> dict[str, Any]:
    """The options that are not None."""
    return {key: value for key, value in (options or {}).items() if value is not None}


def checked(kind: type[T], **fields: Any) -> T:
    """Validates fields as a `kind`.

    Raises:
        InvalidInput: invalid fields, which the message names.
    """
    try:
        return kind.model_validate(fields)
    except ValidationError as error:
        raise invalid_body(error) from error


def log_notes(model_id: str, notes: Sequence[str]) -> None:
    """Logs each note once for each model."""
    for note in notes:
        _log_note_once(model_id, note)


@functools.lru_cache(maxsize=4096)
def _log_note_once(model_id: str, note: str) -> None:
    logger.warning("%s: %r", model_id, note)  # %r, because a client's text may contain line breaks


# --- answers ------------------------------------------------------------------------------------------------------


async def metric_lines(runner: JobRunner, job_id: str) -> AsyncIterator[bytes]:
    """The stream of a train call: one line with the step's metrics, or one line with the error. Until then blanks,
    which JSON allows before a value, keep the connection alive."""
    async for event in runner.follow(job_id):
        if event.event == "done":
            steps = event.metrics.get("data/step_num_gradient_steps", 1.0)
            row = {"num_gradient_steps": steps, **event.metrics}
            yield json.dumps(row).encode() + b"\n"
        elif event.event == "error":
            yield error_line(event.error or ErrorDetail(message=f"job {job_id} failed"))
        else:
            yield b" "


def error_line(error: ErrorDetail) -> bytes:
    """The cause of an error and its remedy, as the one line that these clients show."""
    remedy = REMEDIES.get(error.code)
    text = f"{error.message.rstrip('.')}. {remedy}" if remedy else error.message
    return json.dumps({"error": text}).encode() + b"\n"
