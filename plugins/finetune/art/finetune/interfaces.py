"""The three parts of the harness that a file can replace by `_type`, and what they hand to each other.

They are those of NVIDIA's `nat.finetuning.interfaces`, as far as the harness calls them. A `TrajectoryCollection` has groups of
`art.Trajectory`, which know their exact tokens, in place of NVIDIA's episodes. docs/howto/finetune-parts.md replaces each.
"""

import sys
from abc import ABC, abstractmethod
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any

from tqdm.auto import tqdm

import art
from art.finetune.agent import Agent
from art.finetune.folder import Folder
from art.finetune.masking import masked
from art.finetune.rows import Row
from art.finetune.sections import Component, Config, Curriculum


class TrainingStatusEnum(StrEnum):
    PENDING = "pending"
    RUNNING = "running"
    COMPLETED = "completed"
    FAILED = "failed"
    CANCELED = "canceled"


@dataclass(frozen=True, slots=True)
class TrainingJobRef:
    """A train call that was begun."""

    run_id: str
    backend: str = "art"
    metadata: dict[str, Any] = field(default_factory=dict[str, Any])


@dataclass(frozen=True, slots=True)
class TrainingJobStatus:
    """How a train call ended."""

    run_id: str
    status: TrainingStatusEnum
    backend: str = "art"
    progress: float | None = None
    """Percent."""
    message: str | None = None
    metadata: dict[str, Any] = field(default_factory=dict[str, Any])
    """`step` and `metrics` of a step that was made."""


@dataclass(frozen=True, slots=True)
class TrajectoryCollection:
    """What an epoch sampled: a group for each row, in their order, with its failures in `exceptions`."""

    trajectories: list[art.TrajectoryGroup]
    run_id: str
    meta: dict[str, Any] = field(default_factory=dict[str, Any])
    """`epoch`, `rows` (their places) and `step`, the model's step that samples."""


@dataclass(frozen=True, slots=True)
class Run:
    """What the parts of a run share."""

    config: Config
    rows: list[Row]
    validation_rows: list[Row]
    train_config: art.TrainConfig
    model: art.TrainableModel
    agent: Agent
    validation_agent: Agent
    folder: Folder
    seed: int

    @property
    def curriculum(self) -> Curriculum:
        """That of the file. One rollout of a row has no differing rewards."""
        given = self.config.finetuning.curriculum_learning
        if self.config.builder.num_generations == 1:
            return given.model_copy(update={"min_reward_diff": 0.0})
        return given


class Part(ABC):
    """A part of the harness. `config` has its section of the file."""

    context: Run

    def __init__(self, config: Component) -> None:
        self.config = config

    async def initialize(self, context: Run) -> None:
        """Is called once, before the first epoch."""
        self.context = context


class TrajectoryBuilder(Part):
    """Samples an epoch. `meta` is that of the `TrajectoryCollection`."""

    @abstractmethod
    async def start_run(self, run_id: str, meta: dict[str, Any]) -> None:
        """Begins to sample."""

    @abstractmethod
    async def finalize(self, run_id: str, meta: dict[str, Any]) -> TrajectoryCollection:
        """Returns the groups when all rollouts have ended."""

    async def compute_reward(self, trajectory: art.Trajectory, meta: dict[str, Any]) -> float:
        """The reward of a scored trajectory; `meta` has `row` and `output`."""
        return trajectory.reward


class TrainerAdapter(Part):
    """Trains on what was sampled."""

    @abstractmethod
    async def submit(self, trajectories: TrajectoryCollection) -> TrainingJobRef:
        """Begins to train."""

    @abstractmethod
    async def wait_until_complete(self, ref: TrainingJobRef, poll_interval: float = 10.0) -> TrainingJobStatus:
        """The state in which a train call ends."""


class Trainer(Part):
    """Runs the epochs."""

    builder: TrajectoryBuilder
    adapter: TrainerAdapter

    async def bind_components(self, builder: TrajectoryBuilder, adapter: TrainerAdapter) -> None:
        """Is called before `initialize`."""
        self.builder, self.adapter = builder, adapter

    @abstractmethod
    async def run_epoch(self, epoch: int, run_id: str) -> TrainingJobRef | None:
        """Samples and begins to train; None if nothing can be trained."""

    @abstractmethod
    async def run(self, num_epochs: int) -> list[TrainingJobStatus]:
        """Runs what is left of the epochs, and returns how each ended."""

    def log_progress(self, epoch: int, metrics: dict[str, Any], output_dir: str | None = None) -> None:
        """Is called after each epoch with the step's metrics, `epoch` and `epoch/reward`."""

    async def cleanup(self) -> None:
        """Is called at the end, however the run ended."""


def say(line: str) -> None:
    """Prints a line without its secrets on stderr, above a progress bar."""
    tqdm.write(masked(line), file=sys.stderr)
