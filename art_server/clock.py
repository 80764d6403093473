"""The time of day as it was at the server's start, plus what has passed since: a clock that is set meanwhile moves nothing."""

import time

_START = time.time() - time.monotonic()


def now() -> float:
    """Seconds since 1970."""
    return _START + time.monotonic()
