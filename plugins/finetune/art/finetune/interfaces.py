"""The three parts of the harness that a file can replace by `_type`, and the records that the parts exchange.

The parts have the methods of NVIDIA's `nat.finetuning.interfaces` that the harness calls. In place of NVIDIA's episodes a
`TrajectoryCollection` has groups of `art.Trajectory`, which know their exact tokens. docs/howto/finetune-parts.md replaces each
part.
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
    """A train call that has begun."""

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
    """`step` and `metrics` of the step that a completed call has trained."""


@dataclass(frozen=True, slots=True)
class TrajectoryCollection:
    """The rollouts of an epoch: a group for each row, in the order of the rows. A group's `exceptions` are its failed
    rollouts."""

    trajectories: list[art.TrajectoryGroup]
    run_id: str
    meta: dict[str, Any] = field(default_factory=dict[str, Any])
    """`epoch`, `rows` (the indices of the sampled rows) and `step` (the model's step that samples)."""


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
        """The curriculum of the file. A row with a single rollout has no rewards that differ: `min_reward_diff` is then 0."""
        section = self.config.finetuning.curriculum_learning
        if self.config.builder.num_generations == 1:
            return section.model_copy(update={"min_reward_diff": 0.0})
        return section


class Part(ABC):
    """A part of the harness. `config` is the part's section of the file."""

    context: Run

    def __init__(self, config: Component) -> None:
        self.config = config

    async def initialize(self, context: Run) -> None:
        """Called once, before the first epoch."""
        self.context = context


class TrajectoryBuilder(Part):
    """Samples an epoch. `meta` is also the `meta` of the `TrajectoryCollection`."""

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
    """Trains on sampled trajectories."""

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
        """Called before `initialize`."""
        self.builder, self.adapter = builder, adapter

    @abstractmethod
    async def run_epoch(self, epoch: int, run_id: str) -> TrainingJobRef | None:
        """Samples and begins to train; None if nothing can be trained."""

    @abstractmethod
    async def run(self, num_epochs: int) -> list[TrainingJobStatus]:
        """Runs the remaining epochs, and returns how each epoch ended."""

    def log_progress(self, epoch: int, metrics: dict[str, Any], output_dir: str | None = None) -> None:
        """Called after each epoch with the step's metrics, `epoch` and `epoch/reward`."""

    async def cleanup(self) -> None:
        """Called at the end, however the run ended."""


def say(line: str) -> None:
    """Prints a line without its secrets on stderr, above a progress bar."""
    tqdm.write(masked(line), file=sys.stderr)
