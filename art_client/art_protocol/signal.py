"""What counts as a difference: the one rule by which client and server decide whether a group has something to learn."""

import math
from collections.abc import Iterable, Iterator
from typing import SupportsFloat, cast

NOISE = 1e-6
"""Share of the largest magnitude. Rounding in float32 is 6e-8 of a number, and a sum of a few scores adds little to the
rounding."""


def has_signal(values: Iterable[float]) -> bool:
    """Whether finite values differ by more than rounding: by at least NOISE times the largest magnitude of a value, or
    NOISE times 1 if all magnitudes are smaller than 1.

    Advantages are divided by the deviation of rewards, so rounding would be trained like a real difference.
    """
    known = list(values)
    if not known:
        return False
    lowest, highest = min(known), max(known)
    return highest - lowest >= NOISE * max(1.0, -lowest, highest)


def group_has_signal(
    rewards: Iterable[object],
    turn_rewards: Iterable[object],
    turn_advantages: Iterable[object],
    *,
    is_taught: bool = False,
) -> bool:
    """Whether the rewards of a group's trajectories differ, the rewards of turns differ, a turn has its own advantage
    other than 0, or a turn has a teacher's log-probabilities (`is_taught`).

    Values may be nested lists, because each history of a trajectory has a list. A value that is not a finite number does
    not count.
    """
    if is_taught or has_signal(_numbers(rewards)) or has_signal(_numbers(turn_rewards)):
        return True
    return any(_numbers(turn_advantages))


def _numbers(values: Iterable[object]) -> Iterator[float]:
    for value in values:
        if isinstance(value, list):
            yield from _numbers(cast(list[object], value))
        elif (number := to_finite(value)) is not None:
            yield number


def to_finite(value: object) -> float | None:
    """A number, or a NumPy or torch scalar, as a float. None for NaN, infinity, and any other value that a program may
    have set."""
    if not isinstance(value, SupportsFloat):
        return None
    try:
        number = float(value)
    except (TypeError, ValueError, OverflowError, RuntimeError):  # an array, or an int above 1e308
        return None
    return number if math.isfinite(number) else None
