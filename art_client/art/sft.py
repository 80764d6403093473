"""Trajectories as supervised training takes them: each alone in a group, with a weight for each assistant message; and a data set
in chunks, of which each is a train call."""

import math
import random
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, Literal, NamedTuple, TypeAlias, TypeVar

from art.trajectories import History, Trajectory, TrajectoryGroup, is_informative
from art.types import TrainSFTConfig

Schedule: TypeAlias = Literal["linear", "cosine", "constant"]

H = TypeVar("H", bound=History)


class SFTChunk(NamedTuple):
    """The trajectories of some optimizer steps, with their learning rates."""

    trajectories: list[Trajectory]
    config: TrainSFTConfig
    step: int
    """The chunk's first optimizer step, from 0 over all epochs."""
    epoch: int
    epoch_step: int


def choose(entries: Iterable[Trajectory | TrajectoryGroup], *, best_of_group: bool) -> list[Trajectory]:
    """The trajectories, and the trajectories of the groups. With `best_of_group` a group has only its best trajectory (the
    first of equals), and none if all its rewards are equal.

    Raises:
        TypeError: an entry is neither of both.
    """
    chosen: list[Trajectory] = []
    for index, entry in enumerate(entries):
        if isinstance(entry, Trajectory):
            chosen.append(entry)
        elif not isinstance(entry, TrajectoryGroup):  # pyright: ignore[reportUnnecessaryIsInstance]
            raise TypeError(
                f"trajectories[{index}] is a {type(entry).__name__}, not art.Trajectory: write "
                "`art.Trajectory(messages_and_choices=...)` with the messages"
            )
        elif not best_of_group:
            chosen += entry.trajectories
        elif is_informative(entry):
            chosen.append(max(entry.trajectories, key=lambda trajectory: trajectory.reward))
    return chosen


def as_group(trajectory: Trajectory, turns: Literal["all", "last"]) -> TrajectoryGroup:
    """A group with a copy of the trajectory. The `turn_advantages` of each history are 1 for trained messages and 0 for
    others. A history that has `turn_advantages` keeps them."""
    others = [_weigh(history, turns) for history in trajectory.additional_histories]
    weighed = _weigh(trajectory, turns)
    return TrajectoryGroup([weighed.model_copy(update={"additional_histories": others})])


def _weigh(history: H, turns: Literal["all", "last"]) -> H:
    if history.turn_advantages is not None:
        return history
    num_turns = sum(_role(entry) == "assistant" for entry in history.messages_and_choices)
    weights = [1.0] * num_turns
    if turns == "last":
        weights[:-1] = [0.0] * (num_turns - 1)
    return history.model_copy(update={"turn_advantages": weights})


def _role(entry: Any) -> str | None:
    """The role of a message or of a sampled choice."""
    if isinstance(entry, dict):
        return "assistant" if "finish_reason" in entry else str(entry.get("role"))  # pyright: ignore[reportUnknownMemberType, reportUnknownArgumentType]
    return "assistant" if hasattr(entry, "finish_reason") else getattr(entry, "role", None)


def chunks(
    trajectories: Sequence[Trajectory],
    *,
    chunk_size: int,
    epochs: int,
    batch_size: int,
    peak_lr: float,
    min_lr: float,
    schedule_type: Schedule,
    warmup_ratio: float,
    shuffle: bool,
    seed: int,
) -> Iterator[SFTChunk]:
    """The dataset in chunks of `chunk_size` optimizer steps, under one schedule. An epoch ends with a chunk. Each epoch is shuffled
    by `seed` plus its number."""
    steps_per_epoch = math.ceil(len(trajectories) / batch_size)
    total = steps_per_epoch * epochs
    rates = create_lr_schedule(total, peak_lr, schedule_type, int(total * warmup_ratio), min_lr)
    for epoch in range(epochs):
        ordered = list(trajectories)
        if shuffle:
            random.Random(seed + epoch).shuffle(ordered)
        for epoch_step in range(0, steps_per_epoch, chunk_size):
            first, stop = epoch * steps_per_epoch + epoch_step, min(epoch_step + chunk_size, steps_per_epoch)
            config = TrainSFTConfig(learning_rate=rates[first : first + stop - epoch_step], batch_size=batch_size)
            yield SFTChunk(ordered[epoch_step * batch_size : stop * batch_size], config, first, epoch, epoch_step)


def create_lr_schedule(
    total_steps: int,
    peak_lr: float,
    method: Schedule = "linear",
    warmup_steps: int = 0,
    min_lr: float = 0.0,
) -> list[float]:
    """The learning rate of each optimizer step: it rises linearly from `min_lr` to `peak_lr` over the warm-up, and falls
    to `min_lr` at the last step: linearly, by half a cosine, or not at all."""
    shapes: dict[str, Callable[[float], float]] = {
        "linear": lambda done: 1.0 - done,
        "cosine": lambda done: 0.5 * (1.0 + math.cos(math.pi * done)),
        "constant": lambda done: 1.0,
    }
    if method not in shapes:
        raise ValueError(f"method {method!r} is none of {', '.join(shapes)}")
    last = total_steps - warmup_steps - 1
    rates: list[float] = []
    for step in range(total_steps):
        if step < warmup_steps:
            factor = (step + 1) / warmup_steps
        else:
            done = (step - warmup_steps) / last if last > 0 else 0.0
            factor = shapes[method](done)
        rates.append(min_lr + (peak_lr - min_lr) * factor)
    return rates
