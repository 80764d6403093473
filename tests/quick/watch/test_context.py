"""What a run is, against the files and the table of jobs."""

import json
from datetime import datetime
from pathlib import Path

import pytest

from art_protocol.wire import About, Difference, Dropped, ErrorDetail, JobReport
from art_server.store.model_folder import ModelFolder
from art_server.store.model_table import ModelTable
from art_server.store.server_database import FILE
from art_watch.context import DEAD, SUBMITTED, TOKENS, context, idle, read_jobs
from art_watch.runs import Runs
from tests.makers.demo import log, make_demo, write_jobs
from tests.quick.jobs.queued_jobs import open_queue

EQUAL = Dropped(reason="all rewards in the group are equal: no signal", count=6, unit="group")


def notes_of(root: Path, folder: ModelFolder) -> dict[str, dict[str, object]]:
    return {note["text"]: note for note in context(Runs(root), folder)["notes"]}


def test_a_run_has_its_base_its_times_its_tokens_and_its_configuration(tmp_path: Path) -> None:
    (folder,) = make_demo(tmp_path, runs=1, steps=4, rollouts=8)
    rows = [json.loads(line) for line in folder.history_file.read_text().splitlines()]
    run = context(Runs(tmp_path), folder)
    assert (run["base_model"], run["lora"]["rank"]) == ("Qwen/Qwen3-8B", 16)
    assert (run["started_at"], run["last_at"]) == (rows[0]["recorded_at"], rows[-1]["recorded_at"])
    assert run["trained_tokens"] == sum(row["data/step_trainable_assistant_tokens"] for row in rows)
    assert run["config"]["max_grad_norm"] == 1.0, "defaults included"
    assert run["changed"] == {"preset": "grpo", "learning_rate": 2e-5}
    assert run["learning_rate"] == rows[-1]["loss/learning_rate"]


def test_a_run_says_when_nothing_is_trained(tmp_path: Path) -> None:
    equal = ": all rewards of each group are equal."
    assert idle({}, ()) is None and idle({1: 9, 2: 0, 3: 9}, {2}) is None
    assert idle({1: 9, 2: 9, 3: 0, 4: 0}, {3, 4}) == f"Nothing was trained since step 2{equal}"
    assert idle({1: 9, 2: 0, 3: 0}, {2}) == "Nothing was trained since step 1."
    assert idle({1: 0, 2: 0, 3: 9}, {1, 2}) == f"2 of 3 steps trained nothing{equal}"
    assert idle({1: 0}, {1}) == f"Nothing was trained yet, in 1 step{equal}"
    (folder,) = make_demo(tmp_path, runs=1, steps=4, rollouts=8)
    log(folder, 5, {TOKENS: 0.0, DEAD: 6.0, SUBMITTED: 6.0})
    run = context(Runs(tmp_path), folder)
    assert run["idle"] == f"Nothing was trained since step 4{equal}"
    assert (run["num_trained_steps"], run["num_jobs"]) == (4, 5)


def test_notes_that_differ_in_numbers_are_one_with_its_steps(tmp_path: Path) -> None:
    (folder,) = make_demo(tmp_path, runs=1, steps=4, rollouts=8)
    stop = Difference(whose="the policy's answer", expected="</code>", found="</code>?", count=3, example="groups[0]")
    report = JobReport(num_groups=6, dropped=[EQUAL], differences=[stop])
    dead = {"job_id": "x", "report": report.model_dump_json()}
    write_jobs(tmp_path, [(folder, 5)], **dead)
    error = ErrorDetail(message="the gap is 1.3 on average").model_dump_json()
    write_jobs(tmp_path, [(folder, 6)], job_id="y", state="failed", target_step=None, last_error=error, report="{}")
    notes = notes_of(tmp_path, folder)
    (left_out,) = [note for text, note in notes.items() if text.startswith("Left out: 1 group, ")]
    assert (left_out["first"], left_out["last"], left_out["count"], left_out["is_bad"]) == (1, 4, 4, False)
    write_jobs(
        tmp_path,
        [(folder, 8)],
        job_id="z",
        report=report.model_copy(
            update={"num_groups": 7, "dropped": [EQUAL.model_copy(update={"count": 7})]}
        ).model_dump_json(),
    )
    (merged,) = [note for text, note in notes_of(tmp_path, folder).items() if "trained nothing: 7 groups" in text]
    assert (merged["first"], merged["last"], merged["has_older_numbers"]) == (5, 8, True)
    assert not left_out["has_older_numbers"]
    (noted,) = [note for text, note in notes.items() if "sampled twice" in text]
    assert (noted["first"], noted["last"]) == (1, 1)
    (nothing,) = [note for text, note in notes.items() if "trained nothing: 6 groups, because all rewards" in text]
    assert nothing["is_bad"] and nothing["last"] == 5
    assert any("3 rollouts have turns that do not continue" in text and "</code>?" in text for text in notes)
    (failed,) = [note for text, note in notes.items() if "the gap is 1.3" in text]
    assert failed["is_bad"] and failed["last"] is None


