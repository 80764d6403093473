"""Whether processes have gone."""

from pathlib import Path

from tests.waiting import wait_until


def is_alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


def wait_until_gone(pids: set[int]) -> None:
    wait_until(lambda: not any(map(is_alive, pids)), lambda: f"processes left: {list(filter(is_alive, pids))}")
