"""Advantages: how much better a trajectory did than its group. An advantage scales the gradients of the trajectory's
tokens.

Only this file decides which groups have signal, so that forward passes, denominators and counts agree.
"""

import bisect
import itertools
import math
from collections.abc import Iterable, Sequence
from typing import TypeAlias

from art_protocol.signal import has_signal
from art_protocol.wire import LossConfig
from art_server.shared.trainer_messages import TokenSequence, TrainableGroup, TrainableTrajectory

STD_FLOOR = 1e-6
"""Added to a standard deviation, as published implementations do. Whether a difference is more than rounding is decided
before (`art_protocol.signal`)."""

GroupTokens: TypeAlias = list[list[list[tuple[int, float]]]]
"""By trajectory and sequence: the positions of trained tokens, with their advantages."""


def trained_tokens(
    groups: Sequence[TrainableGroup],
    config: LossConfig | None = None,
    penalties: Sequence[float] | None = None,
) -> list[GroupTokens | None]:
    """The trained tokens of each group; None for a group that is left out.

    A group without signal, in which no token has an advantage or a teacher, is left out unless other terms of the loss train
    it (`trains_without_signal`): then its tokens have the advantage 0.

    `penalties`, one for each trajectory, are subtracted from the rewards. Whether a group has signal is decided without
    the penalties.

    Raises:
        FloatingPointError: a reward is not finite, or too large for a standard deviation.
    """
    config = config or LossConfig()
    is_enough = trains_without_signal(config)
    unpenalised = _tokens_of_groups(groups, itertools.repeat(0.0), config)
    kept: list[GroupTokens | None] = []
    for group, tokens in zip(groups, unpenalised, strict=True):
        is_kept = has_tokens(tokens) if is_enough else teaches(group, tokens)
        kept.append(tokens if is_kept else None)
    if penalties is None:
        return kept
    for index, penalised in enumerate(_tokens_of_groups(groups, penalties, config)):
        tokens = kept[index]
        # A group without signal stays as it is: the penalties alone would make differences in it.
        if tokens is not None and has_advantage(tokens):
            kept[index] = penalised
    return kept


def _tokens_of_groups(
    groups: Sequence[TrainableGroup], penalties: Iterable[float], config: LossConfig
) -> list[GroupTokens]:
    """The trained tokens of all groups, also of those without signal. `penalties` are subtracted from the rewards."""
    of_trajectories = iter(penalties)
    outcomes: list[list[float] | None] = []
    turns: list[list[float] | None] = []
    for group in groups:
        rewards_G = [reward - next(of_trajectories) for reward in penalised_rewards(group, config)]
        is_live = _has_signal(group, config)
        outcomes.append(group_advantages(rewards_G, config) if is_live else None)
        turns.append(turn_advantages(group, config) if is_live else None)
    if config.baseline == "similar_prompts":
        outcomes = above_expected(groups, outcomes)
    outcomes = scale_over_batch(outcomes, config)
    turns = scale_over_batch(turns, config)
    return [
        _group_tokens(group, outcomes_G, of_turns, config)
        for group, outcomes_G, of_turns in zip(groups, outcomes, turns, strict=True)
    ]


def trains_without_signal(config: LossConfig) -> bool:
    """Whether the loss has a term besides the policy gradient, which trains tokens without an advantage, too: the KL
    divergence from the reference, or the entropy."""
    return (config.beta > 0 and config.kl_in == "loss") or config.entropy_bonus > 0


def _has_signal(group: TrainableGroup, config: LossConfig) -> bool:
    """Whether any trained token has an advantage before batch scaling. Where only the batch has a baseline, any group
    with trained tokens may have an advantage after the scaling."""
    outcomes_G = group_advantages(penalised_rewards(group, config), config)
    tokens = _group_tokens(group, outcomes_G, turn_advantages(group, config), config)
    return has_tokens(tokens) if _is_batch_baseline(config) else has_advantage(tokens)


def _is_batch_baseline(config: LossConfig) -> bool:
    """Whether only the whole batch has a baseline, as in REINFORCE++ without a baseline of the group."""
    return config.baseline == "similar_prompts" or (config.baseline == "none" and config.scaling == "batch_std")


def has_tokens(tokens: GroupTokens) -> bool:
    return any(map(any, tokens))


