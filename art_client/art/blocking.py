"""Notices rollouts that block the event loop: `time.sleep`, a synchronous client. All other rollouts wait meanwhile.

A thread looks at the loop's thread ten times a second. A line of a rollout that blocks the loop for two seconds in all is named
in one warning.
"""

import asyncio
import linecache
import logging
import re
import sys
import threading
import time
from collections import defaultdict
from collections.abc import Generator
from contextlib import contextmanager
from types import CodeType, FrameType

from art.tracebacks import OURS, is_own, package_of

logger = logging.getLogger(__name__)

LOOK_SECONDS = 0.1
BLOCKED_SECONDS = 0.3
"""A loop that runs no callback for this long is blocked."""
SAID_SECONDS = 2.0
"""A line that blocks the loop for this long in all is named."""
AWAIT = "await an asynchronous client (openai.AsyncOpenAI), `asyncio.sleep`, or `asyncio.to_thread(function, ...)`"
CLIENT = re.compile(r"\b(?:Async)?(?:OpenAI|Anthropic|HTTPTransport|Client|AsyncClient)\(")
"""The making of a client, which loads certificates for a tenth of a second."""
MAKE_ONCE = "a client is made for each rollout. Take the rollout's own, `r.openai_client()`, or share one httpx.AsyncClient as its http_client"
SENDING = "art.patches"
"""The module of ours whose functions call an HTTP client on behalf of the program."""

Line = tuple[str, int]
"""A file and the number of a line."""

_said: set[Line] = set()
_watched: dict[asyncio.AbstractEventLoop, "_Watch"] = {}


@contextmanager
def watched(rollout: CodeType) -> Generator[None]:
    """Watches the running loop during the block. `rollout` is the code of the function that awaits each rollout."""
    loop = asyncio.get_running_loop()
    watch = _watched.get(loop)
    if watch is None:
        watch = _watched[loop] = _Watch(loop, rollout)
    watch.num_blocks += 1
    try:
        yield
    finally:
        watch.num_blocks -= 1
        if not watch.num_blocks:
            watch.stop()
            del _watched[loop]


class _Watch:
    """The watch over a loop."""

    def __init__(self, loop: asyncio.AbstractEventLoop, rollout: CodeType) -> None:
        self.num_blocks = 0
        self._loop, self._rollout = loop, rollout
        self._thread_id = threading.get_ident()
        self._ran_at = time.monotonic()
        """When the loop last ran a callback of ours."""
        self._seconds = defaultdict[Line, float](float)
        self._ended = threading.Event()
        self._timer = loop.call_soon(self._run)
        threading.Thread(target=self._look, name="art: blocked loop", daemon=True).start()

    def stop(self) -> None:
        self._ended.set()
        self._timer.cancel()

    def _run(self) -> None:
        self._ran_at = time.monotonic()
        self._timer = self._loop.call_later(LOOK_SECONDS, self._run)

    def _look(self) -> None:
        while not self._ended.wait(LOOK_SECONDS):
            if time.monotonic() - self._ran_at < BLOCKED_SECONDS:
                continue
            line = _blocking_line(sys._current_frames().get(self._thread_id), self._rollout)  # pyright: ignore[reportPrivateUsage]
            if line is None or line in _said:
                continue
            self._seconds[line] += LOOK_SECONDS
            if self._seconds[line] >= SAID_SECONDS:
                _said.add(line)
                file, number = line
                text = linecache.getline(file, number).strip()
                logger.warning(
                    "%s, line %d blocked the event loop for %.0f seconds so far: `%s`. All other rollouts wait meanwhile: %s",
                    *(file, number, self._seconds[line], text),
                    MAKE_ONCE if CLIENT.search(text) else AWAIT,
                )


def _blocking_line(frame: FrameType | None, rollout: CodeType) -> Line | None:
    """The program's line in which a rollout's code runs; None if no rollout runs, or code of `art` or an import."""
    line: Line | None = None
    while frame is not None:
        package = package_of(frame)
        if frame.f_code is rollout:
            return line
        if package == "asyncio":  # a task that a rollout started
            return line
        is_ours = package in OURS and frame.f_globals["__name__"] != SENDING
        if line is None and (is_ours or frame.f_code.co_filename.startswith("<frozen importlib")):
            return None
        if line is None and is_own(frame):
            line = frame.f_code.co_filename, frame.f_lineno
        frame = frame.f_back
    return None
