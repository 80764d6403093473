"""A copy of frozen weights in main memory, for the time that they are off the device between steps."""

import contextlib
import weakref
from collections.abc import Sequence
from typing import Any

import torch

ALIGNMENT = 512
"""Bytes; more than any dtype needs."""


class HostCopy:
    """One flat copy of frozen weights, made once. While they are off the device, the parameters are views of it."""

    def __init__(self, parameters: Sequence[torch.nn.Parameter], device: torch.device) -> None:
        """Copies the weights. On CUDA the pages are locked, so that the copy back runs at the bus's speed. torch's own
        allocator for locked pages is not used, because it would round the block up to a power of two."""
        self._parameters = list(parameters)
        self._device = device
        sizes = [-(-each.nbytes // ALIGNMENT) * ALIGNMENT for each in self._parameters]
        self._block = torch.empty(sum(sizes), dtype=torch.uint8)
        self.is_locked = device.type == "cuda" and _lock_pages(self._block, device)
        if self.is_locked:
            # Memory that is freed while it is locked stays locked, and its address cannot be locked again.
            weakref.finalize(self, _unlock_pages, self._block).atexit = False
        self._views: list[torch.Tensor] = []
        start = 0
        for each, size in zip(self._parameters, sizes, strict=True):
            view = self._block[start : start + each.nbytes].view(each.dtype).view(each.shape)
            view.copy_(each.detach())
            self._views.append(view)
            start += size

    @property
    def num_bytes(self) -> int:
        return self._block.nbytes

    def holds(self, parameters: Sequence[torch.nn.Parameter]) -> bool:
        """Whether it is a copy of exactly these parameters."""
        return [id(each) for each in parameters] == [id(each) for each in self._parameters]

    def leave(self) -> None:
        """Frees the device's memory. Nothing is copied."""
        for each, view in zip(self._parameters, self._views, strict=True):
            each.data = view

    def return_to_device(self) -> None:
        """Copies the weights to the device."""
        for each, view in zip(self._parameters, self._views, strict=True):
            each.data = view.to(self._device, non_blocking=self.is_locked, copy=True)
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
