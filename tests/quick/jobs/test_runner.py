"""What becomes of jobs when engine, trainer, disk and database fail: only a job's own fault ends it."""

import asyncio
import errno
import shutil
import sqlite3
import threading
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from art_protocol.history import pack_rows, read_rows
from art_protocol.wire import JobEvent, JobReport, TrainConfig
from art_server.errors import Conflict, StorageFull
from art_server.jobs.job_row import Payload
from art_server.jobs.runner import REST_SECONDS
from art_server.jobs.trainer_process import TrainerDied, TrainerError
from art_server.shared.trainer_messages import Batch, TrainTask
from art_server.store.base_models import TINY_DIR, BaseModel
from art_server.store.model_folder import CheckpointRecord, ModelFolder
from tests.fakes.clock import FakeClock
from tests.quick.jobs.job_runner import PROBE, House, running
from tests.refusals import refused
from tests.waiting import PATIENCE_SECONDS, until

pytestmark = pytest.mark.anyio


async def test_steps_count_the_optimizers_steps_and_keep_the_best_steps_state(
    tmp_path: Path,
) -> None:
    async with running(tmp_path, "a") as house:
        model = house.registry.get("p", "a")
        for number, reward in enumerate((0.1, 0.9, 0.2, 0.3, 0.4), 1):
            job = house.add_job("a", reward=reward, sampled_step=number - 1)
            assert await house.wait(job) == ["done"]
        steps = model.folder.steps()
        counts = [model.folder.read_checkpoint(step).optimizer_steps for step in steps]
        assert counts == [0, 1, 2, 3, 4, 5]
        assert [task.optimizer_steps for task in house.trainer.tasks] == [0, 1, 2, 3, 4]
        state = [model.folder.checkpoint_dir(step) / "optimizer.safetensors" for step in steps]
        assert [file.exists() for file in state] == [False, True, False, False, True, True]


async def test_a_job_becomes_a_step(tmp_path: Path) -> None:
    async with running(tmp_path, "a") as house:
        job = house.add_job("a")
        assert await house.wait(job) == ["done"]
        model = house.registry.get("p", "a")
        assert model.step == 1 and list(house.engine.adapters) == ["p/a@1"]
        row = model.history.values([1])[1]
        assert row["train/reward"] == 0.25 and row["loss/train"] == 0.5
        assert list(read_rows(model.folder.trajectories_file("train", 1)))
        assert house.trainer.batches == [{"groups": [], "distributions": [], "num_groups": None, "held_out": []}]


async def test_a_step_keeps_the_chat_template_of_the_server(tmp_path: Path) -> None:
    template = tmp_path / "mine.jinja"
    template.write_text("{{ messages }}")
    async with running(tmp_path, "a") as house:
        folder = house.registry.get("p", "a").folder
        assert house.engine.base is not None
        for base in (house.engine.base, replace(house.engine.base, template=template)):
            house.engine.base = base
            assert await house.wait(house.add_job("a")) == ["done"]
        assert [folder.read_checkpoint(step).chat_template for step in (1, 2)] == [None, "{{ messages }}"]


ENVIRONMENT: dict[str, Exception] = {
    "disk full": StorageFull("no room", code="no_disk_space"),
    "disk full in the trainer": TrainerError("no_disk_space", "os error 28", retryable=True),
    "read-only": OSError(errno.EROFS, "Read-only file system"),
    "database": sqlite3.OperationalError("disk I/O error"),
}


@pytest.mark.parametrize("error", ENVIRONMENT.values(), ids=ENVIRONMENT.keys())
async def test_an_error_of_the_environment_leaves_a_job_queued(error: Exception, tmp_path: Path) -> None:
    async with running(tmp_path, "a", "b") as house:
        house.trainer.events = [error] * 8
        first, second, other = house.add_job("a"), house.add_job("a"), house.add_job("b")
        await until(lambda: house.queue.get(first).last_error is not None)
        await until(lambda: house.state(first) == "queued" and not house.engine.is_paused)
        assert await house.wait(first, second, other) == ["done"] * 3
        model = house.registry.get("p", "a")
        assert model.step == 2 and model.history.span()[0] == 2
        assert house.queue.get(first).target_step == 1, "a model's jobs keep their order"


