"""What changes on stderr: bars, and a line about what a program waits for. In a terminal they change in place. In a file each is
a new line now and then."""

import builtins
import io
import shutil
import sys
import time
from typing import Any

from tqdm.auto import tqdm

FIRST_SECONDS = 1.0
"""The time until a bar has a line in a file, unless another bar has printed a line just before."""
SECONDS = 30.0
"""The time between two lines of bars in a file."""
AGAIN_SECONDS = 60.0
"""The time until a file gets the same reason for waiting again."""

_printed_at = -SECONDS
"""When a bar last printed a line into a file, in monotonic time."""


def is_terminal() -> bool:
    return sys.stderr is not None and sys.stderr.isatty()  # pyright: ignore[reportUnnecessaryComparison]


def make_bar(**options: Any) -> "tqdm[Any]":  # Any: tqdm's arguments
    """A bar with tqdm's arguments."""
    if is_terminal() or hasattr(builtins, "__IPYTHON__"):
        return tqdm(**options)
    return tqdm(**options, file=_Lines())


class _Lines(io.StringIO):
    """A file for a bar, which passes the bar's text on as lines: during the bar and at its end, if no bar has printed a line for
    `SECONDS`. A bar that has printed a line prints its end, too."""

    def __init__(self) -> None:
        super().__init__()
        self._text = ""
        self._printed = ""
        self._since = time.monotonic()

    def write(self, text: str, /) -> int:
        global _printed_at
        self._text = text.strip() or self._text
        now, is_end = time.monotonic(), text == "\n"
        is_due = now - _printed_at >= SECONDS and (is_end or now - self._since >= min(FIRST_SECONDS, SECONDS))
        if self._text != self._printed and (is_due or (is_end and self._printed)):
            _printed_at, self._printed = now, self._text
            print(self._text, file=sys.stderr, flush=True)
        return len(text)


class StatusLine:
    """What a program waits for. In a terminal it is one line that changes, in a file a line when the reason changes, and every
    `AGAIN_SECONDS`."""

    def __init__(self) -> None:
        self.reason: str | None = None
        """The reason of the last text."""
        self._printed_at = 0.0
        self._bar: tqdm[Any] | None = None

    def show(self, text: str, reason: str) -> None:
        now, is_new, self.reason = time.monotonic(), reason != self.reason, reason
        if is_terminal():
            if self._bar is None:
                self._bar = tqdm(bar_format="{desc}", leave=False, file=sys.stderr)
            # A longer line would wrap, and a terminal goes back to the beginning of the last row only.
            self._bar.set_description_str(text[: shutil.get_terminal_size().columns - 1])
        elif is_new or now - self._printed_at >= AGAIN_SECONDS:
            self._printed_at = now
            tqdm.write(text, file=sys.stderr)

    def end(self, text: str | None = None) -> None:
        """Removes the line from the terminal. The text, if any, is a line that stays."""
        if self._bar is not None:
            self._bar.close()
            self._bar = None
        if text is not None:
            self.reason = None
            tqdm.write(text, file=sys.stderr)
