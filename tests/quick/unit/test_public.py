"""What others rely on stays: public names, flags, routes and bodies, and what an earlier server left on disk."""

import gzip
import json
import shutil
import sqlite3
from pathlib import Path

import pytest

from art_protocol.history import read_rows
from art_protocol.wire import TrainConfig
from art_server.jobs.queue import JobQueue
from art_server.ledger.earlier import number_records
from art_server.ledger.ledger import Ledger
from art_server.shared.trainer_messages import Batch
from art_server.store.registry import Registry
from scripts.public_surface import FILE, surface

STORED = Path(__file__).parent / "stored"
"""A server's folder as commit 72080d0 wrote it, with a queued job; its databases as SQL."""


def test_names_flags_and_routes_are_those_that_were_promised() -> None:
    assert json.loads(json.dumps(surface())) == json.loads(FILE.read_text())


def restore(folder: Path) -> Path:
    shutil.copytree(STORED, folder, dirs_exist_ok=True)
    for dump in (folder / ".server").glob("*.sql"):
        database = sqlite3.connect(dump.with_suffix(".sqlite"))
        database.executescript(dump.read_text())
        database.close()
    return folder


def test_models_of_an_earlier_server_are_read(tmp_path: Path) -> None:
    model = Registry(restore(tmp_path)).get("p", "a")
    assert model.step == 1 and model.record.base_model == "art/tiny" and model.record.lora.rank == 4
    assert model.folder.read_checkpoint(1).job_id == "job-one"
    (rollouts,) = read_rows(model.folder.trajectories_file("train", 1))
    assert rollouts["trajectories"][0]["messages"][1]["content"] == "yes"
    row = model.history.values([1])[1]
    assert row["train/reward"] == 0.25 and row["loss/train"] == 0.5


def test_a_queued_job_of_an_earlier_server_is_read(tmp_path: Path) -> None:
    registry = Registry(restore(tmp_path))
    queue = JobQueue(registry.database)
    job = queue.get(queue.waiting()[0].job_id)
    assert job.model == registry.get("p", "a").number
    assert job.state == "queued" and TrainConfig.model_validate_json(job.config) == TrainConfig(learning_rate=1e-4)
    batch = Batch.model_validate_json(queue.batch(job.job_id))
    trajectory, other = batch.groups[0].trajectories
    (sequence,) = trajectory.sequences
    assert sequence.token_ids == [1, 2, 3] and sequence.logprobs == [None, -0.5, -0.25]
    assert sequence.advantages == {2: 1.5} and sequence.spans[0].step == 1
    assert batch.distributions[0].temperature == 0.7 and other.sequences == []
    (line,) = gzip.decompress(queue.trajectories(job.job_id)).splitlines()
    assert json.loads(line)["trajectories"]
    assert b'"rows"' in batch.model_dump_json().encode(), "an earlier server may read it again"
    registry.database.close()


def test_a_record_of_an_earlier_server_is_found(tmp_path: Path) -> None:
    registry, file = Registry(restore(tmp_path)), tmp_path / ".server" / "ledger.sqlite"
    for _ in range(2):
        number_records(file, registry.table.number_of)
    ledger = Ledger(file)
    record = ledger.find("f" * 32 + "-0")
    assert record is not None and record.token_ids == [7, 8] and record.prompt_token_ids == [1, 2]
    assert record.request.model == registry.get("p", "a").number
    assert record.logprobs == [-0.5, -0.25] and record.sampled_logprobs == pytest.approx([-0.4, -0.2])
    ledger.close()
    registry.database.close()
