"""The server's processes: how they share cores, and the children on disk, so that what a killed server left behind is found
and killed at the next start.

Each child leads a session of its own, so that all that it spawned can be killed with it. Children also die with their
parent through the kernel (PR_SET_PDEATHSIG); this covers what slips through.
"""

import asyncio
import contextlib
import ctypes
import gc
import json
import logging
import os
import signal
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import BinaryIO

from art.log_file import LogFile
from art_server.errors import StorageFull
from art_server.store import files

logger = logging.getLogger(__name__)

GARBAGE = 20_000
"""Objects made between two looks for garbage; Python's 700 take 6% of the time of a process that answers requests."""

PR_SET_PDEATHSIG = 1

CORES_VARIABLE = "ART_CORES"
"""The cores that a child keeps to, with commas; unset: all."""


def _session(leader: int) -> list[int]:
    """The processes of the session that `leader` leads or led. Its id is no other program's while any of them runs."""
    members: list[int] = []
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            with contextlib.suppress(ProcessLookupError, PermissionError):
                if os.getsid(int(entry.name)) == leader:
                    members.append(int(entry.name))
    return members


def _kill(pids: list[int]) -> None:
    for pid in pids:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)


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


async def start_child(
    command: Sequence[str],
    log: LogFile,
    environment: Mapping[str, str] | None = None,
    max_line_bytes: int | None = None,
) -> asyncio.subprocess.Process:
    """A process that leads a session of its own and writes into a log; with a limit of its lines, what it prints comes to
    us, and it reads what we write."""
    with log.open() as file:
        pipe = asyncio.subprocess.PIPE
        return await asyncio.create_subprocess_exec(
            *command,
            stdin=asyncio.subprocess.DEVNULL if max_line_bytes is None else pipe,
            stdout=file if max_line_bytes is None else pipe,
            stderr=file,
            env=environment,
            limit=max_line_bytes or 2**16,
            start_new_session=True,
        )


class Children:
    """The list of running children, kept in one file under the server's folder."""

    def __init__(self, server_dir: Path, log_dir: Path):
        self._file = server_dir / "children.json"
        self._log_dir = log_dir
        self._pids: list[int] = []

    def reap(self) -> list[int]:
        """Kill what an earlier server left behind. Returns the session leaders' process ids."""
        if not self._file.exists():
            return []
        left: list[int] = []
        for leader in map(int, json.loads(self._file.read_text())):
            session = _session(leader)
            if any(self._is_ours(pid) for pid in session):
                _kill(session)
                left.append(leader)
        self._file.unlink()
        return left

    def add(self, pid: int) -> None:
        self._pids.append(pid)
        self._write()

    def remove(self, pid: int) -> None:
        """Kill a child with all of its session, and forget it."""
        if pid in self._pids:
            self._pids.remove(pid)
            _kill(_session(pid))
            self._write()

    def _is_ours(self, pid: int) -> bool:
        """Whether a process writes its errors into our logs. Its id may have been another program's since the list was
        written, and the list may have been copied with the server's folder."""
        try:
            return Path(os.readlink(f"/proc/{pid}/fd/2")).is_relative_to(self._log_dir.resolve())
        except OSError:  # gone, or somebody else's
            return False

    def _write(self) -> None:
        """A disk that is full must not keep an engine from being restarted: the kernel ends what is not on the list."""
        try:
            files.write_json(self._file, [str(pid) for pid in self._pids])
        except (OSError, StorageFull) as error:
            logger.warning("the list of running children is not written: %s", error)
