"""How a job's sequences are divided among its optimizer steps."""

import random
from typing import NamedTuple

from art_server.shared.trainer_messages import TrainTask
from art_server.trainer.batches import TrainBatch


class MiniBatch(NamedTuple):
    """The sequences of one optimizer step."""

    number: int
    """The index that the step would have if all groups of the request were trained. It is also the index of the step's learning
    rate."""
    sequences: list[int]
    """Indices into `TrainBatch.sequences`."""


def split_mini_batches(task: TrainTask, trained: TrainBatch, notes: list[str]) -> list[MiniBatch]:
    """The optimizer steps of the job. Each pass covers all groups: with `batch_size` in the order of the request, else in
    an order that the task's seed fixes. With `batch_size` a step has fewer groups if some of its groups are not trained."""
    config = task.config
    if config.passes == config.mini_batches == 1 and config.batch_size is None:
        return [MiniBatch(0, list(range(len(trained.sequences))))]
    sequences_of = _sequences_by_group(task, trained)
    if config.batch_size is not None:
        return _by_batch_size(task, config.batch_size, sequences_of)
    num = min(config.mini_batches, len(sequences_of))
    if num < config.mini_batches:
        notes.append(
            f"mini_batches is {config.mini_batches}, and {num} groups are trained: each pass takes {num} optimizer steps"
        )
    chance = random.Random(task.seed)
    mini_batches: list[MiniBatch] = []
    for turn in range(config.passes):
        groups = list(sequences_of)
        chance.shuffle(groups)
        for first in range(num):
            chosen = [index for group in groups[first::num] for index in sequences_of[group]]
            mini_batches.append(MiniBatch(turn * config.mini_batches + first, sorted(chosen)))
    return mini_batches


def _sequences_by_group(task: TrainTask, trained: TrainBatch) -> dict[int, list[int]]:
    """Maps each group that is trained, by its index in the task, to its sequences."""
    group_of = [index for index, group in enumerate(task.batch.groups) for _ in group.trajectories]
    sequences_of: dict[int, list[int]] = {}
    for index, sequence in enumerate(trained.sequences):
        sequences_of.setdefault(group_of[sequence.trajectory], []).append(index)
    return sequences_of


def _by_batch_size(task: TrainTask, batch_size: int, sequences_of: dict[int, list[int]]) -> list[MiniBatch]:
    """`batch_size` groups of the request in each optimizer step."""
    one_pass: dict[int, list[int]] = {}
    for index, sequences in sequences_of.items():
        number = task.batch.groups[index].number
        step = (index if number is None else number) // batch_size
        one_pass.setdefault(step, []).extend(sequences)
    num_groups = task.batch.num_groups or len(task.batch.groups)
    steps_of_pass = -(-num_groups // batch_size)
    return [
        MiniBatch(turn * steps_of_pass + step, sequences)
        for turn in range(task.config.passes)
        for step, sequences in one_pass.items()
    ]
