"""A run, and its three parts, which a file can replace by `_type`. docs/howto/finetune-parts.md replaces each part.

A `_type` names a class. The class of a builder or an adapter is called with its section of the file and the run, the class of a
trainer also with the builder and the adapter.
"""

import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, Protocol

from tqdm.auto import tqdm

import art
from art.finetune.agent import Agent
from art.finetune.batches import Batches
from art.finetune.folder import Folder
from art.finetune.masking import masked
from art.finetune.reading import Document
from art.finetune.rows import DatasetRow
from art.finetune.sections import Component, Config, Curriculum


@dataclass(frozen=True)
class CheckedFile:
    """A file without problems. Its code and its data sets may have problems."""

    document: Document
    config: Config
    policy: str | None
    """The policy's entry of `llms`."""


@dataclass(frozen=True)
class Code:
    """The functions and classes that a file names. None: the type is built in, or of NVIDIA's toolkit."""

    workflow: Callable[..., Any] | None
    evaluators: Mapping[str, Callable[..., Any] | None]
    """The evaluators of the rewards, by name."""
    trajectory_builder: Callable[..., "TrajectoryBuilder"]
    trainer_adapter: Callable[..., "TrainerAdapter"]
    trainer: Callable[..., "Trainer"]


@dataclass(frozen=True)
class Loaded(CheckedFile):
    """A checked file with its code and its rows. No server has got a request."""

    backend: art.Backend
    code: Code
    rows: list[DatasetRow]
    validation_rows: list[DatasetRow]
    train_config: art.TrainConfig

    @property
    def batches(self) -> Batches:
        """How the rows are divided into batches."""
        return Batches(len(self.rows), self.config.finetuning.rows_per_step)


@dataclass(frozen=True)
class Connected(Loaded):
    """A loaded file with its registered model, and with the agents that play the rows."""

    model: art.TrainableModel
    agent: Agent
    validation_agent: Agent


@dataclass(frozen=True)
class Run(Connected):
    """What the parts of a run share."""

    folder: Folder
    seed: int

    @property
    def curriculum(self) -> Curriculum:
        """The curriculum of the file. A row with a single rollout has no rewards that differ: `min_reward_diff` is then 0."""
        section = self.config.finetuning.curriculum_learning
        if self.config.builder.num_generations == 1:
            return section.model_copy(update={"min_reward_diff": 0.0})
        return section


@dataclass(frozen=True, slots=True)
class TrainingJobStatus:
    """How a batch ended. A batch that fails is an error, and has no status. Without `rows_per_step` a batch is a whole epoch."""

    epoch: int
    step: int
    """The model's step after the batch."""
    message: str | None = None
    """Why nothing was trained."""
    status: Literal["completed"] = "completed"


class TrajectoryBuilder(Protocol):
    async def sample(self, number: int, row_indices: Sequence[int]) -> list[art.TrajectoryGroup]:
        """The rollouts of a batch: a group for each row, in the order of `row_indices`, which are indices of the run's rows.
        The `exceptions` of a group are its failed rollouts. `number` counts the batches from 0, over all epochs; without
        `rows_per_step` a batch is an epoch."""
        ...


class TrainerAdapter(Protocol):
    async def train(self, groups: list[art.TrajectoryGroup], number: int) -> art.TrainResult:
        """The step that is trained on the groups of a batch.

        Raises:
            ArtJobError, ArtStatusError, ValueError: the groups cannot be trained.
        """
        ...


class Trainer(Protocol):
    async def run(self, num_epochs: int) -> list[TrainingJobStatus]:
        """Runs the batches that are left of so many epochs, and returns how each batch ended. A batch is left until
        `folder.save(epochs=...)` has the batch's row."""
        ...


class Part:
    """A part of ours. A subclass can use `config`, the part's section of the file, and `context`, the run."""

    def __init__(self, config: Component, context: Run) -> None:
        self.config, self.context = config, context


def say(line: str) -> None:
    """Prints a line without its secrets on stderr, above a progress bar."""
    tqdm.write(masked(line), file=sys.stderr)
