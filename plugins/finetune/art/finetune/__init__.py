"""The finetuning harness: `art finetune` trains an agent workflow from one file, or a function without a file.

    await art.finetune.run("finetune.yml")

docs/finetune.md has the file, the commands, and how a part is replaced. Names are loaded when they are first used: the command
`art` imports this package without the packages of the extra `finetune`.
"""

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from art.finetune.agent import RolloutFailed
    from art.finetune.context import Run
    from art.finetune.errors import FinetuneError, NoServer, NoSignal, WrongInput
    from art.finetune.evaluating import evaluate
    from art.finetune.interfaces import (
        Trainer,
        TrainerAdapter,
        TrainingJobRef,
        TrainingJobStatus,
        TrainingStatusEnum,
        TrajectoryBuilder,
        TrajectoryCollection,
    )
    from art.finetune.rollouts import ArtTrajectoryBuilder
    from art.finetune.runs import check, run
    from art.finetune.training import ArtTrainer, ArtTrainerAdapter
    from art.finetune.workflows import function

__all__ = [
    "ArtTrainer",
    "ArtTrainerAdapter",
    "ArtTrajectoryBuilder",
    "FinetuneError",
    "NoServer",
    "NoSignal",
    "RolloutFailed",
    "Run",
    "Trainer",
    "TrainerAdapter",
    "TrainingJobRef",
    "TrainingJobStatus",
    "TrainingStatusEnum",
    "TrajectoryBuilder",
    "TrajectoryCollection",
    "WrongInput",
    "check",
    "evaluate",
    "function",
    "run",
]

_NAMES_BY_MODULE = {
    "agent": ("RolloutFailed",),
    "context": ("Run",),
    "errors": ("FinetuneError", "NoServer", "NoSignal", "WrongInput"),
    "evaluating": ("evaluate",),
    "interfaces": tuple(name for name in __all__ if name.startswith("Tra")),
    "rollouts": ("ArtTrajectoryBuilder",),
    "runs": ("check", "run"),
    "training": ("ArtTrainer", "ArtTrainerAdapter"),
    "workflows": ("function",),
}


def __getattr__(name: str) -> Any:
    for module, names in _NAMES_BY_MODULE.items():
        if name in names:
            return getattr(importlib.import_module(f"{__name__}.{module}"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return __all__
