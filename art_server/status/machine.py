"""Memory of the server's processes, free disk space, and the ends of log files."""

import contextlib
import os
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from art_protocol.log_file import LogFile

MAX_LINES = 2000


def memory(root: Path, leaders: Mapping[str, int | None]) -> dict[str, Any]:
    """Resident memory in bytes of this process and of the named children with their sessions (Linux), and the bytes that
    are free on the folder's disk. Blocking."""
    resident = {name: 0 for name, pid in leaders.items() if pid is not None}
    names = {pid: name for name, pid in leaders.items()}
    proc = Path("/proc")
    entries = proc.iterdir() if proc.is_dir() else ()
    for entry in entries:
        if entry.name.isdigit():
            with contextlib.suppress(OSError, ValueError):  # it has ended
                # Each child leads its own session, and all that it spawned is in it (`start_child`).
                name = names.get(os.getsid(int(entry.name)))
                if name is not None and int(entry.name) != os.getpid():
                    resident[name] += resident_bytes(entry)
    with contextlib.suppress(OSError):
        resident["server"] = resident_bytes(proc / "self")
    return {"resident_bytes": resident, "disk_free_bytes": shutil.disk_usage(root).free}


def resident_bytes(process: Path) -> int:
    # The second number is the resident memory, in pages (proc(5)).
    return int((process / "statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def log_tail(log_dir: Path, name: str, num_lines: int) -> str:
    """The last lines of a log file; empty if there is no file."""
    return LogFile(log_dir / f"{name}.log").tail(min(num_lines, MAX_LINES))
