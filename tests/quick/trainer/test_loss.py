import dataclasses
import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from art_protocol.wire import PRESETS, TrainConfig
from art_server.trainer.batches import SampledTokens
from art_server.trainer.loss import MAX_LOG_RATIO, TokenLoss, policy_loss, shape_advantages


def tensor(*values: float) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.float64)


def sampled_tokens(
    sampled: torch.Tensor,
    advantages: torch.Tensor,
    weights: float | torch.Tensor = 1.0,
    trajectories: list[int] | None = None,
    old: torch.Tensor | None = None,
    reference: torch.Tensor | None = None,
) -> SampledTokens:
    """Tokens with known log-probabilities, by default of one trajectory."""
    return SampledTokens(
        sampled_logprobs_S=sampled,
        is_unknown_S=torch.zeros(len(sampled), dtype=torch.bool),
        advantages_S=advantages,
        weights_S=torch.ones_like(sampled) * weights,
        trajectories_S=torch.tensor(trajectories or [0] * len(sampled), dtype=torch.int64),
        is_fresh_S=torch.zeros(len(sampled), dtype=torch.bool),
        is_stale_S=torch.zeros(len(sampled), dtype=torch.bool),
        allowances_S=torch.zeros(len(sampled)),
        old_logprobs_S=old,
        reference_logprobs_S=reference,
    )


def grpo_loss(
    logprobs: torch.Tensor,
    sampled: torch.Tensor,
    advantages: torch.Tensor,
    reference: torch.Tensor | None,
    config: TrainConfig,
    num_tokens: int,
) -> TokenLoss:
    """The policy has moved since the start of the job; the sampler was the policy then."""
    started = sampled_tokens(sampled, advantages, 1 / num_tokens, old=sampled, reference=reference)
    return policy_loss(logprobs, started, config)


@pytest.mark.parametrize(
    ("ratio", "advantage", "objective", "coefficient"),
    [
        (1.0, 2.0, 2.0, -2.0),
        (1.1, 2.0, 2.2, -2.2),
        (1.5, 2.0, 2.4, 0.0),  # clipped above: 1.2 * 2
        (0.5, 2.0, 1.0, -1.0),  # below the clip with A > 0: still pulled up
        (0.5, -2.0, -1.6, 0.0),  # clipped below: 0.8 * -2
        (1.5, -2.0, -3.0, 3.0),  # above the clip with A < 0: still pushed down
        (1.5, 0.0, 0.0, 0.0),
    ],
)
def test_clip_by_hand(ratio: float, advantage: float, objective: float, coefficient: float) -> None:
    sampled = tensor(-3.0)
    loss = grpo_loss(sampled + math.log(ratio), sampled, tensor(advantage), None, TrainConfig(), num_tokens=4)
    assert float(loss.value) == pytest.approx(-objective / 4)
    assert float(loss.coefficients_S[0]) == pytest.approx(coefficient / 4)
    assert float(loss.policy_ratios_S[0]) == pytest.approx(ratio)
    assert bool(loss.is_clipped_S[0]) == (coefficient == 0.0 and advantage != 0.0)
    assert loss.kl_S is None


def test_upper_clip_may_be_wider_than_the_lower() -> None:
    config = TrainConfig(epsilon=0.1, epsilon_high=0.5)
    sampled, ratios = tensor(-1.0, -1.0, -1.0), tensor(1.4, 1.6, 0.85).log()
    loss = grpo_loss(sampled + ratios, sampled, tensor(1.0, 1.0, -1.0), None, config, num_tokens=1)
    assert loss.is_clipped_S.tolist() == [False, True, True]
    assert float(loss.value) == pytest.approx(-(1.4 + 1.5 - 0.9))


def test_kl_penalty_by_hand() -> None:
    # ref - new = ln 2: k3 = 2 - ln 2 - 1, slope 1 - 2
    logprobs = tensor(-2.0)
    loss = grpo_loss(logprobs, logprobs, tensor(0.0), logprobs + math.log(2), TrainConfig(beta=0.5), num_tokens=2)
    assert loss.kl_S is not None
    assert float(loss.kl_S[0]) == pytest.approx(1 - math.log(2))
    assert float(loss.value) == pytest.approx(0.5 * (1 - math.log(2)) / 2)
    assert float(loss.coefficients_S[0]) == pytest.approx(0.5 * -1 / 2)


def test_absurd_ratios_stay_finite() -> None:
    loss = grpo_loss(
        tensor(0.0, -1e4),
        tensor(-1e4, 0.0),
        tensor(-1.0, 1.0),
        tensor(-1e4, 0.0),
        TrainConfig(beta=1),
        1,
    )
    assert loss.value.isfinite()
    assert loss.coefficients_S.tolist() == [0.0, 0.0]