async def test_an_engine_that_was_given_up_costs_no_job(tmp_path: Path) -> None:
    async with running(tmp_path, "a", clock=FakeClock(stands=True)) as house:
        house.engine.state = "failed"
        jobs = [house.add_job("a") for _ in range(3)]
        await until(lambda: house.queue.get(jobs[0]).last_error is not None)
        info = await house.runner.info(jobs[0])
        assert info.state == "queued" and "another try in" in (info.waits_for or "")
        house.engine.state = "ready"
        await house.clock.end(REST_SECONDS)
        assert await house.wait(*jobs) == ["done"] * 3


async def test_jobs_of_another_base_model_wait_and_stop_nobody(tmp_path: Path) -> None:
    async with running(tmp_path, "a") as house:
        house.add_model("elsewhere", base_model="another base")
        waits, runs = house.add_job("elsewhere"), house.add_job("a")
        assert await house.wait(runs) == ["done"]
        info = await house.runner.info(waits)
        assert info.state == "queued" and "'another base'" in (info.waits_for or "")
        house.engine.base = BaseModel("another base", TINY_DIR)
        assert await house.wait(waits) == ["done"]


async def test_a_finished_step_whose_base_is_gone_is_finished_without_serving(
    tmp_path: Path,
) -> None:
    async with running(tmp_path, "a") as house:
        model = house.add_model("elsewhere", base_model="another base")
        committed, runs = house.add_job("elsewhere"), house.add_job("a")
        house.queue.set_running(committed, 1)
        model.folder.commit_checkpoint(model.folder.new_checkpoint_dir(), CheckpointRecord(step=1, job_id=committed))
        assert await house.wait(committed, runs) == ["done", "done"]
        assert model.step == 1 and model.history.span()[0] == 1
        assert house.trainer.tasks[0].in_dir.endswith("a/checkpoints/0000"), "not trained again"


async def test_a_step_that_the_engine_refuses_is_done_and_said(tmp_path: Path) -> None:
    async with running(tmp_path, "a", "b") as house:
        house.engine.refused = {"p/a@1"}
        job, other = house.add_job("a"), house.add_job("b")
        assert await house.wait(job, other) == ["done", "done"]
        assert house.registry.get("p", "a").step == 0
        assert "its rank is too high" in house.queue.get(job).report.notes[-1]
        assert await house.wait(house.add_job("a")) == ["done"]
        assert house.registry.get("p", "a").step == 2


async def test_a_step_that_the_engine_computes_differently_does_not_serve_and_ends_the_next_job(
    tmp_path: Path,
) -> None:
    async with running(tmp_path, "a") as house:
        house.trainer.probe = PROBE
        house.engine.differs = {"p/a@1"}
        job = house.add_job("a")
        assert await house.wait(job) == ["done"]
        model = house.registry.get("p", "a")
        assert model.step == 0, "the step before it serves on"
        assert "step 1 is saved but does not serve" in house.queue.get(job).report.notes[-1]
        refused = house.add_job("a")
        assert await house.wait(refused) == ["failed"]
        error = house.queue.get(refused).last_error
        assert error is not None and error.code == "policy_differs" and not error.retryable
        assert len(house.trainer.tasks) == 1, "nothing was trained"
        assert model.folder.steps() == [0, 1] and not house.engine.is_paused
        house.engine.differs = set()  # a restart with the right arguments
        assert await house.wait(house.add_job("a")) == ["done"]
        assert model.step == 2


async def test_a_job_gets_the_probe_of_the_step_that_it_starts_from(tmp_path: Path) -> None:
    async with running(tmp_path, "a") as house:
        house.trainer.probe = PROBE
        assert await house.wait(house.add_job("a"), house.add_job("a")) == ["done", "done"]
        assert [task.probe for task in house.trainer.tasks] == [None, PROBE]
        assert house.registry.get("p", "a").folder.read_checkpoint(2).probe == PROBE


