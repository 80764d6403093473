"""The server's child processes: how they share cores with it, and a list of them on disk. From this list the next start
finds and kills the processes that a killed server left running.

Each child leads its own session, so that all processes that it spawned can be killed with it. The kernel also kills
children when their parent ends (PR_SET_PDEATHSIG); the list is for those that survive this.
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
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import BinaryIO

from art_protocol.log_file import LogFile
from art_server.errors import StorageFull
from art_server.store import files

logger = logging.getLogger(__name__)

GARBAGE = 20_000
"""Objects made between two garbage collections; Python's 700 take 6% of the time of a process that answers requests."""
SWITCH_SECONDS = 0.0005
"""Time for which a thread keeps the GIL while another one waits for it."""

PR_SET_PDEATHSIG = 1

END_SECONDS, POLL_SECONDS = 60.0, 0.02
"""Wait for a killed session's end: the driver takes seconds to free tens of gigabytes."""

PARENT_VARIABLE = "ART_PARENT"
"""The process id of the server that starts a child."""
CORES_VARIABLE = "ART_CORES"
"""Numbers of the cores that a child may use, separated by commas; unset: all."""


def _session(leader: int) -> list[int]:
    """The running processes of the session that `leader` leads or led. While a process is left, no other session gets
    this id."""
    members: list[int] = []
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            with contextlib.suppress(ProcessLookupError, PermissionError):
                if os.getsid(int(entry.name)) == leader and not _is_zombie(entry):
                    members.append(int(entry.name))
    return members


def _is_zombie(process: Path) -> bool:
    """Whether a process has ended, and only its parent does not know yet. Such a process holds no memory."""
    try:
        # The process's name, in brackets, may contain spaces and brackets (proc(5)).
        return (process / "stat").read_text().rpartition(")")[2].split()[0] == "Z"
    except OSError:
        return True


def _kill(pids: list[int]) -> None:
    for pid in pids:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)


def kill_left(leader: int) -> None:
    """Kills what is left of the session of a child that has just ended by itself."""
    _kill(_session(leader))


def set_up_logs() -> None:
    """Sends the logs of this process to stderr."""
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname)s %(name)s: %(message)s")
    # huggingface_hub's HTTP clients, the first below its version 2: at INFO they log each request.
    for name in ("httpx", "httpx2"):
        logging.getLogger(name).setLevel(logging.WARNING)


def claim_stdout() -> BinaryIO:
    """The original stdout, for answers only. From here on, everything that libraries print goes to stderr."""
    answers = os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)
    return answers


def collect_seldom() -> None:
    """Has Python collect garbage less often, for processes that answer requests."""
    gc.set_threshold(GARBAGE)


def take_turns_often() -> None:
    """Has the event loop wait less for other threads, for processes that answer requests beside threads that compute.

    A thread that computes keeps the GIL for one switch interval (5 ms by default) each time the loop releases it, and
    the loop releases it at every write to a socket or a database: sixty times in one turn with 64 answers.
    """
    sys.setswitchinterval(SWITCH_SECONDS)


def wake_in_batches() -> None:
    """Runs this process under SCHED_BATCH (Linux), so that it does not preempt the engine at every write.

    Each step of the engine writes to every open stream. A reader that took the core at each write would cost two
    context switches for each token; under SCHED_BATCH it reads all writes of a step together. The engine would be
    slower under it, so children reset it (`be_child`). A sandbox may forbid the change; then nothing changes.
    """
    if sys.platform == "linux":
        with contextlib.suppress(PermissionError):
            os.sched_setscheduler(0, os.SCHED_BATCH, os.sched_param(0))


def be_child() -> None:
    """Prepares a process that a server started: it gets normal scheduling and its assigned cores, and the kernel kills
    it when its parent ends (Linux; prctl(2), PR_SET_PDEATHSIG).

    Raises:
        OSError: the kernel refuses the cores or the signal.
    """
    if sys.platform == "linux":
        with contextlib.suppress(PermissionError):
            os.sched_setscheduler(0, os.SCHED_OTHER, os.sched_param(0))
        if cores := os.environ.get(CORES_VARIABLE):
            os.sched_setaffinity(0, {int(core) for core in cores.split(",")})
        if ctypes.CDLL(None, use_errno=True).prctl(PR_SET_PDEATHSIG, signal.SIGKILL) != 0:
            raise OSError(ctypes.get_errno(), "prctl(PR_SET_PDEATHSIG) failed")
        # Removed, because a process that this one forks has another parent.
        parent = os.environ.pop(PARENT_VARIABLE, None)
        if parent is not None and os.getppid() != int(parent):
            os.kill(os.getpid(), signal.SIGKILL)  # the server ended while this process started


async def start_child(
    command: Sequence[str],
    log: LogFile,
    environment: Mapping[str, str] | None = None,
    max_line_bytes: int | None = None,
    inherited: Sequence[int] = (),
) -> asyncio.subprocess.Process:
    """Starts a process that leads its own session and writes into a log. With `max_line_bytes` its stdin and stdout are
    pipes to this process, and only its stderr goes into the log. `inherited` are file descriptors that the process gets."""
    environment = {**(os.environ if environment is None else environment), PARENT_VARIABLE: str(os.getpid())}
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
            pass_fds=inherited,
        )


class Children:
    """The list of running children, in one file in the server's folder."""

    def __init__(self, server_dir: Path, log_dir: Path):
        self._file = server_dir / "children.json"
        self._log_dir = log_dir
        self._pids: list[int] = []

    def reap(self) -> list[int]:
        """Kills the processes that an earlier server left running. Returns the process ids of their session leaders."""
        if not self._file.exists():
            return []
        left: list[int] = []
        for leader in map(int, json.loads(self._file.read_text())):
            if self._kill_session(leader):
                left.append(leader)
        self._file.unlink()
        return left

    def add(self, pid: int) -> None:
        self._pids.append(pid)
        self._write()

    def remove(self, pid: int) -> None:
        """Kills a child with its whole session, and removes it from the list."""
        if pid in self._pids:
            self._pids.remove(pid)
            self._kill_session(pid)
            self._write()

    def end(self, pid: int) -> None:
        """Does what `remove` does, then waits until all processes of the session have ended: only then is their GPU memory
        free."""
        self.remove(pid)
        deadline = time.monotonic() + END_SECONDS
        while (left := _session(pid)) and time.monotonic() < deadline:
            time.sleep(POLL_SECONDS)
        if left:
            logger.error("processes %s did not end within %.0f s after SIGKILL", left, END_SECONDS)

    def _kill_session(self, leader: int) -> bool:
        """Kills the processes of a child's session, if they are still ours: another program, or this very server, may have
        got the child's id since."""
        session = _session(leader)
        is_child = leader != os.getsid(0) and any(self._is_ours(pid) for pid in session)
        if is_child:
            _kill(session)
        return is_child

    def _is_ours(self, pid: int) -> bool:
        """Whether a process writes its errors into our logs. Otherwise another program got its id after the list was
        written, or the list is a copy from another server's folder."""
        try:
            return Path(os.readlink(f"/proc/{pid}/fd/2")).is_relative_to(self._log_dir.resolve())
        except OSError:  # it has ended, or is another user's
            return False

    def _write(self) -> None:
        """Writes the list. A full disk must not prevent an engine's restart: unlisted children still end with the server."""
        try:
            files.write_json(self._file, [str(pid) for pid in self._pids])
        except (OSError, StorageFull) as error:
            logger.warning("cannot write the list of running children: %s", error)
