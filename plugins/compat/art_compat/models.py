"""`art.Model` and `art.TrainableModel`: the client's models with ART's fields, methods and arguments, such as
`train(trajectory_groups=...)`."""

# pyright: reportPrivateUsage=false, reportIncompatibleMethodOverride=false

import asyncio
import contextlib
import dataclasses
import logging
from collections.abc import Iterable, Iterator
from contextvars import Token
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Generic, Never, Self, cast

from pydantic import (
    ModelWrapValidatorHandler,
    PrivateAttr,
    SerializerFunctionWrapHandler,
    model_serializer,
    model_validator,
)

from art.core import model as core
from art.core.model import ConfigT, check_backend
from art.job import Job
from art.metrics import SUMMED, MetricsBuilder
from art.protocols import ServerBackend
from art.trajectories import Trajectory, TrajectoryGroup, group_list
from art.types import LoRAConfig, TrainResult, TrainSFTConfig, to_train_config
from art_compat import internal_config, offline_log
from art_compat.internal_config import CLIENT_CONFIG_IGNORED
from art_compat.third_party_backend import ThirdPartyBackend, train_there
from art_protocol.art_options import apply_options
from art_protocol.wire import DeleteCheckpointsReply, RegisterRequest, TrainConfig

logger = logging.getLogger("art.compat")


class Model(core.Model[ConfigT], Generic[ConfigT]):
    """Fields of ART, and metrics of a step that no trajectory has (`art.metrics`). The history of a model that is not
    trainable, or not registered, is below `base_path` on this machine."""

    _hidden: ClassVar[frozenset[str]] = frozenset({"entity", "id", "run_id", "base_path", "report_metrics"})

    entity: str | None = None
    id: str | None = None
    run_id: str | None = None
    base_path: str = ".art"
    report_metrics: list[str] | None = None

    _metrics: MetricsBuilder | None = PrivateAttr(default=None)

    async def log(
        self,
        trajectories: Iterable[Trajectory | BaseException] | Iterable[TrajectoryGroup] | None = (),
        split: str = "val",
        *,
        metrics: dict[str, float] | None = None,
        step: int | None = None,
    ) -> dict[str, float]:
        """Logs as the `log` of the client's class. Metrics under "costs/", "time/" and "data/" also get their sums over the
        run (`metrics_builder`).

        Raises:
            ValueError: the trajectories cannot be written; or the folder belongs to a server's model.
        """
        trajectories, metrics = trajectories or (), metrics or {}
        summed = {key: value for key, value in metrics.items() if key.startswith(SUMMED) and "/cum/" not in key}
        if self._metrics is not None or summed:
            # ART counts costs in the contexts "train" and "eval".
            builder = self.metrics_builder({"val": "eval", "test": "eval"}.get(split, split))
            collected, undo = builder.take(summed)
            with contextlib.ExitStack() as on_failure:
                on_failure.callback(undo)
                row = await self._write_row(trajectories, split, metrics | collected, step)
                on_failure.pop_all()
            return row
        return await self._write_row(trajectories, split, metrics, step)

    async def _write_row(
        self,
        trajectories: Iterable[Trajectory | BaseException] | Iterable[TrajectoryGroup],
        split: str,
        metrics: dict[str, float],
        step: int | None,
    ) -> dict[str, float]:
        if self.trainable and self._links.backend is not None:
            return await super().log(trajectories, split, metrics=metrics, step=step)
        return await asyncio.to_thread(offline_log.log, self._folder, trajectories, split, metrics, step)

    def metrics_builder(self, cost_context: str = "train") -> MetricsBuilder:
        """Collects metrics of the next step in a context ("train", "eval"). The next `log` of that split writes them."""
        if self._metrics is None:
            self._metrics = MetricsBuilder(cost_context)
            self._metrics.load_state_dict({"totals": offline_log.sums(self._folder), "scenarios": ()})
        return self._metrics.for_cost_context(cost_context)

    def activate_metrics_context(self, cost_context: str = "train") -> "Token[MetricsBuilder]":
        """Functions with `track_api_cost` add to this model's metrics, until `token.var.reset(token)`."""
        return self.metrics_builder(cost_context).activate()

    def litellm_completion_params(self, step: int | None = None) -> dict[str, Any]:
        """Arguments of `litellm.acompletion` for this model: its name, address, key, and temperature 1."""
        name = self.get_inference_name(step)
        return {
            "model": f"hosted_vllm/{name}" if self.trainable else name,
            "base_url": self.inference_base_url,
            "api_key": self.inference_api_key,
            "temperature": 1,
        }

    @property
    def _folder(self) -> Path:
        """The folder with the history of a model that no server keeps."""
        return Path(self.base_path) / self.project / "models" / self._storage_name


