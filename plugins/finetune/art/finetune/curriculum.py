"""The curriculum: which groups of a batch are trained, as a function of the batch's rewards and number. Without `rows_per_step` a
batch is an epoch. Numbers count from 0."""

import math
import random
import statistics
from collections.abc import Sequence
from dataclasses import dataclass

from art.finetune.batches import WHOLE_EPOCHS, Batches
from art.finetune.sections import Curriculum


@dataclass(frozen=True, slots=True)
class Chosen:
    """A group that is trained."""

    group: int
    """The index of the group in the batch."""
    trajectories: tuple[int, ...]
    """The indices of the group's trajectories that are trained."""


def percentile(curriculum: Curriculum, number: int, batches: Batches = WHOLE_EPOCHS) -> float:
    """The share of the groups with signal that is trained."""
    if not curriculum.enabled:
        return 1.0
    expansions = batches.num_intervals(number, curriculum.expansion_interval)
    return min(1.0, round(curriculum.initial_percentile + curriculum.increment_percentile * expansions, 9))


def last_expansion(curriculum: Curriculum, number: int, batches: Batches = WHOLE_EPOCHS) -> int:
    """The newest batch up to this one in which the percentile rose; 0 before the first rise."""
    while number > 0 and percentile(curriculum, number, batches) == percentile(curriculum, number - 1, batches):
        number -= 1
    return number


def samples_all_rows(curriculum: Curriculum, epoch: int) -> bool:
    """Whether the epoch samples all rows. False: the epoch samples only the rows that were chosen at the last expansion, which
    only a run of whole epochs does."""
    is_kept = curriculum.enabled and curriculum.rank == "on_expansion"
    return not is_kept or last_expansion(curriculum, epoch) == epoch


def choose(
    curriculum: Curriculum,
    rewards: Sequence[Sequence[float]],
    number: int,
    seed: str,
    batches: Batches = WHOLE_EPOCHS,
) -> list[Chosen]:
    """The groups that are trained, in their order of rank.

    `rewards` has the rewards of each group, in the order of rows. Without a curriculum all groups are chosen. A curriculum
    leaves out groups whose rewards differ by less than `min_reward_diff`, sorts the other groups by mean reward, and chooses
    the first `percentile` of the sorted groups. All numbers are rounded to nine digits: 0.3 + 3 * 0.2 is more than 0.9.
    """
    if not curriculum.enabled:
        return [Chosen(index, tuple(range(len(group_rewards)))) for index, group_rewards in enumerate(rewards)]
    with_signal: list[int] = []
    for index, group_rewards in enumerate(rewards):
        if group_rewards and round(max(group_rewards) - min(group_rewards), 9) >= curriculum.min_reward_diff:
            with_signal.append(index)
    sign = 1 if curriculum.sort_ascending else -1
    ranked = sorted(with_signal, key=lambda index: (sign * round(statistics.fmean(rewards[index]), 9), index))
    if samples_all_rows(curriculum, number):
        ranked = ranked[: math.ceil(round(len(ranked) * percentile(curriculum, number, batches), 9))]
    return [Chosen(index, _subsample(curriculum, len(rewards[index]), f"{seed}/{index}")) for index in ranked]


def _subsample(curriculum: Curriculum, number: int, seed: str) -> tuple[int, ...]:
    """The indices of the trained trajectories of a group, which has `number` trajectories."""
    if curriculum.random_subsample is None:
        return tuple(range(number))
    kept = max(2, math.ceil(round(number * curriculum.random_subsample, 9)))
    return tuple(sorted(random.Random(seed).sample(range(number), min(number, kept))))