def teaches(group: TrainableGroup, tokens: GroupTokens) -> bool:
    """Whether a trained token of the group has signal: an advantage, or a teacher's log-probabilities."""
    return has_advantage(tokens) or _is_taught(group, tokens)


def _is_taught(group: TrainableGroup, tokens: GroupTokens) -> bool:
    for trajectory, of_trajectory in zip(group.trajectories, tokens, strict=True):
        for sequence, of_sequence in zip(trajectory.sequences, of_trajectory, strict=True):
            for span in sequence.taught:
                if any(span.start <= position < span.stop for position, _ in of_sequence):
                    return True
    return False


def has_advantage(tokens: GroupTokens) -> bool:
    for of_trajectory in tokens:
        for of_sequence in of_trajectory:
            if any(advantage for _, advantage in of_sequence):
                return True
    return False


def _group_tokens(
    group: TrainableGroup,
    outcomes_G: Sequence[float] | None,
    of_turns: Sequence[float] | None,
    config: LossConfig,
) -> GroupTokens:
    """The trained tokens of a group. Where outcomes or turns have no signal (None), their advantages are 0."""
    outcomes_G = outcomes_G or [0.0] * len(group.trajectories)
    turns = iter(of_turns or itertools.repeat(0.0))
    tokens: GroupTokens = []
    for trajectory, outcome in zip(group.trajectories, outcomes_G, strict=True):
        of_trajectory = list(itertools.islice(turns, len(turn_rewards(trajectory))))
        tokens.append(_trajectory_tokens(trajectory, outcome, of_trajectory, config))
    return tokens


def is_identical(group: TrainableGroup) -> bool:
    """Whether several trajectories of the group can be trained, and all of these have the same sampled tokens."""
    trainable = [trajectory for trajectory in group.trajectories if trajectory.sequences]
    if len(trainable) < 2:
        return False
    first = sampled_ids(trainable[0])
    return any(first) and all(sampled_ids(trajectory) == first for trajectory in trainable[1:])


def sampled_ids(trajectory: TrainableTrajectory) -> list[list[int]]:
    """The sampled tokens of each sequence."""
    sampled: list[list[int]] = []
    for sequence in trajectory.sequences:
        sampled.append([sequence.token_ids[position] for position in trained_positions(sequence)])
    return sampled


def is_masked(sequence: TokenSequence, config: LossConfig) -> bool:
    """Whether the sequence is left out because its conversation was cut at a length limit."""
    return config.overlong == "mask" and sequence.truncated


def count_masked(group: TrainableGroup, config: LossConfig) -> int:
    """The number of trajectories of which a sequence is left out because it was cut."""
    num = 0
    for trajectory in group.trajectories:
        if any(is_masked(sequence, config) for sequence in trajectory.sequences):
            num += 1
    return num


def _trajectory_tokens(
    trajectory: TrainableTrajectory, outcome: float, of_turns: Sequence[float], config: LossConfig
) -> list[list[tuple[int, float]]]:
    """The trained tokens of each sequence.

    A token has the advantage that the client gave it. Without one, it has the trajectory's advantage (`outcome`)
    plus the advantages of its own turn and all later turns (`of_turns`).
    """
    of_sequences: list[list[tuple[int, float]]] = []
    is_timed = all(sequence.turns for sequence in trajectory.sequences)
    ends, sums = _sums_of_later_turns(trajectory, of_turns, is_timed)
    for number, sequence in enumerate(trajectory.sequences):
        tokens: list[tuple[int, float]] = []
        for position in trained_positions(sequence):
            advantage = sequence.advantages.get(position)
            if advantage is None:
                advantage = outcome
                if ends:
                    key = _order_key(number, position, sequence, is_timed)
                    advantage += sums[bisect.bisect_left(ends, key)]
            # In SFT an advantage is a weight, and a token of weight 0 is context.
            if advantage or config.objective == "policy":
                tokens.append((position, advantage))
        of_sequences.append([] if is_masked(sequence, config) else tokens)
    return of_sequences


