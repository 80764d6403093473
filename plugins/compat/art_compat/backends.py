"""`art.Backend`: the client's backend with ART's arguments and methods."""

# pyright: reportPrivateUsage=false, reportIncompatibleMethodOverride=false

import logging
from collections.abc import Iterable
from typing import Any

from art.core.model import Model, TrainableModel
from art.trajectories import TrajectoryGroup
from art.types import TrainResult
from art_compat.buckets import Buckets
from art_compat.internal_config import CLIENT_CONFIG_IGNORED
from art_compat.models import under_either_name
from art_protocol.art_options import ART_DEFAULTS, apply_options
from art_protocol.wire import TrainConfig

logger = logging.getLogger("art.compat")


class Backend(Buckets):
    """Without a `config`, `train` works as in ART: `options` have ART's names (`learning_rate`, `loss_fn`, `epsilon`,
    `kl_penalty_coef`...), and other options have ART's defaults: CISPO, each trajectory with the same weight.
    `trajectory_groups` is ART's name for `groups`."""

    async def train(
        self,
        model: TrainableModel,
        groups: Iterable[TrajectoryGroup] = (),
        config: TrainConfig | None = None,
        *,
        trajectory_groups: Iterable[TrajectoryGroup] = (),
        verbose: bool = False,
        idempotency_key: str | None = None,
        expected_step: int | None = None,
        **options: Any,
    ) -> TrainResult:
        return await super().train(
            model,
            under_either_name(groups, trajectory_groups),
            _to_config(config, options),
            verbose=verbose,
            idempotency_key=idempotency_key,
            expected_step=expected_step,
        )

    async def _prepare_backend_for_training(self, model: TrainableModel, config: Any = None) -> tuple[str, str]:
        if config:
            logger.warning(CLIENT_CONFIG_IGNORED)
        return await super()._prepare_backend_for_training(model)

    async def _delete_checkpoint_files(self, model: Model, steps_to_keep: list[int]) -> None:
        await self._delete_checkpoints(model, steps_to_keep=steps_to_keep)


def _to_config(config: TrainConfig | None, options: dict[str, Any]) -> TrainConfig:
    """The given configuration, or ART's defaults with `options`."""
    if config is not None and options:
        raise ValueError(f"backend.train takes config or options, not both: {', '.join(options)}")
    if config is not None:
        return config
    config, ignored = apply_options(TrainConfig(**ART_DEFAULTS), options)
    if ignored:
        logger.warning("backend.train: an art-server ignores these options: %s", ", ".join(ignored))
    return config
