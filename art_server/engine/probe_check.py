"""The server's side of the probe: whether the engine computes a step as the trainer that made the step (`trainer/probe.py`).

Two questions, because an adapter's effect can be smaller than the rounding of 16 bits: do the log-probabilities agree,
and is the effect of the adapter the trainer's, at its own alpha or at a multiple of it?
"""

import math
from collections.abc import Sequence

from art_server.shared.trainer_messages import NUM_SIGMAS_OF_EFFECT, MismatchLimits, Probe

ROUNDING_FACTOR = 3.0
"""A gap above this many times the measured effect of rounding to 16 bits is another policy (docs/precision.md)."""
EFFECT_TOLERANCE = 0.2
"""The engine's effect of the adapter is within this of the trainer's. Half the alpha gives at most 0.6, twice the alpha
at least 1.3, the base's weights 0, and the right adapter 0.98 to 1.04 (docs/precision.md)."""


def find_fault(probe: Probe, logprobs: Sequence[float], scaled: Sequence[float], limits: MismatchLimits) -> str | None:
    """Why the engine's log-probabilities of the probe are not the trainer's; None if they are.

    `scaled` are the log-probabilities with `probe.factor` times the adapter's alpha; empty for a factor of 1.
    """
    gap = rms(_difference(logprobs, probe.logprobs))
    limit = ROUNDING_FACTOR * probe.rounding if probe.rounding else limits.wrong
    if not gap <= limit:
        return (
            f"its log-probabilities of {len(logprobs)} tokens differ from the trainer's by {gap:.2g} (root mean square); "
            f"rounding explains at most {limit:.2g}"
        )
    ratio = effect_ratio(probe, scaled or logprobs, limits)
    if ratio is not None and not abs(ratio - 1) <= EFFECT_TOLERANCE:
        return (
            f"the adapter changes its log-probabilities {ratio:.2f} times as much as the trainer's: it applies another "
            "alpha, another adapter or none"
        )
    return None


def effect_ratio(probe: Probe, logprobs: Sequence[float], limits: MismatchLimits) -> float | None:
    """The adapter's effect in the engine as a multiple of its effect in the trainer (least squares). None if the effect in
    the trainer is too close to rounding: the adapter is zero."""
    expected = _difference(probe.scaled_logprobs or probe.logprobs, probe.base_logprobs)
    if rms(expected) < NUM_SIGMAS_OF_EFFECT * (probe.rounding or limits.high):
        return None
    measured = _difference(logprobs, probe.base_logprobs)
    products = (a * b for a, b in zip(measured, expected, strict=True))
    return math.fsum(products) / math.fsum(b * b for b in expected)


def rms(values: Sequence[float]) -> float:
    """Root mean square."""
    return math.sqrt(math.fsum(value * value for value in values) / len(values))


def _difference(one: Sequence[float], other: Sequence[float]) -> list[float]:
    return [a - b for a, b in zip(one, other, strict=True)]
