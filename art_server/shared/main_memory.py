"""The main memory that this process may use, by which the server plans and the trainer sets its token budget."""

import contextlib
import os
from pathlib import Path


def main_memory(root: Path = Path("/sys/fs/cgroup"), own: Path = Path("/proc/self/cgroup")) -> int:
    """Bytes of main memory that this process may use: the machine's, or the lowest limit of its control groups (Linux),
    as a container has them."""
    limits = [os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")]
    with contextlib.suppress(OSError):
        for line in own.read_text().splitlines():
            # cgroups(7): the hierarchy of version 2 has no controllers' names; in version 1 memory has its own.
            _, controllers, path = line.split(":", 2)
            if controllers not in ("", "memory"):
                continue
            top = root / controllers
            here = top / path.lstrip("/")
            name = "memory.limit_in_bytes" if controllers else "memory.max"
            for folder in (here, *here.parents):
                with contextlib.suppress(OSError, ValueError):  # "max", or no such group
                    limits.append(int((folder / name).read_text()))
                if folder == top:
                    break
    return min(limits)
