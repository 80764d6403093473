"""The divergence from a teacher's distribution: targets of tokens, and a term of the loss (`TeacherTop` on the wire).

A target has the teacher's log-probabilities of K tokens. What these tokens leave of the distribution is one further entry, the
tail, on both sides. So the two distributions of K + 1 entries are exact, and their divergence is at most that of the whole
vocabulary.

Sources: Agarwal et al. 2024, GKD (arXiv:2306.13649), section 3 (the divergences); Hübotter et al. 2026, SDPO (arXiv:2601.20802)
(the tail, the truncated ratio); the repository of Zhao et al. 2026, OPSD (arXiv:2601.18734) (the clip of each entry).
"""

import math
from dataclasses import dataclass

import numpy as np
import torch

from art_server.shared.teacher_top import read_top
from art_server.shared.trainer_messages import TokenSequence

NOT_TAUGHT = -1
"""The target of a token without a teacher."""

MAX_LOG_SUM = -1e-7
"""The largest logarithm of the probability of K tokens: the tail of a whole vocabulary is 0, whose logarithm is not finite."""


@dataclass(frozen=True, slots=True)
class Targets:
    """U different targets."""

    ids_UK: torch.Tensor
    """int64."""
    logprobs_UK: torch.Tensor
    """float32: the teacher's."""


NO_TARGETS = Targets(torch.zeros(0, 0, dtype=torch.int64), torch.zeros(0, 0))


class TargetCollector:
    """Collects the targets of a batch. Equal targets are one, so that siblings with the same tokens and the same teacher share
    their predictions."""

    def __init__(self) -> None:
        self._indices: dict[bytes, int] = {}
        self._ids: list[np.ndarray] = []
        self._logprobs: list[np.ndarray] = []

    def add(self, sequence: TokenSequence) -> list[int]:
        """The target of each token of a sequence, an index or NOT_TAUGHT.

        Raises:
            ValueError: the sequence's targets cannot be read.
        """
        indices = [NOT_TAUGHT] * len(sequence.token_ids)
        for span in sequence.taught:
            pairs = zip(*read_top(span.top), strict=True)
            for position, (ids_K, logprobs_K) in zip(range(span.start, span.stop), pairs, strict=True):
                indices[position] = self._index(ids_K, logprobs_K)
        return indices

    def _index(self, ids_K: np.ndarray, logprobs_K: np.ndarray) -> int:
        index = self._indices.setdefault(ids_K.tobytes() + logprobs_K.tobytes(), len(self._ids))
        if index == len(self._ids):
            self._ids.append(ids_K)
            self._logprobs.append(logprobs_K)
        return index

    def targets(self) -> Targets:
        if not self._ids:
            return NO_TARGETS
        ids_UK = torch.from_numpy(np.stack(self._ids).astype(np.int64))
        return Targets(ids_UK, torch.from_numpy(np.stack(self._logprobs).astype(np.float32)))


def is_taught(targets_N: torch.Tensor) -> torch.Tensor:
    """bool: whether a prediction has a target."""
    return targets_N != NOT_TAUGHT


def divergence(
    student_NK: torch.Tensor, teacher_NK: torch.Tensor, alpha: float, clip: float | None = None
) -> torch.Tensor:
    """D_alpha(student, teacher) from the log-probabilities of K tokens at N positions, with the tail: N, in nats.

    0: KL(teacher || student). 1: KL(student || teacher). Between: (1 - alpha) KL(student || mixture) + alpha KL(teacher ||
    mixture) with mixture = (1 - alpha) student + alpha teacher. An entry's part above `clip` is `clip`, without gradient.
    """
    student, teacher = _with_tail(student_NK), _with_tail(teacher_NK)
    if alpha == 0:
        parts = teacher.exp() * (teacher - student)
    elif alpha == 1:
        parts = student.exp() * (student - teacher)
    else:
        mixture = torch.logaddexp(student + math.log1p(-alpha), teacher + math.log(alpha))
        parts = (1 - alpha) * student.exp() * (student - mixture) + alpha * teacher.exp() * (teacher - mixture)
    if clip is not None:
        parts = parts.clamp(max=clip)
    return parts.sum(-1)


def _with_tail(logprobs_NK: torch.Tensor) -> torch.Tensor:
    """The log-probabilities, and behind them the logarithm of what they leave: N x (K + 1)."""
    log_sums_N1 = logprobs_NK.logsumexp(-1, keepdim=True).clamp(max=MAX_LOG_SUM)
    return torch.cat([logprobs_NK, torch.log(-torch.expm1(log_sums_N1))], -1)
