"""A trainer process that fails when it is told to: `faulty_rank.py CONFIG FILE CODE`.

FILE has a stage (load, forward, backward, join, reduce, save) and a fault. The process removes FILE when it comes to
this stage. CODE runs first, with `rank` and `is_last`: it makes the machine of one rank unlike the others.
"""

import json
import os
import signal
import sys
import time
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import torch

from art_server.process.children import claim_stdout
from art_server.trainer import worker

FILE = Path(sys.argv[2])
CONFIG = json.loads(sys.argv[1])


def kill() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def stop() -> None:
    os.kill(os.getpid(), signal.SIGSTOP)


def cancel() -> None:
    os.kill(os.getpid(), signal.SIGUSR1)


def hang() -> None:
    time.sleep(3600)


def fill_memory() -> None:
    raise MemoryError("out of memory, as the test wants it")


def fill_disk() -> None:
    raise OSError(28, "No space left on device")


def spoil() -> None:
    Spoilt.next = True


class Spoilt:
    """Whether the next scores are not numbers."""

    next = False


FAULTS = {fault.__name__: fault for fault in (kill, stop, cancel, hang, fill_memory, fill_disk, spoil)}


def comes_to(stage: str, function: Callable[..., Any]) -> Callable[..., Any]:
    """The function, which fails before it begins if the file says so."""

    def faulty(*args: Any, **kwargs: Any) -> Any:
        if FILE.exists() and FILE.read_text().split()[0] == stage:
            fault = FILE.read_text().split()[1]
            FILE.unlink()
            FAULTS[fault]()
        result = function(*args, **kwargs)
        if stage == "forward" and Spoilt.next:
            Spoilt.next = False
            result = result._replace(logprobs_N=result.logprobs_N * torch.nan)
        return result

    return faulty


def import_faulty() -> ModuleType:
    """The trainer, with the faults."""
    tasks = import_tasks()
    from art_server.trainer import job, step
    from art_server.trainer.policy import Policy

    Policy._load_base = comes_to("load", Policy._load_base)
    Policy.scores = comes_to("forward", Policy.scores)
    torch.Tensor.backward = comes_to("backward", torch.Tensor.backward)
    step.join_gradients = comes_to("join", step.join_gradients)
    step.sum_gradients = comes_to("reduce", step.sum_gradients)
    job.save_checkpoint = comes_to("save", job.save_checkpoint)
    return tasks


if __name__ == "__main__":
    exec(sys.argv[3], {"rank": CONFIG["rank"], "is_last": CONFIG["rank"] == CONFIG["num_ranks"] - 1})
    import_tasks, worker.import_tasks = worker.import_tasks, import_faulty
    worker.main(claim_stdout())
