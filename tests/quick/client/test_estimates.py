"""The formulas of estimates, against published tables, numbers worked by hand and an independent integral."""

import math
import statistics

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from art.estimates import Estimate, estimate, estimate_differences, estimate_rewards, t_probability, t_quantile

TABLE = {
    1: 12.706,
    2: 4.303,
    3: 3.182,
    4: 2.776,
    5: 2.571,
    9: 2.262,
    10: 2.228,
    29: 2.045,
    30: 2.042,
    60: 2.000,
    120: 1.980,
}
"""The two-sided 95% quantiles of every statistics book."""


@pytest.mark.parametrize(("degrees", "quantile"), TABLE.items())
def test_quantiles_are_those_of_the_tables(degrees: int, quantile: float) -> None:
    assert t_quantile(degrees) == pytest.approx(quantile, abs=5.1e-4)


def test_quantiles_with_a_closed_form() -> None:
    """One degree: tan(0.475 pi), as Student's distribution is then Cauchy's. Two: 0.95 * sqrt(2 / (1 - 0.95^2))."""
    assert t_quantile(1) == pytest.approx(math.tan(0.475 * math.pi), rel=1e-12)
    assert t_quantile(2) == pytest.approx(0.95 * math.sqrt(2 / (1 - 0.95**2)), rel=1e-12)


def test_the_quantile_approaches_that_of_the_normal_distribution() -> None:
    normal = statistics.NormalDist().inv_cdf(0.975)
    assert normal < t_quantile(5000) < normal + 1e-3


@given(st.integers(1, 200), st.floats(0, 20))
def test_the_probability_is_the_integral_of_the_density(degrees: int, t: float) -> None:
    """With Simpson's rule over the density, from the gamma function."""
    constant = math.lgamma((degrees + 1) / 2) - math.lgamma(degrees / 2)
    places = np.linspace(0, t, 4001)
    density = np.exp(constant - (degrees + 1) / 2 * np.log1p(places**2 / degrees))
    density /= math.sqrt(degrees * math.pi)
    weights = np.ones(4001)
    weights[1:-1:2], weights[2:-1:2] = 4, 2
    integral = 2 * float(weights @ density) * t / 4000 / 3
    assert t_probability(t, degrees) == pytest.approx(integral, abs=1e-9)


def test_an_interval_worked_by_hand() -> None:
    """Rewards 0, 0.5, 1, 1, 0: mean 0.5, s = sqrt(1 / 4) = 0.5, error 0.5 / sqrt(5), t = 2.776 for 4 degrees."""
    reward = estimate([0.0, 0.5, 1.0, 1.0, 0.0])
    assert (reward.mean, reward.num_scenarios) == (0.5, 5)
    assert reward.standard_error == pytest.approx(0.22360679775)
    assert reward.interval == pytest.approx((0.5 - 0.62083, 0.5 + 0.62083), abs=5e-5)
    assert str(reward) == "0.5 (95% -0.1208 to 1.121, n=5)"


def test_the_interval_holds_the_true_mean_in_95_of_100_samples() -> None:
    """2,000 samples of six normal values: 1,900 expected, with a standard deviation of 9.7."""
    samples = np.random.default_rng(0).normal(3.0, 2.0, (2000, 6))
    held = sum(low <= 3.0 <= high for low, high in (estimate(list(row)).interval for row in samples))
    assert 1860 <= held <= 1940


def test_one_value_has_no_known_error_and_none_has_no_mean() -> None:
    assert estimate([0.25]) == Estimate(0.25, 1, math.nan, (-math.inf, math.inf))
    with pytest.raises(ValueError):
        estimate([])


def test_equal_values_have_an_interval_without_width() -> None:
    assert estimate([0.5] * 4) == Estimate(0.5, 4, 0.0, (0.5, 0.5))


@pytest.mark.parametrize(
    ("num_good", "number", "interval"),
    [(10, 10, (0.7225, 1.0)), (0, 10, (0.0, 0.2775)), (5, 10, (0.2366, 0.7634)), (63, 64, (0.9167, 0.9972))],
)
def test_rewards_of_0_and_1_have_wilsons_interval(num_good: int, number: int, interval: tuple[float, float]) -> None:
    """10 of 10: 10 / (10 + 1.96^2) = 0.7225, and 1."""
    rewards = estimate_rewards([1.0] * num_good + [0.0] * (number - num_good))
    assert rewards.interval == pytest.approx(interval, abs=1e-4) and rewards.num_scenarios == number


def test_the_interval_of_rewards_from_0_to_1_stays_there() -> None:
    assert estimate_rewards([0.0, 0.5, 1.0, 1.0, 0.0]).interval == (0.0, 1.0)
    assert estimate_rewards([0.9, 1.0, 1.0]).interval[1] == 1.0
    assert estimate_rewards([0.5] * 4).interval == (0.5, 0.5)


def test_rewards_of_another_range_have_the_interval_of_their_mean() -> None:
    for rewards in ([0.0, 2.0, 1.0], [-1.0, 1.0], [0.25]):
        assert str(estimate_rewards(rewards)) == str(estimate(rewards))


def test_differences_of_rewards_from_0_to_1_stay_between_minus_1_and_1() -> None:
    """Without the limits: 1/3 ± 1.4342, as the mean of 1, 0 and 0 has s = 0.5774 and t = 4.303."""
    assert estimate_differences([1.0, 0.0, 0.0], [0.0, 1.0]).interval == (-1.0, 1.0)
    assert estimate_differences([1.0, 0.0, 0.0], [0.0, 2.0]) == estimate([1.0, 0.0, 0.0])
    assert str(estimate_differences([0.5], [0.5, 1.0])) == str(estimate([0.5]))
