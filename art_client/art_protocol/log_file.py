"""The log file of a child process. Each restarted process appends to the same file."""

import os
from pathlib import Path
from typing import BinaryIO

LINE_BYTES = 2**10
"""The mean length of lines up to which `tail` gives all that were asked for."""


class LogFile:
    """A log file that remembers where the output of its latest process begins."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.start = 0
        """Where that output begins."""

    def open(self) -> BinaryIO:
        """The file, opened for a new process. The caller closes it."""
        self.path.parent.mkdir(parents=True, exist_ok=True)
        log = self.path.open("ab")
        self.start = log.tell()
        return log

    def tail(self, num_lines: int = 20) -> str:
        """The last lines of the latest process; empty if it wrote none."""
        if not self.path.exists():
            return ""
        with self.path.open("rb") as log:
            place = max(self.start, log.seek(0, os.SEEK_END) - num_lines * LINE_BYTES)
            log.seek(place)
            lines = log.read().decode(errors="replace").splitlines()
        if place > self.start and len(lines) > 1:
            lines = lines[1:]  # its beginning is missing
        return "\n".join(lines[-num_lines:])
