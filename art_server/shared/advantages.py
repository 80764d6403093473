"""Advantages: how much better a trajectory did than its group. They scale the gradients of its tokens.

Only this file decides which groups have signal, so that forward passes, denominators and counts agree.
"""

import math
from collections.abc import Sequence

from art.wire import LossConfig
from art_server.shared.tasks import TokenSequence, TrainableGroup, TrainableTrajectory

STD_FLOOR = 1e-6
"""Added to a standard deviation, so that rewards that differ only by rounding do not get advantages near 1."""


def has_signal(group: TrainableGroup, config: LossConfig | None = None) -> bool:
    """Whether any trained token of the group has an advantage, before batch scaling and before KL lowers rewards.

    Raises:
        FloatingPointError: a reward is not finite, or too large for a standard deviation.
    """
    config = config or LossConfig()
    outcomes_G = group_advantages(penalised_rewards(group, config), config)
    turns_G = turn_advantages([turn_rewards(each) for each in group.trajectories], config)
    return any(
        any(advantages)
        for index, trajectory in enumerate(group.trajectories)
        for sequence, advantages in zip(
            trajectory.sequences,
            sequence_advantages(
                trajectory, outcomes_G[index] if outcomes_G else 0.0, turns_G[index]
            ),
            strict=True,
        )
        if not is_masked(sequence, config)
    )


def is_masked(sequence: TokenSequence, config: LossConfig) -> bool:
    """Whether the sequence is left out because its conversation was cut at a length limit."""
    return config.overlong == "mask" and sequence.truncated


def sequence_advantages(
    trajectory: TrainableTrajectory, outcome: float, of_turns: Sequence[float]
) -> list[list[float]]:
    """The advantages of each sequence's trained tokens.

    A token has the advantage that the client gave it. Without one, it has the trajectory's (`outcome`) plus those of
    its own turn and all later turns (`of_turns`).
    """
    made: list[list[float]] = []
    turns = iter(of_turns)
    remaining = sum(of_turns)
    for sequence in trajectory.sequences:
        advantages: list[float] = []
        ends = sorted(sequence.rewards)
        for position in trained_positions(sequence):
            while ends and ends[0] < position:
                remaining -= next(turns)
                ends.pop(0)
            advantages.append(sequence.advantages.get(position, outcome + remaining))
        for _ in ends:
            remaining -= next(turns)
        made.append(advantages)
    return made


def trained_positions(sequence: TokenSequence) -> list[int]:
    """Positions of the trained tokens: the sampled ones, except position 0, which no token predicts.

    Raises:
        ValueError: tokens and log-probabilities differ in number, or a position in `recompute` has a log-probability.
    """
    if len(sequence.token_ids) != len(sequence.logprobs):
        raise ValueError(
            f"a sequence has {len(sequence.token_ids)} tokens and {len(sequence.logprobs)} log-probabilities"
        )
    recomputed = set(sequence.recompute)
    if known := [each for each in recomputed if sequence.logprobs[each] is not None]:
        raise ValueError(f"positions {known[:3]} are to be recomputed but have log-probabilities")
    return [
        index
        for index, value in enumerate(sequence.logprobs)
        if index > 0 and (value is not None or index in recomputed)
    ]


def turn_rewards(trajectory: TrainableTrajectory) -> list[float]:
    """The rewards of the turns that have one, in order."""
    return [
        sequence.rewards[end]
        for sequence in trajectory.sequences
        for end in sorted(sequence.rewards)
    ]


def penalised_rewards(group: TrainableGroup, config: LossConfig) -> list[float]:
    """The rewards of a group's trajectories; with overlong="soft_penalty", lowered where a trajectory is too long."""
    return [
        each.reward + overlong_penalty(num_sampled(each), config) for each in group.trajectories
    ]


def num_sampled(trajectory: TrainableTrajectory) -> int:
    return sum(
        sum(value is not None for value in sequence.logprobs) + len(sequence.recompute)
        for sequence in trajectory.sequences
    )


def group_advantages(
    rewards_G: Sequence[float], config: LossConfig | None = None
) -> list[float] | None:
    """The advantage of each trajectory of a group, or None where the group has no signal.

    It has none if its rewards are all equal, as with a single trajectory; with baseline="none", if all are 0.
    baseline: group_mean is reward - mean, leave_one_out is reward - mean of the others, none is the reward.
    scaling: group_std divides by (population standard deviation + STD_FLOOR), unless all rewards are equal.
    Source: Shao et al. 2024, arXiv:2402.03300, section 4.1.2 (outcome supervision); Ahmadian et al. 2024,
    arXiv:2402.14740, eq. 8 (leave one out).

    Raises:
        FloatingPointError: a reward is not finite, or too large for a standard deviation.
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
            f"the rewards of a group range from {min(rewards_G):g} to {max(rewards_G):g}: their standard deviation is"
            " not a finite number; scale the rewards down"
        )
    if config.baseline == "none":
        advantages_G = list(rewards_G)
    elif config.baseline == "leave_one_out":
        advantages_G = [deviation * size / (size - 1) for deviation in deviations_G]
    else:
        advantages_G = deviations_G
    if config.scaling != "group_std" or max(rewards_G) == min(rewards_G):
        return advantages_G
    return [advantage / (std + STD_FLOOR) for advantage in advantages_G]


def scale_over_batch(
    advantages: Sequence[list[float] | None], config: LossConfig
) -> list[list[float] | None]:
    """The advantages, with scaling="batch_std" normalised over all groups: (advantage - mean) / (std + STD_FLOOR).

    None marks a group without signal, which does not count.

    Source: Hu 2025, arXiv:2501.03262, section 3.2 (global advantage normalisation).
    """
    values = [value for group in advantages if group is not None for value in group]
    if config.scaling != "batch_std" or not values:
        return list(advantages)
    mean = sum(values) / len(values)
    deviations = [value - mean for value in values]
    std = math.sqrt(sum(each * each for each in deviations) / len(values)) + STD_FLOOR
    return [
        None if group is None else [(value - mean) / std for value in group] for group in advantages
    ]


def overlong_penalty(num_tokens: int, config: LossConfig) -> float:
    """The soft penalty that is added to the reward of a trajectory with this many sampled tokens: 0 to -1.

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
    """For each trajectory of a group, the advantage of each of its turn rewards.

    A turn reward is compared with all turn rewards of the group. A token gets the sum over its own and later turns.
    Source: Shao et al. 2024, arXiv:2402.03300, section 4.1.3 (process supervision).

    Raises:
        FloatingPointError: a turn reward is not finite, or too large for a standard deviation.
    """
    values = [value for rewards in rewards_of_turns for value in rewards]
    if not all(math.isfinite(value) for value in values):
        raise FloatingPointError(f"turn rewards must be finite numbers, got {values[:8]}")
    if config.baseline != "none" and len(set(values)) == 1:
        return [[0.0] * len(rewards) for rewards in rewards_of_turns]
    mean = sum(values) / len(values) if values and config.baseline != "none" else 0.0
    std = 1.0
    if config.scaling != "none" and len(set(values)) > 1:
        centre = sum(values) / len(values)
        deviations = [value - centre for value in values]
        std = math.sqrt(sum(each * each for each in deviations) / len(values)) + STD_FLOOR
    if not math.isfinite(std):
        raise FloatingPointError(
            f"the turn rewards of a group range from {min(values):g} to {max(values):g}: their standard deviation is not"
            " a finite number; scale the rewards down"
        )
    return [[(value - mean) / std for value in rewards] for rewards in rewards_of_turns]
