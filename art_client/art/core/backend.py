"""`Backend`: the connection to an art-server. A program makes a backend, passes it to `model.register`, and closes it."""

# pyright: reportPrivateUsage=false

import asyncio
import builtins
import functools
import hashlib
import logging
import os
import uuid
from collections import Counter
from collections.abc import Callable, Container, Iterable, Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any, Self, TypeVar

import httpx
from pydantic import BaseModel, ValidationError

from art import tracing
from art.bars import make_bar
from art.bodies import build_log_request, build_train_request
from art.connection import ACCEPTED, ENDED, REQUEST_TIMEOUT_SECONDS, Connection, JobRequest
from art.core.model import Model, TrainableModel, clean_key
from art.errors import ArtError, ArtJobError, ArtStatusError
from art.job import Job
from art.notices import Notices, interrupted, shorten_errors, show_event
from art.reporting import OnStep, Reporting
from art.scopes import add_server
from art.trajectories import Trajectory, TrajectoryGroup, group_list
from art.types import TrainResult, to_train_config
from art_protocol.learning import Feedback, FeedbackToken, FeedbackTokenRequest, LearningInfo, Policy, Score
from art_protocol.wire import (
    DIGEST_HEADER,
    IDEMPOTENCY_HEADER,
    NDJSON,
    CheckpointList,
    DeleteCheckpointsReply,
    DeleteCheckpointsRequest,
    ForkRequest,
    JobEvent,
    JobReport,
    LogReply,
    ModelInfo,
    ModelList,
    RollbackRequest,
    SessionReply,
    TrainConfig,
)

logger = logging.getLogger(__name__)

ReplyT = TypeVar("ReplyT", bound=BaseModel)
LOG_DIR = Path(".art/logs")
"""The folder to which a program's trackers write, unless their own environment variables name another folder."""

DEFAULT_URL = "http://127.0.0.1:7623"

REGISTER_TIMEOUT_SECONDS = 1800
"""The first model of a base model waits until the server has loaded the weights, and possibly downloaded them."""


