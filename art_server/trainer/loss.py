"""Losses as coefficients: a pure function that computes the loss and its derivative by each log-probability.

Nothing here has an autograd graph. The trainer runs backward on sum(coefficient * logprob), which has the loss's
gradient. Denominators are in the tokens' weights, so the losses of a step's parts add up. Sequence-level ratios and
masks need all tokens of a trajectory at once (`needs_whole_trajectories`).

docs/training.md has the formulas in one table.
"""

from dataclasses import dataclass

import torch

from art_protocol.wire import LossConfig
from art_server.trainer.batches import SampledTokens

MAX_LOG_RATIO = 20.0
"""Differences of log-probabilities are clamped to +-20 before exp: e^20 is far outside every clip, and its square is
still finite in float32."""

LEVELS = {"token": (1.0, 0.0), "sequence": (0.0, 1.0), "geometric": (0.5, 0.5)}
"""For each `LossConfig.ratio`, the shares of the token's own log-ratio and of its trajectory's mean."""


@dataclass(frozen=True, slots=True)
class TokenLoss:
    """A loss over S sampled tokens, without autograd graph."""

    value: torch.Tensor
    """Scalar: these tokens' part of the step's loss, without the entropy bonus. Parts add up."""
    coefficients_S: torch.Tensor
    """dL/dlogprob."""
    policy_ratios_S: torch.Tensor
    """The ratio that the clip bounds, at the configured level: pi_new / pi_old, or pi_new / pi_sampled (`ratio_to`)."""
    is_clipped_S: torch.Tensor
    """bool: the clip is active."""
    importance_ratios_S: torch.Tensor
    """pi_old / pi_sampled of each token, before any truncation; 1 where pi_sampled is unknown."""
    corrections_S: torch.Tensor
    """The off-policy weight that multiplies the policy term."""
    is_corrected_S: torch.Tensor
    """bool: the weight differs from the ratio, because it was truncated or masked."""
    teacher_weights_S: torch.Tensor
    """The weight of a token's divergence from its teacher: the correction times min(pi_new / pi_old, correction_high) of the
    token itself."""
    kl_S: torch.Tensor | None
    """Estimate of each token's KL divergence from the reference; None without reference."""


def needs_whole_trajectories(config: LossConfig) -> bool:
    if config.objective == "likelihood":
        return False
    return config.ratio != "token" or config.correction == "sequence_mask"


def policy_loss(
    logprobs_S: torch.Tensor,
    tokens: SampledTokens,
    config: LossConfig,
) -> TokenLoss:
    """The loss sum(weight * (-correction * objective + beta * KL)) over the tokens, and its coefficients.

    The clip bounds pi_new / pi_old. pi_old is the trainer's policy at the start of the job; if `tokens.old_logprobs_S`
    is None, pi_old is pi_new itself, detached. The correction is the weight pi_old / pi_sampled.
    Source: Schulman et al. 2017, arXiv:1707.06347, eq. 7 (two_sided); Yu et al. 2025, arXiv:2503.14476, eq. 10
    (clip-higher); Ye et al. 2020, arXiv:1912.09729, eq. 5 (dual); MiniMax 2025, arXiv:2506.13585, eq. 4 and 5 (cispo);
    Zheng et al. 2025, arXiv:2507.18071, eq. 5 and 7 (sequence); ART's `importance_sampling_level` (geometric);
    Hilton et al. 2021, arXiv:2110.00641, eq. 3 (the decoupled ratios).
    """
    old_S = logprobs_S if tokens.old_logprobs_S is None else tokens.old_logprobs_S
    to_sampler_S = torch.where(tokens.is_unknown_S, 0.0, old_S - tokens.sampled_logprobs_S)
    differences_S = logprobs_S - old_S
    if config.ratio_to == "sampled":
        differences_S = differences_S + to_sampler_S
    own, shared = LEVELS[config.ratio]
    log_ratios_S = differences_S
    if shared:
        means_S = _trajectory_means(differences_S, tokens.trajectories_S)
        log_ratios_S = own * differences_S + shared * means_S
    ratios_S = _exp(log_ratios_S)
    # Beyond the clamp of `_exp` the ratio is constant: no slope.
    is_finite_S = log_ratios_S.abs() <= MAX_LOG_RATIO

    corrections_S, is_corrected_S = _corrections(to_sampler_S, tokens, config)
    low = 1 - config.epsilon
    high = 1 + (config.epsilon if config.epsilon_high is None else config.epsilon_high)
    advantages_S = tokens.advantages_S
    if config.objective == "likelihood":
        is_clipped_S = torch.zeros_like(tokens.is_unknown_S)
        losses_S = -advantages_S * logprobs_S
        coefficients_S = -tokens.weights_S * advantages_S
    elif config.clip == "cispo":
        clipped_S = ratios_S.clamp(low, high)
        is_clipped_S = (ratios_S > high) | (ratios_S < low)
        losses_S = -corrections_S * clipped_S * advantages_S * logprobs_S
        coefficients_S = -corrections_S * tokens.weights_S * clipped_S * advantages_S
    else:
        objectives_S, is_clipped_S = _clip(ratios_S, advantages_S, low, high, config)
        losses_S = -corrections_S * objectives_S
        has_slope_S = ~is_clipped_S & is_finite_S
        slopes_S = torch.where(has_slope_S, -corrections_S * ratios_S * advantages_S, 0.0)
        slopes_S = slopes_S * tokens.weights_S
        coefficients_S = own * slopes_S
        # The mean of n log-ratios changes by 1/n of each of them, so each token gets the mean of all slopes.
        if shared:
            coefficients_S = coefficients_S + shared * _trajectory_means(slopes_S, tokens.trajectories_S)

    kl_S = None
    if tokens.reference_logprobs_S is not None:
        kl_S, kl_slopes_S = kl_estimate(logprobs_S, tokens.reference_logprobs_S, config.kl_estimator)
        if config.kl_in == "loss":
            losses_S = losses_S + config.beta * kl_S
            coefficients_S = coefficients_S + config.beta * tokens.weights_S * kl_slopes_S

    return TokenLoss(
        value=(losses_S * tokens.weights_S).sum(),
        coefficients_S=coefficients_S,
        policy_ratios_S=ratios_S,
        is_clipped_S=is_clipped_S,
        importance_ratios_S=_exp(to_sampler_S),
        corrections_S=corrections_S,
        is_corrected_S=is_corrected_S,
        teacher_weights_S=corrections_S * _exp(differences_S).clamp(max=config.correction_high),
        kl_S=kl_S,
    )