LOGPROB = st.floats(-6.0, 0.0)
OFFSET = st.one_of(
    st.floats(-3.0, 3.0),
    st.sampled_from([0.0, math.log(1.2), math.log(0.8), math.log(1.3), MAX_LOG_RATIO + 1, -MAX_LOG_RATIO - 1]),
)
TOKEN = st.tuples(LOGPROB, OFFSET, st.floats(-3.0, 3.0), OFFSET)


@settings(deadline=None)
@given(
    tokens=st.lists(TOKEN, min_size=1, max_size=8),
    beta=st.sampled_from([0.0, 0.04, 1.0]),
    epsilon_high=st.sampled_from([None, 0.3]),
)
def test_coefficients_are_the_autograd_of_the_loss(
    tokens: list[tuple[float, float, float, float]], beta: float, epsilon_high: float | None
) -> None:
    logprobs, offsets, advantages, reference_offsets = (tensor(*column) for column in zip(*tokens, strict=True))
    sampled = logprobs - offsets
    reference = logprobs + reference_offsets if beta > 0 else None
    # Off the kinks of the clip, where the loss has no derivative.
    upper = 0.2 if epsilon_high is None else epsilon_high
    ratios = offsets.exp()
    if ((ratios - 0.8).abs() < 1e-9).any() or ((ratios - 1 - upper).abs() < 1e-9).any():
        advantages = advantages.abs().clamp(min=0.1) * torch.where(ratios < 1, 1.0, -1.0)
    config = TrainConfig(beta=beta, epsilon=0.2, epsilon_high=epsilon_high)

    loss = grpo_loss(logprobs, sampled, advantages, reference, config, num_tokens=5)

    leaf = logprobs.clone().requires_grad_()
    expected = -_plain_objective(leaf, sampled, advantages, 0.8, 1 + upper).sum()
    if reference is not None:
        difference = (reference - leaf).clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO)
        expected = expected + beta * (torch.expm1(difference) - difference).sum()
    expected = expected / 5
    expected.backward()
    torch.testing.assert_close(loss.value, expected.detach())
    assert leaf.grad is not None
    torch.testing.assert_close(loss.coefficients_S, leaf.grad)


def _plain_objective(
    logprobs: torch.Tensor, sampled: torch.Tensor, advantages: torch.Tensor, low: float, high: float
) -> torch.Tensor:
    """The clipped objective the other way round: per sign of the advantage, one bound of the ratio."""
    ratios = (logprobs - sampled).clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO).exp()
    pulled_up = advantages * ratios.clamp(max=high)
    pushed_down = advantages * ratios.clamp(min=low)
    return torch.where(advantages >= 0, pulled_up, pushed_down)


@settings(deadline=None)
@given(tokens=st.lists(TOKEN, min_size=2, max_size=8), cut=st.integers(1, 7))
def test_shares_of_a_split_add_up(tokens: list[tuple[float, float, float, float]], cut: int) -> None:
    logprobs, offsets, advantages, reference_offsets = (tensor(*column) for column in zip(*tokens, strict=True))
    sampled, reference = logprobs - offsets, logprobs + reference_offsets
    whole, *parts = [
        grpo_loss(
            logprobs[part],
            sampled[part],
            advantages[part],
            reference[part],
            TrainConfig(beta=0.1),
            num_tokens=len(tokens),
        )
        for part in (slice(None), slice(None, cut), slice(cut, None))
    ]
    torch.testing.assert_close(whole.value, parts[0].value + parts[1].value)
    torch.testing.assert_close(whole.coefficients_S, torch.cat([part.coefficients_S for part in parts]))


def by_hand(config: TrainConfig, *tokens: tuple[float, float, float], **options) -> TokenLoss:
    """Tokens of (pi_new / pi_old, advantage, logprob); the sampler was the policy at the start."""
    ratios, advantages, logprobs = (tensor(*column) for column in zip(*tokens, strict=True))
    old = logprobs - ratios.log()
    return policy_loss(logprobs, sampled_tokens(old, advantages, old=old, **options), config)


@pytest.mark.parametrize(
    ("ratio", "advantage", "value", "coefficient"),
    [
        # ART's default, -clip(r, 0, 5) A log pi, at log pi = -2; the weight has no gradient.
        (1.0, 1.0, 2.0, -1.0),
        (3.0, 1.0, 6.0, -3.0),
        (7.0, 1.0, 10.0, -5.0),
        (7.0, -1.0, -10.0, 5.0),
        (0.01, -1.0, -0.02, 0.01),
    ],
)
def test_cispo_by_hand(ratio: float, advantage: float, value: float, coefficient: float) -> None:
    loss = by_hand(TrainConfig(preset="cispo"), (ratio, advantage, -2.0))
    assert float(loss.value) == pytest.approx(value)
    assert loss.coefficients_S.tolist() == pytest.approx([coefficient])
    assert loss.is_clipped_S.tolist() == [ratio > 5]


