"""How a run ends that is not trained to its last epoch: each error has the exit code of `art finetune`."""

from collections.abc import Sequence


class FinetuneError(Exception):
    """The message has the reason and the remedy."""

    exit_code = 1
    """1: rollouts or training failed."""


class WrongInput(FinetuneError):
    """A wrong file, data set or flag. Nothing was asked of a server, and nothing was written."""

    exit_code = 2

    def __init__(self, problems: Sequence[str]) -> None:
        super().__init__("\n".join(problems))
        self.problems = list(problems)


class NoSignal(FinetuneError):
    """In no epoch did the rewards of a group differ."""

    exit_code = 3


class NoServer(FinetuneError):
    exit_code = 4


class RolloutFailed(Exception):
    """A rollout without a reward; the message has the reason and the remedy."""