async def test_a_job_whose_step_was_committed_before_a_kill_ends_the_same_if_the_step_differs(
    tmp_path: Path,
) -> None:
    house = House(tmp_path)
    model = house.add_model("a")
    job = house.add_job("a")
    house.queue.set_running(job, 1)
    record = CheckpointRecord(step=1, job_id=job, probe=PROBE)
    model.folder.commit_checkpoint(model.folder.new_checkpoint_dir(), record)
    house.engine.differs = {"p/a@1"}
    house.background.start("job runner", house.runner.run_forever)
    assert await house.wait(job) == ["done"]
    assert model.step == 0 and house.trainer.tasks == []
    assert "does not serve" in house.queue.get(job).report.notes[-1]
    await house.background.stop()
    house.registry.database.close()


async def test_a_trainer_that_dies_again_and_again_ends_a_job_with_few_tokens_last(
    tmp_path: Path,
) -> None:
    async with running(tmp_path, "a", "b") as house:
        job = house.add_job("a", key="k")
        house.trainer.events = [TrainerDied("killed")] * 6
        assert await house.wait(job) == ["failed"]
        assert [task.budget_divisor for task in house.trainer.tasks] == [1, 1, 1, 2, 4, 8]
        error = house.queue.get(job).last_error
        assert error is not None and error.retryable and "killed" in error.message
        model = house.registry.get("p", "a")
        again = await house.runner.find_repeated(model, "k", "digest")
        assert again is not None and again.job_id == job, "the same request, the same job"
        assert await house.wait(job) == ["done"]


async def test_a_repeated_request_does_not_run_a_failed_job_at_another_step(tmp_path: Path) -> None:
    async with running(tmp_path, "a") as house:
        job = house.add_job("a", key="k", expected_step=0)
        house.trainer.events = [TrainerDied("killed")] * 6
        assert await house.wait(job) == ["failed"]
        assert await house.wait(house.add_job("a", key="other")) == ["done"]
        model = house.registry.get("p", "a")
        with refused(Conflict, "step_moved", "expected_step"):
            await house.runner.find_repeated(model, "k", "digest")
        assert house.state(job) == "failed" and model.step == 1


async def test_a_model_that_is_renamed_while_a_request_comes_is_at_its_step(tmp_path: Path) -> None:
    async with running(tmp_path, "a") as house:
        assert await house.wait(house.add_job("a")) == ["done"]
        model = house.registry.get("p", "a")
        house.registry.rename(model, "b")
        payload = Payload.make(Batch(groups=[]), pack_rows([{"trajectories": []}]))
        request = ("k", "digest", TrainConfig(), payload, JobReport(), {})
        with refused(Conflict, "step_moved", "expected_step"):
            await house.runner.add_job(model, *request, expected_step=0)
        job = await house.runner.add_job(model, *request, expected_step=1)
        assert await house.wait(job.job_id) == ["done"]
        assert house.registry.get("p", "b").step == 2


async def test_only_deaths_of_the_trainer_lower_the_tokens(tmp_path: Path) -> None:
    async with running(tmp_path, "a") as house:
        job = house.add_job("a")
        house.trainer.events = [KeyError("what"), KeyError("what"), TrainerDied("killed")]
        assert await house.wait(job) == ["done"]
        assert [task.budget_divisor for task in house.trainer.tasks] == [1, 1, 1, 1]


async def test_a_jobs_own_fault_ends_it_at_once(tmp_path: Path) -> None:
    async with running(tmp_path, "a") as house:
        house.trainer.events = [TrainerError("non_finite", "the loss is NaN")]
        job, other = house.add_job("a", key="k"), house.add_job("a")
        assert await house.wait(job, other) == ["failed", "done"]
        model = house.registry.get("p", "a")
        again = await house.runner.find_repeated(model, "k", "digest")
        assert again is not None and again.state == "failed"


async def test_an_unforeseen_error_is_tried_again_and_then_reported(tmp_path: Path) -> None:
    async with running(tmp_path, "a") as house:
        house.trainer.events = [KeyError("what")] * 6
        job = house.add_job("a")
        assert await house.wait(job) == ["failed"]
        error = house.queue.get(job).last_error
        assert error is not None and "KeyError" in error.message
        assert not house.engine.is_paused and house.gate.model is None


