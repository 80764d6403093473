"""The server's database: the number of a model, and folders of earlier servers, which kept jobs in a file of their own."""

import asyncio
import functools
import gzip
import json
import shutil
import sqlite3
from contextlib import closing
from pathlib import Path
from typing import get_args

import pytest

from art_protocol.wire import JobState
from art_server.errors import Conflict, NotFound, StorageFull, UsageError
from art_server.jobs.queue import JobQueue
from art_server.shared.trainer_messages import Batch
from art_server.store import files, server_database
from art_server.store.model_folder import ModelFolder
from art_server.store.registry import Registry
from art_server.store.server_database import FILE, open_server_database
from tests.quick.jobs.queued_jobs import add, open_queue
from tests.quick.store.model_folders import commit, make_model
from tests.refusals import refused

STORED = Path(__file__).parent / "stored" / "jobs_72080d0.sql"
"""The jobs of a server of commit 72080d0, named after what became of them."""


@pytest.fixture
def earlier(tmp_path: Path) -> Path:
    """The folder of an earlier server with jobs of the models a and b, of which a is registered."""
    make_model(tmp_path, "p", "a", steps=2).append_history({"step": 1, "train/reward": 0.5})
    (tmp_path / ".server").mkdir()
    with closing(sqlite3.connect(tmp_path / ".server" / "jobs.sqlite")) as database:
        database.executescript(STORED.read_text())
    (tmp_path / ".server" / "history.sqlite").write_bytes(b"the metrics are in each history.jsonl")
    return tmp_path


def test_the_jobs_of_an_earlier_server_go_on(earlier: Path) -> None:
    for _ in range(2):  # taken over, and opened again
        queue = open_queue(earlier)
        assert [waiting.job_id for waiting in queue.waiting()] == ["running", "first", "waits", "last"]
        jobs = {job.job_id: job for job in queue.jobs(None, get_args(JobState), limit=10)}
        for state in ("done", "failed", "cancelled", "running"):
            assert jobs[state].state == state
        waits, failed = jobs["waits"], jobs["failed"]
        assert (waits.model_id, jobs["last"].model_id) == ("p/a", "p/b")
        assert (waits.state, waits.target_step, waits.idempotency_key) == ("queued", 3, "waits")
        assert waits.last_error is not None and waits.last_error.code == "no_disk_space"
        assert failed.last_error is not None and failed.last_error.retryable
        assert jobs["done"].metrics == {"loss/train": 0.5} and jobs["done"].target_step == 1
        assert waits.metrics == {"train/reward": 5.0} and waits.report.num_rows == 5
        assert (waits.phase, waits.attempts, waits.next_attempt_at) == ("queued", {}, 0.0)
        batch = Batch.model_validate_json(queue.batch("waits"))
        assert batch.groups[0].trajectories[0].sequences[0].token_ids == [1, 2, 3]
        (line,) = gzip.decompress(queue.trajectories("waits")).splitlines()
        assert json.loads(line)["trajectories"][0]["reward"] == 5.0
        assert queue.find_key(waits.model, "running", "digest") == jobs["running"]
        queue.database.close()
    queue = open_queue(earlier)
    model = queue.get("failed").model
    assert queue.revive(model, "failed", lambda: 0) is not None and queue.set_running("first", 1)
    assert [waiting.job_id for waiting in queue.waiting()][:3] == ["running", "first", "failed"]
    assert add(queue, "k").job_id == queue.waiting()[-1].job_id
    queue.database.close()


def test_the_models_of_an_earlier_server_have_numbers_which_their_jobs_name(earlier: Path) -> None:
    for _ in range(2):
        registry = Registry(earlier)
        (model,) = registry.all()
        jobs = JobQueue(registry.database).jobs(None, ("queued", "done"), limit=10)
        assert {job.model for job in jobs if job.name == "a"} == {model.number}
        assert registry.of_number(next(job.model for job in jobs if job.name == "b")) is None, "its folder is gone"
        assert model.history.means("train/reward") == {1: 0.5}
        registry.database.close()


def job_models(root: Path) -> dict[str, str | None]:
    """The registered model of each job of a new server; None: a deleted model."""
    registry = Registry(root)
    models = {model.number: model.id for model in registry.all()}
    jobs = JobQueue(registry.database).jobs(None, get_args(JobState), limit=20)
    registry.database.close()
    return {job.job_id: models.get(job.model) for job in jobs}


def test_jobs_with_a_key_and_jobs_that_have_not_ended_are_the_registered_model_s_whatever_the_clock_was(
    earlier: Path,
) -> None:
    folder = ModelFolder(earlier, "p", "a")
    folder.create(folder.read().model_copy(update={"created_at": 4e9}), earlier / "engine.log")
    models = job_models(earlier)
    assert {job for job, model in models.items() if model == "p/a"} == {"done", "failed", "running", "waits"}
    assert models["cancelled"] is None, "it has no key, and may be an earlier model's"


