"""Losses as coefficients: a pure function from numbers to the loss and to its derivative by each log-probability.

Nothing here holds a graph. The trainer runs backward on sum(coefficient * logprob), which has the loss's gradient.
Denominators are in the uses' weights, so a loss over part of a step is that part's share. One thing must be whole:
what looks at a trajectory (sequence ratios, sequence masks) needs all its uses at once (`needs_whole_trajectories`).

docs/training.md has the formulas in one table.
"""

from dataclasses import dataclass

import torch

from art.wire import LossConfig
from art_server.trainer.batches import Uses

MAX_LOG_RATIO = 20.0
"""Differences of log-probabilities are cut to +-20 before exp: e^20 is far outside every clip and still finite in
float32 when squared."""

LEVELS = {"token": (1.0, 0.0), "sequence": (0.0, 1.0), "geometric": (0.5, 0.5)}
"""A use's log-ratio is a mix of its own and its trajectory's mean: the shares of both."""


@dataclass(frozen=True, slots=True)
class TokenLoss:
    """A loss over U uses, everything detached."""

    value: torch.Tensor
    """Scalar: these uses' share of the step's loss; shares add up. Without the entropy bonus."""
    coefficients_U: torch.Tensor
    """dL/dlogprob."""
    policy_ratios_U: torch.Tensor
    """What the clip bounds, at the configured level: pi_new / pi_old, or pi_new / pi_sampled with ratio_to="sampled"."""
    is_clipped_U: torch.Tensor
    """bool: the clip is active."""
    importance_ratios_U: torch.Tensor
    """pi_old / pi_sampled of each token, before any truncation; 1 where the sampler's figure is unknown."""
    corrections_U: torch.Tensor
    """The off-policy weight that multiplies the policy term."""
    is_corrected_U: torch.Tensor
    """bool: the weight is not the ratio itself, because it was truncated or the use was left out."""
    kl_U: torch.Tensor | None
    """Estimate of the KL divergence from the reference, None without reference."""


def needs_whole_trajectories(config: LossConfig) -> bool:
    return config.ratio != "token" or config.correction == "sequence_mask"


def policy_loss(
    logprobs_U: torch.Tensor,
    uses: Uses,
    config: LossConfig,
) -> TokenLoss:
    """sum(weight * (-correction * objective + beta * KL)) over the uses.

    The clip bounds pi_new / pi_old, where pi_old is the trainer's policy at the start of the job: on a first pass
    (`uses.old_logprobs_U` is None) pi_new itself, detached. The correction is the weight pi_old / pi_sampled.
    Source: Schulman et al. 2017, arXiv:1707.06347, eq. 7 (two_sided); Yu et al. 2025, arXiv:2503.14476, eq. 10
    (clip-higher); Ye et al. 2020, arXiv:1912.09729, eq. 5 (dual); MiniMax 2025, arXiv:2506.13585, eq. 4 and 5 (cispo);
    Zheng et al. 2025, arXiv:2507.18071, eq. 5 and 7 (sequence); ART's `importance_sampling_level` (geometric);
    Hilton et al. 2021, arXiv:2110.00641, eq. 3 (the decoupled ratios).
    """
    old_U = logprobs_U if uses.old_logprobs_U is None else uses.old_logprobs_U
    to_sampler_U = torch.where(uses.is_unknown_U, 0.0, old_U - uses.sampled_logprobs_U)
    differences_U = logprobs_U - old_U
    if config.ratio_to == "sampled":
        differences_U = differences_U + to_sampler_U
    own, shared = LEVELS[config.ratio]
    log_ratios_U = differences_U
    if shared:
        means_U = _trajectory_means(differences_U, uses.trajectories_U)
        log_ratios_U = own * differences_U + shared * means_U
    ratios_U = _exp(log_ratios_U)
    is_finite_U = log_ratios_U.abs() <= MAX_LOG_RATIO

    corrections_U, is_corrected_U = _corrections(to_sampler_U, uses, config)
    low = 1 - config.epsilon
    high = 1 + (config.epsilon if config.epsilon_high is None else config.epsilon_high)
    advantages_U = uses.advantages_U
    if config.clip == "cispo":
        clipped_U = ratios_U.clamp(low, high)
        is_clipped_U = (ratios_U > high) | (ratios_U < low)
        losses_U = -corrections_U * clipped_U * advantages_U * logprobs_U
        coefficients_U = -corrections_U * uses.weights_U * clipped_U * advantages_U
    else:
        objectives_U, is_clipped_U = _clip(ratios_U, advantages_U, low, high, config)
        losses_U = -corrections_U * objectives_U
        has_slope_U = ~is_clipped_U & is_finite_U
        slopes_U = torch.where(has_slope_U, -corrections_U * ratios_U * advantages_U, 0.0)
        slopes_U = slopes_U * uses.weights_U
        coefficients_U = own * slopes_U
        if shared:
            coefficients_U = coefficients_U + shared * _trajectory_means(
                slopes_U, uses.trajectories_U
            )

    kl_U = None
    if uses.reference_logprobs_U is not None:
        kl_U, kl_slopes_U = kl_estimate(logprobs_U, uses.reference_logprobs_U, config.kl_estimator)
        if config.kl_in == "loss":
            losses_U = losses_U + config.beta * kl_U
            coefficients_U = coefficients_U + config.beta * uses.weights_U * kl_slopes_U

    return TokenLoss(
        value=(losses_U * uses.weights_U).sum(),
        coefficients_U=coefficients_U,
        policy_ratios_U=ratios_U,
        is_clipped_U=is_clipped_U,
        importance_ratios_U=_exp(to_sampler_U),
        corrections_U=corrections_U,
        is_corrected_U=is_corrected_U,
        kl_U=kl_U,
    )


