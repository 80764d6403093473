"""The log file of a child process. Each restarted process appends to the same file."""

import os
from pathlib import Path
from typing import BinaryIO

LINE_BYTES = 2**10
"""Bytes that `tail` reads for each requested line. If the lines are longer on average, `tail` returns fewer lines."""


class LogFile:
    """A log file that remembers where the output of its latest process begins."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.start = 0
        """The byte at which the output of the latest process begins."""

    def open(self) -> BinaryIO:
        """The file, opened for a new process. The caller closes it."""
        self.path.parent.mkdir(parents=True, exist_ok=True)
        log = self.path.open("ab")
        self.start = log.tell()
        return log

    def tail(self, num_lines: int = 20) -> str:
        """The last lines that the latest process wrote; empty if there are none."""
        if not self.path.exists():
            return ""
        with self.path.open("rb") as log:
            offset = max(self.start, log.seek(0, os.SEEK_END) - num_lines * LINE_BYTES)
            log.seek(offset)
            lines = log.read().decode(errors="replace").splitlines()
        if offset > self.start and len(lines) > 1:
            lines = lines[1:]  # the beginning of the first line is missing
        return "\n".join(lines[-num_lines:])
