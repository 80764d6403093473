"""Log-probabilities of chosen tokens from hidden states, without keeping all positions x vocabulary: one target at each
position and, for a teacher's targets, K further tokens.

Positions go through the output head in pieces. If all logits fit one chunk, their probabilities are kept for backward.
Otherwise backward recomputes them, so memory does not grow with vocabulary x length. Sums are float32.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch

MAX_LOGITS = {"cpu": 2**22, "cuda": 2**27}
"""Logits of a chunk: 16 and 512 MiB in float32, of which backward holds two; 27 and 894 positions for a vocabulary of
150,000. The CPU's value is measured, CUDA's calculated: each weight that is read should serve some 300 products."""

Project = Callable[[torch.Tensor], torch.Tensor]
"""From hidden states, n x D, to their logits."""
ProjectColumns = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]
"""From hidden states, n x D, and C columns of the vocabulary to the logits of these columns only."""


@dataclass(frozen=True, slots=True)
class Piece:
    """Positions that go through the head together, and the function that computes their logits."""

    here: slice
    targets_n: torch.Tensor
    """int64: the column of each position's target."""
    project: Project
    num_columns: int
    more_nK: torch.Tensor | None = None
    """int64: the columns of K further tokens at each position, all different; None: their log-probabilities are not needed."""


class Scores(NamedTuple):
    """Log-probability and entropy of each of N targets, and whether it is the likeliest token."""

    logprobs_N: torch.Tensor
    """float32."""
    entropies_N: torch.Tensor
    """float32: of the target's distribution."""
    is_likeliest_N: torch.Tensor
    """bool: no token of the distribution has a higher probability."""
    more_NK: torch.Tensor
    """float32: the log-probabilities of the further tokens; 0 in pieces without any. K is 0 if no piece has any."""


def max_logits(device: torch.device) -> int:
    return MAX_LOGITS.get(device.type, MAX_LOGITS["cpu"])