def kl_estimate(
    logprobs_U: torch.Tensor, reference_logprobs_U: torch.Tensor, estimator: str
) -> tuple[torch.Tensor, torch.Tensor]:
    """KL(policy || reference) of a token sampled from the policy, and its derivative by logprobs.

    With d = log reference - log policy: k1 = -d, k2 = d^2 / 2, k3 = exp(d) - d - 1.
    Source: Schulman, http://joschu.net/blog/kl-approx.html; k3 in GRPO: arXiv:2402.03300, eq. 4.
    """
    differences_U = reference_logprobs_U - logprobs_U
    cut_U = differences_U.clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO)
    if estimator == "k1":
        kl_U, slopes_U = -cut_U, torch.ones_like(cut_U)
    elif estimator == "k2":
        kl_U, slopes_U = cut_U.square() / 2, -cut_U
    else:
        kl_U, slopes_U = cut_U.exp() - cut_U - 1, 1 - cut_U.exp()
    return kl_U, torch.where(differences_U.abs() <= MAX_LOG_RATIO, slopes_U, 0.0)


def shape_advantages(
    advantages_U: torch.Tensor, kl_U: torch.Tensor, beta: float, is_unknown_U: torch.Tensor
) -> torch.Tensor:
    """advantage + beta * (mean KL - KL of the token); a token without sampled log-probability keeps its own.

    Source: ART's `kl_penalty_coef` with `kl_penalty_source="sample"`.
    """
    known_U = ~is_unknown_U
    mean = (kl_U * known_U).sum() / known_U.sum().clamp(min=1)
    return torch.where(known_U, advantages_U + beta * (mean - kl_U), advantages_U)


def _clip(
    ratios_U: torch.Tensor, advantages_U: torch.Tensor, low: float, high: float, config: LossConfig
) -> tuple[torch.Tensor, torch.Tensor]:
    """The clipped objective, and where it has no slope."""
    objectives_U = ratios_U * advantages_U
    if config.clip == "none":
        return objectives_U, torch.zeros_like(ratios_U, dtype=torch.bool)
    objectives_U = torch.minimum(objectives_U, ratios_U.clamp(low, high) * advantages_U)
    is_clipped_U = torch.where(
        advantages_U > 0, ratios_U > high, (ratios_U < low) & (advantages_U < 0)
    )
    if config.clip == "dual":
        is_beyond_U = (advantages_U < 0) & (ratios_U > config.dual_clip)
        objectives_U = torch.where(is_beyond_U, config.dual_clip * advantages_U, objectives_U)
        is_clipped_U = is_clipped_U | is_beyond_U
    return objectives_U, is_clipped_U


def _corrections(
    to_sampler_U: torch.Tensor, uses: Uses, config: LossConfig
) -> tuple[torch.Tensor, torch.Tensor]:
    """The off-policy weight of each use from log(pi_old / pi_sampled), and where it is not the ratio itself.

    Source: verl's docs/algo/rollout_corr.md (token and sequence level, truncate and mask); TRL 1.16,
    `vllm_importance_sampling_mode`.
    """
    if config.correction == "off" or config.ratio_to == "sampled":
        return torch.ones_like(to_sampler_U), torch.zeros_like(uses.is_unknown_U)
    if config.correction == "sequence_mask":
        to_sampler_U = _trajectory_means(to_sampler_U, uses.trajectories_U)
    ratios_U = _exp(to_sampler_U)
    is_above_U = ratios_U > config.correction_high
    if config.correction == "truncate":
        return ratios_U.clamp(max=config.correction_high), is_above_U
    is_outside_U = is_above_U | (ratios_U < config.correction_low)
    return ratios_U.masked_fill(is_outside_U, 0.0), is_outside_U


def _exp(log_ratios_U: torch.Tensor) -> torch.Tensor:
    return log_ratios_U.clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO).exp()


def _trajectory_means(values_U: torch.Tensor, trajectories_U: torch.Tensor) -> torch.Tensor:
    """For each use, the mean over the uses of its trajectory that are given."""
    num = int(trajectories_U.max()) + 1 if len(trajectories_U) else 0
    sums = values_U.new_zeros(num).index_add_(0, trajectories_U, values_U)
    counts = torch.bincount(trajectories_U, minlength=num)
    return (sums / counts.clamp(min=1))[trajectories_U]
