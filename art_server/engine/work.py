"""How much vLLM has computed: counted in its own processes, in a file that the server reads without asking anybody.

A number that stands still while requests wait is a hung engine; an engine that is busy with a long prompt, or for minutes
with full batches, raises it all the time, however late its answers are.
"""

import functools
import mmap
import os
from pathlib import Path
from typing import Any

FILE_VARIABLE = "ART_ENGINE_WORK"
"""Names the file to vLLM's processes."""

NUM_SLOTS = 16
"""Of eight bytes. The engine's core writes into the first, workers into the others; two of them may share one."""


class WorkCounter:
    """One process's number in the file."""

    def __init__(self, path: Path, slot: int):
        with path.open("r+b") as file:
            self._numbers = memoryview(mmap.mmap(file.fileno(), NUM_SLOTS * 8)).cast("Q")
        self._slot = slot

    def add(self, amount: int) -> None:
        self._numbers[self._slot] += amount


def make_file(path: Path) -> None:
    """Start at nothing."""
    path.write_bytes(bytes(NUM_SLOTS * 8))


def read_work(path: Path) -> bytes:
    """Equal to an earlier reading where nothing was computed since."""
    return path.read_bytes()


def install(device: str) -> None:
    """Count the tokens of each step of the scheduler and, on a CPU, where one step may take minutes, each layer."""
    path = os.environ.get(FILE_VARIABLE)
    if path is None:
        return
    from vllm.v1.core.sched.scheduler import Scheduler

    from art_server.engine.kept_sets import seam

    update = seam(Scheduler, "update_from_output")
    counters: list[WorkCounter] = []

    @functools.wraps(update)
    def update_and_count(self: Any, scheduler_output: Any, model_runner_output: Any) -> Any:
        if not counters:
            counters.append(WorkCounter(Path(path), 0))
        counters[0].add(scheduler_output.total_num_scheduled_tokens)
        return update(self, scheduler_output, model_runner_output)

    Scheduler.update_from_output = update_and_count
    if device == "cpu":
        _count_layers(Path(path))


def _count_layers(path: Path) -> None:
    from vllm.v1.attention.backends.cpu_attn import CPUAttentionBackendImpl

    from art_server.engine.kept_sets import seam

    forward = seam(CPUAttentionBackendImpl, "forward")
    counters: list[WorkCounter] = []

    @functools.wraps(forward)
    def forward_and_count(self: Any, *args: Any, **kwargs: Any) -> Any:
        if not counters:
            counters.append(WorkCounter(path, 1 + os.getpid() % (NUM_SLOTS - 1)))
        counters[0].add(1)
        return forward(self, *args, **kwargs)

    CPUAttentionBackendImpl.forward = forward_and_count
