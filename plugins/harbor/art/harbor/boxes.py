"""The folders of the boxes of this machine's user, one for each running box, and what is left of programs that were killed.

    ~/.cache/art/harbor/lock         held while a folder is made or removed
    ~/.cache/art/harbor/NUMBER/lock  held by the program that has the box, as long as it lives
    ~/.cache/art/harbor/NUMBER/holder, cgroups, work/, scratch/

The kernel ends a box with its program. What can be left is a folder, its cgroups, and in rare cases the holder. The next program that
starts a box finds each folder whose lock is free, ends its holder, and removes the rest.
"""

import contextlib
import fcntl
import hashlib
import json
import os
import shutil
import signal
import time
from collections.abc import Generator
from dataclasses import dataclass
from pathlib import Path
from typing import IO

CGROUPS = Path("/sys/fs/cgroup")
FIRST_USER, NUM_RANGES, USERS_OF_RANGE = 2_000_000_000, 10_000, 10_000
"""Ranges of user ids from here on. systemd assigns none of them, and 31 bits hold them."""
WAIT_SECONDS, POLL_SECONDS = 10.0, 0.02
"""Wait for the end of a killed holder, whose cgroups can be removed only then."""


@dataclass(frozen=True, slots=True)
class BoxFolder:
    """The folder of one box, which is this program's as long as `lock` is open."""

    path: Path
    lock: IO[str]

    @property
    def user(self) -> int:
        """As root: the id of the box's user, which no other running box has."""
        return first_user(self.path.parent) + int(self.path.name)

    def remove(self) -> None:
        """Removes the folder and the cgroups of a box without processes."""
        with locked(self.path.parent):
            clear(self.path)
            self.lock.close()


def state_folder() -> Path:
    return Path.home() / ".cache" / "art" / "harbor"


def first_user(state: Path) -> int:
    """The first of the ids for the boxes of a folder: another home of root has other ids, so that the boxes do not share limits."""
    return FIRST_USER + _digest(state) % NUM_RANGES * USERS_OF_RANGE


def _digest(state: Path) -> int:
    return int.from_bytes(hashlib.sha256(str(state).encode()).digest()[:6])


def new_folder() -> BoxFolder:
    """A new box's folder. Removes what killed programs left."""
    state = state_folder()
    state.mkdir(parents=True, exist_ok=True, mode=0o700)
    with locked(state):
        numbers = {int(path.name) for path in state.iterdir() if path.name.isdecimal()}
        for number in list(numbers):
            if remove_if_left(state / str(number)):
                numbers.remove(number)
        path = state / str(next(number for number in range(len(numbers) + 1) if number not in numbers))
        path.mkdir()
        lock = open(path / "lock", "w")  # noqa: SIM115  # open as long as the box runs
        fcntl.flock(lock, fcntl.LOCK_EX)
        for name in ("work", "scratch"):
            (path / name).mkdir()
        return BoxFolder(path, lock)


@contextlib.contextmanager
def locked(state: Path) -> Generator[None]:
    with open(state / "lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield


def remove_if_left(path: Path) -> bool:
    """Removes a folder whose program has ended, with what is left of its box. Returns whether the folder is gone."""
    with open(path / "lock", "w") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return False
        with contextlib.suppress(OSError, ValueError):
            holder = json.loads((path / "holder").read_text())
            deadline = time.monotonic() + WAIT_SECONDS
            while started_at(holder["pid"]) == holder["started_at"] and time.monotonic() < deadline:
                os.kill(holder["pid"], signal.SIGKILL)
                time.sleep(POLL_SECONDS)
        clear(path)
    return True


def note_holder(path: Path, pid: int) -> None:
    """Writes down a box's process, for a program that has to end it."""
    (path / "holder").write_text(json.dumps({"pid": pid, "started_at": started_at(pid)}))


def started_at(pid: int) -> str | None:
    """When a process started, in the kernel's clock ticks. None: there is no such process. A reused id has another time."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return None
    return None if fields[0] == "Z" else fields[19]


def clear(path: Path) -> None:
    """Removes the cgroups and the folder of a box without processes. What is mounted is gone with the box's process."""
    with contextlib.suppress(OSError, ValueError):
        for group in json.loads((path / "cgroups").read_text()):
            remove_cgroup(Path(group))
    shutil.rmtree(path, ignore_errors=True)


def cgroup_name(path: Path) -> str:
    """A name that no box of another user or folder has."""
    return f"art-harbor-{_digest(path.parent):012x}-{path.name}"


def remove_cgroup(cgroup: Path) -> None:
    """Removes a cgroup as soon as its last process is gone."""
    deadline = time.monotonic() + WAIT_SECONDS
    while cgroup.exists():
        try:
            cgroup.rmdir()
        except OSError:
            if time.monotonic() > deadline:
                return
            time.sleep(POLL_SECONDS)


def make_cgroups(path: Path, memory_bytes: int, num_processes: int) -> list[Path]:
    """The cgroups of a box that limit the memory and the number of all its processes. Empty where this user cannot make one."""
    limits_by_group = {parent / cgroup_name(path): limits for parent, limits in parents(memory_bytes, num_processes)}
    (path / "cgroups").write_text(json.dumps([*map(str, limits_by_group)]))  # before there are any to be left
    groups: list[Path] = []
    for group, limits in limits_by_group.items():
        try:
            group.mkdir(exist_ok=True)
        except OSError:
            continue
        for file, value in limits.items():
            with contextlib.suppress(OSError):  # a kernel without a limit of swapped memory
                (group / file).write_text(str(value))
        groups.append(group)
    return groups


def parents(memory_bytes: int, num_processes: int) -> list[tuple[Path, dict[str, int]]]:
    """The cgroups below which a box's cgroups may be, with the files of the limits (Linux's cgroup-v1 and cgroup-v2)."""
    parents: list[tuple[Path, dict[str, int]]] = []
    for line in Path("/proc/self/cgroup").read_text().splitlines():
        _, controllers, own = line.split(":", 2)
        if controllers == "memory":
            limits = {"memory.limit_in_bytes": memory_bytes, "memory.memsw.limit_in_bytes": memory_bytes}
            parents.append((CGROUPS / "memory" / own.lstrip("/"), limits))
        elif controllers == "pids":
            parents.append((CGROUPS / "pids" / own.lstrip("/"), {"pids.max": num_processes}))
        elif controllers == "":
            limits = {"memory.max": memory_bytes, "memory.swap.max": 0, "pids.max": num_processes}
            folder = CGROUPS / own.lstrip("/")
            parents += [(parent, limits) for parent in (folder, *folder.parents) if has_controllers(parent)][:1]
    return parents


def has_controllers(parent: Path) -> bool:
    """Whether children of a cgroup (version 2) can have limits of memory and processes."""
    try:
        enabled = (parent / "cgroup.subtree_control").read_text().split()
    except OSError:
        return False
    return {"memory", "pids"} <= set(enabled) and os.access(parent, os.W_OK)
