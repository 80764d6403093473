"""The errors of a run that was not trained to its last epoch. Each error has the exit code of `art finetune`."""

from collections.abc import Sequence

from art.finetune.masking import masked


class FinetuneError(Exception):
    """The message has the reason and the remedy, and no secrets."""

    exit_code = 1
    """1: rollouts or training failed."""

    def __init__(self, message: str) -> None:
        super().__init__(masked(message))


class WrongInput(FinetuneError):
    """A wrong file, data set or flag. Nothing was asked of a server, and nothing was written."""

    exit_code = 2

    def __init__(self, problems: Sequence[str]) -> None:
        self.problems = [masked(problem) for problem in problems]
        super().__init__("\n".join(self.problems))


class NoSignal(FinetuneError):
    """In no epoch did the rewards of a group differ."""

    exit_code = 3


class NoServer(FinetuneError):
    exit_code = 4


class BelowTarget(FinetuneError):
    """An evaluation is not surely at least the number of `--at_least`."""

    exit_code = 5


class RolloutFailed(Exception):
    """A rollout without a reward; the message has the reason and the remedy."""
