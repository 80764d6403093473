import gzip
import json
import sqlite3
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from art_protocol.wire import (
    ErrorDetail,
    JobReport,
    TrainConfig,
)
from art_server.errors import Conflict, NotFound, StorageFull, TooMany, Unavailable
from art_server.jobs.job_row import JobRow
from art_server.jobs.queue import FAILED_PAYLOAD_SECONDS, JobQueue
from art_server.shared.trainer_messages import (
    Batch,
)
from art_server.store.server_database import FILE
from tests.fakes.clock import FakeClock
from tests.quick.jobs.queued_jobs import GROUP, PAYLOAD, add, number_of, open_queue, request_digest
from tests.refusals import refused


def test_jobs_and_payloads_survive_a_restart(tmp_path: Path) -> None:
    queue = open_queue(tmp_path)
    job = add(queue, "k")
    queue.database.close()
    queue = open_queue(tmp_path)
    assert queue.get(job.job_id) == job
    assert queue.batch(job.job_id) == PAYLOAD.batch
    assert queue.trajectories(job.job_id) == PAYLOAD.trajectories
    assert queue.find_key(number_of(queue), "k", request_digest(b"x")) == job


def test_an_interrupted_job_runs_before_those_that_wait(tmp_path: Path) -> None:
    queue = open_queue(tmp_path)
    first, second = add(queue), add(queue)
    assert queue.waiting()[0].job_id == first.job_id
    queue.set_running(second.job_id, 1)
    running = queue.get(queue.waiting()[0].job_id)
    assert running.job_id == second.job_id and running.target_step == 1
    queue.set_done(second.job_id, {"loss/train": 0.5}, JobReport(notes=["tried again"]))
    queue.set_failed(first.job_id, ErrorDetail(message="no"))
    assert not queue.waiting()
    done = queue.get(second.job_id).info()
    assert (done.state, done.step, done.metrics) == ("done", 1, {"loss/train": 0.5})
    assert queue.get(first.job_id).info().step is None


def test_the_same_key_is_one_job_for_each_model(tmp_path: Path) -> None:
    queue = open_queue(tmp_path)
    one = add(queue, "k")
    assert add(queue, "k") == one, "two requests at once"
    assert add(queue, "k", name="b").job_id != one.job_id
    with refused(Conflict, "key_reused", "idempotency-key"):
        queue.find_key(number_of(queue), "k", request_digest(b"y"))
    assert add(queue).job_id != add(queue).job_id, "without a key every request is a job"


def test_unknown_jobs_are_refused(tmp_path: Path) -> None:
    with pytest.raises(NotFound):
        open_queue(tmp_path).get("nothing")


def test_a_payload_is_the_batch_and_the_trajectories_as_they_are_read_later() -> None:
    batch = Batch.model_validate_json(PAYLOAD.batch)
    assert batch.groups == [GROUP, GROUP] and batch.distributions[0].temperature == 0.5
    (line,) = gzip.decompress(PAYLOAD.trajectories).splitlines()
    assert json.loads(line)["trajectories"][0]["reward"] == 1.0


NO_ROOM = ErrorDetail(message="no room", code="trainer_died", retryable=True)


def test_a_failed_job_runs_again_as_long_as_its_payload_is_there(tmp_path: Path) -> None:
    clock = FakeClock()
    queue = open_queue(tmp_path, clock=clock)
    job = add(queue, "k")

    def revived() -> JobRow | None:
        return queue.revive(number_of(queue), "k", lambda: 0)

    assert revived() is None, "it has not failed"
    queue.set_failed(job.job_id, NO_ROOM)
    queue.prune()
    again = revived()
    assert again is not None and (again.job_id, again.state) == (job.job_id, "queued")
    assert queue.batch(job.job_id) == PAYLOAD.batch
    queue.set_failed(job.job_id, NO_ROOM)
    clock.advance(FAILED_PAYLOAD_SECONDS + 1)
    queue.prune()
    assert revived() is None and queue.get(job.job_id).state == "failed"
    assert add(queue, "k").job_id != job.job_id, "the same request is a new job, and not refused for ever"


