"""How much better a trajectory did than the others of its group: the weight of its tokens in the loss.

Groups that teach nothing are named here and nowhere else, so that forward passes, denominators and counts agree.
"""

import math
from collections.abc import Sequence

STD_FLOOR = 1e-6
"""Added to a group's standard deviation, so that rewards which differ by rounding only do not become advantages of
order one."""


def group_advantages(rewards_G: Sequence[float]) -> list[float] | None:
    """The group-relative advantage of each trajectory, or None where the group carries no signal: its rewards are all
    exactly equal, as those of a single trajectory (or none) always are.

    (reward - mean) / (population standard deviation + STD_FLOOR).
    Raises FloatingPointError when the rewards are not finite, or so large that their deviation is not.
    Source: Shao et al. 2024, arXiv:2402.03300, section 4.1.2 (outcome supervision).
    """
    if not all(math.isfinite(reward) for reward in rewards_G):
        raise FloatingPointError(f"rewards must be finite numbers, got {list(rewards_G)[:8]}")
    if not rewards_G or max(rewards_G) == min(rewards_G):
        return None
    mean = sum(rewards_G) / len(rewards_G)
    deviations_G = [reward - mean for reward in rewards_G]
    std = math.sqrt(sum(deviation * deviation for deviation in deviations_G) / len(rewards_G))
    if not math.isfinite(std):
        raise FloatingPointError(
            f"the rewards of a group run from {min(rewards_G):g} to {max(rewards_G):g}: their standard deviation is"
            " not a finite number; scale the rewards down"
        )
    return [deviation / (std + STD_FLOOR) for deviation in deviations_G]
