import math
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from art_protocol.wire import TrainConfig
from art_server.shared.advantages import (
    STD_FLOOR,
    group_advantages,
    is_identical,
    overlong_penalty,
    scale_over_batch,
    trained_tokens,
    turn_advantages,
)
from art_server.shared.trainer_messages import TokenSequence, TrainableGroup, TrainableTrajectory


def group(*rewards_of_turns: list[float], rewards: list[float] | None = None) -> TrainableGroup:
    """Trajectories of one turn of two tokens for each turn reward, and of one turn without any."""

    def sequence(of_turns: list[float]) -> TokenSequence:
        num_tokens = 1 + 2 * max(1, len(of_turns))
        return TokenSequence(
            token_ids=[5] * num_tokens,
            logprobs=[None, *[-1.0] * (num_tokens - 1)],
            rewards=[(2 * (turn + 1), reward) for turn, reward in enumerate(of_turns)],
        )

    return TrainableGroup(
        trajectories=[
            TrainableTrajectory(reward=reward, sequences=[sequence(of_turns)])
            for of_turns, reward in zip(rewards_of_turns, rewards or [0.0] * len(rewards_of_turns), strict=True)
        ]
    )


def advantages(groups: list[TrainableGroup], config: TrainConfig) -> list[list[list[float]] | None]:
    """Of each trajectory's tokens; None for a group without signal."""
    return [
        None if tokens is None else [[value for _, value in sequence] for (sequence,) in tokens]
        for tokens in trained_tokens(groups, config)
    ]


def test_advantages_are_deviations_in_population_standard_deviations() -> None:
    # mean 2, deviations -1, -1, 2, population variance (1 + 1 + 4) / 3 = 2
    std = math.sqrt(2)
    assert group_advantages([1.0, 1.0, 4.0]) == pytest.approx(
        [-1 / (std + STD_FLOOR), -1 / (std + STD_FLOOR), 2 / (std + STD_FLOOR)]
    )


@pytest.mark.parametrize("rewards", [[], [3.0], [0.1, 0.1, 0.1], [0.0, -0.0]])
def test_group_without_signal_has_no_advantages(rewards: list[float]) -> None:
    assert group_advantages(rewards) is None


def test_equal_rewards_without_a_baseline_are_their_own_advantages() -> None:
    """The mean of equal numbers can differ from them by rounding."""
    config = TrainConfig(baseline="none")
    assert group_advantages([0.1, 0.1, 0.1], config) == [0.1, 0.1, 0.1]


@pytest.mark.parametrize("scaling", ["group_std", "batch_std"])
def test_turn_rewards_beyond_arithmetic_are_refused(scaling: Any) -> None:
    with pytest.raises(FloatingPointError):
        turn_advantages(group([1e200], [0.0]), TrainConfig(scaling=scaling))


FLOAT32_MEANS = [0.699999988079071, 0.7, 0.7000000476837158]
"""0.7 as sums of scores in float32 give it."""

CONFIGS = [
    TrainConfig(baseline=baseline, scaling=scaling)
    for baseline in ("group_mean", "leave_one_out")
    for scaling in ("group_std", "batch_std", "none")
]


@pytest.mark.parametrize("config", CONFIGS, ids=lambda config: f"{config.baseline} {config.scaling}")
@pytest.mark.parametrize("rewards", [[0.3, 0.1 + 0.2], FLOAT32_MEANS, [1e6, 1e6 + 0.5], [0.0, 9e-7], [-1e-12, 1e-12]])
def test_rewards_that_differ_by_rounding_are_equal(rewards: list[float], config: TrainConfig) -> None:
    assert group_advantages(rewards, config) is None
    assert advantages([group([], *[[]] * (len(rewards) - 1), rewards=rewards)], config) == [None]
    of_turns = group(rewards, [])
    assert turn_advantages(of_turns, config) is None
    assert advantages([of_turns], config) == [None]


@pytest.mark.parametrize("config", CONFIGS, ids=lambda config: f"{config.baseline} {config.scaling}")
@pytest.mark.parametrize("rewards", [[0.5, 0.500002], [1e6, 1e6 + 2], [0.0, 2e-6], [-1e-3, 1e-3]])
def test_small_differences_above_rounding_are_a_signal(rewards: list[float], config: TrainConfig) -> None:
    low, high = group_advantages(rewards, config) or (0, 0)
    assert low < 0 < high


