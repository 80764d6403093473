"""`Model` and `TrainableModel`: a model's name, its inference client, and the calls that train and log it.

The calls go to the backend that the model is registered with. `art.protocols` has the backend's methods that models use.
`art.TrainableModel` is a subclass of `TrainableModel`, with the arguments of ART's programs (`art_compat/models.py`).
"""

# pyright: reportPrivateUsage=false

import asyncio
import logging
import operator
import re
import uuid
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Generic, Never, Protocol, Self, TypeAlias, cast

from pydantic import ConfigDict, Field, PrivateAttr, ValidationInfo, field_validator

from art import sft
from art.errors import ArtStatusError
from art.field_errors import Configuration
from art.job import Job
from art.loops import running_loop
from art.protocols import ServerBackend
from art.trajectories import Trajectory, TrajectoryGroup
from art.types import LoRAConfig, TrainResult, TrainSFTConfig, to_sft_config, to_train_config
from art_protocol.display import Displayed
from art_protocol.learning import Feedback, FeedbackToken, FeedbackTokenRequest, LearningInfo, Policy, Score
from art_protocol.wire import (
    NAME_PATTERN,
    NAME_RULE,
    CheckpointInfo,
    DeleteCheckpointsReply,
    RegisterRequest,
    TrainConfig,
)

if TYPE_CHECKING:
    from openai import AsyncOpenAI
    from typing_extensions import TypeVar

    # The TypeVar of `typing` has a default only from Python 3.13 on.
    ConfigT = TypeVar("ConfigT", default=Any)
else:
    from typing import TypeVar

    ConfigT = TypeVar("ConfigT")


class HasId(Protocol):
    """An answer of any of the four APIs, as clients read it."""

    @property
    def id(self) -> str: ...


ClientKey: TypeAlias = tuple[asyncio.AbstractEventLoop | None, str, str]
"""The event loop that a client was made in, its address and its API key."""

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class _Links:
    """A model's backend and OpenAI clients. Copies of the model, also deep copies, share them."""

    backend: ServerBackend | None = None
    clients: "dict[ClientKey, AsyncOpenAI]" = field(default_factory=dict[ClientKey, "AsyncOpenAI"])

    def __deepcopy__(self, memo: dict[int, Any]) -> Self:
        return self

    def client(self, base_url: str, api_key: str, *, is_trainable: bool) -> "AsyncOpenAI":
        """The client of this event loop for an address. The client's connections belong to the loop."""
        key = (running_loop(), base_url, api_key)
        client = self.clients.get(key)
        if client is None or client.is_closed():
            # Imported here, because it imports openai, which takes most of a second.
            from art.openai_client import make_client

            closed_keys = [old_key for old_key in self.clients if old_key[0] and old_key[0].is_closed()]
            for closed_key in closed_keys:
                del self.clients[closed_key]
            client = make_client(base_url, api_key, is_trainable=is_trainable)
            self.clients[key] = client
        return client

    async def close(self) -> None:
        """Closes the clients that this event loop can close, and forgets the others."""
        clients = dict(self.clients)
        self.clients.clear()
        for (loop, *_), client in clients.items():
            if loop in (None, running_loop()):
                await client.close()


def clean_key(key: str | None) -> str | None:
    r"""An API key without surrounding white space, such as the end of a file's line: `'key\n' -> 'key'`. None for an empty key.

    Raises:
        ValueError: no HTTP header can contain the key. The message does not contain the key.
    """
    key = (key or "").strip()
    for position, character in enumerate(key):
        if not "!" <= character <= "~":
            raise ValueError(
                f"character {position} of the API key is no printable ASCII character: check the file or variable that the "
                "key comes from"
            )
    return key or None


def check_backend(backend: object) -> None:
    """Checks that a model is registered with a backend, not with an address or a class.

    Raises:
        TypeError: the message has the call that was meant.
    """
    if isinstance(backend, str):
        raise TypeError(f"register got the text {backend!r}, not a backend: write `art.Backend({backend!r})`")
    if isinstance(backend, type):
        raise TypeError(f"register got the class {backend.__name__}, not a backend: write {backend.__name__}()")