def test_a_model_that_cannot_be_read_stops_the_start_before_its_jobs_are_taken_over(earlier: Path) -> None:
    file = ModelFolder(earlier, "p", "a").path / "model.json"
    content = file.read_bytes()
    file.write_bytes(b"")
    for _ in range(2):
        with pytest.raises(ValueError):
            Registry(earlier)
    file.write_bytes(content)
    assert job_models(earlier)["waits"] == "p/a"


def test_jobs_that_an_earlier_version_accepted_after_it_was_started_again_are_taken_over_too(earlier: Path) -> None:
    open_queue(earlier).database.close()
    with closing(sqlite3.connect(earlier / ".server" / "jobs.sqlite")) as database:
        database.executescript(STORED.read_text())
        database.execute("UPDATE jobs SET job_id = 'new ' || job_id, idempotency_key = 'new ' || idempotency_key")
        database.commit()
    for _ in range(2):
        queue = open_queue(earlier)
        order = ["running", "first", "waits", "last"]
        waiting = [waiting.job_id for waiting in queue.waiting()]
        assert [job for job in waiting if "new" not in job] == order
        assert [job for job in waiting if "new" in job] == [f"new {job}" for job in order]
        queue.database.close()
    kept = {file.name for file in (earlier / ".server").iterdir()}
    assert kept == {FILE, "earlier-jobs.sqlite", "earlier-history.sqlite", "earlier-earlier-jobs.sqlite"}
    with closing(sqlite3.connect(earlier / ".server" / "earlier-jobs.sqlite")) as database:
        assert database.execute("SELECT COUNT(*) FROM jobs WHERE job_id LIKE 'new%'").fetchone() == (0,)


def test_an_empty_table_of_jobs_is_closed(tmp_path: Path) -> None:
    (tmp_path / ".server").mkdir()
    (tmp_path / ".server" / "jobs.sqlite").touch()
    database = open_server_database(tmp_path)
    assert [name for _, name, _ in database.connection.execute("PRAGMA database_list")] == ["main"]
    database.close()


@pytest.mark.parametrize("statement", ["INTO jobs", "PRAGMA user_version=", "aside"])
def test_a_server_that_is_killed_while_it_takes_an_earlier_one_s_jobs_over_begins_again(
    earlier: Path, monkeypatch: pytest.MonkeyPatch, statement: str
) -> None:
    class Killed(BaseException):
        pass

    def die(trace: str) -> None:
        if statement in trace:
            raise Killed

    with monkeypatch.context() as patched:
        if statement == "aside":
            patched.setattr(server_database.os, "replace", lambda source, target: die("aside"))
        else:
            real = sqlite3.connect

            class Dying(sqlite3.Connection):
                def execute(self, text: str, *values: object) -> sqlite3.Cursor:  # type: ignore[override]
                    die(text)
                    return super().execute(text, *values)  # type: ignore[arg-type]

            patched.setattr(sqlite3, "connect", functools.partial(real, factory=Dying))
        with pytest.raises(Killed):
            open_server_database(earlier)
    queue = open_queue(earlier)
    assert len(queue.waiting()) == 4 and queue.batch("waits")
    queue.database.close()
    kept = {file.name for file in (earlier / ".server").iterdir()}
    assert kept == {FILE, "earlier-jobs.sqlite", "earlier-history.sqlite"}


@pytest.mark.parametrize("version", [0, 1, 9])
def test_a_table_of_another_version_is_refused_and_kept(earlier: Path, version: int) -> None:
    with closing(sqlite3.connect(earlier / ".server" / "jobs.sqlite")) as database:
        database.execute(f"PRAGMA user_version={version}")
    refusal = "the table of jobs was written by a version of art-server that this version cannot read"
    for _ in range(2):
        with pytest.raises(UsageError, match=refusal):
            open_server_database(earlier)
    with closing(sqlite3.connect(earlier / ".server" / "jobs.sqlite")) as database:
        assert database.execute("SELECT COUNT(*) FROM jobs").fetchone() == (7,)


def test_a_database_of_another_version_is_refused(tmp_path: Path) -> None:
    database = open_server_database(tmp_path)
    database.select("PRAGMA user_version=9")
    database.close()
    with pytest.raises(UsageError, match=FILE):
        open_server_database(tmp_path)


# --- numbers ---


def numbers(root: Path) -> dict[str, int]:
    """The number of each model of a new server."""
    registry = Registry(root)
    by_id = {model.id: model.number for model in registry.all()}
    registry.database.close()
    return by_id


