"""Losses as coefficients: pure functions from numbers to the loss and to its derivative by each log-probability.

Nothing here holds a graph. The trainer runs backward on sum(coefficient * logprob), which has the loss's gradient, so
a loss is right for every split into micro-batches as long as its denominator is that of the whole optimizer step.
"""

from dataclasses import dataclass

import torch

from art.wire import TrainConfig

MAX_LOG_RATIO = 20.0
"""Differences of log-probabilities are cut to +-20 before exp: e^20 is far outside every clip and still finite in
float32 when squared."""


@dataclass(frozen=True, slots=True)
class TokenLoss:
    """A loss over N tokens, everything detached."""

    value: torch.Tensor
    """Scalar: these tokens' share of the step's loss; shares add up."""
    coefficients_N: torch.Tensor
    """dL/dlogprob."""
    ratios_N: torch.Tensor
    """pi_new / pi_sampled."""
    is_clipped_N: torch.Tensor
    """bool: the clip is active, the policy term has no gradient here."""
    kl_N: torch.Tensor | None
    """Estimate of the KL divergence from the reference, None without reference."""


def grpo_loss(
    logprobs_N: torch.Tensor,
    sampled_logprobs_N: torch.Tensor,
    advantages_N: torch.Tensor,
    reference_logprobs_N: torch.Tensor | None,
    config: TrainConfig,
    num_tokens: int,
) -> TokenLoss:
    """-sum(min(ratio * A, clip(ratio) * A) - beta * k3) / num_tokens, with ratio = pi_new / pi_sampled.

    `num_tokens` counts the trained tokens of the whole optimizer step, not only those given here.
    `reference_logprobs_N` is needed exactly when beta > 0.
    Source: Schulman et al. 2017, arXiv:1707.06347, eq. 7 (clip); Shao et al. 2024, arXiv:2402.03300, eq. 3 and 4 (with
    token normalisation over the step in place of 1/|o_i|); Schulman, http://joschu.net/blog/kl-approx.html (k3).
    """
    log_ratios_N = logprobs_N - sampled_logprobs_N
    ratios_N = log_ratios_N.clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO).exp()
    low = 1 - config.epsilon
    high = 1 + (config.epsilon if config.epsilon_high is None else config.epsilon_high)

    objectives_N = torch.minimum(ratios_N * advantages_N, ratios_N.clamp(low, high) * advantages_N)
    is_clipped_N = torch.where(
        advantages_N > 0, ratios_N > high, (ratios_N < low) & (advantages_N < 0)
    )
    has_gradient_N = ~is_clipped_N & (log_ratios_N.abs() <= MAX_LOG_RATIO)
    losses_N = -objectives_N
    coefficients_N = torch.where(has_gradient_N, -ratios_N * advantages_N, 0.0)

    kl_N = None
    if reference_logprobs_N is not None:
        differences_N = reference_logprobs_N - logprobs_N
        cut_N = differences_N.clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO)
        kl_N = cut_N.exp() - cut_N - 1
        losses_N = losses_N + config.beta * kl_N
        slopes_N = torch.where(differences_N.abs() <= MAX_LOG_RATIO, 1 - cut_N.exp(), 0.0)
        coefficients_N = coefficients_N + config.beta * slopes_N

    return TokenLoss(
        value=losses_N.sum() / num_tokens,
        coefficients_N=coefficients_N / num_tokens,
        ratios_N=ratios_N,
        is_clipped_N=is_clipped_N,
        kl_N=kl_N,
    )
