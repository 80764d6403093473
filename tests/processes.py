"""Whether processes have gone."""

import time
from pathlib import Path


def is_alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


def wait_until_gone(pids: set[int], seconds: float = 20.0) -> None:
    deadline = time.monotonic() + seconds
    while any(is_alive(pid) for pid in pids):
        left = [pid for pid in pids if is_alive(pid)]
        assert time.monotonic() < deadline, f"processes left: {left}"
        time.sleep(0.1)
