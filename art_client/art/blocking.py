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
CALL_SECONDS = 0.15
"""A call that two looks see, one after the other, is a long one."""
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
        self._call: tuple[int, int] | None = None
        """The call of a rollout's code that the last look saw: its frame and its instruction."""
        self._called_at = self._counted_at = 0.0
        """When a look first saw this call, and to which moment its seconds are counted."""
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
            now = time.monotonic()
            if now - self._ran_at < LOOK_SECONDS:
                self._call = None
                continue
            frame = sys._current_frames().get(self._thread_id)  # pyright: ignore[reportPrivateUsage]
            line, call = _blocking_line(frame, self._rollout)
            if call != self._call:
                self._call, self._called_at, self._counted_at = call, now, now
            # Many short calls on a busy machine hold up the loop, too, and none of them is to blame.
            is_long = now - self._called_at >= CALL_SECONDS
            if line is None or line in _said or not is_long or now - self._ran_at < BLOCKED_SECONDS:
                continue
            self._seconds[line] += now - self._counted_at
            self._counted_at = now
            if self._seconds[line] >= SAID_SECONDS:
                _said.add(line)
                file, number = line
                text = linecache.getline(file, number).strip()
                logger.warning(
                    "%s, line %d blocked the event loop for %.0f seconds so far: `%s`. All other rollouts wait meanwhile: %s",
                    *(file, number, self._seconds[line], text),
                    MAKE_ONCE if CLIENT.search(text) else AWAIT,
                )


def _blocking_line(frame: FrameType | None, rollout: CodeType) -> tuple[Line | None, tuple[int, int] | None]:
    """The program's line in which a rollout's code runs, and which call of the line; None if no rollout runs, or code of `art` or an
    import."""
    line: Line | None = None
    call: tuple[int, int] | None = None
    while frame is not None:
        package = package_of(frame)
        if frame.f_code is rollout or package == "asyncio":  # asyncio: a task that a rollout started
            return line, call
        is_ours = package in OURS and frame.f_globals["__name__"] != SENDING
        if line is None and (is_ours or frame.f_code.co_filename.startswith("<frozen importlib")):
            return None, None
        if line is None and is_own(frame):
            line, call = (frame.f_code.co_filename, frame.f_lineno), (id(frame), frame.f_lasti)
        frame = frame.f_back
    return None, None
