"""`art tail`: the last events of folder and server, then the new ones."""

import itertools
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from art_protocol.wire import ErrorDetail
from art_server.store.model_folder import ModelFolder
from art_watch.terminal import tail as tail_module
from art_watch.terminal.sources import FolderSource, HttpSource
from art_watch.terminal.tables import print_event
from art_watch.terminal.tail import NUM_FIRST, Tail, with_days
from tests.http_server import served
from tests.makers.demo import log, make_demo
from tests.quick.api.idle_server import make
from tests.quick.jobs.queued_jobs import add
from tests.quick.watch.terminal.conftest import Ran, screen, shown


def test_the_last_ten_events_of_all_models_come_first_then_new_ones(tmp_path: Path) -> None:
    new, old = make_demo(tmp_path, runs=2, steps=8, rollouts=8)
    changes = iter([lambda: log(new, 9, {"train/reward": 0.5}), lambda: log(old, 8, {"val/reward": 0.25})])
    events = Tail(FolderSource(tmp_path), None, wait=lambda: next(changes)()).events()
    first = list(itertools.islice(events, NUM_FIRST))
    assert [event["at"] for event in first] == sorted(event["at"] for event in first)
    assert [(event["model"], event["step"]) for event in first[-8:]] == [(new.model_id, step) for step in range(1, 9)]
    assert [event["step"] for event in first[:-8]] == [7, 8]
    step, late = itertools.islice(events, 2)
    assert (step["model"], step["step"], step["metrics"]) == (new.model_id, 9, {"train/reward": 0.5})
    assert (late["model"], late["step"], late["metrics"]["val/reward"]) == (old.model_id, 8, 0.25)
    only = Tail(FolderSource(tmp_path), old.model_id).events()
    assert {event["model"] for event in itertools.islice(only, 8)} == {old.model_id}


def test_jobs_of_a_server_are_events_and_a_server_that_is_away_none(tmp_path: Path) -> None:
    app, server = make(tmp_path)
    with served(app, lifespan="off") as url:
        job = add(server.queue, name="run")
        source = HttpSource(url)

        def away() -> None:
            source._http.base_url = "http://127.0.0.1:9"

        def end() -> None:
            source._http.base_url = url
            server.queue.set_failed(job.job_id, ErrorDetail(message="out of memory"))

        changes = iter([lambda: server.queue.set_running(job.job_id, 1), away, end])
        events = Tail(source, None, wait=lambda: next(changes)()).events()
        seen = list(itertools.islice(events, 3))
        source.close()
    server.close()
    assert [event["state"] for event in seen] == ["queued", "running", "failed"]
    console = screen()
    print_event(console, None, None, seen[-1])
    assert shown(console) == f"--:--:-- p/run job {job.job_id[:8]} failed out of memory"


def test_the_date_stands_where_the_day_changes() -> None:
    times = ("2026-03-01T12:00:00+00:00", "2026-03-01T12:00:01+00:00", "", "2026-03-03T12:00:00+00:00")
    events: list[dict[str, Any]] = [
        {"event": "step", "model": "p/a", "step": step, "metrics": {"train/reward": 0.5}, "at": at}
        for step, at in enumerate(times)
    ]
    console = screen()
    for day, at, event in with_days(iter(events)):
        print_event(console, day, at, event)
    lines = shown(console).splitlines()
    assert len(lines) == 6 and lines[0].endswith("2026-03-01") and lines[4].endswith("2026-03-03")
    assert lines[1].endswith("p/a step 0  reward 0.5") and lines[3].startswith("--:--:--")


def test_tail_prints_lines_or_json_until_it_is_ended(
    run: Callable[..., Ran], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    log(ModelFolder(tmp_path, "p", "a"), 3, {"train/reward": 0.5})

    def end(_: float) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(tail_module.time, "sleep", end)
    code, out, err = run("tail", "--path", tmp_path)
    assert (code, err) == (130, "") and out.splitlines()[1].endswith("p/a step 3  reward 0.5")
    (line,) = run("tail", "a", "--json", "--path", tmp_path).out.splitlines()
    assert json.loads(line)["metrics"] == {"train/reward": 0.5}
    assert run("tail", "none", "--path", tmp_path).code == 1
