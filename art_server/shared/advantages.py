"""How much better a trajectory did than it was expected to: the weight of its tokens in the loss.

Groups that teach nothing are named here and nowhere else, so that forward passes, denominators and counts agree.
"""

import math
from collections.abc import Sequence

from art.wire import LossConfig
from art_server.shared.tasks import Row, TrainableGroup, TrainableTrajectory

STD_FLOOR = 1e-6
"""Added to a standard deviation, so that rewards which differ by rounding only do not become advantages of order
one."""


def has_signal(group: TrainableGroup, config: LossConfig | None = None) -> bool:
    """Whether any token of a group that is trained has an advantage, before the batch is scaled or KL lowers rewards.

    Raises FloatingPointError for rewards beyond arithmetic.
    """
    config = config or LossConfig()
    outcomes_G = group_advantages(penalised_rewards(group, config), config)
    turns_G = turn_advantages([turn_rewards(each) for each in group.trajectories], config)
    return any(
        any(advantages)
        for index, trajectory in enumerate(group.trajectories)
        for row, advantages in zip(
            trajectory.rows,
            row_advantages(trajectory, outcomes_G[index] if outcomes_G else 0.0, turns_G[index]),
            strict=True,
        )
        if not is_masked(row, config)
    )


def is_masked(row: Row, config: LossConfig) -> bool:
    """Left out because its conversation was cut at a length limit."""
    return config.overlong == "mask" and row.truncated


def row_advantages(
    trajectory: TrainableTrajectory, outcome: float, of_turns: Sequence[float]
) -> list[list[float]]:
    """For each row the advantages of its trained tokens: those given for them, elsewhere that of the trajectory plus those
    of its turns that are not over."""
    made: list[list[float]] = []
    turns = iter(of_turns)
    remaining = sum(of_turns)
    for row in trajectory.rows:
        advantages: list[float] = []
        ends = sorted(row.rewards)
        for position in trained_positions(row):
            while ends and ends[0] < position:
                remaining -= next(turns)
                ends.pop(0)
            advantages.append(row.advantages.get(position, outcome + remaining))
        for _ in ends:
            remaining -= next(turns)
        made.append(advantages)
    return made


def trained_positions(row: Row) -> list[int]:
    """Where the trained tokens of a row are: sampled ones, but the first token of all, which nothing predicts.

    Raises ValueError for a row whose log-probabilities and tokens differ in number, or contradict `recompute`.
    """
    if len(row.token_ids) != len(row.logprobs):
        raise ValueError(
            f"a row has {len(row.token_ids)} tokens and {len(row.logprobs)} log-probabilities"
        )
    recomputed = set(row.recompute)
    if known := [each for each in recomputed if row.logprobs[each] is not None]:
        raise ValueError(f"positions {known[:3]} are to be recomputed and have log-probabilities")
    return [
        index
        for index, value in enumerate(row.logprobs)
        if index > 0 and (value is not None or index in recomputed)
    ]


def turn_rewards(trajectory: TrainableTrajectory) -> list[float]:
    """In the order of the turns."""
    return [row.rewards[end] for row in trajectory.rows for end in sorted(row.rewards)]


def penalised_rewards(group: TrainableGroup, config: LossConfig) -> list[float]:
    """The rewards of a group's trajectories, lowered where they are too long."""
    return [
        each.reward + overlong_penalty(num_sampled(each), config) for each in group.trajectories
    ]


def num_sampled(trajectory: TrainableTrajectory) -> int:
    return sum(
        sum(value is not None for value in row.logprobs) + len(row.recompute)
        for row in trajectory.rows
    )


