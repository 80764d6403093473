"""What counts as a difference: the one rule by which client and server decide whether a group has something to learn."""

import math
from collections.abc import Iterable, Iterator
from typing import SupportsFloat, cast

NOISE = 1e-6
"""Share of the largest magnitude. Rounding in float32 is 6e-8 of a number, and a sum of a few scores adds little to it."""


def has_signal(values: Iterable[float]) -> bool:
    """Whether finite values differ by more than rounding: by at least NOISE of the largest magnitude among them, or of 1
    if that is larger.

    Advantages are divided by the deviation of rewards, so rounding would be trained like a real difference.
    """
    known = list(values)
    if not known:
        return False
    lowest, highest = min(known), max(known)
    return highest - lowest >= NOISE * max(1.0, -lowest, highest)


def group_has_signal(
    rewards: Iterable[object], turn_rewards: Iterable[object], turn_advantages: Iterable[object]
) -> bool:
    """Whether the rewards of a group's trajectories differ, or those of its turns, or a turn has an advantage of its own.

    Values may be in lists of lists, as several histories have them. What is no finite number does not count.
    """
    return has_signal(_numbers(rewards)) or has_signal(_numbers(turn_rewards)) or any(_numbers(turn_advantages))


def _numbers(values: Iterable[object]) -> Iterator[float]:
    for value in values:
        if isinstance(value, list):
            yield from _numbers(cast(list[object], value))
        elif (number := to_finite(value)) is not None:
            yield number


def to_finite(value: object) -> float | None:
    """A number, or a NumPy or torch scalar, as a float. None for all else that a program may have set, and for NaN."""
    if not isinstance(value, SupportsFloat):
        return None
    try:
        number = float(value)
    except (TypeError, ValueError, OverflowError, RuntimeError):  # an array, or an int above 1e308
        return None
    return number if math.isfinite(number) else None
