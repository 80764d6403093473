"""Trackers: where the steps of models are reported, by a program (`art.Backend(trackers=[...])`) or by a server
(`--tracker NAME`), with the same code.

Each model has its own run. A tracker that fails costs a training nothing but one warning: the tracker's library, an optional
extra, is imported and called in a thread (`thread.py`), and sends in the background from its own queue. "otlp" sends traces
instead of steps (`tracing.py`).

A module of this package is a tracker. The module is named as the tracker's library, and its `open_run(record, folder)` begins a
run (`thread.py`).
"""

import atexit
import time
from collections.abc import Sequence
from pathlib import Path

from art_protocol.tracking import CLOSE_SECONDS, StepRecord
from art_trackers.library import OneWarning, is_installed, missing
from art_trackers.thread import TrackerThread


class Trackers:
    """The trackers of one program or server. Files are written to `folder`. `close` waits for all of them together."""

    def __init__(self, names: Sequence[str], folder: Path) -> None:
        self._folder = folder.absolute()
        self._warnings = {name: OneWarning(name) for name in names}
        self._threads: list[TrackerThread] = []
        for name, warning in self._warnings.items():
            if not is_installed(name):
                warning.give(missing(name, name))

    def report(self, record: StepRecord) -> None:
        """Reports a step to all trackers. Returns at once."""
        if self._warnings and not self._threads:
            self._threads = [
                TrackerThread(name, self._folder, warning, self._close_at_exit)
                for name, warning in self._warnings.items()
            ]
            self._close_at_exit()
        for thread in self._threads:
            thread.put(record)

    def close(self, limit_seconds: float = CLOSE_SECONDS) -> None:
        """Delivers what is queued and ends the runs. Returns after the limit at the latest (blocking). A later report
        continues the runs."""
        atexit.unregister(self.close)
        threads, self._threads = self._threads, []
        deadline = time.monotonic() + limit_seconds
        for thread in threads:
            thread.end()
        for thread in threads:
            thread.join(max(0.0, deadline - time.monotonic()))
            if thread.is_alive():
                thread.warning.give("does not finish in time, and the program continues")

    def _close_at_exit(self) -> None:
        """Makes `close` the first thing at the program's exit, before the hooks of the trackers' libraries."""
        atexit.unregister(self.close)
        atexit.register(self.close)
