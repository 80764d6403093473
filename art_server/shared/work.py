"""How much vLLM has computed: counted in its own processes, in a file that the server reads without asking anybody.

A number that stands still while requests wait is a hung engine; an engine that is busy with a long prompt, or for minutes
with full batches, raises it all the time, however late its answers are.
"""

import mmap
from pathlib import Path

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
