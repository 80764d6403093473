"""The time of day, and the order of events."""

import threading
import time

_latest = 0
_lock = threading.Lock()


def now() -> float:
    """Seconds since 1970."""
    return time.time()


def tick(after: int = 0) -> int:
    """A time in microseconds since 1970 that is later than the times of all earlier calls, and later than `after`: the
    order of events is exact, also across restarts."""
    global _latest
    with _lock:
        _latest = max(int(now() * 1e6), _latest + 1, after + 1)
        return _latest
