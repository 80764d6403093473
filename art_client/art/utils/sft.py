"""Supervised training from lists and files, with the names and numbers of ART's `art.utils.sft`.

    for chunk in create_sft_dataset_iterator(trajectories, epochs=3, batch_size=4):
        await model.train_sft(chunk.trajectories, chunk.config)

A line of a file is a JSON object with `messages` and, if the conversation has tools, `tools`.
"""

import itertools
import math
from typing import Any, Literal

from art.model import TrainableModel
from art.sft import (
    Schedule,
    SFTChunk,
    create_lr_schedule,
    create_sft_dataset_iterator,
    get_file_row_count,
    iterate_file,
)
from art.types import TrainResult, TrainSFTConfig

__all__ = [
    "SFTChunk",
    "create_lr_schedule",
    "create_sft_dataset_iterator",
    "get_file_row_count",
    "iterate_file",
    "train_sft_from_file",
]


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
    num = get_file_row_count(file_path) * epochs
    total = math.ceil(num / batch_size)
    rates = create_lr_schedule(total, peak_lr, schedule_type, int(total * warmup_ratio))
    rates = rates[initial_step:final_step]
    if not rates:
        return None
    chosen = iterate_file(file_path, epochs, shuffle_buffer_size, 42, initial_step * batch_size)
    config = TrainSFTConfig(
        learning_rate=rates, batch_size=batch_size, assistant_turns=assistant_turns
    )
    trajectories = list(itertools.islice(chosen, len(rates) * batch_size))
    return await model.train_sft(trajectories, config, verbose=verbose)
