"""A disk that is really full: nothing acknowledged is lost, and nothing needs a restart."""

import contextlib
import dataclasses
import os
import sqlite3
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from art_protocol.wire import JobReport, TrainConfig
from art_server.errors import StorageFull
from art_server.jobs.job_row import Payload
from art_server.ledger.ledger import Ledger
from art_server.shared.trainer_messages import Batch
from art_server.store.history import HistoryTable
from art_server.store.model_folder import ModelFolder
from tests.quick.jobs.job_runner import running
from tests.quick.jobs.queued_jobs import number_of, open_queue
from tests.quick.ledger.recorded_choices import REQUEST, add, sample
from tests.refusals import refused
from tests.waiting import until

SIZE_MB = 6


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    folder = tmp_path / "disk"
    folder.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", f"size={SIZE_MB}m", "tmpfs", str(folder)]
    if os.geteuid() != 0 or subprocess.run(mount, capture_output=True).returncode != 0:
        pytest.skip("only root can make a disk of a few megabytes")
    yield folder
    subprocess.run(["umount", "--lazy", str(folder)], check=True)


@contextlib.contextmanager
def filled(disk: Path) -> Iterator[None]:
    """Leave no room on a disk."""
    ballast = disk / "ballast"
    with open(ballast, "wb", buffering=0) as file:
        for size in (2**16, 2**12, 1):
            with contextlib.suppress(OSError):
                while file.write(bytes(size)) == size:
                    pass
    yield
    ballast.unlink()


@pytest.mark.anyio
async def test_a_job_waits_for_room_and_is_done(small_disk: Path) -> None:
    async with running(small_disk, "a") as house:
        model = house.registry.get("p", "a")
        first = house.add_job("a")
        assert await house.wait(first) == ["done"]
        await house.background.stop("job runner")
        acknowledged = house.add_job("a")
        with filled(small_disk):
            house.background.start("job runner", house.runner.run_forever)
            await until(lambda: house.background.faults or house.queue.get(acknowledged).next_attempt_at)
            with refused(StorageFull, "no_disk_space"):
                for _ in range(100):
                    big = Payload(os.urandom(100_000), b"")
                    report = JobReport()
                    house.queue.insert(model.number, None, "d", TrainConfig(), big, report)
            assert house.state(acknowledged) in ("queued", "running")
            assert not house.engine.is_paused
        assert await house.wait(acknowledged) == ["done"]
        assert model.step == 2 and model.history.columns(())["steps"] == [1, 2]
        assert not list(model.folder.checkpoints_dir.glob(".*"))


def test_a_full_disk_costs_the_ledger_these_records_and_no_more(small_disk: Path) -> None:
    ledger = Ledger(small_disk / "ledger.sqlite")
    before = add(ledger, 1, [1, 2, 3])
    with filled(small_disk), ledger.open_request(REQUEST) as opened:
        with pytest.raises(sqlite3.OperationalError) as caught:
            for index in range(100):
                prompt = [index * number % 50_000 for number in range(4000)]
                taken = dataclasses.replace(sample(), rendered=prompt)
                ledger.take_samples([(REQUEST.request_id, index, index, taken)])
        assert caught.value.sqlite_errorcode == sqlite3.SQLITE_FULL
        ledger.lose(REQUEST.request_id, 0, "the disk is full")
        ledger.mark_delivered(REQUEST.request_id)
        ledger.keep_turn(REQUEST.request_id, {"messages": ["x" * 100_000]})
        assert opened.lost == {0: "the disk is full"}
    after = add(ledger, 2, [4, 5, 6])
    assert ledger.find(before) is not None and ledger.find(after) is not None
    ledger.close()
    assert Ledger(small_disk / "ledger.sqlite").find(after) is not None


def test_what_does_not_fit_is_not_there_in_part(small_disk: Path) -> None:
    folder = ModelFolder(small_disk, "p", "a")
    folder.write_lines("train", 1, b"one\n")
    queue = open_queue(small_disk)
    model = number_of(queue)
    history = HistoryTable(queue.database).of(model, folder)
    history.add(1, {"train/reward": 0.5})
    payload = Payload.make(Batch(groups=[]))
    kept = queue.insert(model, "k", "d", TrainConfig(), payload, JobReport())
    with filled(small_disk):
        with pytest.raises(StorageFull):
            folder.write_lines("train", 1, bytes(100_000))
        with pytest.raises(StorageFull):
            history.add(1, {f"train/{index}": 0.5 for index in range(5000)})
        with pytest.raises(StorageFull):
            folder.new_checkpoint_dir()
            folder.write_lines("val", 2, bytes(10_000))
    file = small_disk / "p" / "models" / "a" / "trajectories" / "train" / "0001.jsonl.gz"
    assert file.read_bytes() == b"one\n"
    assert history.values([1]) == {1: {"train/reward": 0.5}}
    assert queue.find_key(model, "k", "d") == kept
