"""The thread in which the library of one tracker is called.

The libraries send in the background, but their import and the opening of a run take seconds, and longer if the tracker is
down. The thread is a daemon, so that a tracker that hangs does not keep the program from ending.
"""

import contextlib
import functools
import importlib
import queue
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Protocol

from art_protocol.tracking import StepRecord
from art_trackers.library import OneWarning

MAX_QUEUED = 32
"""Number of steps. A tracker that is further behind will not catch up, and a program's records hold the trajectories."""


class TrackerRun(Protocol):
    """A tracker's run of one model. The methods block, and raise the exceptions of the tracker's library."""

    def log(self, record: StepRecord) -> None: ...

    def close(self) -> None: ...


class TrackerThread(threading.Thread):
    """Opens a run for each model at the model's first record, and hands the records to the run. `opened` is called after each
    opening.

    Any exception of the library becomes a warning, and the next record is tried again.
    """

    def __init__(self, name: str, folder: Path, warning: OneWarning, opened: Callable[[], None]) -> None:
        super().__init__(name=f"tracker {name}", daemon=True)
        self.warning = warning
        self._tracker, self._folder, self._opened = name, folder, opened
        self._records: queue.Queue[StepRecord | None] = queue.Queue()
        self._runs: dict[tuple[str, str], TrackerRun] = {}
        self.start()

    def put(self, record: StepRecord) -> None:
        """Queues a record. If the queue is full, the oldest record is lost."""
        if self._records.qsize() >= MAX_QUEUED:
            with contextlib.suppress(queue.Empty):  # the thread took the record meanwhile
                self._records.get_nowait()
                self.warning.give(f"is more than {MAX_QUEUED} reports behind, which are lost")
        self._records.put(record)

    def end(self) -> None:
        """Lets the thread close the runs and end, after the queued records."""
        self._records.put(None)

    def run(self) -> None:
        while (record := self._records.get()) is not None:
            self._try(functools.partial(self._log, record))
        for run in self._runs.values():
            self._try(run.close)

    def _log(self, record: StepRecord) -> None:
        model = record.project, record.name
        if model not in self._runs:
            module = importlib.import_module(f"art_trackers.{self._tracker}")
            self._runs[model] = module.open_run(record, self._folder)
            self._opened()
        self._runs[model].log(record)

    def _try(self, call: Callable[[], None]) -> None:
        try:
            call()
        except Exception as error:  # a tracker's library may raise anything
            self.warning.give(f"failed ({type(error).__name__}: {error})")