def test_a_number_is_given_once(tmp_path: Path) -> None:
    make_model(tmp_path, "p", "a")
    make_model(tmp_path, "p", "b")
    before = numbers(tmp_path)
    assert len(set(before.values())) == 2 and numbers(tmp_path) == before
    shutil.copytree(tmp_path / "p" / "models" / "a", tmp_path / "q" / "models" / "a", symlinks=True)
    after = numbers(tmp_path)
    assert after.pop("q/a") not in before.values() and after == before
    registry = Registry(tmp_path)
    registry.remove(registry.get("p", "b"))
    shutil.rmtree(tmp_path / "p" / "models" / "b")
    registry.database.close()
    make_model(tmp_path, "p", "b")
    assert numbers(tmp_path)["p/b"] not in before.values()


def test_a_database_that_was_lost_or_is_a_backup_gives_no_number_again(tmp_path: Path) -> None:
    """The ledger's records still name the models that this database does not have."""
    make_model(tmp_path, "p", "a")
    first = numbers(tmp_path)
    backup = {file: file.read_bytes() for file in (tmp_path / ".server").iterdir()}
    make_model(tmp_path, "p", "b")
    later = numbers(tmp_path)
    for file, content in backup.items():
        file.write_bytes(content)
    shutil.rmtree(tmp_path / "p" / "models" / "b")
    make_model(tmp_path, "o", "c")
    restored = numbers(tmp_path)
    assert restored.pop("o/c") not in later.values() and restored == first
    for file in (tmp_path / ".server").iterdir():
        file.unlink()
    registry = Registry(tmp_path)
    assert {model.number for model in registry.all()}.isdisjoint(later.values())
    assert registry.table.name_of(later["p/b"]) == "(unknown)"
    registry.database.close()


def test_a_folder_that_another_model_s_replaced_is_another_model(tmp_path: Path) -> None:
    folder = make_model(tmp_path, "p", "a", steps=2)
    folder.append_history({"step": 1, "val/reward": 0.5})
    (before,) = numbers(tmp_path).values()
    folder.history_file.unlink()
    folder.create(folder.read().model_copy(update={"created_at": 5.0}), tmp_path / "engine.log")
    registry = Registry(tmp_path)
    model = registry.get("p", "a")
    assert model.number != before and model.history.span()[0] == 0
    assert registry.table.name_of(before) == "p/a (deleted)"
    registry.database.close()


def test_a_server_that_died_before_a_renamed_model_s_folder_moved_is_followed_by_one_that_moves_it(
    tmp_path: Path,
) -> None:
    folder = make_model(tmp_path, "p", "a", steps=2)
    folder.append_history({"step": 1, "train/reward": 0.1})
    registry = Registry(tmp_path)
    number = registry.get("p", "a").number
    registry.table.rename(number, "b", "a")
    registry.database.close()
    for _ in range(2):
        registry = Registry(tmp_path)
        (model,) = registry.all()
        assert (model.id, model.record.name, model.number) == ("p/b", "b", number)
        assert model.history.means("train/reward") == {1: 0.1}
        registry.database.close()
    make_model(tmp_path, "p", "a")
    assert set(numbers(tmp_path)) == {"p/a", "p/b"}


def refuse(*_: object, **__: object) -> None:
    raise OSError(5, "Input/output error")