class Backend:
    """The art-server at an address.

    `base_url` and `api_key` default to ART_SERVER_URL (else http://127.0.0.1:7623) and ART_API_KEY. While the server is
    away, calls wait up to `reconnect_seconds` for its return. A train call then continues with the same job.

    `trackers` ("wandb", "trackio", "tensorboard", "mlflow", "otlp") get every step that this backend trains or logs.
    `on_step` is called with the same `art.trackers.StepRecord` after each such call and may be async. A failure of a
    tracker or of `on_step` is one warning in the log.
    """

    _log_dir = LOG_DIR

    def __init__(
        self,
        base_url: str | None = None,
        api_key: str | None = None,
        *,
        reconnect_seconds: float = 600,
        trackers: Sequence[str] = (),
        on_step: OnStep | None = None,
    ) -> None:
        shorten_errors()
        url, key = _fill_in_from_environment(base_url, api_key)
        self._connection = Connection(_normalize_url(url), key, reconnect_seconds, self._check_server)
        self._models: list[Model] = []
        self._steps: dict[str, int] = {}
        """The newest known step of each trainable model, by its inference name."""
        self._accepted: set[tuple[str, str]] = set()
        """Jobs that have not ended as far as this program knows: the model's inference name, and the job's id."""
        self._notices = Notices()
        self._reporting = Reporting(trackers, on_step, self._log_dir)

    def __repr__(self) -> str:
        key = "'***'" if self._connection.api_key else "None"
        return f"{type(self).__name__}(base_url='{self.base_url}', api_key={key})"

    @property
    def base_url(self) -> str:
        """The server's address."""
        return self._connection.base_url

    @property
    def is_open(self) -> bool:
        """Whether the backend has open connections. A call after `close` opens new ones."""
        return self._connection.is_open

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, kind: object, error: object, traceback: object) -> None:
        if kind is asyncio.CancelledError and self._steps:  # asyncio.run cancels the program's task at Ctrl-C
            interrupted(self._location, self._steps, self._coming_steps())
        await self.close()

    def _coming_steps(self) -> dict[str, int]:
        """For each model with accepted jobs the last step that these jobs will make, by the model's inference name."""
        jobs = Counter(name for name, _ in self._accepted)
        return {name: self._steps.get(name, 0) + number for name, number in jobs.items()}

    @property
    def _location(self) -> str:
        """Where the models are, in messages."""
        return self.base_url

    async def close(self) -> None:
        """Closes the connections of this backend and of its models, and delivers what is queued for its trackers. A later
        call opens new connections."""
        for model in self._models:
            await model.close()
        await self._connection.close()
        await self._reporting.close()

    async def register(self, model: Model) -> None:
        """Creates the model on the server, or continues the existing one.

        Raises:
            ArtConnectionError: no server answers.
        """
        if isinstance(model, TrainableModel):
            # A wrong address fails here at once. Later calls wait for a server that does not answer.
            await self._connection.request("GET", "/health", reconnect_seconds=0)
            with self._connection.waiting.call(f"registering '{model.name}'"):
                info = await self._call(
                    ModelInfo,
                    "POST",
                    "/api/models",
                    model._to_registration(),
                    timeout_seconds=REGISTER_TIMEOUT_SECONDS,
                )
            logger.info(
                "registered %s at step %d, with a context of %s tokens",
                info.inference_name,
                info.step,
                info.max_seq_length,
            )
            for note in info.notes:
                logger.warning("register: %s", note)
            self._steps[info.inference_name] = info.step
            add_server(self)
            self._reporting.know(info)
        self._models.append(model)

    async def train(
        self,
        model: TrainableModel,
        groups: Iterable[TrajectoryGroup],
        config: TrainConfig | None = None,
        *,
        verbose: bool = False,
        idempotency_key: str | None = None,
        expected_step: int | None = None,
    ) -> TrainResult:
        """Trains one step; see `TrainableModel.train`."""
        groups, config = group_list(groups, "train"), to_train_config(config)
        call = _TrainCall(self, model)
        # With disable=None tqdm shows the bar on a terminal only, and the stderr of a notebook is no terminal.
        is_shown = verbose or hasattr(builtins, "__IPYTHON__")
        with (
            tracing.training(call.name) as link,
            make_bar(desc="train", disable=False if is_shown else None) as bar,
        ):

            def take(event: JobEvent) -> None:
                call.take(event)
                show_event(bar, event)

            build = functools.partial(build_train_request, groups, config, expected_step)
            key = idempotency_key or link or uuid.uuid4().hex
            # With a span's link as its key, the job's span on the server is this span's child (`tracking.link_of`).
            result = call.result(await self._request_job(model, build, key, take))
        trained = groups[: len(groups) - config.held_out]
        await self._reporting.trained(_names(model), trained, result)
        return result

    async def submit(
        self,
        model: TrainableModel,
        groups: Iterable[TrajectoryGroup],
        config: TrainConfig | None = None,
        *,
        idempotency_key: str | None = None,
        expected_step: int | None = None,
    ) -> Job:
        """Requests the training of one step; see `TrainableModel.submit`."""
        groups, config = group_list(groups, "submit"), to_train_config(config)
        call = _TrainCall(self, model)
        with tracing.training(call.name) as link:
            build = functools.partial(build_train_request, groups, config, expected_step)
            key = idempotency_key or link or uuid.uuid4().hex
            accepted = await self._request_job(model, build, key, call.take, ACCEPTED)

        async def follow() -> TrainResult:
            result = call.result(await self._connection.follow_job(accepted.job_id, call.take))
            await self._reporting.trained(_names(model), groups, result)
            return result

        return Job(accepted.job_id, follow)

    async def _request_job(
        self,
        model: TrainableModel,
        build: Callable[..., bytes],
        key: str,
        take: Callable[[JobEvent], None],
        until: Container[str] = ENDED,
    ) -> JobEvent:
        """Requests a job, and returns its first event that is in `until`. `build(whole=ids)` makes the request's body, in
        which the choices with these ids have their tokens."""
        path, headers = f"{_model_path(model)}/train", {IDEMPOTENCY_HEADER: key}
        whole: set[str] = set()
        while True:
            body = await asyncio.to_thread(build, whole=whole)
            try:
                return await self._connection.follow_job(JobRequest(path, body, headers), take, until)
            except ArtStatusError as error:
                missing = set(error.ids) - whole
                if error.code != "records_missing" or not missing:
                    raise
                logger.info("train: %d choices are sent with their tokens", len(missing))
                # The first body's digest: a program that repeats its call with this key sends that body again.
                headers.setdefault(DIGEST_HEADER, hashlib.sha256(body).hexdigest())
                whole |= missing

    def _model_inference_name(self, model: Model, step: int | None = None) -> str:
        name = f"{model.project}/{model._storage_name}"
        return name if step is None else f"{name}@{step}"

    async def _prepare_backend_for_training(self, model: TrainableModel) -> tuple[str, str]:
        """The base URL and API key for inference on the model."""
        # `openai` makes no client without a key.
        return f"{self.base_url}/v1", self._connection.api_key or "default"

    async def _list_models(self) -> list[str]:
        """The names of the models that the key may see: "PROJECT/NAME". A wrong address fails at once."""
        await self._connection.request("GET", "/health", reconnect_seconds=0)
        models = (await self._call(ModelList, "GET", "/api/models")).models
        return [f"{model.project}/{model.name}" for model in models]

    async def _get_step(self, model: Model) -> int:
        return (await self._call(ModelInfo, "GET", _model_path(model))).step

    def _reporting_start(self) -> AbstractContextManager[None]:
        """While the block runs, the server's start is reported, because requests wait for the start."""
        return self._connection.waiting.call(None)

    async def _fetch_session(self, model: TrainableModel, session: str) -> SessionReply:
        return await self._call(SessionReply, "GET", f"{_model_path(model)}/sessions/{session}")

    @property
    def trainable_names(self) -> list[str]:
        """The names by which agents use the registered trainable models, without repetition."""
        models = [model for model in self._models if isinstance(model, TrainableModel)]
        return list(dict.fromkeys(model.get_inference_name() for model in models))

    async def fetch_captured(self, session: str, known: Container[str]) -> dict[str, SessionReply]:
        """The answers of each registered trainable model in a session, by the model's path; without the `known` paths."""
        models = {_model_path(model): model for model in self._models if isinstance(model, TrainableModel)}
        replies: dict[str, SessionReply] = {}
        for path, model in models.items():
            if path in known:
                continue
            try:
                replies[path] = await self._fetch_session(model, session)
            except ArtStatusError as error:
                if error.code != "unknown_model":  # deleted meanwhile
                    raise
        return replies

    async def _log(
        self,
        model: Model,
        trajectories: Iterable[Trajectory | BaseException] | Iterable[TrajectoryGroup],
        split: str,
        *,
        metrics: dict[str, float] | None = None,
        step: int | None = None,
    ) -> dict[str, float]:
        entries: list[Any] = list(trajectories)  # Any: trajectories, exceptions or groups
        body = await asyncio.to_thread(build_log_request, entries, split, metrics or {}, step)
        path = f"{_model_path(model)}/log"
        # The server would tell its trackers twice, and a repeated call without a step may meet a newer step.
        reply = await self._call(LogReply, "POST", path, body, is_repeatable=False)
        await self._reporting.logged(_names(model), entries, split, reply)
        return reply.metrics

    async def _delete_checkpoints(
        self,
        model: Model,
        *,
        best_metric: str | None = None,
        steps_to_keep: list[int] | None = None,
    ) -> DeleteCheckpointsReply:
        request = DeleteCheckpointsRequest(best_metric=best_metric, keep=steps_to_keep)
        path = f"{_model_path(model)}/checkpoints/delete"
        reply = await self._call(DeleteCheckpointsReply, "POST", path, request)
        logger.info("%s: deleted steps %s, kept %s", model.get_inference_name(), reply.deleted, reply.kept)
        return reply

    async def _list_checkpoints(self, model: Model) -> CheckpointList:
        return await self._call(CheckpointList, "GET", f"{_model_path(model)}/checkpoints")

    async def _fork(self, model: Model, name: str, project: str, step: int | None) -> ModelInfo:
        request = ForkRequest(name=name, project=project, step=step)
        path = f"{_model_path(model)}/fork"
        # The server would refuse the repeated request, because the new model exists.
        info = await self._call(ModelInfo, "POST", path, request, is_repeatable=False)
        for note in info.notes:
            logger.warning("fork: %s", note)
        return info

    async def _roll_back(self, model: Model, step: int) -> None:
        path = f"{_model_path(model)}/rollback"
        await self._call(ModelInfo, "POST", path, RollbackRequest(step=step))
        self._steps[self._model_inference_name(model)] = step

    async def _feedback(self, model: Model, feedback: Feedback) -> Score:
        return await self._call(Score, "POST", f"{_model_path(model)}/feedback", feedback)

    async def _feedback_token(self, model: Model, request: FeedbackTokenRequest) -> FeedbackToken:
        return await self._call(FeedbackToken, "POST", f"{_model_path(model)}/feedback/tokens", request)

    async def _learn(self, model: Model, policy: Policy) -> LearningInfo:
        return await self._call(LearningInfo, "PUT", f"{_model_path(model)}/learning", policy)

    async def _learning(self, model: Model) -> LearningInfo:
        return await self._call(LearningInfo, "GET", f"{_model_path(model)}/learning")

    async def _delete(self, model: Model) -> None:
        path = _model_path(model)
        # The server would answer a repeated request with "unknown_model".
        await self._call(ModelInfo, "DELETE", path, is_repeatable=False)
        self._models = [registered for registered in self._models if _model_path(registered) != path]
        self._steps.pop(self._model_inference_name(model), None)
        await model.close()

    async def _call(
        self,
        kind: type[ReplyT],
        method: str,
        path: str,
        body: BaseModel | bytes | None = None,
        *,
        timeout_seconds: float = REQUEST_TIMEOUT_SECONDS,
        is_repeatable: bool = True,
    ) -> ReplyT:
        is_json = isinstance(body, BaseModel)
        answer = await self._connection.request(
            method,
            path,
            body.model_dump_json().encode() if is_json else body,
            media_type="application/json" if is_json else NDJSON,
            timeout_seconds=timeout_seconds,
            is_repeatable=is_repeatable,
        )
        try:
            return kind.model_validate_json(answer)
        except ValidationError as error:
            raise ArtError(
                f"the answer to {method} {self.base_url}{path} does not come from an art-server: {answer[:200]!r}"
            ) from error

    def _check_server(self) -> None:
        """Called while the server does not answer. Subclasses raise ArtError if waiting is useless."""


