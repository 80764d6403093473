"""Trajectories as supervised training takes them: each alone in a group, with a weight for each assistant message; and
datasets in chunks, with a learning rate for each optimizer step (`art.utils.sft`)."""

import itertools
import json
import math
import random
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any, Literal, NamedTuple, TypeAlias, TypeVar

from tqdm.auto import tqdm

from art.gather import is_informative
from art.trajectories import History, Trajectory, TrajectoryGroup
from art.types import TrainSFTConfig

Schedule: TypeAlias = Literal["linear", "cosine", "constant"]

H = TypeVar("H", bound=History)


def choose(
    given: Iterable[Trajectory | TrajectoryGroup], *, best_of_group: bool
) -> list[Trajectory]:
    """The trajectories, with those of groups: all, or the best one if the group's rewards differ (the first of equals)."""
    chosen: list[Trajectory] = []
    for each in given:
        if isinstance(each, Trajectory):
            chosen.append(each)
        elif not best_of_group:
            chosen += each.trajectories
        elif is_informative(each):
            chosen.append(max(each.trajectories, key=lambda trajectory: trajectory.reward))
    return chosen


def as_group(trajectory: Trajectory, turns: Literal["all", "last"]) -> TrajectoryGroup:
    """A group of a copy of the trajectory. Its `turn_advantages` are 1 for trained messages and 0 for others, unless it
    has some already."""
    others = [_weigh(history, turns) for history in trajectory.additional_histories]
    weighed = _weigh(trajectory, turns)
    return TrajectoryGroup([weighed.model_copy(update={"additional_histories": others})])


def _weigh(history: H, turns: Literal["all", "last"]) -> H:
    if history.turn_advantages is not None:
        return history
    num = sum(_role(entry) == "assistant" for entry in history.messages_and_choices)
    weights = [1.0] * num if turns == "all" else [0.0] * (num - 1) + [1.0] * bool(num)
    return history.model_copy(update={"turn_advantages": weights})


def _role(entry: Any) -> str | None:
    """The role of a message or of a sampled choice."""
    if isinstance(entry, dict):
        return "assistant" if "finish_reason" in entry else str(entry.get("role"))  # pyright: ignore[reportUnknownMemberType, reportUnknownArgumentType]
    return "assistant" if hasattr(entry, "finish_reason") else getattr(entry, "role", None)


# --- datasets ---------------------------------------------------------------------------------------------------------


class SFTChunk(NamedTuple):
    """The trajectories of some optimizer steps, with their learning rates."""

    trajectories: list[Trajectory]
    config: TrainSFTConfig
    step: int
    """The chunk's first optimizer step, from 0 over all epochs."""
    epoch: int
    epoch_step: int


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
    factors = [
        (step + 1) / warmup_steps
        if step < warmup_steps
        else shapes[method]((step - warmup_steps) / last if last > 0 else 0.0)
        for step in range(total_steps)
    ]
    return [min_lr + (peak_lr - min_lr) * factor for factor in factors]


def create_sft_dataset_iterator(
    trajectories: Sequence[Trajectory],
    chunk_size: int = 10,
    epochs: int = 1,
    batch_size: int = 2,
    peak_lr: float = 2e-4,
    schedule_type: Schedule = "linear",
    warmup_ratio: float = 0.1,
    shuffle: bool = True,
    seed: int = 42,
    initial_step: int = 0,
    show_progress: bool = True,
) -> Iterator[SFTChunk]:
    """The dataset in chunks of `chunk_size` optimizer steps, for one `train_sft` call each. One schedule covers all.

    Each epoch is shuffled by `seed` plus its number. `initial_step` is the optimizer step at which an interrupted run
    continues; the chunk that contains it is repeated whole.
    """
    if chunk_size < 1 or batch_size < 1:
        raise ValueError("chunk_size and batch_size are at least 1")
    of_epoch = math.ceil(len(trajectories) / batch_size)
    rates = create_lr_schedule(
        of_epoch * epochs, peak_lr, schedule_type, int(of_epoch * epochs * warmup_ratio)
    )
    with tqdm(total=len(rates), desc="SFT", unit="step", disable=not show_progress) as bar:
        chunks = itertools.product(range(epochs), range(0, of_epoch, chunk_size))
        for epoch, epoch_step in chunks:
            first = epoch * of_epoch + epoch_step
            num_steps = min(chunk_size, of_epoch - epoch_step)
            if first + num_steps > initial_step:
                items = list(trajectories)
                if shuffle:
                    random.Random(seed + epoch).shuffle(items)
                chosen = items[epoch_step * batch_size : (epoch_step + num_steps) * batch_size]
                config = TrainSFTConfig(
                    learning_rate=rates[first : first + num_steps], batch_size=batch_size
                )
                yield SFTChunk(chosen, config, first, epoch, epoch_step)
            bar.update(num_steps)


def get_file_row_count(file_path: str) -> int:
    """The number of conversations in a JSONL file.

    Raises:
        ValueError: the name does not end in .jsonl.
    """
    return sum(1 for _ in _lines(file_path))


def iterate_file(
    file_path: str,
    epochs: int = 1,
    shuffle_buffer_size: int = 10_000,
    seed: int = 42,
    initial_skip: int = 0,
) -> Iterator[Trajectory]:
    """The conversations of a JSONL file, shuffled within a buffer, which bounds the memory. The order depends on `seed`
    and the epoch. The first `initial_skip` are left out.

    Raises:
        ValueError: the name does not end in .jsonl, or a line has no conversation; the message names the line.
    """
    return itertools.islice(
        _iterate(file_path, epochs, shuffle_buffer_size, seed), initial_skip, None
    )


def _iterate(path: str, epochs: int, buffer_size: int, seed: int) -> Iterator[Trajectory]:
    for epoch in range(epochs):
        rng = random.Random(seed + epoch)
        buffer: list[Trajectory] = []
        for number, line in _lines(path):
            buffer.append(_parse(path, number, line))
            if len(buffer) >= buffer_size:
                yield buffer.pop(rng.randint(0, len(buffer) - 1))
        rng.shuffle(buffer)
        yield from buffer


def _lines(path: str) -> Iterator[tuple[int, str]]:
    if not path.endswith(".jsonl"):
        raise ValueError(f"{path} is not a .jsonl file")
    with Path(path).open() as file:
        yield from ((number, line) for number, line in enumerate(file, 1) if line.strip())


def _parse(path: str, number: int, line: str) -> Trajectory:
    try:
        row: dict[str, Any] = json.loads(line)
        return Trajectory(messages_and_choices=row["messages"], tools=row.get("tools"))
    except (ValueError, LookupError, TypeError) as error:
        raise ValueError(
            f"{path}, line {number}: not a JSON object with `messages`: {error}"
        ) from error
