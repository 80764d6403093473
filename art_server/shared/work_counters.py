"""Counters of the work that vLLM has done. Its processes write them to a file, so the server can read them at any time.

A hung engine raises no counter while requests wait, and does not answer the server's own request for one token. An
engine that computes long prompts or large batches raises them all the time, even if it answers minutes later.
"""

import mmap
from pathlib import Path

FILE_VARIABLE = "ART_ENGINE_WORK"
"""Environment variable with the file's path, for vLLM's processes."""

NUM_SLOTS = 16
"""Counters of eight bytes. The engine's core writes to the first, workers to the others. Two workers may share one."""


class WorkCounter:
    """One process's counter in the file."""

    def __init__(self, path: Path, slot: int):
        with path.open("r+b") as file:
            self._numbers = memoryview(mmap.mmap(file.fileno(), NUM_SLOTS * 8)).cast("Q")
        self._slot = slot

    def add(self, amount: int) -> None:
        self._numbers[self._slot] += amount


def make_file(path: Path) -> None:
    """Writes the file with all counters at 0."""
    path.write_bytes(bytes(NUM_SLOTS * 8))


def read_work(path: Path) -> bytes:
    """The counters. They equal an earlier reading if nothing was computed since."""
    return path.read_bytes()