def _sums_of_later_turns(
    trajectory: TrainableTrajectory, of_turns: Sequence[float], is_timed: bool
) -> tuple[list[tuple[int, int, int]], list[float]]:
    """The ends of the turns with a reward (`_order_key`), in order, and for each end the sum of the advantages of its turn and
    all later turns. The sums have one entry more: 0, for positions behind the last end."""
    ends: list[tuple[int, int, int]] = []
    for number, sequence in enumerate(trajectory.sequences):
        ends += [_order_key(number, end, sequence, is_timed) for end, _ in in_order(sequence)]
    turns = sorted(zip(ends, of_turns, strict=True))
    sums = [0.0]
    for _, advantage in reversed(turns):
        sums.append(sums[-1] + advantage)
    return sorted(ends), sums[::-1]


def _order_key(number: int, position: int, sequence: TokenSequence, is_timed: bool) -> tuple[int, int, int]:
    """A key that sorts positions by the order of the trajectory's turns: the order of their requests where all times are
    known (`is_timed`), else the order of the sequences. Context belongs to the turn behind it, if there is one."""
    if not is_timed:
        return 0, number, position
    turn = bisect.bisect_right(sequence.turns, position, key=lambda turn: turn[0])
    return sequence.turns[min(turn, len(sequence.turns) - 1)][1], number, position


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
    if known := [position for position in recomputed if sequence.logprobs[position] is not None]:
        raise ValueError(f"positions {known[:3]} are to be recomputed but have log-probabilities")
    return [
        index
        for index, value in enumerate(sequence.logprobs)
        if index > 0 and (value is not None or index in recomputed)
    ]


def turn_rewards(trajectory: TrainableTrajectory) -> list[float]:
    """The rewards of the turns that have a reward, in order."""
    return [reward for sequence in trajectory.sequences for _, reward in in_order(sequence)]


def in_order(sequence: TokenSequence) -> list[tuple[int, float]]:
    """The rewards of a sequence's turns by position; of turns at one position in the order in which they were added."""
    return sorted(sequence.rewards, key=lambda reward: reward[0])


def penalised_rewards(group: TrainableGroup, config: LossConfig) -> list[float]:
    """The rewards of a group's trajectories (`penalised_reward`)."""
    return [penalised_reward(trajectory, config) for trajectory in group.trajectories]


def penalised_reward(trajectory: TrainableTrajectory, config: LossConfig) -> float:
    """A trajectory's reward; with overlong="soft_penalty", lowered if the trajectory is too long."""
    return trajectory.reward + overlong_penalty(num_sampled(trajectory), config)


def num_sampled(trajectory: TrainableTrajectory) -> int:
    num = 0
    for sequence in trajectory.sequences:
        num += len(sequence.logprobs) - sequence.logprobs.count(None) + len(sequence.recompute)
    return num


def group_advantages(
    rewards_G: Sequence[float], config: LossConfig | None = None, what: str = "rewards"
) -> list[float] | None:
    """The advantage of each trajectory of a group, or None where the group has no signal. `what` names the rewards in
    errors.

    A group has no signal if its rewards are equal but for rounding (`art_protocol.signal`), as with a single trajectory.
    With baseline="none" it has no signal if all rewards are 0; with scaling="batch_std" in addition, and with "similar_prompts", it
    always has signal, because the baseline of the batch is subtracted later.
    baseline: group_mean is reward - mean, leave_one_out is reward - mean of the others, the others are the reward.
    scaling: group_std divides by (population standard deviation + STD_FLOOR), unless the rewards are equal.
    Source: Shao et al. 2024, arXiv:2402.03300, section 4.1.2 (outcome supervision); Ahmadian et al. 2024,
    arXiv:2402.14740, eq. 8 (leave one out).

    Raises:
        FloatingPointError: a reward is not finite, or too large for a standard deviation.
    """
    config = config or LossConfig()
    if not all(math.isfinite(reward) for reward in rewards_G):
        raise FloatingPointError(f"{what} must be finite numbers, got {list(rewards_G)[:8]}")
    if not rewards_G or not _rewards_have_signal(rewards_G, config):
        return None
    size = len(rewards_G)
    mean = sum(rewards_G) / size
    deviations_G = [reward - mean for reward in rewards_G]
    std = math.sqrt(sum(deviation * deviation for deviation in deviations_G) / size)
    if not math.isfinite(std):
        raise FloatingPointError(
            f"the {what} of a group range from {min(rewards_G):g} to {max(rewards_G):g}: their standard deviation is"
            " not a finite number; scale the rewards down"
        )
    if config.baseline in ("none", "similar_prompts"):
        advantages_G = list(rewards_G)
    elif config.baseline == "leave_one_out":
        advantages_G = [deviation * size / (size - 1) for deviation in deviations_G]
    else:
        advantages_G = deviations_G
    if config.scaling == "group_std" and has_signal(rewards_G):
        advantages_G = [advantage / (std + STD_FLOOR) for advantage in advantages_G]
    return advantages_G


