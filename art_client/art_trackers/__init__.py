"""Trackers: where the steps of models are reported, by a program (`art.Backend(trackers=[...])`) or by a server
(`--tracker NAME`), with the same code.

A tracker costs a training nothing but one warning. It works in a thread of its own (`delivery.py`), and its library, an
optional extra, is imported there. Each model has its own run. "otlp" sends traces instead of steps (`tracing.py`).
"""

import atexit
import functools
import importlib
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Literal, get_args

from art_trackers.delivery import Delivery
from art_trackers.library import is_installed, missing
from art_trackers.records import RolloutRow, Run, Runs, StepRecord

__all__ = ["RolloutRow", "StepRecord", "TrackerName", "Trackers"]

TrackerName = Literal["wandb", "trackio", "tensorboard", "mlflow", "otlp"]

LOG_DIR = Path(".art/logs")
"""Where a program's trackers write, unless their own environment variables name another place."""
CLOSE_SECONDS = 5.0
"""How long `close` waits for all trackers together."""


class Trackers:
    """The trackers of one program or server. Without names it does nothing.

    Files are written to `folder`. The name "otlp" only sets `has_traces`.

    Raises:
        ValueError: no tracker has this name.
    """

    def __init__(self, names: Sequence[TrackerName], folder: Path) -> None:
        if unknown := set(names) - set(get_args(TrackerName)):
            raise ValueError(
                f"there is no tracker '{min(unknown)}': use {', '.join(get_args(TrackerName))}"
            )
        self.has_traces = "otlp" in names
        self._deliveries = [
            Delivery(
                name,
                functools.partial(_open, name, folder.absolute()),
                after_send=self._close_at_exit,
            )
            for name in dict.fromkeys(names)
            if name != "otlp"
        ]
        for delivery in self._deliveries:
            if not is_installed(delivery.name):
                delivery.warn(missing(delivery.name, delivery.name))

    def report(self, record: StepRecord) -> None:
        """Reports a step to all trackers. Returns at once."""
        for delivery in self._deliveries:
            delivery.put(record)
        self._close_at_exit()

    def close(self, limit_seconds: float = CLOSE_SECONDS) -> None:
        """Delivers what is queued and ends the runs. Returns after the limit at the latest (blocking). A later report
        continues the runs."""
        atexit.unregister(self.close)
        deadline = time.monotonic() + limit_seconds
        for delivery in self._deliveries:
            delivery.finish()
        for delivery in self._deliveries:
            delivery.join(deadline - time.monotonic())

    def _close_at_exit(self) -> None:
        """Makes `close` the first thing at the program's exit, before the hooks of the trackers' libraries."""
        if self._deliveries:
            atexit.unregister(self.close)
            atexit.register(self.close)


def _open(name: str, folder: Path) -> Runs:
    module = importlib.import_module(f"art_trackers.{name}")
    open_run: Callable[[StepRecord, Path], Run] = module.open_run
    return Runs(open_run, folder)
