"""ART's client: your code runs the agent's rollouts, and an art-server trains the model.

    model = art.TrainableModel(name="agent", project="demo", base_model="art/tiny")
    await model.register(art.Backend("http://gpu-box:7623"))
    groups = await art.gather_trajectory_groups(
        art.TrajectoryGroup(rollout(model, scenario) for _ in range(8)) for scenario in scenarios
    )
    await model.train(groups, config=art.TrainConfig(learning_rate=1e-5))

`import art` imports neither `openai` nor an HTTP client. The first client or backend imports them.
"""

import importlib
from typing import TYPE_CHECKING, Any

from art import dev, types
from art.compat import refused
from art.compat.names import (
    auto_trajectory,
    capture_auto_trajectory,
    capture_yielded_trajectory,
    current_trajectory,
    no_capture,
    trajectory,
    trajectory_group,
    trajectory_group_batches,
    yield_trajectory,
)
from art.data import DatasetBatch, iterate_dataset
from art.distillation import distill
from art.errors import ArtConnectionError, ArtError, ArtJobError, ArtStatusError
from art.evaluation import Estimate, Evaluation, evaluate
from art.gather import gather_trajectories, gather_trajectory_groups
from art.model import Model, TrainableModel
from art.retrying import retry
from art.sessions import Rollout, rollout
from art.trajectories import History, Trajectory, TrajectoryGroup
from art.types import (
    LoRAConfig,
    Messages,
    MessagesAndChoices,
    Tools,
    TrainConfig,
    TrainResult,
    TrainSFTConfig,
)

if TYPE_CHECKING:
    from art.backend import Backend
    from art.local import LocalBackend
    from art.serverless import ServerlessBackend
    from art.skypilot import SkyPilotBackend

__all__ = [
    "ArtConnectionError",
    "ArtError",
    "ArtJobError",
    "ArtStatusError",
    "Backend",
    "DatasetBatch",
    "Estimate",
    "Evaluation",
    "History",
    "LoRAConfig",
    "LocalBackend",
    "Messages",
    "MessagesAndChoices",
    "Model",
    "Rollout",
    "ServerlessBackend",
    "SkyPilotBackend",
    "Tools",
    "TrainConfig",
    "TrainResult",
    "TrainSFTConfig",
    "TrainableModel",
    "Trajectory",
    "TrajectoryGroup",
    "auto_trajectory",
    "capture_auto_trajectory",
    "capture_yielded_trajectory",
    "current_trajectory",
    "dev",
    "distill",
    "evaluate",
    "gather_trajectories",
    "gather_trajectory_groups",
    "iterate_dataset",
    "no_capture",
    "retry",
    "rollout",
    "trajectory",
    "trajectory_group",
    "trajectory_group_batches",
    "types",
    "yield_trajectory",
]

_MODULE_BY_LAZY_NAME = {
    "Backend": "art.backend",
    "LocalBackend": "art.local",
    "LocalTrainResult": "art.types",
    "ServerlessBackend": "art.serverless",
    "SkyPilotBackend": "art.skypilot",
}
"""Imported on first access: their import of httpx takes as long as all other imports together."""
_LAZY_MODULES = (
    *("backend", "guided_completion", "local", "metrics"),
    *("rewards", "serverless", "skypilot", "utils"),
)


def __getattr__(name: str) -> Any:
    if name in _MODULE_BY_LAZY_NAME:
        return getattr(importlib.import_module(_MODULE_BY_LAZY_NAME[name]), name)
    if name in refused.NAMES["art"]:
        return refused.refused(name, refused.NAMES["art"][name])
    if name in _LAZY_MODULES:
        return importlib.import_module(f"art.{name}")
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
