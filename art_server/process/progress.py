"""What the server's start has done so far, one line each: for the log, and for clients that wait for it."""

import contextlib
import logging
import time
from collections import deque
from collections.abc import Iterator

from art_protocol.wire import ProgressLine

logger = logging.getLogger(__name__)

MAX_LINES = 50


class StartProgress:
    """The lines of the newest start of the engine. An earlier start's lines are dropped."""

    def __init__(self) -> None:
        self._started = time.monotonic()
        self._lines: deque[ProgressLine] = deque(maxlen=MAX_LINES)
        self._number = 0

    def begin(self, text: str) -> None:
        """Begins a new start with its first line."""
        self._started = time.monotonic()
        self._lines.clear()
        self.note(text)

    def note(self, text: str) -> None:
        """Adds and logs a line."""
        self._number += 1
        seconds = time.monotonic() - self._started
        self._lines.append(ProgressLine(number=self._number, seconds=seconds, text=text))
        logger.info("start, %.1f s: %s", seconds, text)

    @contextlib.contextmanager
    def unless_refused(self) -> Iterator[None]:
        """If the block fails, restores the lines from before the block: nothing has started."""
        before = self._lines.copy()
        with contextlib.ExitStack() as undo:
            undo.callback(self._restore, before)
            yield
            undo.pop_all()

    def _restore(self, lines: deque[ProgressLine]) -> None:
        self._lines = lines

    @property
    def lines(self) -> list[ProgressLine]:
        """The lines, oldest first."""
        return list(self._lines)