def whole_pieces(
    targets_N: torch.Tensor, project: Project, num_vocabulary: int, more_NK: torch.Tensor | None = None
) -> list[Piece]:
    """Pieces of all positions in order, over the whole vocabulary."""
    chunk = max(1, max_logits(targets_N.device) // num_vocabulary)
    parts = [slice(start, start + chunk) for start in range(0, len(targets_N), chunk)]
    return [
        Piece(part, targets_N[part], project, num_vocabulary, None if more_NK is None else more_NK[part])
        for part in parts
    ]


def score_targets(hidden_ND: torch.Tensor, pieces: Sequence[Piece], *, with_entropy_gradient: bool = False) -> Scores:
    """Log-probability of each target and of further tokens, entropy of the distribution, and whether the target is its
    likeliest token.

    Backward also reaches the parameters of `project`. The entropy has a gradient only on request.
    """
    scored: Any = _ScoreTargets.apply(hidden_ND, pieces, with_entropy_gradient)  # apply is untyped
    return Scores(*scored)


class _ScoreTargets(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, hidden_ND: torch.Tensor, pieces: Sequence[Piece], with_entropy_gradient: bool
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
        num = len(hidden_ND)
        num_more = max((piece.more_nK.shape[1] for piece in pieces if piece.more_nK is not None), default=0)
        more_NK = hidden_ND.new_zeros(num, num_more, dtype=torch.float32)
        logprobs_N = hidden_ND.new_empty(num, dtype=torch.float32)
        entropies_N = torch.empty_like(logprobs_N)
        is_likeliest_N = torch.empty_like(logprobs_N, dtype=torch.bool)
        num_logits = sum(len(piece.targets_n) * piece.num_columns for piece in pieces)
        fits = num_logits <= max_logits(hidden_ND.device)
        all_kept: list[tuple[torch.Tensor, torch.Tensor, torch.Tensor]] = []
        for piece in pieces:
            states = hidden_ND[piece.here]
            kept = _project(states, piece.project) if fits else None
            logits = kept[1].detach() if kept else piece.project(states)
            probabilities, scores = _score(logits.float(), piece.targets_n, piece.more_nK)
            for whole_N, part_n in zip((logprobs_N, entropies_N, is_likeliest_N), scores[:3], strict=True):
                whole_N[piece.here] = part_n
            if piece.more_nK is not None:
                more_NK[piece.here] = scores.more_NK
            if kept:
                all_kept.append((*kept, probabilities))
        ctx.save_for_backward(hidden_ND, entropies_N)
        ctx.pieces, ctx.kept = pieces, all_kept if fits else None
        constants = [is_likeliest_N] if with_entropy_gradient else [is_likeliest_N, entropies_N]
        ctx.mark_non_differentiable(*constants)
        ctx.with_entropy_gradient = with_entropy_gradient
        return logprobs_N, entropies_N, is_likeliest_N, more_NK

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        hidden_ND, entropies_N = ctx.saved_tensors
        grad_logprobs_N, grad_entropies_N, _, grad_more_NK = gradients
        grad_hidden_ND = torch.empty_like(hidden_ND)
        for index, piece in enumerate(ctx.pieces):
            here = piece.here
            # Each log-probability takes its gradient times p from all logits of its position.
            sums_n1 = grad_logprobs_N[here, None]
            if piece.more_nK is not None:
                sums_n1 = sums_n1 + grad_more_NK[here].sum(-1, keepdim=True)
            if ctx.kept is not None:
                leaf, logits, slopes = ctx.kept[index]
            else:
                leaf, logits = _project(hidden_ND[here], piece.project)
                slopes = torch.softmax(logits.detach().float(), -1)
            if ctx.with_entropy_gradient:
                # dH/dz = -p (log p + H)
                # Outside the kept set p is 0: with a logarithm of -inf the product would be NaN.
                surprises = slopes.log().clamp_(min=-1e4).add_(entropies_N[here, None])
                surprises.mul_(grad_entropies_N[here, None]).add_(sums_n1)
                slopes = slopes.mul_(surprises).neg_()
            else:
                slopes = slopes.mul_(-sums_n1)
            # dlogp/dz = one-hot - p
            slopes.scatter_add_(1, piece.targets_n[:, None], grad_logprobs_N[here, None])
            if piece.more_nK is not None:
                slopes.scatter_add_(1, piece.more_nK, grad_more_NK[here])
            torch.autograd.backward(logits, slopes.to(logits.dtype))
            assert leaf.grad is not None
            grad_hidden_ND[here] = leaf.grad
        ctx.kept = None
        return grad_hidden_ND, None, None


def _project(hidden_ND: torch.Tensor, project: Project) -> tuple[torch.Tensor, torch.Tensor]:
    """A leaf with the hidden states, and its logits with their autograd graph."""
    with torch.enable_grad():
        leaf = hidden_ND.detach().requires_grad_()
        return leaf, project(leaf)


def _score(
    logits_NV: torch.Tensor, targets_N: torch.Tensor, columns_NK: torch.Tensor | None
) -> tuple[torch.Tensor, Scores]:
    """Probabilities, and the scores of targets and further columns, with one pass of exp.

    The log-sum-exp follows from the likeliest token, whose probability is at least 1 / V. A target's log-probability is
    its logit minus the likeliest token's logit, plus the likeliest token's log-probability. So the result is rounded at its
    own size, not at the size of the logits.
    """
    probabilities_NV = torch.softmax(logits_NV, -1)
    largest_N1, indices_N1 = logits_NV.max(-1, keepdim=True)
    likeliest_N = probabilities_NV.gather(-1, indices_N1)[:, 0].log()
    below_N = (logits_NV.gather(-1, targets_N[:, None]) - largest_N1)[:, 0]
    logprobs_N = below_N + likeliest_N
    sums_N = largest_N1[:, 0] - likeliest_N
    entropies_N = sums_N - torch.linalg.vecdot(probabilities_NV, logits_NV)
    more_NK = logits_NV[:, :0]
    if columns_NK is not None:
        more_NK = logits_NV.gather(-1, columns_NK) - largest_N1 + likeliest_N[:, None]
    return probabilities_NV, Scores(logprobs_N, entropies_N, below_N == 0, more_NK)