class _TrainCall:
    """What is known of the job of one train call, from its events."""

    def __init__(self, backend: Backend, model: TrainableModel) -> None:
        self.name = backend._model_inference_name(model)
        self._backend = backend
        self._report = JobReport()

    def take(self, event: JobEvent) -> None:
        self._report = event.report or self._report
        if event.event == "accepted":
            self._backend._accepted.add((self.name, event.job_id))
        elif event.event in ENDED:
            self._backend._accepted.discard((self.name, event.job_id))

    def result(self, last: JobEvent) -> TrainResult:
        """The result in the job's last event.

        Raises:
            ArtJobError: the job failed.
        """
        if last.event == "error":
            raise _to_job_error(last)
        if last.step is None:
            raise ArtError(f"art-server ended job {last.job_id} without reporting its step")
        self._backend._notices.job(self._report)
        self._backend._steps[self.name] = last.step
        logger.info("%s trained to step %d", self.name, last.step)
        return TrainResult(last.step, last.metrics, self._report)


def _fill_in_from_environment(base_url: str | None, api_key: str | None) -> tuple[str, str | None]:
    """Address and API key. Arguments override environment variables, which the client reads only here."""
    url = base_url or os.environ.get("ART_SERVER_URL") or DEFAULT_URL
    return url, clean_key(api_key) or clean_key(os.environ.get("ART_API_KEY"))


def _normalize_url(base_url: str) -> str:
    url = base_url.rstrip("/").removesuffix("/v1").rstrip("/")
    if httpx.URL(url).scheme not in ("http", "https"):
        raise ValueError(f"base_url must begin with http:// or https://, not {base_url!r}")
    return url


def _names(model: Model) -> tuple[str, str]:
    """The model's project, and its name on the server."""
    return model.project, model._storage_name


def _model_path(model: Model) -> str:
    return f"/api/models/{model.project}/{model._storage_name}"


def _to_job_error(event: JobEvent) -> ArtJobError:
    if event.error is None:
        return ArtJobError(f"job {event.job_id} failed", job_id=event.job_id)
    return ArtJobError(
        f"job {event.job_id} failed: {event.error.message}",
        job_id=event.job_id,
        code=event.error.code,
        retryable=event.error.retryable,
    )
