"""Supervised training from lists and files, with the names and numbers of ART's `art.utils.sft`.

    for chunk in create_sft_dataset_iterator(trajectories, epochs=3, batch_size=4):
        await model.train_sft(chunk.trajectories, chunk.config)

A line of a file is a JSON object with `messages` and, if the conversation has tools, `tools`.
"""

import itertools
import json
import math
import random
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, Literal, NamedTuple

from tqdm.auto import tqdm

from art.sft import Schedule
from art.trajectories import Trajectory
from art.types import TrainResult, TrainSFTConfig
from art_compat.models import TrainableModel
from art_protocol.demonstrations import SHAREGPT

__all__ = [
    "SFTChunk",
    "create_lr_schedule",
    "create_sft_dataset_iterator",
    "get_file_row_count",
    "iterate_file",
    "train_sft_from_file",
]


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
    rates: list[float] = []
    for step in range(total_steps):
        if step < warmup_steps:
            factor = (step + 1) / warmup_steps
        else:
            done = (step - warmup_steps) / last if last > 0 else 0.0
            factor = shapes[method](done)
        rates.append(min_lr + (peak_lr - min_lr) * factor)
    return rates


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
    """The dataset in chunks of `chunk_size` optimizer steps, for one `train_sft` call each. One schedule covers all chunks.

    Each epoch is shuffled by `seed` plus its number. `initial_step` is the optimizer step at which an interrupted run
    continues; the chunk with this step is repeated whole.
    """
    if chunk_size < 1 or batch_size < 1:
        raise ValueError("chunk_size and batch_size are at least 1")
    steps_per_epoch = math.ceil(len(trajectories) / batch_size)
    total = steps_per_epoch * epochs
    rates = create_lr_schedule(total, peak_lr, schedule_type, int(total * warmup_ratio))
    with tqdm(total=len(rates), desc="SFT", unit="step", disable=not show_progress) as bar:
        chunks = itertools.product(range(epochs), range(0, steps_per_epoch, chunk_size))
        for epoch, epoch_step in chunks:
            first = epoch * steps_per_epoch + epoch_step
            num_steps = min(chunk_size, steps_per_epoch - epoch_step)
            if first + num_steps > initial_step:
                ordered = list(trajectories)
                if shuffle:
                    random.Random(seed + epoch).shuffle(ordered)
                chosen = ordered[epoch_step * batch_size : (epoch_step + num_steps) * batch_size]
                config = TrainSFTConfig(learning_rate=rates[first : first + num_steps], batch_size=batch_size)
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
    and the epoch. The first `initial_skip` conversations are left out.

    Raises:
        ValueError: the name does not end in .jsonl, or a line has no conversation; the message names the line.
    """
    return itertools.islice(_iterate(file_path, epochs, shuffle_buffer_size, seed), initial_skip, None)


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
        if "conversations" in row and "messages" not in row:
            raise ValueError(f"its `conversations` are of the form ShareGPT: {SHAREGPT}")
        return Trajectory(messages_and_choices=row["messages"], tools=row.get("tools"))
    except (ValueError, LookupError, TypeError) as error:
        raise ValueError(f"{path}, line {number}: not a JSON object with `messages`: {error}") from error


async def train_sft_from_file(
    model: TrainableModel,
    file_path: str,
    epochs: int = 1,
    batch_size: int = 2,
    peak_lr: float = 2e-4,
    schedule_type: Schedule = "linear",
    warmup_ratio: float = 0.1,
    initial_step: int = 0,
    final_step: int | None = None,
    _config: Any = None,
    verbose: bool = False,
    shuffle_buffer_size: int = 10_000,
    log_metrics: bool = True,
    assistant_turns: Literal["all", "last"] = "all",
) -> TrainResult | None:
    """One `train_sft` call on a JSONL file, from `initial_step` to `final_step` (exclusive) of its optimizer steps. None
    if no steps are left."""
    num_conversations = get_file_row_count(file_path) * epochs
    total = math.ceil(num_conversations / batch_size)
    rates = create_lr_schedule(total, peak_lr, schedule_type, int(total * warmup_ratio))
    rates = rates[initial_step:final_step]
    if not rates:
        return None
    chosen = iterate_file(file_path, epochs, shuffle_buffer_size, 42, initial_step * batch_size)
    config = TrainSFTConfig(learning_rate=rates, batch_size=batch_size, assistant_turns=assistant_turns)
    trajectories = list(itertools.islice(chosen, len(rates) * batch_size))
    return await model.train_sft(trajectories, config, verbose=verbose)