def _rewards_have_signal(rewards_G: Sequence[float], config: LossConfig) -> bool:
    """Whether a group's rewards give any trajectory an advantage. Where only the batch has a baseline, any rewards may."""
    if config.baseline in ("group_mean", "leave_one_out"):
        return has_signal(rewards_G)
    return _is_batch_baseline(config) or has_signal([0.0, *rewards_G])


def above_expected(groups: Sequence[TrainableGroup], rewards: Sequence[list[float] | None]) -> list[list[float] | None]:
    """The rewards minus what the other trajectories of the batch with similar prompts lead to expect (`expected_rewards`).

    None marks a group without signal, which does not count. If all rewards are equal but for rounding, no group has signal.
    """
    prompts: list[list[int]] = []
    values: list[float] = []
    for group, rewards_G in zip(groups, rewards, strict=True):
        if rewards_G is not None:
            prompts += map(_prompt, group.trajectories)
            values += rewards_G
    if not has_signal(values):
        return [None] * len(rewards)
    from art_server.shared.expected_rewards import expected_rewards  # with numpy, which not every command of `art` has

    expected = iter(expected_rewards(prompts, values))
    advantages: list[list[float] | None] = []
    for rewards_G in rewards:
        advantages.append(None if rewards_G is None else [reward - next(expected) for reward in rewards_G])
    return advantages


def _prompt(trajectory: TrainableTrajectory) -> list[int]:
    """The tokens before the first trained token; none of a trajectory without sequences."""
    if not trajectory.sequences:
        return []
    sequence = trajectory.sequences[0]
    return sequence.token_ids[: next(iter(trained_positions(sequence)), len(sequence.token_ids))]


def scale_over_batch(advantages: Sequence[list[float] | None], config: LossConfig) -> list[list[float] | None]:
    """The advantages, with scaling="batch_std" normalised over all groups: (advantage - mean) / (std + STD_FLOOR).

    None marks a group without signal, which does not count. If all advantages are equal but for rounding, no group has
    signal.

    Source: Hu 2025, arXiv:2501.03262, section 3.2 (global advantage normalisation).
    """
    values: list[float] = []
    for group in advantages:
        values += group or ()
    if config.scaling != "batch_std" or not values:
        return list(advantages)
    if not has_signal(values):
        return [None] * len(advantages)
    mean = sum(values) / len(values)
    deviations = [value - mean for value in values]
    std = math.sqrt(sum(deviation * deviation for deviation in deviations) / len(values)) + STD_FLOOR
    scaled: list[list[float] | None] = []
    for group in advantages:
        scaled.append(None if group is None else [(value - mean) / std for value in group])
    return scaled


def overlong_penalty(num_tokens: int, config: LossConfig) -> float:
    """The soft penalty that is added to the reward of a trajectory with this many sampled tokens: 0 to -1.

    Source: Yu et al. 2025, arXiv:2503.14476, eq. 13.
    """
    if config.overlong != "soft_penalty":
        return 0.0
    assert config.overlong_length is not None and config.overlong_buffer is not None
    over = num_tokens - (config.overlong_length - config.overlong_buffer)
    return -min(1.0, max(0.0, over / config.overlong_buffer))


def turn_advantages(group: TrainableGroup, config: LossConfig) -> list[float] | None:
    """The advantage of each turn reward of a group, in order, as `group_advantages` makes them of rewards.

    A turn reward is compared with all turn rewards of the group. A token gets the sum over its own and later turns.
    Source: Shao et al. 2024, arXiv:2402.03300, section 4.1.3 (process supervision).

    Raises:
        FloatingPointError: a turn reward is not finite, or too large for a standard deviation.
    """
    rewards = [reward for trajectory in group.trajectories for reward in turn_rewards(trajectory)]
    return group_advantages(rewards, config, "turn rewards")