def test_jobs_of_a_deleted_model_with_the_same_name_are_left_out(tmp_path: Path) -> None:
    (folder,) = make_demo(tmp_path, runs=1, steps=2, rollouts=8)
    later = folder.read().model_copy(update={"created_at": 9e9})
    folder.create(later, tmp_path / "engine.log")
    run = context(Runs(tmp_path), folder)
    assert run["config"] == {} and run["notes"] == []
    assert run["started_at"].startswith("2255-")


def test_jobs_are_read_while_a_server_writes_them_and_not_changed(tmp_path: Path) -> None:
    (folder,) = make_demo(tmp_path, runs=1, steps=2, rollouts=8)
    files = {file.name: file.read_bytes() for file in (tmp_path / ".server").iterdir()}
    assert [job.target_step for job in read_jobs(tmp_path, folder, 0.0)] == [2, 1]
    assert {file.name: file.read_bytes() for file in (tmp_path / ".server").iterdir()} == files
    queue = open_queue(tmp_path)
    assert len(read_jobs(tmp_path, folder, 0.0)) == 2
    queue.database.close()


def test_jobs_of_a_model_whose_folder_has_yet_to_follow_a_rename_are_read(tmp_path: Path) -> None:
    (folder,) = make_demo(tmp_path, runs=1, steps=2, rollouts=8)
    queue = open_queue(tmp_path)
    table = ModelTable(queue.database)
    (row,) = table.rows()
    table.rename(row.model, "other", folder.name)
    queue.database.close()
    assert len(read_jobs(tmp_path, folder, 0.0)) == 2


def test_a_folder_without_a_table_of_jobs_has_the_rest(tmp_path: Path) -> None:
    folder = ModelFolder(tmp_path, "demo", "judge")
    log(folder, 0, {"val/reward": 1.0})
    (tmp_path / ".server").mkdir()
    (tmp_path / ".server" / FILE).write_bytes(b"no database")
    run = context(Runs(tmp_path), folder)
    assert (run["base_model"], run["num_rows"], run["trained_tokens"], run["notes"]) == (None, 1, 0, [])


def test_costs_are_those_of_all_jobs_and_say_what_trained_nothing(tmp_path: Path) -> None:
    (folder,) = make_demo(tmp_path, runs=1, steps=2, rollouts=8)
    whole = JobReport(num_trajectories=10, num_failed_rollouts=2, num_sampled_tokens=500)
    for state, name in (("failed", "x"), ("cancelled", "y"), ("queued", "z")):
        write_jobs(tmp_path, [(folder, 3)], job_id=name, state=state, seconds=None, report=whole.model_dump_json())
    run = context(Runs(tmp_path), folder)
    assert run["costs"] == {
        "num_jobs": 4,
        "num_rollouts": 2 * 48 + 2 * 12,
        "num_tokens": 4001 + 4002 + 2 * 500,
        "step_seconds": 62.0,
        "unused": [
            {"reason": "all rewards in the group are equal: no signal", "num_rollouts": 16, "num_tokens": 2000},
            {"reason": "the job failed", "num_rollouts": 12, "num_tokens": 500},
            {"reason": "the job was cancelled", "num_rollouts": 12, "num_tokens": 500},
            {"reason": "the rollout failed", "num_rollouts": 2, "num_tokens": 0},
        ],
    }
    log(folder, 2, {"costs/all": 1.5})
    assert context(Runs(tmp_path), folder)["logged_costs"] == 1.5


def test_costs_need_jobs_and_a_price_needs_an_hour_s(tmp_path: Path) -> None:
    (folder,) = make_demo(tmp_path, runs=1, steps=2, rollouts=8)
    run = context(Runs(tmp_path), folder)
    assert run["price"] is None
    folder.write_about(About(price_per_hour=36.0))
    priced = context(Runs(tmp_path), folder)
    times = [datetime.fromisoformat(run[name]).timestamp() for name in ("started_at", "last_at")]
    assert priced["price"] == pytest.approx((times[1] - times[0]) / 100)
    (tmp_path / ".server" / FILE).write_bytes(b"damaged")
    assert context(Runs(tmp_path), folder)["costs"] is None
