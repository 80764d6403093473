"""The log file of a child process. Each restarted process appends to the same file."""

import os
from pathlib import Path
from typing import BinaryIO

MAX_TAIL_BYTES = 2**16


class LogFile:
    """A log file that remembers where the output of its latest process begins."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._start = 0

    def open(self) -> BinaryIO:
        """The file, opened for a new process. The caller closes it."""
        self.path.parent.mkdir(parents=True, exist_ok=True)
        log = self.path.open("ab")
        self._start = log.tell()
        return log

    def tail(self, num_lines: int = 20) -> str:
        """The last lines of the latest process; empty if it wrote none."""
        if not self.path.exists():
            return ""
        with self.path.open("rb") as log:
            log.seek(max(self._start, log.seek(0, os.SEEK_END) - MAX_TAIL_BYTES))
            lines = log.read().decode(errors="replace").splitlines()
        return "\n".join(lines[-num_lines:])
