"""Jobs in a queue, without a server."""

from pathlib import Path
from typing import Any

from art_protocol.history import pack_rows
from art_protocol.wire import (
    JobReport,
    LoRAConfig,
    TrainConfig,
)
from art_server.jobs.job_row import JobRow, Payload
from art_server.jobs.queue import JobQueue
from art_server.shared.trainer_messages import (
    Batch,
    Distribution,
    TokenSequence,
    TrainableGroup,
    TrainableTrajectory,
)
from art_server.store.model_folder import ModelRecord
from art_server.store.model_table import ModelTable
from art_server.store.server_database import open_server_database

SEQUENCE = TokenSequence(token_ids=[1, 2, 3], logprobs=[None, -0.5, -0.25])


GROUP = TrainableGroup(trajectories=[TrainableTrajectory(reward=1.0, sequences=[SEQUENCE])])


PAYLOAD = Payload.make(
    Batch(groups=[GROUP, GROUP], distributions=[Distribution(temperature=0.5)]),
    pack_rows([{"trajectories": [{"reward": 1.0, "messages": []}], "metadata": {"a": 1}}]),
)


def request_digest(body: bytes) -> str:
    return f"of {body!r}"


def open_queue(folder: Path, **options: Any) -> JobQueue:
    return JobQueue(open_server_database(folder), **options)


def number_of(queue: JobQueue, name: str = "a", project: str = "p") -> int:
    """The number of a model, which is added if the table of models lacks it."""
    table = ModelTable(queue.database)
    for row in table.rows():
        if (row.project, row.name) == (project, name):
            return row.model
    return table.add(ModelRecord(name=name, project=project, base_model="base", lora=LoRAConfig()))


def add(queue: JobQueue, key: str | None = None, name: str = "a", body: bytes = b"x", project: str = "p") -> JobRow:
    model = number_of(queue, name, project)
    return queue.insert(model, key, request_digest(body), TrainConfig(), PAYLOAD, JobReport(num_rows=1))
