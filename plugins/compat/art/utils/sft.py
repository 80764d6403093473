"""Supervised training from lists and files, with the names and numbers of ART's `art.utils.sft`.

    for chunk in create_sft_dataset_iterator(trajectories, epochs=3, batch_size=4):
        await model.train_sft(chunk.trajectories, chunk.config)

A line of a file is a JSON object with `messages` and, if the conversation has tools, `tools`.
"""

import itertools
import json
import math
import random
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, Literal

from tqdm.auto import tqdm

from art.sft import Schedule, SFTChunk, chunks, create_lr_schedule
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
    total = math.ceil(len(trajectories) / batch_size) * epochs
    whole = chunks(
        trajectories,
        chunk_size=chunk_size,
        epochs=epochs,
        batch_size=batch_size,
        peak_lr=peak_lr,
        min_lr=0.0,
        schedule_type=schedule_type,
        warmup_ratio=warmup_ratio,
        shuffle=shuffle,
        seed=seed,
    )
    with tqdm(total=total, desc="SFT", unit="step", disable=not show_progress) as bar:
        for chunk in whole:
            num_steps = math.ceil(len(chunk.trajectories) / batch_size)
            if chunk.step + num_steps > initial_step:
                yield chunk
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
