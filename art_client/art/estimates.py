"""Means with their uncertainty, for evaluations. Student's t is computed here, so that the client needs no SciPy."""

import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass

CONFIDENCE = 0.95


@dataclass(frozen=True, slots=True)
class Estimate:
    """A mean over scenarios, which are taken as independent draws from all possible scenarios."""

    mean: float
    num_scenarios: int
    standard_error: float
    """s / sqrt(num_scenarios), where s is the sample standard deviation; NaN for a single scenario."""
    interval: tuple[float, float]
    """The 95% confidence interval; from -inf to inf for a single scenario."""

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
