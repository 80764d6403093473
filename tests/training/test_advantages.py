import math

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from art_server.training.advantages import STD_FLOOR, group_advantages


def test_advantages_are_deviations_in_population_standard_deviations() -> None:
    # mean 2, deviations -1, -1, 2, population variance (1 + 1 + 4) / 3 = 2
    std = math.sqrt(2)
    assert group_advantages([1.0, 1.0, 4.0]) == pytest.approx(
        [-1 / (std + STD_FLOOR), -1 / (std + STD_FLOOR), 2 / (std + STD_FLOOR)]
    )


@pytest.mark.parametrize("rewards", [[], [3.0], [0.1, 0.1, 0.1], [0.0, -0.0]])
def test_group_without_signal_has_no_advantages(rewards: list[float]) -> None:
    assert group_advantages(rewards) is None


def test_rewards_that_differ_by_rounding_get_small_advantages() -> None:
    advantages = group_advantages([0.3, 0.1 + 0.2])
    assert advantages is not None
    assert max(map(abs, advantages)) < 1e-9


@pytest.mark.parametrize("rewards", [[1e308, -1e308], [math.nan, 1.0], [math.inf, 1.0]])
def test_rewards_beyond_arithmetic_are_refused(rewards: list[float]) -> None:
    with pytest.raises(FloatingPointError, match="reward"):
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
