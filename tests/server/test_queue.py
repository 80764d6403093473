from pathlib import Path

import pytest

from art.wire import ErrorDetail, JobReport, TrainConfig
from art_server.errors import Conflict, NotFound
from art_server.jobs.queue import Job, JobQueue, Payload, digest
from art_server.training.task import Batch, Row, TrainableGroup, TrainableTrajectory

ROW = Row(token_ids=[1, 2, 3], logprobs=[None, -0.5, -0.25])
GROUP = TrainableGroup(trajectories=[TrainableTrajectory(reward=1.0, rows=[ROW])])
PAYLOAD = Payload(Batch(groups=[GROUP]), [])


def add(queue: JobQueue, key: str | None = None, name: str = "a", body: bytes = b"x") -> Job:
    return queue.add(
        "me", "p", name, key, digest(body), TrainConfig(), PAYLOAD, JobReport(num_rows=1)
    )


def test_jobs_and_payloads_survive_a_restart(tmp_path: Path) -> None:
    queue = JobQueue(tmp_path / "jobs.sqlite")
    job = add(queue, "k")
    queue.close()
    queue = JobQueue(tmp_path / "jobs.sqlite")
    assert queue.get(job.job_id) == job
    assert queue.payload(job.job_id) == PAYLOAD
    assert queue.find_key("me", "p", "a", "k", digest(b"x")) == job


def test_an_interrupted_job_runs_before_those_that_wait(tmp_path: Path) -> None:
    queue = JobQueue(tmp_path / "jobs.sqlite")
    first, second = add(queue), add(queue)
    assert queue.next() == first
    queue.set_running(second.job_id, 1)
    running = queue.next()
    assert running is not None and running.job_id == second.job_id and running.target_step == 1
    queue.set_done(second.job_id, {"loss/train": 0.5}, JobReport(notes=["tried again"]))
    queue.set_failed(first.job_id, ErrorDetail(message="no"))
    assert queue.next() is None
    done = queue.get(second.job_id).info()
    assert (done.state, done.step, done.metrics) == ("done", 1, {"loss/train": 0.5})
    assert queue.get(first.job_id).info().step is None


def test_the_same_key_is_one_job_for_each_owner_and_model(tmp_path: Path) -> None:
    queue = JobQueue(tmp_path / "jobs.sqlite")
    one = add(queue, "k")
    assert add(queue, "k") == one, "two requests at once"
    assert add(queue, "k", name="b").job_id != one.job_id
    assert queue.find_key("other", "p", "a", "k", digest(b"x")) is None
    with pytest.raises(Conflict, match="new key"):
        queue.find_key("me", "p", "a", "k", digest(b"y"))
    assert add(queue).job_id != add(queue).job_id, "without a key every request is a job"


def test_unknown_jobs_are_refused(tmp_path: Path) -> None:
    with pytest.raises(NotFound):
        JobQueue(tmp_path / "jobs.sqlite").get("nothing")
