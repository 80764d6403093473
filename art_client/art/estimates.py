"""Means with their uncertainty, for evaluations. Student's t is computed here, so that the client needs no SciPy."""

import math
import statistics
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

CONFIDENCE = 0.95


@dataclass(frozen=True, slots=True)
class Estimate:
    """A mean over scenarios, which are taken as independent draws from all possible scenarios."""

    mean: float
    num_scenarios: int
    standard_error: float
    """s / sqrt(num_scenarios), where s is the sample standard deviation; NaN for a single scenario."""
    interval: tuple[float, float]
    """The 95% confidence interval (`estimate_rewards`); from -inf to inf for a single scenario."""

    def __str__(self) -> str:
        low, high = self.interval
        if self.num_scenarios == 1:
            return f"{self.mean:.4g} (no interval from 1 row)"
        return f"{self.mean:.4g} (95% {low:.4g} to {high:.4g}, n={self.num_scenarios})"


def estimate(values: Sequence[float]) -> Estimate:
    """The mean of one value per scenario: mean ± t * s / sqrt(n), where t is Student's quantile for n - 1 degrees.

    The values of a paired comparison are differences. The interval is exact for normally distributed values and
    approximate for others. If all values are equal, the interval has no width, for any number of values.
    Source: Student 1908, The probable error of a mean, Biometrika 6(1); for evaluations of language models, averaged
    repetitions and paired differences: Miller 2024, arXiv:2411.00640.

    Raises:
        ValueError: there are no values.
    """
    if not values:
        raise ValueError("a mean needs at least one value")
    mean = statistics.fmean(values)
    if len(values) == 1:
        return Estimate(mean, 1, math.nan, (-math.inf, math.inf))
    error = statistics.stdev(values) / math.sqrt(len(values))
    margin = t_quantile(len(values) - 1) * error
    return Estimate(mean, len(values), error, (mean - margin, mean + margin))


def estimate_rewards(values: Sequence[float]) -> Estimate:
    """The mean of one reward per scenario, with an interval that does not leave the range from 0 to 1 if no reward does.

    If all rewards are 0 or 1, the interval is Wilson's, which has a width also if all rewards are equal. The interval of other
    rewards is the interval of `estimate`, without what lies outside the range: no mean of such rewards lies there.
    Source: Wilson 1927, Probable inference, the law of succession, and statistical inference, JASA 22(158); for few scenarios
    recommended by Brown, Cai and DasGupta 2001, Interval estimation for a binomial proportion, Statistical Science 16(2).

    Raises:
        ValueError: there are no values.
    """
    whole = estimate(values)
    if len(values) == 1 or min(values) < 0 or max(values) > 1:
        return whole
    if set(values) <= {0, 1}:
        whole = replace(whole, interval=wilson(whole.mean, len(values)))
    return _within(whole, 0.0)


def estimate_differences(values: Sequence[float], rewards: Iterable[float]) -> Estimate:
    """The mean of paired differences, with the interval of `estimate`. If all `rewards` that were compared are between 0 and 1, the
    interval is without what lies outside of -1 to 1: no mean difference of such rewards lies there.

    Raises:
        ValueError: there are no values.
    """
    whole = estimate(values)
    return _within(whole, -1.0) if len(values) > 1 and all(0 <= reward <= 1 for reward in rewards) else whole


def _within(whole: Estimate, lowest: float) -> Estimate:
    low, high = whole.interval
    return replace(whole, interval=(max(low, lowest), min(high, 1.0)))


def wilson(share: float, number: int) -> tuple[float, float]:
    """Wilson's interval of a share of `number` independent draws (equation 4 of Brown, Cai and DasGupta)."""
    z = statistics.NormalDist().inv_cdf((1 + CONFIDENCE) / 2)
    middle = (number * share + z * z / 2) / (number + z * z)
    margin = z / (number + z * z) * math.sqrt(number * share * (1 - share) + z * z / 4)
    return middle - margin, middle + margin


def t_quantile(degrees: int) -> float:
    """The t for which a variable with Student's distribution lies between -t and t with a probability of CONFIDENCE."""
    low, high = 0.0, 1.0
    while t_probability(high, degrees) < CONFIDENCE:
        high *= 2
    while low < (middle := (low + high) / 2) < high:
        if t_probability(middle, degrees) < CONFIDENCE:
            low = middle
        else:
            high = middle
    return high


def t_probability(t: float, degrees: int) -> float:
    """The probability that a variable with Student's distribution lies between -t and t.

    Source: Abramowitz and Stegun 1964, Handbook of Mathematical Functions, 26.7.3 (odd) and 26.7.4 (even degrees).
    """
    angle = math.atan2(t, math.sqrt(degrees))
    sine, cosine = math.sin(angle), math.cos(angle)
    is_odd = degrees % 2 == 1
    first_power, term = (2, cosine) if is_odd else (1, 1.0)
    total = 0.0
    for power in range(first_power, degrees, 2):
        total += term
        term *= cosine * cosine * power / (power + 1)
    if is_odd:
        return 2 / math.pi * (angle + sine * total)
    return sine * total
