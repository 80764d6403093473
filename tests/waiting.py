"""The suite's one limit for what a process, a page or a server has to do first. Tests have no shorter one."""

import asyncio
import time
from collections.abc import Callable

PATIENCE_SECONDS = 600.0
"""Below the limit of a test (pyproject.toml), so that what is waited for is named."""


def wait_until(holds: Callable[[], object], told: Callable[[], object] = lambda: "") -> None:
    """Returns when `holds` does; `told` is shown if it never does."""
    stop = time.monotonic() + PATIENCE_SECONDS
    while not holds():
        assert time.monotonic() < stop, told()
        time.sleep(0.02)


async def until(holds: Callable[[], object], told: Callable[[], object] = lambda: "") -> None:
    """`wait_until` of a test whose event loop has the work to do."""
    stop = time.monotonic() + PATIENCE_SECONDS
    while not holds():
        assert time.monotonic() < stop, told()
        await asyncio.sleep(0.01)