def test_the_key_of_a_job_that_failed_for_good_stays_its_own(tmp_path: Path) -> None:
    clock = FakeClock()
    queue = open_queue(tmp_path, clock=clock)
    job = add(queue, "k")
    queue.set_failed(job.job_id, ErrorDetail(message="not a number", code="non_finite"))
    clock.advance(FAILED_PAYLOAD_SECONDS + 1)
    queue.prune()
    assert add(queue, "k").job_id == job.job_id


def test_a_failed_job_runs_again_only_where_a_new_one_would_be_accepted(tmp_path: Path) -> None:
    """The checks of `insert`, at each step of the model."""
    queue = open_queue(tmp_path, max_queued=2)
    newest = 3

    def put(key: str, name: str = "a", expected_step: int | None = 3) -> JobRow:
        request = (number_of(queue, name), key, f"of {key}", TrainConfig(), PAYLOAD, JobReport())
        return queue.insert(*request, expected_step=expected_step, newest_step=lambda: newest)

    def fail(key: str, **more: Any) -> str:
        job = put(key, **more).job_id
        queue.set_failed(job, NO_ROOM)
        return job

    def revived(key: str) -> JobRow | None:
        return queue.revive(number_of(queue), key, lambda: newest)

    failed, free = fail("k"), fail("free", expected_step=None)
    other = put("other")
    with refused(Conflict, "step_moved", "expected_step"):
        revived("k")
    queue.set_running(other.job_id, 4)
    queue.set_done(other.job_id, {}, JobReport())
    newest = 4
    for _ in range(2):
        with refused(Conflict, "step_moved", "expected_step"):
            put("new")
        with refused(Conflict, "step_moved", "expected_step"):
            revived("k")
        assert queue.get(failed).state == "failed"
        queue.database.close()
        queue = open_queue(tmp_path, max_queued=2)
    newest = 3  # rolled back
    more = [put(name, name=name).job_id for name in ("x", "y")]
    with refused(TooMany, "queue_full"):
        revived("k")
    queue.set_cancelled(more[0], is_running=False)
    job = revived("k")
    assert job is not None and (job.job_id, job.state) == (failed, "queued")
    queue.set_cancelled(more[1], is_running=False)
    newest = 7
    job = revived("free")
    assert job is not None and job.job_id == free, "it may train any step"
    queue.set_failed(free, NO_ROOM)
    queue.database.close()


def test_a_full_queue_takes_no_more(tmp_path: Path) -> None:
    queue = open_queue(tmp_path, max_queued=2)
    first = add(queue)
    add(queue)
    with refused(TooMany, "queue_full"):
        add(queue)
    add(queue, project="q")
    queue.set_done(first.job_id, {}, JobReport())
    add(queue)


def test_a_job_that_must_be_alone_is_refused_beside_another(tmp_path: Path) -> None:
    queue = open_queue(tmp_path)

    checked: list[str] = []

    def add_alone(name: str, key: str | None = None) -> JobRow:
        def step() -> int:
            checked.append(name)
            return 3

        request = (number_of(queue, name), key, "d", TrainConfig(), PAYLOAD, JobReport())
        return queue.insert(*request, expected_step=3, newest_step=step)

    first = add_alone("a", key="k")
    add_alone("b")
    with refused(Conflict, "step_moved", "expected_step"):
        add_alone("a")
    assert checked == ["a", "b"]
    assert add_alone("a", key="k") == first, "the same request came twice"
    queue.set_done(first.job_id, {}, JobReport())
    assert add_alone("a", key="k").job_id == first.job_id
    assert checked == ["a", "b"]


def test_no_job_is_moved_before_one_that_expects_the_models_step(tmp_path: Path) -> None:
    queue = open_queue(tmp_path)
    request = (number_of(queue), "k", "d", TrainConfig(), PAYLOAD, JobReport())
    alone = queue.insert(*request, expected_step=0).job_id
    behind, other = add(queue).job_id, add(queue, name="b").job_id
    for job, before in ((behind, alone), (alone, None)):
        with refused(Conflict, "step_moved", "expected_step"):
            queue.move(job, before)
    queue.move(other, before=alone)
    assert [waiting.job_id for waiting in queue.waiting()] == [other, alone, behind]