def test_dual_clip_bounds_what_a_bad_token_costs() -> None:
    loss = by_hand(TrainConfig(clip="dual", dual_clip=3.0), (2.9, -1.0, -1.0), (3.1, -1.0, -1.0))
    assert float(loss.value) == pytest.approx(2.9 + 3.0)
    assert loss.coefficients_S.tolist() == pytest.approx([2.9, 0.0])
    assert loss.is_clipped_S.tolist() == [False, True]


def test_sequence_ratio_is_the_geometric_mean_and_its_slope_is_shared() -> None:
    # Log-ratios ln 2 and 0: s = sqrt 2; the second trajectory is on its own.
    config = TrainConfig(ratio="sequence", clip="none")
    loss = by_hand(config, (2.0, 1.0, -1.0), (1.0, 1.0, -1.0), (4.0, -1.0, -1.0), trajectories=[0, 0, 1])
    root = math.sqrt(2)
    assert loss.policy_ratios_S.tolist() == pytest.approx([root, root, 4.0])
    assert float(loss.value) == pytest.approx(-2 * root + 4)
    # d(-2 s)/dlogp = -2 s / 2 for each of the two tokens.
    assert loss.coefficients_S.tolist() == pytest.approx([-root, -root, 4.0])


def test_geometric_ratio_is_the_root_of_token_and_sequence() -> None:
    config = TrainConfig(ratio="geometric", clip="none")
    loss = by_hand(config, (4.0, 1.0, -1.0), (1.0, 1.0, -1.0))
    # s = 2: sqrt(4 * 2), sqrt(1 * 2).
    first, second = math.sqrt(8), math.sqrt(2)
    assert loss.policy_ratios_S.tolist() == pytest.approx([first, second])
    mean = (first + second) / 2
    assert loss.coefficients_S.tolist() == pytest.approx([-(first + mean) / 2, -(second + mean) / 2])


@pytest.mark.parametrize(
    ("correction", "corrections", "is_corrected"),
    [
        ("off", [1.0, 1.0, 1.0], [False, False, False]),
        ("truncate", [2.0, 1.0, 0.25], [True, False, False]),
        ("mask", [0.0, 1.0, 0.0], [True, False, True]),
        # Geometric means of the two trajectories: 2 and 0.25.
        ("sequence_mask", [2.0, 2.0, 0.0], [False, False, True]),
    ],
)
def test_corrections_by_hand(correction: str, corrections: list[float], is_corrected: list[bool]) -> None:
    """On a first pass nothing is clipped, whatever separates sampler and trainer: that is the weight's business."""
    config = TrainConfig(
        correction=correction,  # pyright: ignore[reportArgumentType]
        correction_high=2.0,
        correction_low=0.5,
    )
    ratios, logprobs = tensor(4.0, 1.0, 0.25), tensor(-1.0, -1.0, -1.0)
    sampled = sampled_tokens(logprobs - ratios.log(), tensor(1.0, 1.0, 1.0), trajectories=[0, 0, 1])
    loss = policy_loss(logprobs, sampled, config)
    assert loss.corrections_S.tolist() == pytest.approx(corrections)
    assert loss.is_corrected_S.tolist() == is_corrected
    assert loss.importance_ratios_S.tolist() == pytest.approx([4.0, 1.0, 0.25])
    assert loss.policy_ratios_S.tolist() == [1.0, 1.0, 1.0]
    assert not loss.is_clipped_S.any()
    assert loss.coefficients_S.tolist() == pytest.approx([-weight for weight in corrections])


def test_ratio_to_the_sampler_clips_what_separates_it_and_weighs_nothing() -> None:
    config = TrainConfig(ratio_to="sampled")
    ratios, logprobs = tensor(4.0, 1.0, 0.25), tensor(-1.0, -1.0, -1.0)
    sampled = sampled_tokens(logprobs - ratios.log(), tensor(1.0, 1.0, 1.0))
    loss = policy_loss(logprobs, sampled, config)
    assert loss.policy_ratios_S.tolist() == pytest.approx([4.0, 1.0, 0.25])
    assert loss.corrections_S.tolist() == [1.0, 1.0, 1.0]
    assert loss.coefficients_S.tolist() == pytest.approx([0.0, -1.0, -0.25])
    assert TrainConfig.model_validate_json(config.model_dump_json()) == config
    with pytest.raises(ValueError, match="correction"):
        TrainConfig(ratio_to="sampled", correction="truncate")


