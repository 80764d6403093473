"""The time of day at the server's start plus the time since then: setting the system's clock later has no effect."""

import threading
import time

_START = time.time() - time.monotonic()
_latest = 0
_lock = threading.Lock()


def now() -> float:
    """Seconds since 1970."""
    return _START + time.monotonic()


def tick(after: int = 0) -> int:
    """A time in microseconds since 1970 that is later than those of all earlier calls, and later than `after`: the order
    of events is exact, also where the system's clock was set back between two starts of the server."""
    global _latest
    with _lock:
        _latest = max(int(now() * 1e6), _latest + 1, after + 1)
        return _latest