async def test_one_error_of_the_database_does_not_end_the_runner(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with running(tmp_path, "a") as house:
        waiting, fails = house.queue.waiting, [3]

        def fail_thrice() -> Any:
            if fails[0]:
                fails[0] -= 1
                raise sqlite3.OperationalError("disk I/O error")
            return waiting()

        monkeypatch.setattr(house.queue, "waiting", fail_thrice)
        job = house.add_job("a")
        await until(lambda: house.background.faults)
        assert "disk I/O error" in house.background.faults["job runner"]
        assert await house.wait(job) == ["done"]


async def test_a_row_that_cannot_be_read_fails_alone(tmp_path: Path) -> None:
    async with running(tmp_path, "a") as house:
        broken = house.add_job("a")
        unreadable = house.add_job("a")
        house.queue._db.execute("UPDATE jobs SET config = ? WHERE job_id = ?", ('{"invented": 1}', broken))
        house.queue._db.execute("UPDATE jobs SET report = ? WHERE job_id = ?", ('{"num_rows": "x"}', unreadable))
        job = house.add_job("a")
        assert await house.wait(broken, job) == ["failed", "done"]
        (listed,) = [
            job_info for job_info in await house.runner.jobs(None, ("failed",), 10) if job_info.job_id == unreadable
        ]
        assert listed.error is not None and listed.error.code == "unreadable_job"


async def test_the_end_of_a_job_that_cannot_be_written_is_written_later(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with running(tmp_path, "a") as house:
        set_done, fails = house.queue.set_done, [3]

        def fail_thrice(*arguments: Any) -> None:
            if fails[0]:
                fails[0] -= 1
                raise sqlite3.OperationalError("database is locked")
            set_done(*arguments)

        monkeypatch.setattr(house.queue, "set_done", fail_thrice)
        job = house.add_job("a")
        assert await house.wait(job) == ["done"]
        assert len(house.trainer.tasks) == 1, "one training"
        assert house.registry.get("p", "a").history.span()[0] == 1


async def test_a_model_that_is_gone_fails_its_jobs(tmp_path: Path) -> None:
    async with running(tmp_path, "a") as house:
        model = house.add_model("gone")
        job, other = house.add_job("gone"), house.add_job("a")
        house.registry.remove(model)
        assert await house.wait(job, other) == ["failed", "done"]


# --- cancelling, following, expecting ---


async def test_jobs_are_cancelled_in_the_queue_and_between_micro_batches(tmp_path: Path) -> None:
    async with running(tmp_path, "a") as house:
        house.trainer.events = [house.trainer.wait_to_be_cancelled]
        runs, waits, other = (house.add_job("a") for _ in range(3))
        await asyncio.wait_for(house.trainer.is_waiting.wait(), PATIENCE_SECONDS)
        await house.runner.cancel(waits)
        await house.runner.cancel(runs)
        assert await house.wait(runs, waits, other) == ["cancelled", "cancelled", "done"]
        assert house.registry.get("p", "a").step == 1
        with refused(Conflict, "job_ended", "job_id"):
            await house.runner.cancel(other)
        last = [event async for event in house.runner.follow(runs)][-1]
        assert last.event == "error" and last.error is not None and last.error.code == "cancelled"


async def test_cancelling_a_job_that_has_ended_leaves_the_running_one_alone(tmp_path: Path) -> None:
    async with running(tmp_path, "a") as house:
        ended = house.add_job("a")
        assert await house.wait(ended) == ["done"]
        house.trainer.events = [house.trainer.wait_to_be_cancelled]
        runs = house.add_job("a")
        await asyncio.wait_for(house.trainer.is_waiting.wait(), PATIENCE_SECONDS)
        with refused(Conflict, "job_ended", "job_id"):
            await house.runner.cancel(ended)
        for _ in range(99):
            await asyncio.sleep(0)
        assert house.state(runs) == "running" and not house.trainer.was_cancelled
        await house.runner.cancel(runs)
        assert await house.wait(runs) == ["cancelled"]


async def test_a_signal_that_comes_too_late_cancels_no_other_job(tmp_path: Path) -> None:
    async with running(tmp_path, "a") as house:
        house.trainer.events = [TrainerError("cancelled", "late", retryable=True)]
        assert await house.wait(house.add_job("a")) == ["done"]


async def test_a_failed_attempt_leaves_no_files(tmp_path: Path) -> None:
    """They could fill the disk for the next attempt."""

    async def fill(task: TrainTask) -> None:
        (Path(task.out_dir) / "part").write_bytes(b"x" * 1000)
        raise TrainerError("no_disk_space", "os error 28", retryable=True)

    async with running(tmp_path, "a", clock=FakeClock(stands=True)) as house:
        house.trainer.events = [fill]
        job = house.add_job("a")
        await until(lambda: house.queue.get(job).next_attempt_at)
        assert house.state(job) != "done"
        assert not await asyncio.to_thread(lambda: list(tmp_path.rglob(".*.tmp")))


async def test_a_server_that_stops_during_a_commit_lets_it_end(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The thread goes on after the cancellation, and its files must not be cleaned up under it."""
    begun, may_end = threading.Event(), threading.Event()
    commit = ModelFolder.commit_checkpoint

    def slow(*arguments: Any) -> None:
        begun.set()
        may_end.wait(PATIENCE_SECONDS)
        commit(*arguments)

    async with running(tmp_path, "a") as house:
        monkeypatch.setattr(ModelFolder, "commit_checkpoint", slow)

        async def fill(task: TrainTask) -> None:
            (Path(task.out_dir) / "weights").write_bytes(b"x")

        house.trainer.events = [fill]
        house.add_job("a")
        await until(begun.is_set)
        stopping = asyncio.create_task(house.background.stop())
        await asyncio.sleep(0.05)
        assert not stopping.done()
        may_end.set()
        await stopping
        folder = house.registry.get("p", "a").folder
        assert (folder.checkpoint_dir(1) / "weights").exists() and folder.fault(1) is None


async def test_events_are_numbered_and_taken_up_behind_a_number(tmp_path: Path) -> None:
    async with running(tmp_path, "a") as house:
        house.trainer.events = [house.trainer.wait_to_be_cancelled]
        job, waits = house.add_job("a"), house.add_job("a")
        await asyncio.wait_for(house.trainer.is_waiting.wait(), PATIENCE_SECONDS)
        seen: list[JobEvent] = []
        async for event in house.runner.follow(job):
            seen.append(event)
            if event.number is not None:
                break
        (accepted, running_event) = seen
        assert accepted.event == "accepted" and running_event.phase == "train"
        following = house.runner.follow(job, after=running_event.number or 0)
        await house.runner.cancel(job)
        assert "accepted" not in [event.event async for event in following]
        assert await house.wait(waits) == ["done"]


async def test_a_job_that_ends_while_its_client_reads_is_not_missed(tmp_path: Path) -> None:
    async with running(tmp_path, "a", clock=FakeClock(stands=True)) as house:
        house.trainer.events = [house.trainer.wait_to_be_cancelled]
        job = house.add_job("a")
        await asyncio.wait_for(house.trainer.is_waiting.wait(), PATIENCE_SECONDS)
        following = house.runner.follow(job)
        assert [(await anext(following)).event for _ in range(2)] == ["accepted", "progress"]
        await house.runner.cancel(job)
        last = await asyncio.wait_for(anext(following), PATIENCE_SECONDS)
        assert last.error is not None and last.error.code == "cancelled"


async def test_what_a_job_waits_for_is_said(tmp_path: Path) -> None:
    async with running(tmp_path, "a", "b") as house:
        house.trainer.events = [house.trainer.wait_to_be_cancelled]
        job, waits = house.add_job("a"), house.add_job("b")
        await asyncio.wait_for(house.trainer.is_waiting.wait(), PATIENCE_SECONDS)
        assert (await house.runner.info(waits)).waits_for == "1 earlier job, of p/a"
        assert house.gate.model == "p/a"
        waiting = (await asyncio.to_thread(house.queue.waiting))[:1]
        elsewhere = replace((await asyncio.to_thread(house.queue.get, waits)), project="q")
        assert house.runner._waits_for(elsewhere, waiting, None) == "1 earlier job, of other projects"
        ahead = [replace(waiting[0], num_tokens=3000)]
        assert house.runner._waits_for(elsewhere, ahead, 100.0) == "1 earlier job, of other projects, about 30 s"
        await house.runner.cancel(job)
        await house.wait(waits)


async def test_two_gangs_train_two_models_and_never_one_model_twice(tmp_path: Path) -> None:
    async with running(tmp_path, "a", "b", num_gangs=2) as house:
        other = house.more_trainers[0]
        for trainer in (house.trainer, other):
            trainer.events = [trainer.wait_to_be_cancelled]
        jobs = [house.add_job(name) for name in ("a", "a", "b")]
        async with asyncio.timeout(PATIENCE_SECONDS):
            await house.trainer.is_waiting.wait()
            await other.is_waiting.wait()
        assert [house.state(job) for job in jobs] == ["running", "queued", "running"]
        assert {attempt.model.record.name for attempt in house.runner._attempts} == {"a", "b"}
        await house.runner.cancel(jobs[2])
        assert house.state(jobs[2]) == "cancelled" and house.state(jobs[0]) == "running"
        assert house.state(jobs[1]) == "queued", "a gang is free, but the model trains"
        await house.runner.cancel(jobs[0])
        assert await house.wait(jobs[1]) == ["done"]
        assert len(house.trainer.tasks) + len(other.tasks) == 3


async def test_a_job_killed_while_it_ran_goes_on_under_a_new_server(tmp_path: Path) -> None:
    async with running(tmp_path, "a") as house:
        house.trainer.events = [house.trainer.wait_to_be_cancelled]
        job = house.add_job("a")
        await asyncio.wait_for(house.trainer.is_waiting.wait(), PATIENCE_SECONDS)
    async with running(tmp_path) as house:
        assert await house.wait(job) == ["done"]
        assert house.queue.get(job).attempts == {}, "a kill is no error"


async def test_the_job_of_a_model_whose_folder_is_gone_fails_though_another_model_has_its_name(tmp_path: Path) -> None:
    house = House(tmp_path)
    model = house.add_model("a")
    job = house.add_job("a")
    house.registry.database.close()
    shutil.rmtree(model.folder.path)
    async with running(tmp_path, "a") as house:
        assert await house.wait(job) == ["failed"]
        error = house.queue.get(job).last_error
        assert error is not None and (error.code, error.retryable) == ("unknown_model", False)
        assert error.message == "the job's model, 'p/a', was deleted, or no step of it can be read"
        assert house.registry.get("p", "a").step == 0


async def test_layers_that_the_engine_does_not_adapt_are_not_trained_and_reported(
    tmp_path: Path,
) -> None:
    async with running(tmp_path, "a") as house:
        house.check_layers()
        house.engine.differs = {".layers/attn.kv_b_proj@0"}
        jobs = house.add_job("a"), house.add_job("a")
        assert await house.wait(*jobs) == ["done", "done"]
        assert [task.lost_layers for task in house.trainer.tasks] == [["attn.kv_b_proj"]] * 2
        for job in jobs:
            (note,) = house.queue.get(job).report.notes
            assert "attn.kv_b_proj" in note and "attn.q_proj" not in note
        assert not [adapter for adapter in house.engine.adapters if adapter.startswith(".layers")]
        assert len(list((tmp_path / "layers").iterdir())) == 1

        house.engine.differs, house.trainer.layer_probes = set(), {}  # it is remembered
        assert await house.wait(house.add_job("a")) == ["done"]
        assert house.trainer.tasks[-1].lost_layers == ["attn.kv_b_proj"]


async def test_an_engine_that_adapts_no_layer_as_the_trainer_does_trains_nothing(
    tmp_path: Path,
) -> None:
    async with running(tmp_path, "a") as house:
        house.check_layers()
        house.engine.differs = {f".layers/attn.{layer}@0" for layer in ("q_proj", "kv_b_proj")}
        job = house.add_job("a")
        assert await house.wait(job) == ["failed"]
        error = house.queue.get(job).last_error
        assert error is not None and error.code == "policy_differs"
        assert house.trainer.tasks == [] and not house.engine.is_paused
        assert not (tmp_path / "layers").exists(), "it is checked again"
