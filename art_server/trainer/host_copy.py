"""A copy of frozen weights in main memory, for the time between steps, when the weights are off the device."""

import contextlib
import weakref
from collections.abc import Sequence
from typing import Any

import torch

ALIGNMENT = 512
"""Bytes; more than any dtype needs."""


class HostCopy:
    """One flat copy of frozen weights, made once. While the weights are off the device, the
    parameters are views of the copy."""

    def __init__(self, parameters: Sequence[torch.nn.Parameter], device: torch.device) -> None:
        """Copies the weights. On CUDA the pages are locked, so that the copy back runs at the bus's speed. torch's own
        allocator for locked pages is not used, because it would round the block up to a power of two."""
        self._parameters = list(parameters)
        self._device = device
        sizes = [-(-parameter.nbytes // ALIGNMENT) * ALIGNMENT for parameter in self._parameters]
        self._block = torch.empty(sum(sizes), dtype=torch.uint8)
        self.is_locked = device.type == "cuda" and _lock_pages(self._block, device)
        if self.is_locked:
            # Memory that is freed while it is locked stays locked, and its address cannot be locked again.
            weakref.finalize(self, _unlock_pages, self._block).atexit = False
        self._views: list[torch.Tensor] = []
        start = 0
        for parameter, size in zip(self._parameters, sizes, strict=True):
            view = self._block[start : start + parameter.nbytes].view(parameter.dtype).view(parameter.shape)
            view.copy_(parameter.detach())
            self._views.append(view)
            start += size

    @property
    def num_bytes(self) -> int:
        return self._block.nbytes

    def holds(self, parameters: Sequence[torch.nn.Parameter]) -> bool:
        """Whether this is a copy of exactly these parameters."""
        return [*map(id, parameters)] == [*map(id, self._parameters)]

    def leave(self) -> None:
        """Frees the device's memory. Nothing is copied."""
        for parameter, view in zip(self._parameters, self._views, strict=True):
            parameter.data = view

    def return_to_device(self) -> None:
        """Copies the weights to the device."""
        for parameter, view in zip(self._parameters, self._views, strict=True):
            parameter.data = view.to(self._device, non_blocking=self.is_locked, copy=True)
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)


def _lock_pages(block: torch.Tensor, device: torch.device) -> bool:
    """Locks the pages; False if the system refuses (a limit on locked memory). Transfers then work, but slower."""
    runtime: Any = torch.cuda.cudart()  # Any: torch's binding is untyped
    if int(runtime.cudaHostRegister(block.data_ptr(), block.nbytes, 0)) == 0:
        return True
    # CUDA remembers the refusal as its last error, which torch would raise after the next kernel.
    with contextlib.suppress(RuntimeError):
        torch.zeros(1, device=device)
    return False


def _unlock_pages(block: torch.Tensor) -> None:
    runtime: Any = torch.cuda.cudart()
    runtime.cudaHostUnregister(block.data_ptr())