def group_advantages(
    rewards_G: Sequence[float], config: LossConfig | None = None
) -> list[float] | None:
    """The advantage of each trajectory of a group, or None where the group carries no signal: compared within the
    group, its rewards are all exactly equal, as those of a single trajectory (or none) always are.

    group_mean: reward - mean. leave_one_out: reward - mean of the others. none: reward.
    group_std: that, divided by (population standard deviation + STD_FLOOR).
    Raises FloatingPointError when the rewards are not finite, or so large that their deviation is not.
    Source: Shao et al. 2024, arXiv:2402.03300, section 4.1.2 (outcome supervision); Ahmadian et al. 2024,
    arXiv:2402.14740, eq. 8 (leave one out).
    """
    config = config or LossConfig()
    if not all(math.isfinite(reward) for reward in rewards_G):
        raise FloatingPointError(f"rewards must be finite numbers, got {list(rewards_G)[:8]}")
    size = len(rewards_G)
    if config.baseline == "none":
        if not any(rewards_G):
            return None
    elif not size or max(rewards_G) == min(rewards_G):
        return None
    mean = sum(rewards_G) / size
    deviations_G = [reward - mean for reward in rewards_G]
    std = math.sqrt(sum(deviation * deviation for deviation in deviations_G) / size)
    if not math.isfinite(std):
        raise FloatingPointError(
            f"the rewards of a group run from {min(rewards_G):g} to {max(rewards_G):g}: their standard deviation is"
            " not a finite number; scale the rewards down"
        )
    if config.baseline == "none":
        advantages_G = list(rewards_G)
    elif config.baseline == "leave_one_out":
        advantages_G = [deviation * size / (size - 1) for deviation in deviations_G]
    else:
        advantages_G = deviations_G
    if config.scaling != "group_std":
        return advantages_G
    return [advantage / (std + STD_FLOOR) for advantage in advantages_G]


def scale_over_batch(
    advantages: Sequence[list[float] | None], config: LossConfig
) -> list[list[float] | None]:
    """With scaling="batch_std" (advantage - mean) / (standard deviation + STD_FLOOR) over all groups with signal.

    Source: Hu 2025, arXiv:2501.03262, section 3.2 (global advantage normalisation).
    """
    values = [value for group in advantages if group is not None for value in group]
    if config.scaling != "batch_std" or not values:
        return list(advantages)
    mean = sum(values) / len(values)
    std = math.sqrt(sum((value - mean) ** 2 for value in values) / len(values)) + STD_FLOOR
    return [
        None if group is None else [(value - mean) / std for value in group] for group in advantages
    ]


def overlong_penalty(num_tokens: int, config: LossConfig) -> float:
    """What the soft penalty adds to the reward of a trajectory with this many trained tokens: 0 to -1.

    Source: Yu et al. 2025, arXiv:2503.14476, eq. 13.
    """
    if config.overlong != "soft_penalty":
        return 0.0
    assert config.overlong_length is not None and config.overlong_buffer is not None
    over = num_tokens - (config.overlong_length - config.overlong_buffer)
    return -min(1.0, max(0.0, over / config.overlong_buffer))


def turn_advantages(
    rewards_of_turns: Sequence[list[float]], config: LossConfig
) -> list[list[float]]:
    """For each trajectory of a group, the advantage that each of its turn rewards brings to all tokens up to it.

    A turn reward is compared with all turn rewards of the group; a token gets the sum over the turns not yet over.
    Source: Shao et al. 2024, arXiv:2402.03300, section 4.1.3 (process supervision).
    """
    values = [value for rewards in rewards_of_turns for value in rewards]
    if not all(math.isfinite(value) for value in values):
        raise FloatingPointError(f"turn rewards must be finite numbers, got {values[:8]}")
    if config.baseline != "none" and len(set(values)) == 1:
        return [[0.0] * len(rewards) for rewards in rewards_of_turns]
    mean = sum(values) / len(values) if values and config.baseline != "none" else 0.0
    std = 1.0
    if config.scaling != "none" and values:
        centre = sum(values) / len(values)
        std = math.sqrt(sum((value - centre) ** 2 for value in values) / len(values)) + STD_FLOOR
    return [[(value - mean) / std for value in rewards] for rewards in rewards_of_turns]
