import subprocess
import sys

import pytest
import torch

from art_server.trainer import memory
from art_server.trainer.batches import TrainSequence, make_micro_batches
from art_server.trainer.memory import MAX_TOKENS, MIN_TOKENS, default_tokens, is_out_of_memory


def tree(first: int, num_leaves: int) -> list[TrainSequence]:
    """Leaves of ten tokens on a trunk of twenty."""
    return [
        TrainSequence([first] * 20 + [leaf] * 10, [28], [1], [-1.0], [-1], [None], [1.0], leaf, leaf)
        for leaf in range(num_leaves)
    ]


def test_small_trees_are_joined_up_to_the_filling_and_a_large_one_stays_whole() -> None:
    sequences = [*tree(50, 1), *tree(60, 1), *tree(70, 1), *tree(80, 9)]
    batches = make_micro_batches(sequences, 200, fill_tokens=70)
    assert sorted(batch.num_tokens for batch in batches) == [30, 60, 110]
    (whole,) = make_micro_batches(sequences, 200)
    assert whole.num_tokens == 200


def test_default_tokens_fall_with_the_model_and_stay_within_bounds() -> None:
    cpu = torch.device("cpu")
    tiny = default_tokens(cpu, torch.float32, 4, 256, 768)
    large = default_tokens(cpu, torch.float32, 64, 8192, 30_000)
    assert tiny <= MAX_TOKENS["cpu"]
    assert large == MIN_TOKENS
    assert default_tokens(cpu, torch.bfloat16, 30, 1024, 3072) >= default_tokens(cpu, torch.float32, 30, 1024, 3072)


def test_default_tokens_fit_the_memory_of_the_container(monkeypatch: pytest.MonkeyPatch) -> None:
    """An eighth of 16 GiB; a token takes 4 bytes * 6 layers * (28 * 1024 + 8 * 3072)."""
    monkeypatch.setattr(memory, "main_memory", lambda: 16 * 2**30)
    fitting = default_tokens(torch.device("cpu"), torch.float32, 6, 1024, 3072)
    assert fitting == 2**31 // (4 * 6 * (28 * 1024 + 8 * 3072)) == 1680


def test_a_failed_allocation_is_distinguished_from_other_errors() -> None:
    with pytest.raises(RuntimeError) as failed:
        torch.empty(1 << 60, dtype=torch.uint8)
    assert is_out_of_memory(failed.value)
    assert is_out_of_memory(torch.OutOfMemoryError("CUDA out of memory"))
    assert is_out_of_memory(RuntimeError("Triton Error [CUDA]: out of memory"))
    cublas = "CUDA error: CUBLAS_STATUS_NOT_INITIALIZED when calling `cublasCreate(handle)`"
    assert is_out_of_memory(RuntimeError(cublas))
    assert not is_out_of_memory(RuntimeError("shapes do not match"))


MAPPED_MB = """
import ctypes
import os

import torch

from art_server.trainer.memory import return_freed_memory


class Info(ctypes.Structure):
    names = "arena ordblks smblks hblks hblkhd usmblks fsmblks uordblks fordblks keepcost".split()
    _fields_ = [(name, ctypes.c_size_t) for name in names]


libc = ctypes.CDLL(None)
libc.mallinfo2.restype = Info
if child := os.fork():  # torch's import takes seconds
    os.waitpid(child, 0)
    return_freed_memory()
large = torch.ones(2**22 + 2**21)
del large  # from here on glibc keeps what is smaller
before = libc.mallinfo2().hblkhd
tensors = [torch.ones(2**22) for _ in range(8)]
print((libc.mallinfo2().hblkhd - before) // 2**20, flush=True)
"""


@pytest.mark.skipif(sys.platform != "linux", reason="glibc's malloc")
def test_tensors_lie_outside_of_the_heap_so_that_they_go_back_when_freed() -> None:
    ran = subprocess.run([sys.executable, "-c", MAPPED_MB], capture_output=True, check=True, text=True)
    as_usual, returned = map(int, ran.stdout.split())
    assert as_usual == 0 and returned > 100
