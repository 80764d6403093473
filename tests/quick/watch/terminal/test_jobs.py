"""`art jobs` and `art status` on a server: its queue is real, its engine and job runner do not run."""

import json
import re
import time
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from art_protocol.wire import ErrorDetail, JobReport
from art_server.jobs.queue import JobQueue
from art_server.server import Server
from art_server.store import files
from art_watch.terminal.tables import job_progress, print_jobs, print_status
from tests.http_server import served
from tests.quick.api.idle_server import make
from tests.quick.jobs.queued_jobs import add
from tests.quick.watch.terminal.conftest import Ran, screen, shown

Run = Callable[..., Ran]


@pytest.fixture
def server(tmp_path: Path) -> Iterator[tuple[str, Server, JobQueue]]:
    """The address of a server with model p/run."""
    app, server = make(tmp_path)
    with served(app, lifespan="off") as url:
        yield url, server, server.queue
    server.close()


Running = tuple[str, Server, JobQueue]


def test_the_queue_shows_what_runs_and_what_waits(run: Run, server: Running) -> None:
    url, _, queue = server
    running, waiting = (add(queue, name="run") for _ in range(2))
    queue.set_running(running.job_id, 1)
    queue.set_progress(running.job_id, "train", 3, 8)
    jobs = json.loads(run("jobs", "--json", "--url", url).out)["jobs"]
    assert [(job["job_id"], job["state"]) for job in jobs] == [
        (running.job_id, "running"),
        (waiting.job_id, "queued"),
    ]
    assert [jobs[0][name] for name in ("phase", "completed", "total")] == ["train", 3, 8]
    assert jobs[1]["waits_for"] == "1 earlier job, of p/run" and jobs[1]["phase"] == "queued"
    first, second = run("jobs", "--url", url).out.splitlines()[1:]
    assert re.fullmatch(rf"{running.job_id[:8]} running p/run - \d+ s train 3 of 8", " ".join(first.split()))
    assert second.rstrip().endswith("waits for 1 earlier job, of p/run")
    console = screen(60)
    print_jobs(console, [job | {"created_at": time.time()} for job in jobs])
    assert shown(console).splitlines() == [
        "job       state    model  step  age  progress",
        f"{running.job_id[:8]}  running  p/run     -  0 s  train 3 of 8",
        f"{waiting.job_id[:8]}  queued   p/run     -  0 s  waits for 1 earlier",
        " " * 37 + "job, of p/run",
    ]


def test_a_job_that_runs_again_shows_its_progress() -> None:
    progress = {"phase": "train", "completed": 3, "total": 8}
    job = progress | {"error": {"message": "it ran too long"}, "waits_for": None}
    assert job_progress(job | {"state": "running"}) == "train 3 of 8"
    assert job_progress(job | {"state": "failed"}) == "it ran too long"
    assert job_progress(job | {"state": "queued", "waits_for": "room"}) == "waits for room"


def test_a_job_is_cancelled_by_its_first_digits(run: Run, server: Running) -> None:
    url, _, queue = server
    job, other = (add(queue, name="run") for _ in range(2))
    code, out, _ = run("jobs", "--cancel", job.job_id[:12], "--url", url)
    assert code == 0 and "cancelled" in out
    assert queue.get(job.job_id).state == "cancelled" and queue.get(other.job_id).state == "queued"
    for digits, message in (("xyz", "the id of no job"), ("", "the id of no job")):
        code, _, err = run("jobs", "--cancel", digits, "--url", url)
        assert code == 1 and message in err
    queue.set_running(other.job_id, 1)
    queue.set_done(other.job_id, {}, JobReport())
    code, _, err = run("jobs", "--cancel", other.job_id, "--url", url)
    assert code == 2 and "cannot be cancelled any more: it is done" in err


def test_digits_of_several_jobs_cancel_none(run: Run, server: Running) -> None:
    url, _, queue = server
    ids = [add(queue, name="run").job_id for _ in range(17)]  # of which two begin alike
    first_digits = Counter(job_id[0] for job_id in ids)
    digit = next(digit for digit in "0123456789abcdef" if first_digits[digit] > 1)
    code, _, err = run("jobs", "--cancel", digit, "--url", url)
    assert code == 1 and "the ids of several jobs" in err
    assert {queue.get(job_id).state for job_id in ids} == {"queued"}


def test_all_also_shows_jobs_that_have_ended(run: Run, server: Running) -> None:
    url, _, queue = server
    done, failed = (add(queue, name="run") for _ in range(2))
    queue.set_running(done.job_id, 1)
    queue.set_done(done.job_id, {}, JobReport())
    queue.set_failed(failed.job_id, ErrorDetail(message="out of \x1b[31mmemory"))
    assert run("jobs", "--url", url).out == "no jobs\n"
    out = run("jobs", "--all", "--url", url).out
    assert "out of ␛[31mmemory" in out and "\x1b" not in out
    assert next(line for line in out.splitlines() if "done" in line).split()[3] == "1"


def test_status_is_one_screen(run: Run, server: Running, tmp_path: Path) -> None:
    url, parts, queue = server
    job = add(queue, name="run")
    queue.set_running(job.job_id, 1)
    queue.set_progress(job.job_id, "train", 3, 8)
    parts.registry.get("p", "run").history.add(0, {"val/reward": 0.25})
    (engine,) = parts.fleet.replicas
    engine.state, engine.detail = "failed", "loading"
    for _ in range(8):
        add(queue, name="run")
    for _ in range(3):
        parts.status._activity._samples.append(frozenset({"training"}))
    status = json.loads(run("status", "--json", "--url", url).out)
    assert set(status["live"]) == {"health", "activity", "jobs", "learning", "machine"}
    console = screen()
    print_status(console, url, status)
    lines = shown(console).splitlines()
    assert lines[0].startswith("art-server 0.1.0 at http://127.0.0.1")
    assert "engine: loading" in lines
    assert lines[3:5] == ["█" * 40, "training 100%"]
    assert "100% of the last 1 s: the trainer computes" in shown(console)
    assert any(line.startswith("memory: server ") and "free on disk:" in line for line in lines)
    (model,) = (line for line in lines if line.startswith("p/run"))
    assert model.split()[:6] == ["p/run", "art/tiny", "0", "-", "0.250", "0"]
    assert any(line.endswith("train 3 of 8") for line in lines)
    assert "and 3 more jobs: art jobs" in lines
    assert len(lines) < 24 and max(map(len, lines)) <= 80


def test_the_address_in_the_folder_of_a_running_server_is_used(run: Run, server: Running, tmp_path: Path) -> None:
    url, _, queue = server
    add(queue, name="run")
    files.write_json(tmp_path / ".server" / "address.json", {"url": url})
    assert "queued" in run("jobs", "--path", tmp_path).out
