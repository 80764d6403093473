"""How many tokens go through the model at a time: what its activations take, and what the device has.

The figures depend on the machine and the model only, so the same job splits the same way whenever it runs.
"""

import ctypes
import json
import os
from pathlib import Path

import torch

from art_server.store import files

SHARES = {"cpu": 1 / 8, "cuda": 1 / 3}
"""Of the device's memory: beside an engine, weights and what else runs there."""

MAX_TOKENS = {"cpu": 4096, "cuda": 32_768}
"""More is no faster."""

FILL_TOKENS = {"cpu": 1024}
"""Trees are joined up to so many tokens, where more is no faster: one core took 1.07 s for two trees of 1,016 tokens one
after the other, 1.19 s together, with twice the memory. A larger tree still stays whole."""

MIN_TOKENS = 1024

M_MMAP_THRESHOLD = -3
"""Of glibc's malloc.h."""

MMAP_BYTES = 12 << 20
"""Below the logits of a chunk, above most activations: to fetch each tensor's memory anew takes time. With 256 KiB a step
of a model 256 wide took 1.6 times as long and 40% less memory; with this, as long as without."""

CHECKPOINTING_FACTOR = 8
"""With gradient checkpointing so many times the tokens fit: a layer keeps its input, where it keeps about 50 times its
width otherwise, and one layer at a time is whole."""


def default_tokens(
    device: torch.device, dtype: torch.dtype, num_layers: int, hidden: int, intermediate: int
) -> int:
    """Tokens per micro-batch.

    A layer keeps about 28 * width + 8 * intermediate numbers a token for backward: measured, 370 MB for 1,016 tokens of
    six layers of 256 and 768 in float32, including 64 MB at the output head.
    """
    bytes_per_token = dtype.itemsize * num_layers * (28 * hidden + 8 * intermediate)
    fitting = int(SHARES.get(device.type, 1 / 8) * _device_memory(device) / bytes_per_token)
    return max(MIN_TOKENS, min(MAX_TOKENS.get(device.type, 4096), fitting))


class Budgets:
    """What running out of memory taught: how many tokens at a time fit, by device, base, adapter rank and longest row. One
    JSON file, so that no later step or server tries in vain; whoever deletes it has all tried again."""

    def __init__(self, file: Path | None) -> None:
        self.file = file

    def find(self, key: str) -> int | None:
        return self._read().get(key)

    def learn(self, key: str, tokens: int) -> None:
        if self.file is not None:
            files.write_json(self.file, self._read() | {key: tokens})

    def _read(self) -> dict[str, int]:
        if self.file is None or not self.file.exists():
            return {}
        return json.loads(self.file.read_text())


def budget_key(device: torch.device, base_model: str, rank: int, longest_row: int) -> str:
    """Rows count by powers of two."""
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else "CPU"
    length = 1 << (longest_row - 1).bit_length()
    return f"{name}, {_device_memory(device)} bytes; {base_model}; rank {rank}; rows of {length}"


def fill_tokens(device: torch.device) -> int | None:
    """Up to how many tokens small trees are joined; None as many as fit."""
    return FILL_TOKENS.get(device.type)


def return_freed_memory() -> None:
    """From here on, this process gives each freed tensor of MMAP_BYTES or more back to the system at once.

    glibc otherwise keeps it in a heap where what lives longer breaks it up: over 32 micro-batches of 1,024 tokens the peak
    grew threefold. Does nothing where the C library has no mallopt.
    """
    libc = ctypes.CDLL(None)
    if hasattr(libc, "mallopt"):
        libc.mallopt(M_MMAP_THRESHOLD, MMAP_BYTES)


def is_out_of_memory(error: Exception) -> bool:
    """Whether an allocation failed; on a CPU, under a limit, torch raises a plain RuntimeError for it."""
    return isinstance(error, torch.OutOfMemoryError | MemoryError) or (
        isinstance(error, RuntimeError) and "DefaultCPUAllocator" in str(error)
    )


def _device_memory(device: torch.device) -> int:
    """Bytes."""
    if device.type == "cuda":
        return torch.cuda.get_device_properties(device).total_memory
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
