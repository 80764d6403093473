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

from art import annexes, types
from art.data import DatasetBatch, iterate_dataset
from art.distillation import distill
from art.errors import ArtConnectionError, ArtError, ArtJobError, ArtStatusError
from art.evaluation import Estimate, Evaluation, evaluate
from art.gather import gather_trajectories, gather_trajectory_groups
from art.job import Job
from art.model import Model, TrainableModel
from art.retrying import retry
from art.scopes import no_capture
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
    from art.pipeline import PipelineTrainer

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
    "Job",
    "LoRAConfig",
    "LocalBackend",
    "Messages",
    "MessagesAndChoices",
    "Model",
    "PipelineTrainer",
    "Rollout",
    "Tools",
    "TrainConfig",
    "TrainResult",
    "TrainSFTConfig",
    "TrainableModel",
    "Trajectory",
    "TrajectoryGroup",
    "distill",
    "evaluate",
    "gather_trajectories",
    "gather_trajectory_groups",
    "iterate_dataset",
    "no_capture",
    "retry",
    "rollout",
    "types",
]

_MODULE_BY_LAZY_NAME = {"Backend": "art.backend", "LocalBackend": "art.local", "PipelineTrainer": "art.pipeline"}
"""Imported on first access: the import of httpx takes as long as all other imports together, and sqlite3 some milliseconds."""


def __getattr__(name: str) -> Any:
    if name in _MODULE_BY_LAZY_NAME:
        return getattr(importlib.import_module(_MODULE_BY_LAZY_NAME[name]), name)
    return annexes.member(__name__, name)


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__, *annexes.names()})