@pytest.mark.parametrize("scaling", ["group_std", "none"])
def test_without_baseline_rounding_around_zero_is_no_signal(scaling: Any) -> None:
    config = TrainConfig(baseline="none", scaling=scaling)
    assert group_advantages([1e-12, -3e-8], config) is None
    assert group_advantages(FLOAT32_MEANS, config) == FLOAT32_MEANS, "not divided by their noise"


def test_a_batch_whose_rewards_differ_by_rounding_has_no_signal() -> None:
    config = TrainConfig(baseline="none", scaling="batch_std")
    groups = [group([], rewards=[mean]) for mean in FLOAT32_MEANS]
    assert advantages(groups, config) == [None] * 3


KL, ENTROPY = TrainConfig(beta=0.1), TrainConfig(entropy_bonus=0.01)


@pytest.mark.parametrize("config", [KL, ENTROPY], ids=["kl", "entropy"])
def test_other_terms_of_the_loss_keep_groups_without_signal_at_advantage_zero(
    config: TrainConfig,
) -> None:
    dead, live = group([], [], rewards=[1.0, 1.0]), group([], [], rewards=[0.0, 1.0])
    single, of_turns = group([]), group([0.5], [0.5])
    kept, low_and_high, alone, turns = advantages([dead, live, single, of_turns], config)
    assert kept == turns == [[0.0, 0.0]] * 2 and alone == [[0.0, 0.0]]
    assert low_and_high == [pytest.approx([-1, -1], abs=1e-5), pytest.approx([1, 1], abs=1e-5)]
    assert advantages([dead], TrainConfig()) == [None]


@pytest.mark.parametrize("kl_in", ["reward", "advantage"])
def test_a_kl_penalty_in_rewards_or_advantages_leaves_groups_without_signal_out(
    kl_in: Any,
) -> None:
    dead = group([], [], rewards=[1.0, 1.0])
    config = TrainConfig(beta=0.1, kl_in=kl_in)
    assert advantages([dead], config) == [None]
    assert trained_tokens([dead], config, [0.0, 5.0]) == [None]
    with_entropy = TrainConfig(beta=0.1, kl_in=kl_in, entropy_bonus=0.1)
    (tokens,) = trained_tokens([dead], with_entropy, [0.0, 5.0])
    assert tokens == [[[(1, 0.0), (2, 0.0)]]] * 2, "a penalty alone is no signal"


def test_groups_of_equal_answers_are_distinguished_from_others() -> None:
    def answers(*token_ids: list[int]) -> TrainableGroup:
        rows: list[list[TokenSequence]] = []
        for answer in token_ids:
            sequence = TokenSequence(token_ids=[9, *answer], logprobs=[None, *[-1.0] * len(answer)])
            rows.append([sequence] if answer else [])
        return TrainableGroup(trajectories=[TrainableTrajectory(reward=i, sequences=r) for i, r in enumerate(rows)])

    assert is_identical(answers([1, 2], [1, 2], [1, 2]))
    assert is_identical(answers([1, 2], [], [1, 2])), "one could not be trained"
    for different in (
        answers([1, 2], [1, 2], [1, 3]),
        answers([1, 2], [1]),
        answers([1]),
        answers(),
    ):
        assert not is_identical(different)
    context = TokenSequence(token_ids=[1, 2], logprobs=[None, None])
    empty = TrainableTrajectory(reward=0, sequences=[context])
    assert not is_identical(TrainableGroup(trajectories=[empty, empty])), "nothing was sampled"


@pytest.mark.parametrize("rewards", [[1e308, -1e308], [math.nan, 1.0], [math.inf, 1.0]])
def test_rewards_beyond_arithmetic_are_refused(rewards: list[float]) -> None:
    with pytest.raises(FloatingPointError):
        group_advantages(rewards)


@settings(deadline=None)
@given(st.lists(st.integers(-100, 100), min_size=2, max_size=8), st.integers(-50, 50))
def test_advantages_sum_to_zero_and_ignore_an_offset(rewards: list[int], offset: int) -> None:
    advantages = group_advantages([float(reward) for reward in rewards])
    shifted = group_advantages([float(reward + offset) for reward in rewards])
    if advantages is None or shifted is None:
        assert advantages is shifted
        return
    assert sum(advantages) == pytest.approx(0, abs=1e-9)
    assert advantages == pytest.approx(shifted, abs=1e-9)


