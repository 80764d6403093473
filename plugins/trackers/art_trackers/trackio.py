"""Trackio (extra `trackio`): local by default; `trackio show` displays it.

TRACKIO_DIR names Trackio's folder. With TRACKIO_SPACE_ID or TRACKIO_SERVER_URL, Trackio reports to a Space or to its own
server.
"""

import contextvars
from pathlib import Path
from typing import Any

from art_protocol.tracking import StepRecord
from art_trackers.library import import_library


class TrackioRun:
    """One model's run."""

    def __init__(self, record: StepRecord, folder: Path) -> None:
        del folder  # `trackio show` looks into Trackio's own folder
        self._run = _open(record)
        self._known = record.config.keys()

    def log(self, record: StepRecord) -> None:
        if record.config.keys() - self._known:  # the first report came from `model.log`
            self.close()  # Trackio takes one configuration at a time
            self._run, self._known = _open(record), record.config.keys()
        self._run.log(dict(record.metrics), step=record.step)

    def close(self) -> None:
        self._run.finish()


def _open(record: StepRecord) -> Any:
    trackio = import_library("trackio", "trackio")
    # In a separate context, because Trackio ends the context's previous run.
    return contextvars.copy_context().run(
        trackio.init,
        project=record.project,
        name=record.name,
        config=dict(record.config),
        resume="allow",
        # In a notebook Trackio would show its dashboard at each opening of a run.
        embed=False,
        auto_log_gpu=False,
        auto_log_cpu=False,
    )


open_run = TrackioRun
