"""The time of day at the server's start plus the time since then: setting the system's clock later has no effect."""

import time

_START = time.time() - time.monotonic()


def now() -> float:
    """Seconds since 1970."""
    return _START + time.monotonic()
