"""A model as a program sees it: its name, its inference client, and the calls that train and log it.

The calls go to the backend that the model is registered with. The underscored methods of a backend are the protocol
that ART's backends share, so they are called from here.
"""

# pyright: reportPrivateUsage=false

import asyncio
import logging
import re
from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Self, TypeAlias, cast

from pydantic import (
    BaseModel,
    ConfigDict,
    Field,
    ModelWrapValidatorHandler,
    PrivateAttr,
    SerializerFunctionWrapHandler,
    field_validator,
    model_serializer,
    model_validator,
)

from art.compat import foreign
from art.compat.options import apply_options
from art.protocols import ServerBackend
from art.trajectories import Trajectory, TrajectoryGroup
from art.types import LoRAConfig, TrainConfig, TrainResult
from art.wire import NAME_PATTERN, CheckpointInfo, DeleteCheckpointsReply

if TYPE_CHECKING:
    from openai import AsyncOpenAI

AnyBackend: TypeAlias = ServerBackend | foreign.ForeignBackend

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class _Links:
    """What a model is connected to. Copies of the model, deep ones too, stay connected to the same."""

    backend: AnyBackend | None = None
    client: "AsyncOpenAI | None" = None
    client_key: tuple[object, ...] = ()
    """What the client was made for: an event loop, to which its connections belong, an address and a key."""

    def __deepcopy__(self, memo: dict[int, Any]) -> Self:
        return self


class Model(BaseModel):
    """A model that is asked and measured, but not trained: one behind any OpenAI-compatible address."""

    model_config = ConfigDict(extra="forbid")

    name: str
    project: str
    entity: str | None = None
    id: str | None = None
    run_id: str | None = None
    config: Any = None
    """Anything of the program's own."""
    trainable: bool = False
    inference_api_key: str | None = Field(default=None, repr=False)
    inference_base_url: str | None = None
    inference_model_name: str | None = None
    """What the inference address calls the model; None: its name."""
    base_path: str = ".art"
    report_metrics: list[str] | None = None

    _links: _Links = PrivateAttr(default=_Links())

    @field_validator("name", "project")
    @classmethod
    def _check_name(cls, name: str) -> str:
        if not re.fullmatch(NAME_PATTERN, name):
            raise ValueError(
                f"{name!r} becomes a folder: use letters, digits, '.', '_' and '-', begin with a letter or a digit, "
                "and keep to 128 characters"
            )
        return name

    @property
    def _storage_name(self) -> str:
        """What a server calls the model."""
        return self.name

    async def register(self, backend: AnyBackend) -> None:
        """Binds the model to a backend."""
        await backend.register(self)
        self._links = replace(self._links, backend=backend)

    def backend(self) -> ServerBackend:
        """The backend that the model is registered with. Raises ValueError before that."""
        if self._links.backend is None:
            raise ValueError(
                f"model '{self.name}' is not registered: call `await model.register(backend)` first"
            )
        return cast(ServerBackend, self._links.backend)

    def openai_client(self) -> "AsyncOpenAI":
        """An OpenAI client for the model's inference address; the same one as long as the event loop is the same."""
        if self.inference_base_url is None:
            raise ValueError(self._no_address())
        api_key = self.inference_api_key or "default"
        key = (_running_loop(), self.inference_base_url, api_key)
        client = self._links.client
        if client is None or client.is_closed() or self._links.client_key != key:
            # Here, because it imports openai, which takes most of a second.
            from art.openai_client import make_client

            client = make_client(self.inference_base_url, api_key, is_trainable=self.trainable)
            self._links = replace(self._links, client=client, client_key=key)
        return client

    def get_inference_name(self, step: int | None = None) -> str:
        """What to send as `model` in a request; with `step`, for that checkpoint."""
        name = self.inference_model_name or self.name
        return name if step is None else f"{name}@{step}"

    async def get_step(self) -> int:
        """The number of the newest checkpoint; 0 for a model that is not trained."""
        return 0

    async def log(
        self,
        trajectories: Iterable[Trajectory | BaseException] | Iterable[TrajectoryGroup] = (),
        split: str = "val",
        *,
        metrics: dict[str, float] | None = None,
        step: int | None = None,
    ) -> dict[str, float]:
        """Writes trajectories and metrics to the model's history, and returns the row of means that it made.

        Trajectories that are given bare form one group. `step=None` is the newest step.
        """
        return await self.backend()._log(self, trajectories, split, metrics=metrics, step=step)

    async def close(self) -> None:
        """Closes the OpenAI client's connections; a backend's `close` does it for its models."""
        links = self._links
        if links.client is not None and links.client_key[0] in (None, _running_loop()):
            await links.client.close()
        self._links = replace(links, client=None)

    def _no_address(self) -> str:
        return (
            f"model '{self.name}' has no address: pass inference_base_url (and inference_api_key)"
        )


