"""Third-party backends: any object that implements ART's backend protocol, such as NVIDIA's `RemoteBackend`.

With such a backend a `TrainableModel` can train and delete checkpoints. Logs and sessions need an art-server.
"""

# pyright: reportPrivateUsage=false

import statistics
from collections import defaultdict
from collections.abc import AsyncIterator, Iterable, Sequence
from typing import Any, Protocol, runtime_checkable

from art.errors import ArtJobError
from art.trajectories import TrajectoryGroup, group_list
from art.types import TrainResult
from art_protocol.wire import TrainConfig


@runtime_checkable
class ThirdPartyBackend(Protocol):
    """ART's backend protocol. Models have the type `Any`, because a backend may expect its own similar class."""

    async def register(self, model: Any) -> None: ...

    async def _prepare_backend_for_training(self, model: Any, config: Any) -> tuple[str, str]: ...

    async def _get_step(self, model: Any) -> int: ...

    async def _delete_checkpoint_files(self, model: Any, steps_to_keep: list[int]) -> None: ...

    def _train_model(
        self, model: Any, groups: Any, config: Any, dev_config: Any, verbose: bool
    ) -> AsyncIterator[dict[str, Any]]: ...


async def train_there(
    backend: ThirdPartyBackend,
    model: Any,
    groups: Iterable[TrajectoryGroup],
    config: TrainConfig,
    dev_config: Any,
    verbose: bool,
) -> TrainResult:
    """Trains one step. The metrics are means over the gradient steps that the backend reports.

    Raises:
        ArtJobError: the backend's stream contains an `error`.
    """
    rows: list[dict[str, float]] = []
    async for row in backend._train_model(model, group_list(groups, "train"), config, dev_config, verbose):
        if "error" in row:
            raise ArtJobError(f"the backend could not train '{model.name}': {row['error']}")
        rows.append({key: float(value) for key, value in row.items()})
    return TrainResult(await backend._get_step(model), _means(rows))


def _means(rows: Sequence[dict[str, float]]) -> dict[str, float]:
    values = defaultdict[str, list[float]](list)
    for row in rows:
        for name, value in row.items():
            values[name].append(value)
    return {name: statistics.fmean(values[name]) for name in sorted(values)}