def _check_step(step: object) -> None:
    if not isinstance(step, int) or step < 0:
        raise ValueError(
            f"step {step!r} is not the number of a step: `model.checkpoints()` has the numbers, and which step is the best"
        )


class Model(Displayed, Configuration, Generic[ConfigT]):
    """A model for inference only, behind any OpenAI-compatible address. `Model[Kind]` has a `config` of the type Kind."""

    model_config = ConfigDict(extra="forbid")

    name: str
    project: str
    config: ConfigT = cast(ConfigT, None)
    """Any value, for the program's own use."""
    trainable: bool = False
    inference_api_key: str | None = Field(default=None, repr=False)
    inference_base_url: str | None = None
    inference_model_name: str | None = None
    """The model's name at the inference address; None: `name`."""

    _links: _Links = PrivateAttr(default_factory=_Links)

    @field_validator("name", "project")
    @classmethod
    def _check_name(cls, name: str, info: ValidationInfo) -> str:
        if not re.fullmatch(NAME_PATTERN, name):
            raise ValueError(f"{info.field_name} {name!r} becomes a folder: {NAME_RULE}")
        return name

    @field_validator("inference_api_key")
    @classmethod
    def _strip_key(cls, key: str | None) -> str | None:
        return key.strip() if key else key

    @property
    def _storage_name(self) -> str:
        """The model's name on a server."""
        return self.name

    async def register(self, backend: ServerBackend) -> None:
        """Binds the model to a backend."""
        check_backend(backend)
        await backend.register(self)
        self._links = _Links(backend, self._links.clients)

    def backend(self) -> ServerBackend:
        """The backend that the model is registered with.

        Raises:
            ValueError: the model is not registered.
        """
        if self._links.backend is None:
            raise ValueError(f"model '{self.name}' is not registered: call `await model.register(backend)` first")
        return self._links.backend

    def openai_client(self) -> "AsyncOpenAI":
        """An OpenAI client for the model's inference address. Calls in the same event loop return the same client.

        Raises:
            ValueError: the model has no inference address.
        """
        if self.inference_base_url is None:
            raise ValueError(self._no_address())
        api_key = clean_key(self.inference_api_key) or "default"
        return self._links.client(self.inference_base_url, api_key, is_trainable=self.trainable)

    def get_inference_name(self, step: int | None = None) -> str:
        """The value for `model` in inference requests; with `step`, for that checkpoint."""
        name = self.inference_model_name or self.name
        return name if step is None else f"{name}@{step}"

    async def get_step(self) -> int:
        """The newest step; always 0, because this model is not trained."""
        return 0

    async def log(
        self,
        trajectories: Iterable[Trajectory | BaseException] | Iterable[TrajectoryGroup] | None = (),
        split: str = "val",
        *,
        metrics: dict[str, float] | None = None,
        step: int | None = None,
    ) -> dict[str, float]:
        """Writes trajectories and metrics to the model's history, and returns the metrics that it wrote.

        Trajectories outside a group form one group. `step=None` is the newest step.

        Raises:
            ValueError: the trajectories cannot be written, or the model is not registered.
        """
        return await self.backend()._log(self, trajectories or (), split, metrics=metrics or {}, step=step)

    def _detached(self) -> Self:
        """A copy with separate connections."""
        copied = self.model_copy()
        copied._links = _Links(self._links.backend)
        return copied

    async def close(self) -> None:
        """Closes the connections of the model's OpenAI clients, which its copies share. A backend's `close` does this for
        all its models."""
        await self._links.close()

    def _no_address(self) -> str:
        return f"model '{self.name}' has no address: pass inference_base_url (and inference_api_key)"


