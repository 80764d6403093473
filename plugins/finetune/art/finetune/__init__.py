"""The finetuning harness: `art finetune` trains an agent workflow from one file, or a function without a file.

    await art.finetune.run("finetune.yml")

docs/finetune.md describes the file, the commands, and how to replace a part. `runs` leads from the file to the loop over the
epochs, which is `training.ArtTrainer.run`. `art_finetune` has the commands.
"""

from art.finetune.agreement import Agreement
from art.finetune.differences import Comparison
from art.finetune.errors import BelowTarget, FinetuneError, NoServer, NoSignal, RolloutFailed, WrongInput
from art.finetune.evaluating import compare_files, evaluate, measure_agreement
from art.finetune.interfaces import Run, Trainer, TrainerAdapter, TrainingJobStatus, TrajectoryBuilder
from art.finetune.rollouts import ArtTrajectoryBuilder
from art.finetune.runs import check, run
from art.finetune.training import ArtTrainer, ArtTrainerAdapter
from art.finetune.workflows import function

__all__ = [
    "Agreement",
    "ArtTrainer",
    "ArtTrainerAdapter",
    "ArtTrajectoryBuilder",
    "BelowTarget",
    "Comparison",
    "FinetuneError",
    "NoServer",
    "NoSignal",
    "RolloutFailed",
    "Run",
    "Trainer",
    "TrainerAdapter",
    "TrainingJobStatus",
    "TrajectoryBuilder",
    "WrongInput",
    "check",
    "compare_files",
    "evaluate",
    "function",
    "measure_agreement",
    "run",
]
