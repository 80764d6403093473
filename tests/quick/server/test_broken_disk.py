"""A disk that fails below the file system's calls, and files of which a crash wrote a part."""

import contextlib
import os
import resource
import shutil
import sqlite3
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from art_protocol.wire import JobReport, TrainConfig
from art_server.errors import StorageFull
from art_server.jobs.job_row import Payload
from art_server.ledger.ledger import Ledger
from art_server.store.history import HistoryTable
from art_server.store.model_folder import ModelFolder
from art_server.store.server_database import FILE
from tests.quick.jobs.queued_jobs import number_of, open_queue
from tests.quick.ledger.recorded_choices import add


@pytest.fixture
def longest_file() -> Iterator[Callable[[int], None]]:
    """Sets the size above which the operating system cuts every write of this process short."""
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    yield lambda size: resource.setrlimit(resource.RLIMIT_FSIZE, (size, limits[1]))
    resource.setrlimit(resource.RLIMIT_FSIZE, limits)


@pytest.mark.parametrize("size", [0, 100, 5_000, 70_001])
def test_writes_that_are_cut_short_leave_the_old_or_the_new(
    tmp_path: Path, longest_file: Callable[[int], None], size: int
) -> None:
    folder = ModelFolder(tmp_path, "p", "a")
    folder.write_lines("train", 1, b"old\n")
    queue = open_queue(tmp_path)
    model = number_of(queue)
    history = HistoryTable(queue.database).of(model, folder)
    history.add(1, {"train/reward": 0.5})
    ledger = Ledger(tmp_path / "ledger.sqlite")
    payload = Payload(os.urandom(100_000), b"")
    longest_file(size)
    for number in range(3):
        with pytest.raises(StorageFull):
            queue.insert(model, f"{number}", "d", TrainConfig(), payload, JobReport())
        with contextlib.suppress(sqlite3.OperationalError):
            add(ledger, number, list(range(20_000)))
    with pytest.raises(StorageFull):
        folder.write_lines("train", 1, bytes(100_000))
    with pytest.raises(StorageFull):
        history.add(2, {f"train/{index}": 0.5 for index in range(5000)})
    longest_file(resource.RLIM_INFINITY)
    file = tmp_path / "p" / "models" / "a" / "trajectories" / "train" / "0001.jsonl.gz"
    assert file.read_bytes() == b"old\n"
    history.add(2, {"train/reward": 0.75})
    assert history.values([1, 2]) == {1: {"train/reward": 0.5}, 2: {"train/reward": 0.75}}
    queue.insert(model, "0", "d", TrainConfig(), payload, JobReport())
    assert len(queue.jobs(None, ("queued",), limit=10)) == 1
    assert ledger.find(add(ledger, 9, [1, 2])) is not None


@settings(max_examples=25, deadline=None, derandomize=True)
@given(data=st.data())
def test_a_log_of_which_a_crash_wrote_a_part_is_read_up_to_there(
    tmp_path_factory: pytest.TempPathFactory, data: st.DataObject
) -> None:
    folder = tmp_path_factory.mktemp("torn")
    queue, copy = open_queue(folder), folder / "copy" / ".server"
    model = number_of(queue)
    queue.database.select("PRAGMA wal_checkpoint(TRUNCATE)")  # the tables and the model are in the file
    payload = Payload(b"x" * 3000, b"")
    jobs = [queue.insert(model, f"{number}", "d", TrainConfig(), payload, JobReport()).job_id for number in range(4)]
    copy.mkdir(parents=True)
    shutil.copy(folder / ".server" / FILE, copy)
    log = (folder / ".server" / f"{FILE}-wal").read_bytes()
    queue.database.close()
    cut = data.draw(st.integers(0, len(log)))
    rest = bytes(len(log) - cut) if data.draw(st.booleans()) else b""
    (copy / f"{FILE}-wal").write_bytes(log[:cut] + rest)
    again = open_queue(copy.parent)
    kept = {job.job_id for job in again.jobs(None, ("queued",), limit=10)}
    assert kept == set(jobs[: len(kept)])
    assert kept == set(jobs) or cut < len(log)
    again.insert(model, "later", "d", TrainConfig(), payload, JobReport())
    again.database.close()
