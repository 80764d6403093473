"""What a server reports of its jobs and logs: to trackers, from the files of a step, and in totals."""

from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

import art
from art_protocol import tracking
from art_protocol.history import pack_rows, trajectory_row
from art_protocol.tracking import RolloutRow, StepRecord
from art_protocol.wire import (
    ErrorDetail,
    JobReport,
    LogRequest,
    LoRAConfig,
    TrajectoryBody,
    TrajectoryGroupBody,
)
from art_server.jobs.logs import write_log
from art_server.jobs.received_trajectories import ReceivedTrajectories
from art_server.jobs.reports import Reports, Totals, step_record, stored_rows
from art_server.store.history import HistoryTable
from art_server.store.model_folder import ModelFolder, ModelRecord
from art_server.store.registry import RegisteredModel
from art_server.store.server_database import open_server_database
from tests.quick.jobs.queued_jobs import add, open_queue
from tests.quick.server.served import sample_group, serving

pytestmark = pytest.mark.anyio


@pytest.fixture
def got(monkeypatch: pytest.MonkeyPatch) -> list[tuple[StepRecord, list[RolloutRow]]]:
    """What a tracker named `memory` gets: records, and their rollouts at that moment."""
    received: list[tuple[StepRecord, list[RolloutRow]]] = []

    class Memory:
        def __init__(self, names: Sequence[str], folder: Path) -> None: ...

        def report(self, record: StepRecord) -> None:
            received.append((record, list(record.rollouts())))

        def close(self) -> None: ...

    entry = SimpleNamespace(value="memory:Memory", load=lambda: Memory)
    monkeypatch.setattr(tracking, "_entries", lambda group: {"memory": entry} if group == "art.trackers" else {})
    return received


async def test_a_server_reports_the_steps_and_logs_of_all_clients(
    got: list[tuple[StepRecord, list[RolloutRow]]], tmp_path: Path
) -> None:
    async with serving(tmp_path, trackers=("memory",)) as served:
        model = art.TrainableModel(name="agent", project="demo", base_model="base")
        await model.register(art.Backend(served.url))
        group = await sample_group(model)
        result = await model.train([group], art.TrainConfig(learning_rate=0.25))
        await model.log(group.trajectories[1:], split="val")
        await model.log(metrics={"games": 3.0}, split="val")
        await model.backend().close()
        history = served.server.registry.get("demo", "agent").history.values([1])[1]

    (trained, rows), (logged, logged_rows), (numbers, no_rows) = got
    assert (trained.project, trained.name, trained.step, trained.split) == (
        "demo",
        "agent",
        1,
        "train",
    )
    assert trained.metrics == result.metrics
    assert {name: history[name] for name in trained.metrics} == trained.metrics
    assert trained.config["base_model"] == "base" and trained.config["learning_rate"] == 0.25
    assert trained.config["lora"]["rank"] == LoRAConfig().rank
    assert trained.report is not None and trained.report.num_trained_tokens == 4
    assert [(row.group, row.index, row.reward) for row in rows] == [(0, 0, 0.0), (0, 1, 1.0)]
    assert rows[1].text == "user: question 1.0\n\nassistant: a private answer"
    assert (logged.step, logged.split, logged.metrics["val/reward"]) == (1, "val", 1.0)
    assert [row.reward for row in logged_rows] == [1.0]
    assert numbers.metrics == {"val/games": 3.0} and no_rows == []


def make_model(folder: Path) -> RegisteredModel:
    record = ModelRecord(name="agent", project="demo", base_model="base", lora=LoRAConfig())
    model = ModelFolder(folder, "demo", "agent")
    return RegisteredModel(1, model, record, step=3, history=HistoryTable(open_server_database(None)).of(1, model))


async def test_rollouts_that_are_logged_again_do_not_replace_those_of_the_job(
    tmp_path: Path,
) -> None:
    """The job's have the origin of each turn, and its record of tokens addresses them by their place."""
    model = make_model(tmp_path)
    model.folder.write_lines("train", 3, b"the job's\n")
    model.folder.tokens_file(3).parent.mkdir(parents=True)
    model.folder.tokens_file(3).touch()
    group = TrajectoryGroupBody(trajectories=[TrajectoryBody(messages_and_choices=[], reward=0.5)] * 2)
    for split, is_kept in (("train", True), ("val", False)):
        rollouts = ReceivedTrajectories()
        rollouts.add(group)
        reply = await write_log(model, LogRequest(split=split), rollouts, Reports((), tmp_path))
        assert reply.metrics[f"{split}/reward"] == 0.5
        assert (model.folder.trajectories_file(split, 3).read_bytes() == b"the job's\n") == is_kept


def test_failed_rollouts_of_a_stored_step_are_rows_with_their_error(tmp_path: Path) -> None:
    model = make_model(tmp_path)
    trajectory = TrajectoryBody(messages_and_choices=[{"role": "user", "content": "hi"}], reward=2)
    failure: Any = {"type": "ValueError", "message": "no answer"}
    group = TrajectoryGroupBody(trajectories=[trajectory], exceptions=[failure])
    model.folder.write_lines("val", 3, pack_rows(map(trajectory_row, [group, group])))
    assert list(step_record(model, 3, "val", {}).rollouts()) == [
        RolloutRow(0, 0, 2.0, "user: hi", ""),
        RolloutRow(0, 1, None, "", "ValueError: no answer"),
        RolloutRow(1, 0, 2.0, "user: hi", ""),
        RolloutRow(1, 1, None, "", "ValueError: no answer"),
    ]


def test_a_deleted_file_has_no_rollouts(tmp_path: Path) -> None:
    assert list(stored_rows(tmp_path / "none.jsonl")) == []


def test_totals_have_the_seconds_of_the_last_step(tmp_path: Path) -> None:
    queue, totals = open_queue(tmp_path), Totals()
    jobs = [add(queue).job_id for _ in range(3)]
    for job, seconds in zip(jobs, (5.0, 2.0), strict=False):
        metrics = {"time/job_train_s": seconds, "train/reward": 0.5}
        queue.set_done(job, metrics, JobReport(num_trained_tokens=10))
        totals.count(queue.get(job))
    queue.set_running(jobs[2], 1)
    totals.count(queue.get(jobs[2]))
    queue.set_failed(jobs[2], ErrorDetail(message="bad"))
    totals.count(queue.get(jobs[2]))
    queue.database.close()
    assert totals.seconds == {"job_train": 2.0} and totals.trained_tokens == 20
    assert totals.jobs == {"done": 2, "failed": 1}
