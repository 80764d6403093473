"""Log-probabilities of chosen tokens from hidden states, without ever holding positions x vocabulary for long.

Positions go through the output head in chunks. What fits one chunk keeps its probabilities for backward; more are
computed again there, so memory does not grow with vocabulary x length. Sums are float32.
"""

from collections.abc import Callable
from typing import Any

import torch

MAX_LOGITS = {"cpu": 2**22, "cuda": 2**27}
"""Logits of a chunk: 16 and 512 MiB in float32, of which backward holds two. Of a vocabulary of 150,000 that is 27 and 894
positions. Measured on a CPU; on CUDA by calculation: some 300 products are needed for each weight that is read."""

Project = Callable[[torch.Tensor], torch.Tensor]


def score_targets(
    hidden_ND: torch.Tensor,
    targets_N: torch.Tensor,
    project: Project,
    num_vocabulary: int,
    *,
    with_entropy_gradient: bool = False,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Log-probability of each target, and the entropy of its distribution: both N, float32, temperature 1.

    `project` makes logits from hidden states; its own parameters get their gradients too. The entropy has a gradient
    only on demand.
    """
    limit = MAX_LOGITS.get(hidden_ND.device.type, MAX_LOGITS["cpu"])
    chunk = max(1, limit // num_vocabulary)
    scored: tuple[torch.Tensor, torch.Tensor] = _ScoreTargets.apply(
        hidden_ND, targets_N, project, chunk, with_entropy_gradient
    )  # pyright: ignore[reportAssignmentType]  # apply is untyped
    return scored


class _ScoreTargets(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        hidden_ND: torch.Tensor,
        targets_N: torch.Tensor,
        project: Project,
        chunk: int,
        with_entropy_gradient: bool,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        num = len(targets_N)
        logprobs_N = hidden_ND.new_empty(num, dtype=torch.float32)
        entropies_N = torch.empty_like(logprobs_N)
        ctx.kept = None
        for start in range(0, num, chunk):
            here = slice(start, start + chunk)
            kept = _project(hidden_ND[here], project) if num <= chunk else None
            logits_NV = kept[1].detach() if kept else project(hidden_ND[here])
            probabilities_NV, logprobs, entropies = _score(logits_NV.float(), targets_N[here])
            logprobs_N[here], entropies_N[here] = logprobs, entropies
            if kept:
                ctx.kept = (*kept, probabilities_NV)
        ctx.save_for_backward(hidden_ND, targets_N, entropies_N)
        ctx.project, ctx.chunk = project, chunk
        if not with_entropy_gradient:
            ctx.mark_non_differentiable(entropies_N)
        ctx.with_entropy_gradient = with_entropy_gradient
        return logprobs_N, entropies_N

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        hidden_ND, targets_N, entropies_N = ctx.saved_tensors
        grad_logprobs_N, grad_entropies_N = gradients
        grad_hidden_ND = torch.empty_like(hidden_ND)
        for start in range(0, len(targets_N), ctx.chunk):
            here = slice(start, start + ctx.chunk)
            if ctx.kept is not None:
                leaf, logits_NV, slopes_NV = ctx.kept
            else:
                leaf, logits_NV = _project(hidden_ND[here], ctx.project)
                slopes_NV = torch.softmax(logits_NV.detach().float(), -1)
            if ctx.with_entropy_gradient:
                # dH/dz = -p (log p + H)
                surprises_NV = slopes_NV.log().clamp_(min=-1e4).add_(entropies_N[here, None])
                surprises_NV.mul_(grad_entropies_N[here, None]).add_(grad_logprobs_N[here, None])
                slopes_NV = slopes_NV.mul_(surprises_NV).neg_()
            else:
                slopes_NV = slopes_NV.mul_(-grad_logprobs_N[here, None])
            # dlogp/dz = one-hot - p
            slopes_NV.scatter_add_(1, targets_N[here, None], grad_logprobs_N[here, None])
            torch.autograd.backward(logits_NV, slopes_NV.to(logits_NV.dtype))
            assert leaf.grad is not None
            grad_hidden_ND[here] = leaf.grad
        ctx.kept = None
        return grad_hidden_ND, None, None, None, None


def _project(hidden_ND: torch.Tensor, project: Project) -> tuple[torch.Tensor, torch.Tensor]:
    """A leaf, and its logits with a graph from there."""
    with torch.enable_grad():
        leaf = hidden_ND.detach().requires_grad_()
        return leaf, project(leaf)


def _score(
    logits_NV: torch.Tensor, targets_N: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Probabilities, log-probability of the target, entropy: one pass of exp.

    The log-sum-exp comes from the likeliest token, whose probability is at least 1 / V.
    """
    probabilities_NV = torch.softmax(logits_NV, -1)
    largest_N, places_N = logits_NV.max(-1, keepdim=True)
    sums_N = (largest_N - probabilities_NV.gather(-1, places_N).log())[:, 0]
    logprobs_N = logits_NV.gather(-1, targets_N[:, None])[:, 0] - sums_N
    entropies_N = sums_N - torch.linalg.vecdot(probabilities_NV, logits_NV)
    return probabilities_NV, logprobs_N, entropies_N