def test_jobs_are_moved_and_listed_in_their_order(tmp_path: Path) -> None:
    queue = open_queue(tmp_path)
    one, two, three, four = (add(queue, name=name).job_id for name in "abcd")

    def order() -> list[str]:
        return [waiting.job_id for waiting in queue.waiting()]

    queue.move(four, before=two)
    assert order() == [one, four, two, three]
    queue.move(one, before=None)
    assert order() == [four, two, three, one]
    queue.set_running(two, 1)
    assert order() == [two, four, three, one], "what was interrupted comes first"
    with refused(Conflict, "not_queued", "job_id"):
        queue.move(two, before=one)
    assert queue.set_cancelled(four, is_running=False)
    assert not queue.set_cancelled(two, is_running=False) and queue.get(two).state == "running"
    listed = queue.jobs(None, ("queued", "cancelled"), limit=10)
    assert [job.job_id for job in listed] == [three, one, four]
    assert queue.jobs(frozenset({"other"}), ("queued",), limit=10) == []


def test_only_the_latest_ended_jobs_are_kept(tmp_path: Path) -> None:
    queue = open_queue(tmp_path, max_ended=2)
    waits = add(queue)
    ended = [add(queue) for _ in range(4)]
    for job in ended:
        queue.set_done(job.job_id, {}, JobReport())
    queue.prune()
    kept = {job.job_id for job in queue.jobs(None, ("queued", "done"), limit=10)}
    assert kept == {waits.job_id, ended[2].job_id, ended[3].job_id}


def test_a_disk_that_takes_nothing_and_a_locked_file_are_distinguished(tmp_path: Path) -> None:
    queue = open_queue(tmp_path)
    job = add(queue)
    with sqlite3.connect(tmp_path / ".server" / FILE, isolation_level=None) as other:
        other.execute("BEGIN IMMEDIATE")
        with refused(Unavailable, "database_locked"):
            queue.set_running(job.job_id, 1)
        with refused(Unavailable, "database_locked"):
            queue.forget_keys(job.model, 0)
        other.execute("ROLLBACK")
    other.close()
    (pages,) = queue._db.execute("PRAGMA page_count").fetchone()
    queue._db.execute(f"PRAGMA max_page_count = {pages}")
    with refused(StorageFull, "no_disk_space"):
        for _ in range(50):
            add(queue)
    queue._db.execute("PRAGMA max_page_count = 100000")
    add(queue)


def test_a_project_that_queues_much_waits_for_one_that_queues_little(tmp_path: Path) -> None:
    queue = open_queue(tmp_path, shares={"b": 2.0})
    payload = replace(PAYLOAD, num_tokens=100)

    def put(project: str, name: str = "m") -> str:
        model = number_of(queue, name, project)
        return queue.insert(model, None, "d", TrainConfig(), payload, JobReport()).job_id

    heavy = [put("a") for _ in range(4)]
    assert queue.set_running(heavy[0], 1)
    light = [put("b"), put("b")]
    order = [waiting.job_id for waiting in queue.waiting()]
    assert order == [heavy[0], light[0], light[1], heavy[1], heavy[2], heavy[3]], "twice the share of another project"
    queue.set_done(heavy[0], {"time/step_backend_train_s": 4.0}, JobReport())
    assert queue.tokens_per_second() == 25.0
    assert queue.set_running(light[0], 1)
    retried = ErrorDetail(message="no room", code="no_disk_space", retryable=True)
    assert queue.set_waiting(light[0], retried, {"no_disk_space": 1}, 1.0)
    assert next(waiting.job_id for waiting in queue.waiting()) == light[0], "it keeps its time"
    queue.database.close()
    queue = open_queue(tmp_path, shares={"b": 2.0})
    assert [waiting.job_id for waiting in queue.waiting()] == [light[0], light[1], heavy[1], heavy[2], heavy[3]]
    with refused(Conflict, "not_queued", "job_id"):
        queue.move(heavy[1], before=light[1])
    queue.move(heavy[1], before=None)
    assert [waiting.job_id for waiting in queue.waiting()] == [light[0], light[1], heavy[2], heavy[3], heavy[1]]
    late = [put("c"), put("c")]
    order = [waiting.job_id for waiting in queue.waiting()]
    assert order[1] == late[0] and order.index(late[1]) > order.index(light[1]), "it was idle, and saved nothing up"
    queue.database.close()


