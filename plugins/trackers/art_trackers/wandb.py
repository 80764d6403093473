"""Weights & Biases (extra `wandb`). A model's run has the model's name as its id, so that it continues after a restart.

WANDB_API_KEY or `wandb login` gives the account, WANDB_MODE=offline needs none, WANDB_DIR names another folder.
"""

import dataclasses
import functools
import logging
import os
from pathlib import Path
from typing import Any

from art_protocol.tracking import RolloutRow, StepRecord
from art_trackers.library import import_library

logger = logging.getLogger("art.trackers")

INIT_SECONDS = 8.0
"""Limit on the wait for W&B's answer when a run begins. At the program's end, W&B's process waits for a call that has
begun."""
FINISH_SECONDS = 4.0
"""Limit on the upload at the end of a run. Data that is not uploaded stays on disk, for `wandb sync`."""


class WandbRun:
    """One model's run."""

    def __init__(self, record: StepRecord, folder: Path) -> None:
        # Set before the import. Otherwise the program's end waits for the delivery of W&B's own error reports.
        os.environ.setdefault("WANDB_ERROR_REPORTING", "false")
        logging.getLogger("wandb").propagate = False  # wandb writes its own log files
        self._wandb = import_library("wandb", "wandb")
        _check_login(self._wandb)
        folder.mkdir(parents=True, exist_ok=True)
        self._run: Any = self._wandb.init(
            project=record.project,
            id=record.name,
            name=record.name,
            dir=os.path.abspath(os.environ.get("WANDB_DIR") or folder),
            resume="allow",
            reinit="create_new",  # the program's own run stays the current run
            settings=self._wandb.Settings(
                silent=True,
                console="off",
                # Metadata has the command line, which can contain an API key.
                x_disable_meta=True,
                x_save_requirements=False,
                disable_git=True,
                disable_code=True,
                init_timeout=INIT_SECONDS,
                finish_timeout=FINISH_SECONDS,
            ),
        )
        # W&B's own step must always rise, and a log call may be about an earlier step.
        self._run.define_metric("*", step_metric="training_step")
        where = self._run.dir if self._run.offline else self._run.url
        logger.info("tracker wandb: %s/%s is at %s", record.project, record.name, where)

    def log(self, record: StepRecord) -> None:
        # W&B refuses to change a value otherwise, and the next train call may have another configuration.
        self._run.config.update(dict(record.config), allow_val_change=True)
        values: dict[str, Any] = {"training_step": record.step, **record.metrics}
        if rows := list(record.rollouts()):
            table = [[record.step, *dataclasses.astuple(row)] for row in rows]
            columns = ["step", *(field.name for field in dataclasses.fields(RolloutRow))]
            values[f"{record.split}/rollouts"] = self._wandb.Table(columns=columns, data=table)
        self._run.log(values)

    def close(self) -> None:
        self._run.finish()


@functools.cache
def _check_login(wandb: Any) -> None:
    """Raises where `wandb.init` would ask for a key on the terminal. Checks once, because W&B prints the result."""
    is_online = wandb.setup().settings.mode == "online"
    if is_online and wandb.run is None and not wandb.login(prompt=False, verify=False):
        raise RuntimeError("no account: set WANDB_API_KEY, run `wandb login`, or WANDB_MODE=offline")


open_run = WandbRun
