"""MLflow (extra `mlflow`): an experiment for each project, in which each model has one run.

MLFLOW_TRACKING_URI names the server or store; without this variable the store is FOLDER/mlflow.db.
"""

import re
import time
from pathlib import Path
from typing import Any

from art_protocol.tracking import StepRecord
from art_trackers.library import import_library

MODEL_TAG = "art.model"
"""The tag by which a model's run is found again."""
REFUSED = re.compile(r"[^\w\-./: ]")
"""Characters that MLflow refuses in names."""
MAX_VALUE = 6000
"""The number of characters that MLflow accepts in a parameter's value."""


class MlflowRun:
    """One model's run."""

    def __init__(self, record: StepRecord, folder: Path) -> None:
        mlflow = import_library("mlflow", "mlflow")
        self._entities = import_library("mlflow.entities", "mlflow")
        folder.mkdir(parents=True, exist_ok=True)
        store = None if mlflow.is_tracking_uri_set() else f"sqlite:///{folder}/mlflow.db"
        self._client: Any = mlflow.MlflowClient(tracking_uri=store)
        known = self._client.get_experiment_by_name(record.project)
        experiment = self._client.create_experiment(record.project) if known is None else known.experiment_id
        runs = self._client.search_runs([experiment], f"tags.`{MODEL_TAG}` = '{record.name}'")
        if not runs:
            tags = {MODEL_TAG: record.name}
            runs = [self._client.create_run(experiment, tags=tags, run_name=record.name)]
        self._id = runs[0].info.run_id
        self._parameters = set(runs[0].data.params)
        # An earlier program has ended the run (`close`).
        self._client.update_run(self._id, status="RUNNING")

    def log(self, record: StepRecord) -> None:
        now = int(time.time() * 1000)
        metrics = [
            self._entities.Metric(REFUSED.sub("_", name), float(value), now, record.step)
            for name, value in record.metrics.items()
        ]
        # MLflow refuses to change a parameter, so the parameter keeps the value of the first step that has it.
        added = [name for name in record.config if name not in self._parameters]
        parameters = [self._entities.Param(name, str(record.config[name])[:MAX_VALUE]) for name in added]
        self._client.log_batch(self._id, metrics=metrics, params=parameters)
        self._parameters.update(added)

    def close(self) -> None:
        self._client.set_terminated(self._id)


open_run = MlflowRun