def add_large(queue: JobQueue, project: str, key: str | None = None) -> str:
    """A job of 100 tokens."""
    request = (number_of(queue, "m", project), key, "d", TrainConfig(), replace(PAYLOAD, num_tokens=100), JobReport())
    return queue.insert(*request).job_id


def in_order(queue: JobQueue) -> list[str]:
    return [waiting.job_id for waiting in queue.waiting()]


def test_a_project_is_charged_once_for_a_job_whose_start_is_not_written_at_first(tmp_path: Path) -> None:
    queue = open_queue(tmp_path)
    other, refused_at_first = add_large(queue, "b"), add_large(queue, "a")
    assert queue.set_running(other, 1)
    queue.set_done(other, {}, JobReport())
    with sqlite3.connect(tmp_path / ".server" / FILE, isolation_level=None) as locking:
        locking.execute("BEGIN IMMEDIATE")
        with refused(Unavailable, "database_locked"):
            queue.set_running(refused_at_first, 1)
        locking.execute("ROLLBACK")
    locking.close()
    assert queue.set_running(refused_at_first, 1)
    queue.set_done(refused_at_first, {}, JobReport())
    jobs = [add_large(queue, project) for project in ("a", "b")]
    assert in_order(queue) == jobs, "both projects had one job"
    queue.database.close()
    queue = open_queue(tmp_path)
    assert in_order(queue) == jobs
    queue.database.close()


def test_a_failed_job_that_runs_again_waits_its_turn_and_is_charged(tmp_path: Path) -> None:
    queue = open_queue(tmp_path)
    failed, other = add_large(queue, "a", "k"), add_large(queue, "b")
    assert queue.set_running(failed, 1)
    queue.set_failed(failed, NO_ROOM)
    assert queue.revive(number_of(queue, "m", "a"), "k", lambda: 0) is not None
    assert in_order(queue) == [other, failed], "project a had a job already"
    for job in (other, failed):
        assert queue.set_running(job, 1)
        queue.set_done(job, {}, JobReport())
    jobs = [add_large(queue, project) for project in ("a", "b", "b")]
    assert in_order(queue) == [jobs[1], jobs[0], jobs[2]]
    queue.database.close()


def test_progress_and_retries_are_in_the_row(tmp_path: Path) -> None:
    queue = open_queue(tmp_path)
    job = add(queue).job_id
    queue.set_progress(job, "train", 1, 4)
    assert queue.get(job).phase == "queued", "it does not run"
    queue.set_running(job, 1)
    before = queue.get(job).changes
    queue.set_progress(job, "train", 1, 4)
    running = queue.get(job)
    assert (running.phase, running.completed, running.total) == ("train", 1, 4)
    assert running.changes == before + 1 == running.event().number
    error = ErrorDetail(message="killed", code="trainer_died")
    queue.set_waiting(job, error, {"trainer_died": 2}, 1e12)
    info = queue.get(job).info()
    assert (info.state, info.phase, info.completed, info.attempts) == ("queued", "queued", None, 2)
    assert info.error == error and queue.waiting()[0].next_attempt_at == 1e12
    queue.database.close()
    queue = open_queue(tmp_path)
    assert queue.waiting()[0].next_attempt_at == 0.0, "a new server tries it at once"
    assert queue.get(job).attempts == {"trainer_died": 2}
    queue.database.close()