def kl_estimate(
    logprobs_S: torch.Tensor, reference_logprobs_S: torch.Tensor, estimator: str
) -> tuple[torch.Tensor, torch.Tensor]:
    """An estimate of KL(policy || reference) for each token sampled from the policy, and its derivative by logprobs.

    With d = log reference - log policy: k1 = -d, k2 = d^2 / 2, k3 = exp(d) - d - 1.
    Source: Schulman, http://joschu.net/blog/kl-approx.html; k3 in GRPO: arXiv:2402.03300, eq. 4.
    """
    differences_S = reference_logprobs_S - logprobs_S
    cut_S = differences_S.clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO)
    if estimator == "k1":
        kl_S, slopes_S = -cut_S, torch.ones_like(cut_S)
    elif estimator == "k2":
        kl_S, slopes_S = cut_S.square() / 2, -cut_S
    else:
        kl_S, slopes_S = cut_S.exp() - cut_S - 1, 1 - cut_S.exp()
    return kl_S, torch.where(differences_S.abs() <= MAX_LOG_RATIO, slopes_S, 0.0)


def shape_advantages(
    advantages_S: torch.Tensor, kl_S: torch.Tensor, beta: float, is_kept_S: torch.Tensor
) -> torch.Tensor:
    """advantage + beta * (mean KL - KL of the token). Tokens with `is_kept_S` keep their advantage and are not in the
    mean: tokens without sampled log-probability, and tokens of groups without signal.

    Source: ART's `kl_penalty_coef` with `kl_penalty_source="sample"`.
    """
    shaped_S = ~is_kept_S
    mean = (kl_S * shaped_S).sum() / shaped_S.sum().clamp(min=1)
    return torch.where(shaped_S, advantages_S + beta * (mean - kl_S), advantages_S)


def _clip(
    ratios_S: torch.Tensor, advantages_S: torch.Tensor, low: float, high: float, config: LossConfig
) -> tuple[torch.Tensor, torch.Tensor]:
    """The clipped objective, and a mask of the tokens where it has no slope."""
    objectives_S = ratios_S * advantages_S
    if config.clip == "none":
        return objectives_S, torch.zeros_like(ratios_S, dtype=torch.bool)
    objectives_S = torch.minimum(objectives_S, ratios_S.clamp(low, high) * advantages_S)
    is_clipped_S = torch.where(advantages_S > 0, ratios_S > high, (ratios_S < low) & (advantages_S < 0))
    if config.clip == "dual":
        is_beyond_S = (advantages_S < 0) & (ratios_S > config.dual_clip)
        objectives_S = torch.where(is_beyond_S, config.dual_clip * advantages_S, objectives_S)
        is_clipped_S = is_clipped_S | is_beyond_S
    return objectives_S, is_clipped_S


def _corrections(
    to_sampler_S: torch.Tensor, tokens: SampledTokens, config: LossConfig
) -> tuple[torch.Tensor, torch.Tensor]:
    """The off-policy weight of each token from log(pi_old / pi_sampled), and a mask where it differs from the ratio.

    Source: verl's docs/algo/rollout_corr.md (token and sequence level, truncate and mask); TRL 1.16,
    `vllm_importance_sampling_mode`.
    """
    is_off = config.correction == "off" or config.objective == "likelihood"
    if is_off or config.ratio_to == "sampled":
        return torch.ones_like(to_sampler_S), torch.zeros_like(tokens.is_unknown_S)
    if config.correction == "sequence_mask":
        to_sampler_S = _trajectory_means(to_sampler_S, tokens.trajectories_S)
    ratios_S = _exp(to_sampler_S)
    is_above_S = ratios_S > config.correction_high
    if config.correction == "truncate":
        return ratios_S.clamp(max=config.correction_high), is_above_S
    is_outside_S = is_above_S | (ratios_S < config.correction_low)
    return ratios_S.masked_fill(is_outside_S, 0.0), is_outside_S


def _exp(log_ratios_S: torch.Tensor) -> torch.Tensor:
    return log_ratios_S.clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO).exp()


def _trajectory_means(values_S: torch.Tensor, trajectories_S: torch.Tensor) -> torch.Tensor:
    """For each token, the mean of `values_S` over its trajectory."""
    num = int(trajectories_S.max()) + 1 if len(trajectories_S) else 0
    sums = values_S.new_zeros(num).index_add_(0, trajectories_S, values_S)
    counts = torch.bincount(trajectories_S, minlength=num)
    return (sums / counts.clamp(min=1))[trajectories_S]