def test_later_steps_clip_against_the_start_and_keep_the_weight_of_the_start() -> None:
    # pi_new / pi_old is 1.5 and 0.5, pi_old / pi_sampled 4 and 0.5.
    old, new = tensor(-2.0, -2.0), tensor(-2.0, -2.0) + tensor(1.5, 0.5).log()
    sampled = sampled_tokens(old - tensor(4.0, 0.5).log(), tensor(-1.0, 1.0), old=old)
    loss = policy_loss(new, sampled, TrainConfig())
    assert loss.policy_ratios_S.tolist() == pytest.approx([1.5, 0.5])
    assert loss.corrections_S.tolist() == pytest.approx([2.0, 0.5])
    assert loss.coefficients_S.tolist() == pytest.approx([2.0 * 1.5, -0.5 * 0.5])


@pytest.mark.parametrize(
    ("estimator", "value", "slope"),
    [("k1", -math.log(2), 1.0), ("k2", math.log(2) ** 2 / 2, -math.log(2))],
)
def test_kl_estimators_by_hand(estimator: str, value: float, slope: float) -> None:
    # ref - new = ln 2; k3 stands above.
    config = TrainConfig(beta=0.5, kl_estimator=estimator)  # pyright: ignore[reportArgumentType]
    logprobs = tensor(-2.0)
    loss = policy_loss(logprobs, sampled_tokens(logprobs, tensor(0.0), reference=logprobs + math.log(2)), config)
    assert float(loss.value) == pytest.approx(0.5 * value)
    assert float(loss.coefficients_S[0]) == pytest.approx(0.5 * slope)


def test_kl_in_the_advantage_is_centred_and_leaves_the_loss_alone() -> None:
    shaped = shape_advantages(tensor(1.0, -1.0, 2.0), tensor(0.2, 0.6, 0.0), 0.5, torch.tensor([False, False, True]))
    assert shaped.tolist() == pytest.approx([1.1, -1.1, 2.0])
    logprobs = tensor(-2.0)
    config = TrainConfig(beta=0.5, kl_in="advantage")
    loss = policy_loss(logprobs, sampled_tokens(logprobs, tensor(0.0), reference=logprobs + 1), config)
    assert loss.coefficients_S.tolist() == [0.0]
    assert loss.kl_S is not None


def test_unknown_log_probability_stands_at_the_policys_own() -> None:
    unknown = dataclasses.replace(
        sampled_tokens(tensor(0.0, -1.0), tensor(1.0, 1.0)),
        is_unknown_S=torch.tensor([True, False]),
    )
    loss = policy_loss(tensor(-5.0, -1.0), unknown, TrainConfig())
    assert loss.policy_ratios_S.tolist() == loss.importance_ratios_S.tolist() == [1.0, 1.0]
    assert loss.coefficients_S.tolist() == [-1.0, -1.0]


def test_presets_are_the_published_values() -> None:
    values = {
        name: TrainConfig(preset=name)  # pyright: ignore[reportArgumentType]
        for name in PRESETS
    }
    assert TrainConfig() == values["grpo"]
    assert {(v.ratio_to, v.correction, v.correction_high) for v in values.values()} == {("start", "truncate", 2.0)}
    grpo = values["grpo"]
    assert (grpo.epsilon, grpo.epsilon_high, grpo.beta, grpo.normalisation) == (
        0.2,
        None,
        0,
        "tokens",
    )
    assert (values["dr_grpo"].scaling, values["dr_grpo"].normalisation) == ("none", "constant")
    assert (values["dapo"].epsilon, values["dapo"].epsilon_high) == (0.2, 0.28)
    gspo = values["gspo"]
    assert (gspo.ratio, gspo.epsilon, gspo.epsilon_high) == ("sequence", 3e-4, 4e-4)
    assert gspo.normalisation == "trajectory"
    assert (values["cispo"].epsilon, values["cispo"].epsilon_high) == (1.0, 4.0)
    assert (values["rloo"].baseline, values["rloo"].clip) == ("leave_one_out", "none")
    assert values["reinforce_pp"].scaling == "batch_std"
    assert values["ppo"].clip == "dual"


def test_given_fields_override_a_preset_and_survive_the_wire() -> None:
    config = TrainConfig(preset="gspo", epsilon=0.1)
    assert (config.ratio, config.epsilon, config.epsilon_high) == ("sequence", 0.1, 4e-4)
    assert TrainConfig.model_validate_json(config.model_dump_json()) == config
