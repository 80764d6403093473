"""`iterate_dataset`: the batches of a training loop, in an order that depends only on the epoch.

    for batch in art.iterate_dataset(scenarios, 8, num_epochs=3, initial_step=await model.get_step()):
        groups = await art.gather_trajectory_groups(... for scenario in batch.items)
        await model.train(groups)

A restarted program continues with the batch of the next step, because each train call makes one step.
"""

import logging
import random
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Generic, Protocol, TypeVar

from art.bars import make_bar

logger = logging.getLogger(__name__)

T = TypeVar("T")
T_co = TypeVar("T_co", covariant=True)


class Dataset(Protocol[T_co]):
    """A list, a Hugging Face dataset, or anything else that has a length and items by index."""

    def __len__(self) -> int: ...

    def __getitem__(self, index: int, /) -> T_co: ...


@dataclass(frozen=True, slots=True)
class DatasetBatch(Generic[T]):
    """The items of one step. A batch can be unpacked as (items, epoch, step, epoch_step), as in older releases of ART."""

    items: list[T]
    step: int
    """The number of the step, from 0 over all epochs. Training on the batch makes step + 1."""
    epoch: int
    epoch_step: int
    """The number of the step in its epoch, from 0."""

    def __iter__(self) -> Iterator[Any]:
        return iter((self.items, self.epoch, self.step, self.epoch_step))


def iterate_dataset(
    dataset: Dataset[T],
    groups_per_step: int = 1,
    num_epochs: int = 1,
    initial_step: int = 0,
    use_tqdm: bool = True,
) -> Iterator[DatasetBatch[T]]:
    """The batches from `initial_step` on, with a progress bar over all steps.

    Each epoch has every item once, shuffled by the epoch's number. The last batch of an epoch has the rest, which can
    be fewer than `groups_per_step` items. At the end of the last epoch the iterator is empty: a finished program that
    is started again does nothing.

    Raises:
        ValueError: the dataset is empty, or a number is out of range.
        TypeError: the dataset has no length.
    """
    if not hasattr(dataset, "__len__"):
        raise TypeError(f"a {type(dataset).__name__} has no length: pass list(dataset)")
    if not len(dataset):
        raise ValueError("the dataset is empty: there is nothing to iterate over")
    limits = {"groups_per_step": (groups_per_step, 1), "num_epochs": (num_epochs, 1)}
    for name, (value, minimum) in (limits | {"initial_step": (initial_step, 0)}).items():
        if value < minimum:
            raise ValueError(f"{name} must be at least {minimum}, not {value}")
    return _iterate(dataset, groups_per_step, num_epochs, initial_step, use_tqdm)


def _iterate(
    dataset: Dataset[T], groups_per_step: int, num_epochs: int, initial_step: int, use_tqdm: bool
) -> Iterator[DatasetBatch[T]]:
    steps_per_epoch = -(-len(dataset) // groups_per_step)
    num_steps = steps_per_epoch * num_epochs
    if initial_step > num_steps:
        logger.warning(
            "initial_step %d is after the last step, %d: no batches are left; a larger num_epochs adds steps",
            initial_step,
            num_steps,
        )
    indices: list[int] = []
    done = min(initial_step, num_steps)
    with make_bar(total=num_steps, initial=done, desc="steps", disable=not use_tqdm) as bar:
        for step in range(initial_step, num_steps):
            epoch, epoch_step = divmod(step, steps_per_epoch)
            if epoch_step == 0 or step == initial_step:
                indices = list(range(len(dataset)))
                random.Random(epoch).shuffle(indices)
            first = epoch_step * groups_per_step
            items = [dataset[index] for index in indices[first : first + groups_per_step]]
            yield DatasetBatch(items, step, epoch, epoch_step)
            bar.update()