def test_leave_one_out_compares_with_the_others() -> None:
    config = TrainConfig(baseline="leave_one_out", scaling="none")
    # 1 - (1 + 4) / 2, 4 - 1
    assert group_advantages([1.0, 1.0, 4.0], config) == pytest.approx([-1.5, -1.5, 3.0])
    assert group_advantages([2.0], config) is None


def test_without_baseline_equal_rewards_are_not_divided_by_their_deviation_of_zero() -> None:
    config = TrainConfig(baseline="none", scaling="group_std")
    assert group_advantages([1.0, 1.0], config) == [1.0, 1.0]
    assert group_advantages([2.0], config) == [2.0]


def test_without_baseline_equal_rewards_carry_signal_but_zeros_do_not() -> None:
    config = TrainConfig(baseline="none", scaling="none")
    assert group_advantages([2.0, 2.0], config) == [2.0, 2.0]
    assert group_advantages([0.0, 0.0], config) is None


def test_batch_scaling_is_over_groups_with_signal() -> None:
    config = TrainConfig(scaling="batch_std")
    first, second = group_advantages([0.0, 2.0], config), group_advantages([0.0, 6.0], config)
    scaled = scale_over_batch([first, None, second], config)
    # Deviations -1, 1, -3, 3: variance 5.
    std = math.sqrt(5) + STD_FLOOR
    assert scaled[1] is None
    assert scaled[0] == pytest.approx([-1 / std, 1 / std])
    assert scaled[2] == pytest.approx([-3 / std, 3 / std])


@pytest.mark.parametrize(("num_tokens", "penalty"), [(80, 0.0), (85, -0.25), (100, -1.0), (150, -1.0)])
def test_soft_overlong_penalty_by_hand(num_tokens: int, penalty: float) -> None:
    config = TrainConfig(overlong="soft_penalty", overlong_length=100, overlong_buffer=20)
    assert overlong_penalty(num_tokens, config) == pytest.approx(penalty)


def test_turn_rewards_are_compared_over_the_group() -> None:
    config = TrainConfig(scaling="none")
    assert turn_advantages(group([1.0, 0.0], [2.0]), config) == [0.0, -1.0, 1.0]
    assert turn_advantages(group([], []), config) is None


def test_without_baseline_equal_turn_rewards_are_not_divided_by_their_deviation_of_zero() -> None:
    for scaling in ("group_std", "batch_std"):
        config = TrainConfig(baseline="none", scaling=scaling)
        assert turn_advantages(group([1.0], [1.0, 1.0]), config) == [1.0, 1.0, 1.0]


def test_turn_rewards_have_the_baseline_and_the_scaling_of_rewards() -> None:
    def computed(**config: Any) -> list[float] | None:
        return turn_advantages(group([0.0], [3.0]), TrainConfig(**config))

    assert computed() == pytest.approx([-1.0, 1.0], abs=1e-5)
    assert computed(scaling="none", baseline="leave_one_out") == [-3.0, 3.0]
    assert computed(scaling="batch_std") == [-1.5, 1.5], "the batch scales them later"


def test_batch_scaling_of_turn_rewards_is_over_all_groups() -> None:
    """Deviations -1, 1, -3, 3, as in the test of rewards; the last group's are equal."""
    groups = [group([0.0], [2.0]), group([0.0], [6.0]), group([4.0], [4.0])]
    std = math.sqrt(5) + STD_FLOOR
    first, second, dead = advantages(groups, TrainConfig(scaling="batch_std"))
    assert first == [pytest.approx([-1 / std] * 2), pytest.approx([1 / std] * 2)]
    assert second == [pytest.approx([-3 / std] * 2), pytest.approx([3 / std] * 2)]
    assert dead is None


def test_where_only_the_batch_has_a_baseline_groups_of_equal_rewards_are_trained() -> None:
    """REINFORCE++: rewards 0, 0, 1, 1 have mean and standard deviation 1/2."""
    config = TrainConfig(baseline="none", scaling="batch_std")
    zeros, ones = group([], [], rewards=[0.0, 0.0]), group([], [], rewards=[1.0, 1.0])
    low, high = advantages([zeros, ones], config)
    assert low == [pytest.approx([-1.0] * 2, abs=1e-5)] * 2
    assert high == [pytest.approx([1.0] * 2, abs=1e-5)] * 2
    for equal in (zeros, ones):
        assert advantages([equal, equal], config) == [None, None], "the whole batch is equal"
