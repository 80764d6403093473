"""The server's processes: how they share cores, and the children on disk, so that what a killed server left behind is found
and killed at the next start.

Each child leads a session of its own, so that all that it spawned can be killed with it. Children also die with their
parent through the kernel (PR_SET_PDEATHSIG); this covers what slips through.
"""

import contextlib
import ctypes
import gc
import json
import os
import signal
import sys
from pathlib import Path
from typing import BinaryIO

from art_server.store import files

GARBAGE = 20_000
"""Objects made between two looks for garbage; Python's 700 take 6% of the time of a process that answers requests."""

PR_SET_PDEATHSIG = 1

CORES_VARIABLE = "ART_CORES"
"""The cores that a child keeps to, with commas; unset: all."""


def _stat(pid: int) -> tuple[int, int, str] | None:
    """(session id, start time in clock ticks since boot, state) of a process, None when there is none."""
    try:
        text = Path(f"/proc/{pid}/stat").read_text()
    except (FileNotFoundError, ProcessLookupError):
        return None
    fields = text.rpartition(")")[2].split()
    return int(fields[3]), int(fields[19]), fields[0]


def kill_session(pid: int) -> None:
    """SIGKILL every process of the session that `pid` leads or led."""
    for entry in Path("/proc").iterdir():
        if not entry.name.isdigit():
            continue
        stat = _stat(int(entry.name))
        if stat is not None and stat[0] == pid:
            with contextlib.suppress(ProcessLookupError):
                os.kill(int(entry.name), signal.SIGKILL)
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(pid, signal.SIGKILL)


def claim_stdout() -> BinaryIO:
    """The original stdout, for answers alone; whatever libraries print goes to stderr from here on."""
    answers = os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)
    return answers


def collect_seldom() -> None:
    """For processes that answer requests: less time for garbage."""
    gc.set_threshold(GARBAGE)


def wake_in_batches() -> None:
    """Have this process let the one that wakes it go on (Linux).

    An engine's step writes to each open stream. A reader that took the core at each write would cost two switches for each
    token; so it finds all of a step's together. The engine itself is slower for it: children undo it (`be_child`). Where a
    sandbox forbids it, all go on as they are.
    """
    if sys.platform == "linux":
        with contextlib.suppress(PermissionError):
            os.sched_setscheduler(0, os.SCHED_BATCH, os.sched_param(0))


def be_child() -> None:
    """For a process that a server started: scheduled as others are, on the cores that it was given, and killed by the
    kernel when the one that started it ends, however it ends (Linux; prctl(2), PR_SET_PDEATHSIG).

    Raises:
        OSError: the kernel refuses.
    """
    if sys.platform == "linux":
        with contextlib.suppress(PermissionError):
            os.sched_setscheduler(0, os.SCHED_OTHER, os.sched_param(0))
        if cores := os.environ.get(CORES_VARIABLE):
            os.sched_setaffinity(0, {int(each) for each in cores.split(",")})
        if ctypes.CDLL(None, use_errno=True).prctl(PR_SET_PDEATHSIG, signal.SIGKILL) != 0:
            raise OSError(ctypes.get_errno(), "prctl(PR_SET_PDEATHSIG) failed")


class Children:
    """The list of running children, kept in one file under the server's folder."""

    def __init__(self, server_dir: Path):
        self._file = server_dir / "children.json"
        self._started: dict[int, int] = {}

    def reap(self) -> list[int]:
        """Kill what an earlier server left behind. Returns the session leaders' process ids."""
        if not self._file.exists():
            return []
        left: list[int] = []
        for text, start_time in json.loads(self._file.read_text()).items():
            self._kill(int(text), start_time)
            left.append(int(text))
        self._file.unlink()
        return left

    def add(self, pid: int) -> None:
        stat = _stat(pid)
        if stat is not None:
            self._started[pid] = stat[1]
            self._write()

    def remove(self, pid: int) -> None:
        """Kill a child with all of its session, and forget it."""
        start_time = self._started.pop(pid, None)
        if start_time is not None:
            self._kill(pid, start_time)
            self._write()

    @staticmethod
    def _kill(pid: int, start_time: int) -> None:
        leader = _stat(pid)
        if leader is None or leader[1] == start_time:  # else the id was taken by another program
            kill_session(pid)

    def _write(self) -> None:
        files.write_json(self._file, {str(pid): start for pid, start in self._started.items()})