def test_a_renamed_model_whose_folder_cannot_be_moved_stays_in_it_until_the_next_start(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    make_model(tmp_path, "p", "a", created_at=1.0)
    registry = Registry(tmp_path)
    with monkeypatch.context() as patched:
        patched.setattr("os.rename", refuse)
        model = registry.rename(registry.get("p", "a"), "b")
        registry.database.close()
        for _ in range(2):
            assert (model.id, model.folder.name, model.folder.steps()) == ("p/b", "a", [0])
            registry = Registry(tmp_path)  # which cannot move the folder either
            number = model.number
            (model,) = registry.all()
            assert model.number == number
            with refused(Conflict, "model_exists", "name"):
                registry.folder("p", "a")
            registry.database.close()
    assert numbers(tmp_path) == {"p/b": model.number}
    assert [folder.name for folder in (tmp_path / "p" / "models").iterdir()] == ["b"]


def test_a_renamed_model_whose_folder_could_not_be_moved_is_renamed_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    make_model(tmp_path, "p", "a", created_at=1.0)
    registry = Registry(tmp_path)
    with monkeypatch.context() as patched:
        patched.setattr("os.rename", refuse)
        model = registry.rename(registry.get("p", "a"), "b")
    renamed = registry.rename(model, "c")
    assert (renamed.id, renamed.folder.name, renamed.folder.steps()) == ("p/c", "c", [0])
    registry.database.close()
    assert numbers(tmp_path) == {"p/c": model.number}


def test_a_folder_that_moved_though_the_disk_reported_an_error_is_found(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    make_model(tmp_path, "p", "a", created_at=1.0)
    registry = Registry(tmp_path)
    with monkeypatch.context() as patched:
        patched.setattr(files, "sync", refuse)
        model = registry.rename(registry.get("p", "a"), "b")
    assert registry.rename(model, "c").folder.steps() == [0]
    registry.database.close()
    assert numbers(tmp_path) == {"p/c": model.number}


def test_a_start_moves_no_other_model_s_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The old name of a renamed model is another model's, and the renamed model was deleted but for its row."""
    make_model(tmp_path, "p", "a", created_at=1.0)
    registry = Registry(tmp_path)
    with monkeypatch.context() as patched:
        patched.setattr(registry.table, "note_moved", refuse)
        renamed = registry.rename(registry.get("p", "a"), "b")
    folder = make_model(tmp_path, "p", "a", steps=3, created_at=2.0)
    number = registry.add(folder, folder.read()).number
    renamed.folder.move_to_trash()
    registry.database.close()
    for _ in range(2):
        assert numbers(tmp_path) == {"p/a": number}
        assert folder.steps() == [0, 1, 2]


def test_a_model_is_deleted_also_if_its_row_cannot_be_changed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = make_model(tmp_path, "p", "a", created_at=1.0)
    registry = Registry(tmp_path)
    model = registry.get("p", "a")
    folder.move_to_trash()
    with closing(sqlite3.connect(tmp_path / ".server" / FILE, isolation_level=None)) as other:
        other.execute("BEGIN IMMEDIATE")
        registry.remove(model)
    assert registry.all() == []
    folder = make_model(tmp_path, "p", "a", created_at=2.0)
    assert registry.add(folder, folder.read()).number != model.number
    registry.database.close()


def test_a_rollback_that_the_disk_refuses_stops_no_start_and_no_inference(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = make_model(tmp_path, "p", "a", steps=3)
    folder.append_history({"step": 2, "train/reward": 0.2})
    make_model(tmp_path, "p", "b")
    registry = Registry(tmp_path)
    registry.get("p", "a").history.roll_back(1)
    registry.table.roll_back(registry.get("p", "a").number, 1)
    registry.database.close()

    def fill(*_: object) -> None:
        raise StorageFull("no room", code="no_disk_space")

    with monkeypatch.context() as patched:
        patched.setattr(files, "append_line", fill)
        registry = Registry(tmp_path)
        assert [model.id for model in registry.all()] == ["p/a", "p/b"]
        model = registry.get("p", "a")
        asyncio.run(registry.verify(model))
        for text in ("p/a", "p/a@1"):
            assert registry.resolve(text, None, None).step == 1
        with refused(NotFound, "unknown_step", "model"):
            registry.resolve("p/a@2", None, None)
        with refused(StorageFull, "no_disk_space"):
            asyncio.run(registry.get_whole("p", "a"))
    assert folder.steps() == [0, 1, 2]
    assert asyncio.run(registry.get_whole("p", "a")).step == 1
    assert folder.steps() == [0, 1] and model.history.span()[0] == 0
    registry.database.close()
    assert numbers(tmp_path)["p/a"] == model.number


def test_a_model_that_gets_a_checkpoint_again_after_all_were_broken_is_the_same_model(tmp_path: Path) -> None:
    folder = make_model(tmp_path, "p", "a", steps=3, created_at=1.0)
    forgotten: list[tuple[int, int]] = []
    registry = Registry(tmp_path, lambda *arguments: forgotten.append(arguments))
    model = registry.get("p", "a")
    for step in folder.steps():
        (folder.checkpoint_dir(step) / "checkpoint.json").unlink()
    with refused(NotFound, "unknown_model", "name"):
        asyncio.run(registry.verify(model))
    commit(folder, 1)
    again = registry.add(folder, folder.read())
    assert (again.number, again.step) == (model.number, 1)
    assert forgotten == [(model.number, 1)], "the keys of step 2 name new jobs"
    registry.database.close()


def test_a_name_whose_folder_is_gone_is_free(tmp_path: Path) -> None:
    for name in ("a", "b", "c"):
        make_model(tmp_path, "p", name)
    before = numbers(tmp_path)
    for name in ("b", "c"):
        shutil.rmtree(tmp_path / "p" / "models" / name)
    registry = Registry(tmp_path)
    assert registry.rename(registry.get("p", "a"), "b").number == before["p/a"]
    registry.database.close()
    make_model(tmp_path, "p", "c")
    assert numbers(tmp_path) == {"p/b": before["p/a"], "p/c": before["p/c"]}, "the same folder was put back"