# The client's class comes first: pydantic takes the defaults of fields from the first class that has the field.
class TrainableModel(core.TrainableModel[ConfigT], Model[ConfigT], Generic[ConfigT]):
    """ART's arguments, `_internal_config`, and third-party backends (`art_compat.third_party_backend`)."""

    if TYPE_CHECKING:  # arguments, which `_take_arts_arguments` accepts
        _internal_config: Any = None
        """`art.dev.InternalModelConfig`: ART's settings for engine, adapter and trainer (`art_compat.internal_config`)."""
        lora_config: LoRAConfig | None = None
        """The name of `lora` in newer releases of ART."""
    else:
        _internal_config: Any = PrivateAttr(default=None)

        @property
        def lora_config(self) -> LoRAConfig | None:
            """The name of `lora` in newer releases of ART."""
            return self.lora

    async def register(self, backend: ServerBackend | ThirdPartyBackend, _openai_client_config: Any = None) -> None:
        """The backend is ours, or any object that implements ART's backend protocol."""
        check_backend(backend)
        if not isinstance(backend, ThirdPartyBackend):
            if _openai_client_config:
                logger.warning(CLIENT_CONFIG_IGNORED)
            return await super().register(backend)
        await backend.register(self)
        self._links = dataclasses.replace(self._links, backend=cast(Any, backend))
        address = await backend._prepare_backend_for_training(self, _openai_client_config)
        self.inference_base_url, self.inference_api_key = address
        self.inference_model_name = self.get_inference_name()

    def _to_registration(self) -> RegisterRequest:
        settings = internal_config.read(self._internal_config)
        for name in settings.without_effect:
            logger.warning("register: _internal_config: %s has no effect", name)
        request = super()._to_registration()
        update = {"lora": self.lora or settings.lora, "engine_args": settings.engine_args | self.engine_args}
        return request.model_copy(update=update)

    def get_inference_name(self, step: int | None = None) -> str:
        is_pinned = step is None and self._pinned_name is not None
        if isinstance(self._links.backend, ThirdPartyBackend) and not is_pinned:
            name = self._storage_name  # ART's servers have no projects
            return name if step is None else f"{name}@{step}"
        return super().get_inference_name(step)

    def _pinned(self, step: int | None, seeds: Iterator[int] | None = None) -> Self:
        self.metrics_builder()  # made here, so that the copies share the builder
        return super()._pinned(step, seeds)

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
        **unknown: Never,
    ) -> TrainResult:
        """`trajectory_groups` is ART's name for `groups`. `_config` contains options under ART's names, which override
        `config`."""
        groups = under_either_name(groups, trajectory_groups)
        config = to_train_config(config)
        backend: Any = self._links.backend
        if isinstance(backend, ThirdPartyBackend):
            return await train_there(backend, self, groups, config, _config or {}, verbose)
        config = internal_config.with_defaults(config, internal_config.read(self._internal_config))
        options: dict[str, Any] = _config or {}
        if options and "ratio_to" not in config.model_fields_set:
            # ART's default, which differs from the default of `TrainConfig`
            options = {"precalculate_logprobs": False, **options}
        config, ignored = apply_options(config, options)
        if ignored:
            logger.warning("train: _config is ignored for these keys: %s", ", ".join(ignored))
        return await super().train(
            groups,
            config,
            verbose=verbose,
            idempotency_key=idempotency_key,
            expected_step=expected_step,
            **unknown,
        )

    async def submit(
        self,
        groups: Iterable[TrajectoryGroup],
        config: TrainConfig | None = None,
        *,
        idempotency_key: str | None = None,
        expected_step: int | None = None,
    ) -> Job:
        if isinstance(self._links.backend, ThirdPartyBackend):
            raise ValueError("submit needs an art-server: register the model with art.Backend")
        config = internal_config.with_defaults(to_train_config(config), internal_config.read(self._internal_config))
        return await super().submit(groups, config, idempotency_key=idempotency_key, expected_step=expected_step)

    async def train_sft(
        self,
        trajectories: Iterable[Trajectory | TrajectoryGroup],
        config: TrainSFTConfig | None = None,
        _config: Any = None,
        verbose: bool = False,
        log_metrics: bool = True,
        *,
        validation: Iterable[Trajectory | TrajectoryGroup] = (),
        idempotency_key: str | None = None,
        expected_step: int | None = None,
    ) -> TrainResult:
        """`_config` and `log_metrics` have no effect."""
        if isinstance(self._links.backend, ThirdPartyBackend):
            raise ValueError("train_sft needs an art-server: register the model with art.Backend")
        return await super().train_sft(
            trajectories,
            config,
            validation=validation,
            verbose=verbose,
            idempotency_key=idempotency_key,
            expected_step=expected_step,
        )

    async def delete_checkpoints(
        self, best_checkpoint_metric: str | None = None, *, keep: list[int] | None = None
    ) -> DeleteCheckpointsReply | None:
        """With a third-party backend only the newest checkpoint is kept, and the result is None."""
        backend: Any = self._links.backend
        if isinstance(backend, ThirdPartyBackend):
            await backend._delete_checkpoint_files(self, [await backend._get_step(self)])
            return None
        return await super().delete_checkpoints(best_checkpoint_metric, keep=keep)

    async def fork(self, name: str, *, project: str | None = None, step: int | None = None) -> Self:
        forked = await super().fork(name, project=project, step=step)
        forked.id, forked.run_id, forked._metrics = None, None, None
        return forked

    @model_validator(mode="wrap")
    @classmethod
    def _take_arts_arguments(cls, data: Any, handler: ModelWrapValidatorHandler[Self]) -> Self:
        """Accepts `_internal_config` and `lora_config`."""
        if not isinstance(data, dict):
            return handler(data)
        fields = dict(cast(dict[str, Any], data))
        config = fields.pop("_internal_config", None)
        if "lora_config" in fields:
            fields["lora"] = fields.pop("lora_config")
        model = handler(fields)
        model._internal_config = config
        return model

    @model_serializer(mode="wrap")
    def _dump_internal_config(self, handler: SerializerFunctionWrapHandler) -> dict[str, Any]:
        return {**handler(self), "_internal_config": self._internal_config}


def under_either_name(
    groups: Iterable[TrajectoryGroup], trajectory_groups: Iterable[TrajectoryGroup]
) -> Iterable[TrajectoryGroup]:
    """The groups that a call of `train` has under one of the two names, or under both. Groups under one name are not checked
    here, because the backend checks all groups."""
    if trajectory_groups == ():
        return groups
    if groups == ():
        return trajectory_groups
    return [*group_list(groups, "train"), *group_list(trajectory_groups, "train")]
