"""The process that scores the answers of `reasoning.py`'s tasks. It runs as a script with few imports.

A generator may evaluate an answer as Python. So each answer is scored in a child of this process, which has limits on
time, memory and files. A child that ends without a score, or too late, scores 0. The limits are no sandbox.

The connection to the program brings the import path, then requests. A reply is a score, or the error of a request.
"""

import contextlib
import functools
import importlib
import json
import math
import os
import pickle
import select
import signal
import sys
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

TIMEOUT_SECONDS = 2
"""The right answers of all generators take less than 0.02 s each. Answers are scored one after the other."""
MEMORY_BYTES = 512 << 20
"""What a child may allocate beyond the memory that this process has."""
MAX_OUTPUT_BYTES = 1 << 20
"""Limit on the size of each file that an answer writes."""
MAX_DATASETS = 64
MAX_DIGITS = 64
ProgramConnection = Any
"""The connection to the program. Any: the arguments of `Connection` depend on Python's version."""


def serve(program: ProgramConnection) -> None:
    """Replies to requests until the program closes the connection."""
    sys.path[:] = program.recv()
    with contextlib.suppress(EOFError):
        while True:
            generator, settings, entry, answer = program.recv()
            try:
                # Settings as bytes: `lru_cache` takes arguments with a hash only.
                dataset = load_dataset(generator, pickle.dumps(settings))
            except Exception as error:
                reply: str | float = f"{type(error).__name__}: {error}"
            else:
                reply = score_in_child(program, dataset, entry, answer)
            # As JSON: the program unpickles nothing from a process whose children run answers.
            program.send_bytes(json.dumps(reply).encode())


@functools.lru_cache(MAX_DATASETS)
def load_dataset(generator: str, settings: bytes) -> Any:  # Any: an extra, without types
    gym: Any = importlib.import_module("reasoning_gym")
    return gym.create_dataset(generator, **pickle.loads(settings))


def score_in_child(program: ProgramConnection, dataset: Any, entry: dict[str, Any], answer: str) -> float:
    reading, writing = os.pipe()
    child = os.fork()
    if child == 0:
        try:
            program.close()
            limit_process()
            score = float(dataset.score_answer(answer=answer, entry=entry))
            os.write(writing, repr(score).encode())
        finally:
            os._exit(0)  # pyright: ignore[reportPrivateUsage]  # also after an error of any kind
    os.close(writing)
    in_time, _, _ = select.select([reading], [], [], TIMEOUT_SECONDS)
    digits = os.read(reading, MAX_DIGITS) if in_time else b""
    os.close(reading)
    with contextlib.suppress(OSError):  # the child's session has ended
        os.killpg(child, signal.SIGKILL)
    os.waitpid(child, 0)
    with contextlib.suppress(ValueError):  # the answer may have written something else
        if math.isfinite(score := float(digits)):
            return score
    return 0.0


def limit_process() -> None:
    """Makes this process the leader of a session, which is killed as a whole, and limits time, memory and files."""
    import resource  # imported here, because Windows has none, where this module is only imported

    os.setsid()
    limits = {"CPU": TIMEOUT_SECONDS + 1, "FSIZE": MAX_OUTPUT_BYTES, "CORE": 0}
    if sys.platform == "linux":
        num_pages = int(Path("/proc/self/statm").read_text().split()[0])
        limits["AS"] = num_pages * resource.getpagesize() + MEMORY_BYTES
    for kind, value in limits.items():
        resource.setrlimit(getattr(resource, f"RLIMIT_{kind}"), (value, value))


if __name__ == "__main__":
    serve(Connection(int(sys.argv[1])))
