"""The token budget of a micro-batch, from the memory that activations take and that the device has.

The defaults depend only on the machine and the model, so a repeated job is split in the same way.
"""

import ctypes

import torch

from art_server.shared.main_memory import main_memory

SHARES = {"cpu": 1 / 8, "cuda": 1 / 3}
"""The share of the device's memory for activations. The rest is for the engine, weights and other processes."""

MAX_TOKENS = {"cpu": 4096, "cuda": 32_768}
"""Larger micro-batches are no faster."""

FILL_TOKENS = {"cpu": 1024}
"""Small trees are packed together up to this many tokens; larger micro-batches are no faster. One core took 1.07 s for
two trees of 1,016 tokens one after the other, and 1.19 s together, with twice the memory. A larger tree is not cut."""

MIN_TOKENS = 1024

M_MMAP_THRESHOLD = -3
"""The parameter's number in glibc's malloc.h."""

MMAP_BYTES = 12 << 20
"""Less than a chunk's logits, more than most activations, because fresh memory for each tensor takes time. With 256 KiB
a step of a model of width 256 took 1.6 times as long and 40% less memory; with this value the step takes no longer."""

CHECKPOINTING_FACTOR = 8
"""With gradient checkpointing this many times more tokens fit: a layer keeps only its input instead of activations of about
50 times its width, and one layer at a time is recomputed."""


def default_tokens(device: torch.device, dtype: torch.dtype, num_layers: int, hidden: int, intermediate: int) -> int:
    """Tokens per micro-batch that fit the device.

    A layer keeps about 28 * width + 8 * intermediate numbers per token for backward. Measured: 370 MB for 1,016 tokens
    and six layers of 256 and 768 in float32, including 64 MB at the output head.
    """
    bytes_per_token = dtype.itemsize * num_layers * (28 * hidden + 8 * intermediate)
    fitting = int(SHARES.get(device.type, 1 / 8) * device_memory(device) / bytes_per_token)
    return max(MIN_TOKENS, min(MAX_TOKENS.get(device.type, 4096), fitting))


def fill_tokens(device: torch.device) -> int | None:
    """The number of tokens up to which small trees are packed together; None is as many as fit."""
    return FILL_TOKENS.get(device.type)


def return_freed_memory() -> None:
    """Makes this process return each freed tensor of MMAP_BYTES or more to the system at once.

    Otherwise glibc keeps the memory in a heap that longer-lived tensors fragment: over 32 micro-batches of 1,024 tokens the
    peak grew threefold. Does nothing where the C library has no mallopt.
    """
    libc = ctypes.CDLL(None)
    if hasattr(libc, "mallopt"):
        libc.mallopt(M_MMAP_THRESHOLD, MMAP_BYTES)


def free_cached_memory() -> None:
    """Returns freed GPU memory, if there is a GPU, to the system: the engine on the same device needs it next. cuBLAS's
    workspaces lie in blocks of torch's cache, which could not be returned while they exist."""
    if torch.cuda.is_available():
        torch._C._cuda_clearCublasWorkspaces()  # pyright: ignore[reportPrivateUsage]
        torch.cuda.empty_cache()


OUT_OF_MEMORY = (
    "out of memory",
    "DefaultCPUAllocator",
    "CUBLAS_STATUS_ALLOC_FAILED",
    "CUDNN_STATUS_ALLOC_FAILED",
    "cublasCreate",
    "cublasLtCreate",
)
"""Words of errors that mean a failed allocation. cuBLAS makes its handles at a thread's first product."""


def is_out_of_memory(error: Exception) -> bool:
    """Whether an allocation failed. Triton, CUDA's libraries, and torch on a CPU with a memory limit raise a plain
    RuntimeError."""
    return isinstance(error, torch.OutOfMemoryError | MemoryError) or (
        isinstance(error, RuntimeError) and any(words in str(error) for words in OUT_OF_MEMORY)
    )


def device_memory(device: torch.device) -> int:
    """The device's memory in bytes."""
    if device.type == "cuda":
        return torch.cuda.get_device_properties(device).total_memory
    return main_memory()
