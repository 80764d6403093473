"""The log of a child process, which goes on from one process to the next."""

import os
from pathlib import Path
from typing import BinaryIO

MAX_TAIL_BYTES = 2**16


class LogFile:
    """Remembers where the lines of the last process that was given it begin."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._start = 0

    def open(self) -> BinaryIO:
        """For a new process; the caller closes it."""
        self.path.parent.mkdir(parents=True, exist_ok=True)
        log = self.path.open("ab")
        self._start = log.tell()
        return log

    def tail(self, num_lines: int = 20) -> str:
        """The process's last lines, empty before it wrote any."""
        if not self.path.exists():
            return ""
        with self.path.open("rb") as log:
            log.seek(max(self._start, log.seek(0, os.SEEK_END) - MAX_TAIL_BYTES))
            lines = log.read().decode(errors="replace").splitlines()
        return "\n".join(lines[-num_lines:])
