"""The trainer process: tells what it computes with, imports the trainer, and runs tasks (`tasks.py`).

python -m art_server.trainer.worker '{"base_model": "PATH", "dtype": "float32", "threads": 2}'   (WorkerConfig)
"""

import importlib
import signal
import sys
from types import ModuleType
from typing import BinaryIO

import torch

from art_server.process.children import be_child, claim_stdout, set_up_logs
from art_server.shared.trainer_messages import Ready, WorkerConfig
from art_server.trainer.facts import own_facts
from art_server.trainer.memory import return_freed_memory


def main(answers: BinaryIO) -> None:
    """Sends Ready, then runs tasks until stdin ends."""
    config = WorkerConfig.model_validate_json(sys.argv[1])
    be_child()
    return_freed_memory()
    set_up_logs()
    if config.threads is not None:
        torch.set_num_threads(config.threads)
    signal.signal(signal.SIGUSR1, signal.SIG_IGN)  # the server repeats it at the first progress of a task
    answers.write(Ready(facts=own_facts(config)).model_dump_json().encode() + b"\n")
    answers.flush()
    import_tasks().Worker(config, answers).serve(sys.stdin.buffer)


def import_tasks() -> ModuleType:
    """Imports the trainer with transformers and PEFT. This takes seconds, in which the server compares the ranks."""
    return importlib.import_module("art_server.trainer.tasks")


if __name__ == "__main__":
    main(claim_stdout())
