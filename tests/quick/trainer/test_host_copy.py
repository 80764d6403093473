"""Locked pages of the base's copy in main memory, with a stand-in for CUDA's runtime."""

import gc
from types import SimpleNamespace

import pytest
import torch

from art_server.trainer import host_copy


class Runtime:
    """CUDA's runtime as torch binds it; `answer` is what it says to a registration."""

    def __init__(self, answer: int):
        self.answer = answer
        self.locked: set[int] = set()
        self.kernels = 0

    def cudaHostRegister(self, address: int, size: int, flags: int) -> int:
        del flags
        assert size > 0
        if self.answer == 0:
            self.locked.add(address)
        return self.answer

    def cudaHostUnregister(self, address: int) -> int:
        self.locked.remove(address)
        return 0


def make(monkeypatch: pytest.MonkeyPatch, runtime: Runtime) -> host_copy.HostCopy:
    real = torch.zeros

    def zeros(*size: int, **_: object) -> torch.Tensor:
        runtime.kernels += 1
        raise torch.AcceleratorError("out of memory")  # the refusal, told late

    monkeypatch.setattr(torch.cuda, "cudart", lambda: runtime)
    monkeypatch.setattr(host_copy.torch, "zeros", zeros)
    parameter = torch.nn.Parameter(real(4), requires_grad=False)
    return host_copy.HostCopy([parameter], SimpleNamespace(type="cuda"))  # type: ignore[arg-type]


def test_pages_are_unlocked_before_their_memory_is_freed(monkeypatch: pytest.MonkeyPatch) -> None:
    runtime = Runtime(0)
    copy = make(monkeypatch, runtime)
    assert copy.is_locked and len(runtime.locked) == 1
    del copy
    gc.collect()
    assert runtime.locked == set() and runtime.kernels == 0


def test_a_refusal_to_lock_is_not_left_as_cuda_s_last_error(monkeypatch: pytest.MonkeyPatch) -> None:
    runtime = Runtime(712)
    copy = make(monkeypatch, runtime)
    assert not copy.is_locked and runtime.kernels == 1
