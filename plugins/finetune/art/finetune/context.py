"""What the parts of a run share."""

import sys
from dataclasses import dataclass

from tqdm.auto import tqdm

import art
from art.finetune.agent import Agent
from art.finetune.folder import Folder
from art.finetune.rows import Row
from art.finetune.sections import Config, Curriculum


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

    def say(self, line: str) -> None:
        say(line)


def say(line: str) -> None:
    """Prints a line on stderr, above a progress bar."""
    tqdm.write(line, file=sys.stderr)
