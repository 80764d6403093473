"""A reward as a weighted sum, with each part in the trajectory's metrics."""

import math
from collections.abc import Mapping

from art.trajectories import Trajectory


def set_reward(
    trajectory: Trajectory,
    parts: Mapping[str, float],
    weights: Mapping[str, float] | None = None,
) -> Trajectory:
    """Sets the reward to the sum of weight * part, and metrics["reward/NAME"] to each part. Returns the trajectory.

    A part without a weight counts once.

    Raises:
        ValueError: a part is not a finite number, or a weight belongs to no part.
    """
    weights = weights or {}
    if unknown := weights.keys() - parts.keys():
        raise ValueError(f"weight for '{min(unknown)}', which is not a part: {', '.join(parts)}")
    for name, value in parts.items():
        if not math.isfinite(value):
            raise ValueError(f"part '{name}' of the reward is {value}: use a finite number")
    trajectory.reward = sum(weights.get(name, 1.0) * value for name, value in parts.items())
    trajectory.metrics.update({f"reward/{name}": value for name, value in parts.items()})
    return trajectory