class TrainableModel(Model):
    """A policy: a LoRA adapter on a base model, trained by the backend's server, served under its own name."""

    base_model: str
    """A Hugging Face id, a folder on the server, "art/tiny" or "smollm2"."""
    run_name: str | None = None
    """Where ART's newer releases let several runs share a name: what the server calls the model; None: `name`."""
    trainable: bool = True
    lora: LoRAConfig | None = None
    """The adapter, fixed when the model is first registered; None: what it has, or the defaults."""

    _internal_config: Any = PrivateAttr(default=None)
    """`art.dev.InternalModelConfig`: ART's settings for engine and trainer. They travel with the model on the ART wire;
    `art.Backend` tells that it ignores them."""

    @field_validator("run_name")
    @classmethod
    def _check_run_name(cls, name: str | None) -> str | None:
        return None if name is None else cls._check_name(name)

    @property
    def _storage_name(self) -> str:
        return self.run_name or self.name

    async def register(self, backend: AnyBackend, _openai_client_config: Any = None) -> None:
        """Makes the model on the backend, or takes it up where it is, and learns its inference address.

        The backend is ours or any that bears the methods of ART's (`art.compat.foreign`).

        The first model of a base model loads it, which takes minutes.
        """
        await super().register(backend)
        address = await backend._prepare_backend_for_training(self, _openai_client_config)
        self.inference_base_url, self.inference_api_key = address
        self.inference_model_name = self.get_inference_name()

    def get_inference_name(self, step: int | None = None) -> str:
        """ "PROJECT/NAME" for the newest step, or "PROJECT/NAME@step": what to send as `model` in a request."""
        backend = self._links.backend
        name = f"{self.project}/{self._storage_name}"
        if isinstance(backend, foreign.ForeignBackend):
            name = self._storage_name  # ART's servers know no projects
        elif backend is not None:
            return backend._model_inference_name(self, step)
        return name if step is None else f"{name}@{step}"

    async def get_step(self) -> int:
        """The number of the newest checkpoint: how many train calls were made; 0 before the first."""
        return await self.backend()._get_step(self)

    async def train(
        self,
        groups: Iterable[TrajectoryGroup] = (),
        config: TrainConfig | None = None,
        _config: Any = None,
        verbose: bool = False,
        *,
        trajectory_groups: Iterable[TrajectoryGroup] = (),
        idempotency_key: str | None = None,
        expected_step: int | None = None,
    ) -> TrainResult:
        """Makes one step from groups of trajectories, and returns when inference serves it.

        Survives a restart of the server: it reconnects to the same job. A program that repeats a call itself, with the
        same groups, passes an `idempotency_key`: under the same key it gets the same job instead of a second step.

        With `expected_step` the call is refused (ArtStatusError, code "step_moved") where the model is at another step, or
        has a job that will move it: of two programs that train one model, each trains on what it sampled itself.

        `verbose` shows the progress bar where there is no terminal, too. `trajectory_groups` is ART's name for
        `groups`; `_config` holds options by ART's names, which win over `config`.

        Raises ValueError for what cannot be trained on, ArtStatusError when the server refuses, ArtJobError when the
        job fails, ArtConnectionError when the server stays away.
        """
        groups, config = [*groups, *trajectory_groups], config or TrainConfig()
        backend = self._links.backend
        if isinstance(backend, foreign.ForeignBackend):
            return await foreign.train(backend, self, groups, config, _config or {}, verbose)
        options: dict[str, Any] = _config or {}
        if options and "ratio_to" not in config.model_fields_set:
            options = {"precalculate_logprobs": False, **options}
        config, ignored = apply_options(config, options)
        if ignored:
            logger.warning("train: _config is ignored where it says %s", ", ".join(ignored))
        return await self.backend().train(
            self,
            groups,
            config,
            verbose=verbose,
            idempotency_key=idempotency_key,
            expected_step=expected_step,
        )

    async def checkpoints(self) -> list[CheckpointInfo]:
        """The kept steps, oldest first, each with its metrics, and whether it serves or is the best."""
        return (await self.backend()._list_checkpoints(self)).checkpoints

    async def delete_checkpoints(
        self, best_checkpoint_metric: str | None = None, *, keep: list[int] | None = None
    ) -> DeleteCheckpointsReply | None:
        """Deletes all checkpoints but the newest and the one whose mean of the metric in the history is best, or but the
        newest and those that `keep` names. Returns what was kept and deleted.

        Without a metric the best is that by "val/reward", or by "train/reward" where no "val" split was logged. A backend
        that is not ours keeps the newest, and returns None.
        """
        backend = self._links.backend
        if isinstance(backend, foreign.ForeignBackend):
            await backend._delete_checkpoint_files(self, [await backend._get_step(self)])
            return None
        return await self.backend()._delete_checkpoints(
            self, best_metric=best_checkpoint_metric, steps_to_keep=keep
        )

    async def fork(self, name: str, *, project: str | None = None, step: int | None = None) -> Self:
        """A new model, registered with the same backend, that starts from a step of this one (None: the newest), with its
        optimizer's state where that is kept. It begins at that step's number; its history begins empty."""
        project = project or self.project
        info = await self.backend()._fork(self, name, project, step)
        update = {"name": name, "project": project, "lora": info.lora}
        update |= dict.fromkeys(("id", "run_id", "run_name"))
        forked = self.model_copy(update=update)
        forked._links = _Links()
        await forked.register(self.backend())
        return forked

    async def rollback(self, step: int) -> None:
        """Makes an earlier step the newest: it serves, and the next train call starts from it. The server sets the later
        steps and their metrics aside."""
        await self.backend()._roll_back(self, step)

    async def delete(self) -> None:
        """Deletes the model on the server, with its checkpoints, history and trajectories."""
        await self.backend()._delete(self)

    def _no_address(self) -> str:
        return f"model '{self.name}' is not registered: call `await model.register(backend)` first"

    @model_validator(mode="wrap")
    @classmethod
    def _take_internal_config(cls, data: Any, handler: ModelWrapValidatorHandler[Self]) -> Self:
        if not isinstance(data, dict) or "_internal_config" not in data:
            return handler(data)
        fields = dict(cast(dict[str, Any], data))
        internal_config = fields.pop("_internal_config")
        model = handler(fields)
        model._internal_config = internal_config
        return model

    @model_serializer(mode="wrap")
    def _dump_internal_config(self, handler: SerializerFunctionWrapHandler) -> dict[str, Any]:
        return {**handler(self), "_internal_config": self._internal_config}


def _running_loop() -> asyncio.AbstractEventLoop | None:
    try:
        return asyncio.get_running_loop()
    except RuntimeError:
        return None