class TrainableModel(Model[ConfigT], Generic[ConfigT]):
    """A policy: a LoRA adapter on a base model, trained and served by the backend's server."""

    base_model: str
    """A Hugging Face id, a folder on the server, "art/tiny" or "smollm2"."""
    run_name: str | None = None
    """The model's name on the server; None: `name`. Newer releases of ART let several runs share one `name`."""
    trainable: bool = True
    lora: LoRAConfig | None = None
    """The adapter's configuration, fixed at the first registration. None: the existing configuration, or the defaults."""
    engine_args: dict[str, Any] = Field(default={}, exclude_if=operator.not_)  # Any: vLLM's values
    """Requested engine arguments: `max_seq_length`, and vLLM's arguments that `art-server --engine-arg` takes. They have an
    effect if this model's registration starts the engine. The server's flags take precedence."""

    _pinned_name: str | None = PrivateAttr(default=None)
    """For a copy that `art.evaluate` makes: the name under which it samples."""
    _seeds: Iterator[int] | None = PrivateAttr(default=None)
    """For a copy that `art.evaluate` makes: the seeds of the requests that the copy's client sends."""

    @field_validator("run_name")
    @classmethod
    def _check_run_name(cls, name: str | None, info: ValidationInfo) -> str | None:
        return None if name is None else cls._check_name(name, info)

    @property
    def _storage_name(self) -> str:
        return self.run_name or self.name

    async def register(self, backend: ServerBackend) -> None:
        """Creates the model on the backend, or continues the existing one, and sets its inference address and API key.

        The first model of a base model loads the base model, which takes minutes.
        """
        await super().register(backend)
        address = await backend._prepare_backend_for_training(self)
        self.inference_base_url, self.inference_api_key = address
        self.inference_model_name = self.get_inference_name()

    def _to_registration(self) -> RegisterRequest:
        """What the server registers."""
        return RegisterRequest(
            name=self._storage_name,
            project=self.project,
            base_model=self.base_model,
            lora=self.lora,
            engine_args=self.engine_args,
        )

    def get_inference_name(self, step: int | None = None) -> str:
        """The value for `model` in inference requests: "PROJECT/NAME" for the newest step, or "PROJECT/NAME@step"."""
        if step is None and self._pinned_name is not None:
            return self._pinned_name
        if self._links.backend is not None:
            return self._links.backend._model_inference_name(self, step)
        name = self.inference_model_name or f"{self.project}/{self._storage_name}"
        return name if step is None else f"{name}@{step}"

    def openai_client(self) -> "AsyncOpenAI":
        """An OpenAI client for the model's inference address. Its choices contain the data that training needs.

        Raises:
            ValueError: the model is not registered.
        """
        client = super().openai_client()
        if self._seeds is None:
            return client
        # Imported here, because it imports openai, which takes most of a second.
        from art.openai_client import seeded

        return seeded(client, self._seeds)

    def _pinned(self, step: int | None, seeds: Iterator[int] | None = None) -> Self:
        """A copy that samples from a step, or from the base model (None). Each name of the copy names the step: `name`,
        `inference_model_name` and `get_inference_name()`. On the server the copy is the same model. Both share connections.
        """
        name = inference_name = self.base_model
        if step is not None:
            name, inference_name = f"{self._storage_name}@{step}", self.get_inference_name(step)
        update = {"name": name, "run_name": self._storage_name}
        pinned = self.model_copy(update=update | {"inference_model_name": inference_name})
        pinned._pinned_name, pinned._seeds = inference_name, seeds
        return pinned

    async def get_step(self) -> int:
        """The newest step; 0 before the first train call."""
        return await self.backend()._get_step(self)

    async def train(
        self,
        groups: Iterable[TrajectoryGroup],
        config: TrainConfig | None = None,
        *,
        verbose: bool = False,
        idempotency_key: str | None = None,
        expected_step: int | None = None,
        **unknown: Never,
    ) -> TrainResult:
        """Trains one step on groups of trajectories, and returns when the job is done and the new step serves.

        The call survives a restart of the server, and reconnects to the same job. A program that repeats a call with the
        same groups passes an `idempotency_key`: the same key gets the same job instead of a second step.

        `expected_step` is the step that sampled the groups. The server refuses the call (ArtStatusError, code
        "step_moved") if the model is at another step, or has a job that will change its step. Several programs can then
        train one model, and none of them trains on samples of an older step.

        `verbose` shows the progress bar even without a terminal.

        Raises:
            ValueError: the groups cannot be trained on.
            ArtStatusError: the server refuses the request.
            ArtJobError: the job fails.
            ArtConnectionError: no server answers in time.
        """
        if unknown:
            fields = ", ".join(f"{name}=..." for name in unknown)
            raise TypeError(
                f"train takes {', '.join(unknown)} in `config`: train(groups, config=art.TrainConfig({fields}))"
            )
        return await self.backend().train(
            self,
            groups,
            to_train_config(config),
            verbose=verbose,
            idempotency_key=idempotency_key,
            expected_step=expected_step,
        )

    async def submit(
        self,
        groups: Iterable[TrajectoryGroup],
        config: TrainConfig | None = None,
        *,
        idempotency_key: str | None = None,
        expected_step: int | None = None,
    ) -> Job:
        """Requests the training of one step, and returns the job when the server has the job on disk. From then on the job
        ends without this program as well.

            job = await model.submit(groups)
            later = await sample_more(model)
            result = await job

        The arguments and the job's result are the same as for `train`. A program that repeats the call with the same groups
        and `idempotency_key` gets the same job, also after the job has ended. Several jobs of one model run one after the
        other, in the order in which they were accepted; the second job is refused if it has an `expected_step`.

        Raises:
            ValueError: the groups cannot be trained on.
            ArtStatusError: the server refuses the request.
            ArtConnectionError: no server answers in time.
        """
        return await self.backend().submit(
            self,
            groups,
            to_train_config(config),
            idempotency_key=idempotency_key,
            expected_step=expected_step,
        )

    async def train_sft(
        self,
        trajectories: Iterable[Trajectory | TrajectoryGroup],
        config: TrainSFTConfig | None = None,
        *,
        validation: Iterable[Trajectory | TrajectoryGroup] = (),
        verbose: bool = False,
        idempotency_key: str | None = None,
        expected_step: int | None = None,
    ) -> TrainResult:
        """Supervised training (SFT) on the assistant's messages of the trajectories. Makes one step.

        The call is a train call like `train`: durable, resumable, cancellable. The server renders the conversations with the
        chat template. Messages that this server sampled, which are OpenAI choices, keep their tokens. Rewards have no
        effect, except that `best_of_group` chooses by them. `turn_advantages` of a trajectory weigh its messages.
        `metrics["loss/train"]` is the mean cross-entropy, `metrics["loss/token_accuracy"]` the share of trained tokens that
        were the likeliest, both before each optimizer step and averaged over the steps. `report.losses` has the loss of each
        optimizer step.

        `validation` are trajectories that are not trained: `metrics["val/loss"]` is their mean cross-entropy under the new step.
        Without rewards in the history the step with the lowest is the best step.

        Raises:
            ValueError: no trajectories were given.
            ArtStatusError: the server refuses the request.
            ArtJobError: the job fails.
            ArtConnectionError: no server answers in time.
        """
        config = to_sft_config(config)
        chosen = sft.choose(trajectories, best_of_group=config.best_of_group)
        held_out = sft.choose(validation, best_of_group=False)
        if held_out and not chosen:
            raise ValueError("there is nothing to train on: all trajectories are in `validation`")
        groups = [sft.as_group(trajectory, config.assistant_turns) for trajectory in [*chosen, *held_out]]
        return await self.backend().train(
            self,
            groups,
            config.to_train_config(len(held_out)),
            verbose=verbose,
            idempotency_key=idempotency_key,
            expected_step=expected_step,
        )

    async def checkpoints(self) -> list[CheckpointInfo]:
        """The kept steps, oldest first. Each has its metrics and shows whether it serves and whether it is the best."""
        return (await self.backend()._list_checkpoints(self)).checkpoints

    async def delete_checkpoints(
        self, best_checkpoint_metric: str | None = None, *, keep: list[int] | None = None
    ) -> DeleteCheckpointsReply | None:
        """Deletes all checkpoints except the newest and the one with the highest mean of the metric in the history, or
        except the newest and the steps in `keep`. Checkpoints in use are kept. Returns the kept and the deleted steps.

        The default metric is "val/reward", or "train/reward" if no "val" split was logged, or without rewards "val/loss", of which the
        lowest mean is kept. A metric that the history does
        not have, or not yet, is a warning: nothing is deleted, and the result is None.
        """
        try:
            return await self.backend()._delete_checkpoints(
                self, best_metric=best_checkpoint_metric, steps_to_keep=keep
            )
        except ArtStatusError as error:
            if error.code != "unknown_metric":
                raise
            metric = best_checkpoint_metric or "val/reward"
            logger.warning(
                "%s: delete_checkpoints deleted nothing: the history has no %s; log this metric, or name another one",
                self.name,
                metric,
            )
            return None

    async def fork(self, name: str, *, project: str | None = None, step: int | None = None) -> Self:
        """A new model on the same backend that starts from a step of this model (None: the step that serves).

        The new model gets the same step number, and the optimizer's state if the step still has one. Its history is empty.
        """
        if step is not None:
            _check_step(step)
        project = project or self.project
        info = await self.backend()._fork(self, name, project, step)
        update = {"name": name, "run_name": None, "project": project, "lora": info.lora}
        forked = self.model_copy(update=update)
        forked._links = _Links()
        await forked.register(self.backend())
        return forked

    async def rollback(self, step: int) -> None:
        """Makes an earlier step the newest: inference serves it, and the next train call starts from it. The server
        renames the folders of later steps, and moves their metrics out of the history."""
        _check_step(step)
        await self.backend()._roll_back(self, step)

    async def feedback(
        self,
        answer: str | HasId | None,
        value: float | bool | None = None,
        *,
        session: str | None = None,
        name: str = "thumb",
        comment: str | None = None,
        correction: str | None = None,
        user: str | None = None,
        id: str | None = None,
        metadata: dict[str, str | float | int | bool | None] | None = None,
    ) -> Score:
        """Scores an answer of an agent in use: now, or as long as the server has the answer. When this returns, the score is on the
        server's disk.

        `answer` is an answer of any of the four APIs, or its `id`; None with the name of a `session`, whose turns so far are scored
        together. A second score of the same `user` and `name` replaces the first. Two calls with the same `id` are one score. A
        `comment` says what was wrong, a `correction` what the answer should have been: both teach the model, with a `value` or
        without one (docs/learning-in-use.md).

        Raises:
            ArtStatusError: the server does not have the answer, or the name or value is not in the policy.
        """
        feedback = Feedback(
            answer=answer if answer is None or isinstance(answer, str) else answer.id,
            session=session,
            name=name,
            value=value,
            comment=comment,
            correction=correction,
            user=user,
            id=id or uuid.uuid4().hex,  # a call that is repeated after a lost connection is one score
            metadata=metadata or {},
        )
        return await self.backend()._feedback(self, feedback)

    async def feedback_token(
        self, answer: str | HasId, *, name: str = "thumb", user: str | None = None, seconds: float = 3600.0
    ) -> FeedbackToken:
        """A token with which a browser gives one score of an answer, without a key: it sends `{"value": ...}` to the token's `path`.

        Raises:
            ArtStatusError: the server does not have the answer, or the name is not in the policy.
        """
        answer_id = answer if isinstance(answer, str) else answer.id
        request = FeedbackTokenRequest(answer=answer_id, name=name, user=user, seconds=seconds)
        return await self.backend()._feedback_token(self, request)

    async def learn(self, policy: Policy | None = None) -> LearningInfo:
        """Has the server train this model from scores, without a program: a step when the policy's batch is full. Returns how the
        model learns. `policy` None: the defaults."""
        return await self.backend()._learn(self, policy or Policy())

    async def learning(self) -> LearningInfo:
        """How the model learns from scores at this moment, and what it waits for."""
        return await self.backend()._learning(self)

    async def delete(self) -> None:
        """Deletes the model on the server, with its checkpoints, history and trajectories."""
        await self.backend()._delete(self)

    def _no_address(self) -> str:
        return f"model '{self.name}' is not registered: call `await model.register(backend)` first"
