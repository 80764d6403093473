"""Counts vLLM's work, by which the server recognises a hung engine (`shared/work_counters.py`)."""

import functools
import os
from pathlib import Path
from typing import Any

from art_server.engine.vllm_process.kept_sets import patch_target
from art_server.shared.work_counters import FILE_VARIABLE, NUM_SLOTS, WorkCounter


def install(device: str) -> None:
    """Counts the tokens of each scheduler step and, on a CPU, each attention layer: a step can take minutes there."""
    path = os.environ.get(FILE_VARIABLE)
    if path is None:
        return
    from vllm.v1.core.sched.scheduler import Scheduler

    update = patch_target(Scheduler, "update_from_output")
    counters: list[WorkCounter] = []

    @functools.wraps(update)
    def update_and_count(self: Any, scheduler_output: Any, model_runner_output: Any) -> Any:
        # Not at the installation: the process that counts may be forked later.
        if not counters:
            counters.append(WorkCounter(Path(path), 0))
        counters[0].add(scheduler_output.total_num_scheduled_tokens)
        return update(self, scheduler_output, model_runner_output)

    Scheduler.update_from_output = update_and_count
    if device == "cpu":
        _count_layers(Path(path))


def _count_layers(path: Path) -> None:
    from vllm.v1.attention.backends.cpu_attn import CPUAttentionBackendImpl

    forward = patch_target(CPUAttentionBackendImpl, "forward")
    counters: list[WorkCounter] = []

    @functools.wraps(forward)
    def forward_and_count(self: Any, *args: Any, **kwargs: Any) -> Any:
        # Not at the installation: a worker may be forked later, and its own number chooses its slot.
        if not counters:
            counters.append(WorkCounter(path, 1 + os.getpid() % (NUM_SLOTS - 1)))
        counters[0].add(1)
        return forward(self, *args, **kwargs)

    CPUAttentionBackendImpl.forward = forward_and_count
