"""TensorBoard (extra `tensorboard`): event files in FOLDER/tensorboard/PROJECT/NAME, written without torch."""

from pathlib import Path
from typing import Any

from art_protocol.tracking import StepRecord
from art_trackers.library import import_library


class TensorBoardRun:
    """One model's event file. A run that continues has several event files, which TensorBoard joins."""

    def __init__(self, record: StepRecord, folder: Path) -> None:
        summary = import_library("tensorboard.summary", "tensorboard")
        run_folder = folder / "tensorboard" / record.project / record.name
        self._writer: Any = summary.Writer(str(run_folder))

    def log(self, record: StepRecord) -> None:
        for name, value in record.metrics.items():
            self._writer.add_scalar(name, value, record.step)
        # TensorBoard's writer keeps events for up to two minutes.
        self._writer.flush()

    def close(self) -> None:
        self._writer.close()


open_run = TensorBoardRun
