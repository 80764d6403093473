"""The reader of a server's folder, against its files."""

import json
from pathlib import Path
from typing import Any

import pytest

from art_server.errors import InvalidInput, NotFound
from art_server.store.history import HistoryTable
from art_server.store.model_folder import ModelFolder
from art_server.store.server_database import open_server_database
from art_watch.runs import Runs
from tests.makers.demo import HOSTILE_METRIC, KEPT_STEPS, log, make_demo
from tests.refusals import refused


def rows_of(folder: ModelFolder) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (folder.path / "history.jsonl").read_text().splitlines()]


def test_columns_are_the_values_of_the_file(tmp_path: Path) -> None:
    (folder,) = make_demo(tmp_path, runs=1, steps=12, rollouts=8)
    rows, runs = rows_of(folder), Runs(tmp_path)
    history = runs.history(folder)
    names = history.names()
    assert {"train/reward", "val/reward", "sampled_step", HOSTILE_METRIC} <= set(names)
    assert not {"step", "training_step", "job_id", "recorded_at"} & set(names)
    columns = history.columns(names)
    assert columns["steps"] == [row["step"] for row in rows]
    assert columns["recorded_at"] == [row["recorded_at"] for row in rows]
    for name in names:
        assert columns["metrics"][name] == [row.get(name) for row in rows], name


def test_a_summary_has_the_newest_values_and_the_best_kept_step(tmp_path: Path) -> None:
    (folder,) = make_demo(tmp_path, runs=1, steps=12, rollouts=8)
    rows, summary = rows_of(folder), Runs(tmp_path).summary(folder)
    assert (summary["id"], summary["base_model"], summary["rank"]) == (
        f"demo/{folder.name}",
        "Qwen/Qwen3-8B",
        16,
    )
    assert (summary["step"], summary["num_rows"]) == (12, 12)
    assert summary["reward"] == rows[-1]["train/reward"]
    assert summary["val_reward"] == rows[9]["val/reward"], "the newest row that has it"
    assert summary["rewards"] == [row["train/reward"] for row in rows]
    assert summary["best"] == {
        "step": Runs(tmp_path).history(folder).best_step("val/reward"),
        "metric": "val/reward",
    }
    assert (summary["first_at"], summary["last_at"]) == (
        rows[0]["recorded_at"],
        rows[-1]["recorded_at"],
    )


def test_a_line_that_is_appended_is_read(tmp_path: Path) -> None:
    (folder,) = make_demo(tmp_path, runs=1, steps=3, rollouts=8)
    runs = Runs(tmp_path)
    before, recorded_at = runs.marks(), rows_of(folder)[2]["recorded_at"]
    assert runs.history(folder).columns(())["steps"] == [1, 2, 3]
    log(folder, 4, {"train/reward": 0.25})
    log(folder, 3, {"val/reward": 0.125})
    assert runs.marks() != before
    columns = runs.history(folder).columns(["train/reward", "val/reward"])
    assert columns["steps"] == [1, 2, 3, 4]
    assert columns["metrics"]["train/reward"][3] == 0.25
    assert columns["metrics"]["val/reward"] == [None, None, 0.125, None]
    assert columns["recorded_at"][2] == recorded_at, "the step's time, not that of its late evaluation"
    assert runs.summary(folder)["val_reward"] == 0.125
    folder.roll_back(2)
    assert runs.history(folder).columns(())["steps"] == [1, 2]


def test_a_running_server_s_histories_come_from_its_table_and_others_from_their_files(
    tmp_path: Path,
) -> None:
    (served,) = make_demo(tmp_path, runs=1, steps=3, rollouts=8)
    unserved = ModelFolder(tmp_path, "demo", "judge")
    log(unserved, 0, {"val/reward": 1.0})
    registered = HistoryTable(open_server_database(None)).of(1, served)
    registered.add(7, {"train/reward": 0.5})
    runs = Runs(tmp_path, lambda folder: registered if folder.path == served.path else None)
    assert runs.history(served).columns(())["steps"] == [7]
    assert runs.history(unserved).columns(())["steps"] == [0]
    assert [summary["num_rows"] for summary in map(runs.summary, runs.folders())] == [1, 1]


def test_a_changed_description_is_read(tmp_path: Path) -> None:
    (folder,) = make_demo(tmp_path, runs=1, steps=1, rollouts=8)
    runs = Runs(tmp_path)
    before = runs.marks()
    assert runs.summary(folder)["base_model"] == "Qwen/Qwen3-8B"
    record = json.loads((folder.path / "model.json").read_text())
    (folder.path / "model.json").write_text(json.dumps(record | {"base_model": "art/tiny"}))
    assert runs.summary(folder)["base_model"] == "art/tiny"
    assert runs.marks() != before


def test_a_checkpoint_has_the_reward_that_it_earned(tmp_path: Path) -> None:
    """That of the rollouts it sampled, by which the best is chosen, not that of the step that made it."""
    (folder,) = make_demo(tmp_path, runs=1, steps=3, rollouts=8)
    rows = [
        {"step": 2, "train/reward": 0.9, "sampled_step": 1.0},
        {"step": 3, "train/reward": 0.2, "sampled_step": 2.0},
        {"step": 4, "train/reward": 0.4, "sampled_step": 2.0},
    ]
    (folder.path / "history.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    checkpoints = {checkpoint["step"]: checkpoint for checkpoint in Runs(tmp_path).checkpoints(folder)}
    assert [checkpoints[step]["reward"] for step in (1, 2, 3)] == [0.9, pytest.approx(0.3), None]
    assert [step for step, checkpoint in checkpoints.items() if checkpoint["is_best"]] == [1]


@pytest.mark.parametrize("content", [b"not JSON", b"\xff\xfe JSON"])
def test_a_model_without_files_is_empty_and_an_unreadable_one_is_listed(tmp_path: Path, content: bytes) -> None:
    bare = tmp_path / "p" / "models" / "bare"
    bare.mkdir(parents=True)
    (bare / "model.json").write_bytes(content)
    runs = Runs(tmp_path)
    (folder,) = runs.folders()
    summary = runs.summary(folder)
    assert (summary["base_model"], summary["num_rows"], summary["step"], summary["best"]) == (
        None,
        0,
        None,
        None,
    )
    assert runs.checkpoints(folder) == [] and runs.splits(folder) == {}
    assert runs.marks()["p/bare"].startswith(f"0-0-0-0-0-0-{len(content)}-")


def test_only_the_models_of_the_given_projects_are_read(tmp_path: Path) -> None:
    make_demo(tmp_path, runs=2, steps=1, rollouts=8)
    runs = Runs(tmp_path)
    assert len(runs.folders()) == len(runs.folders(frozenset({"demo"}))) == 2
    assert runs.folders(frozenset({"other"})) == [] and runs.marks(frozenset()) == {}


def test_checkpoints_have_sizes_rewards_and_one_best(tmp_path: Path) -> None:
    (folder,) = make_demo(tmp_path, runs=1, steps=12, rollouts=8)
    rows = {row["step"]: row for row in rows_of(folder)}
    (folder.checkpoint_dir(8) / "checkpoint.json").write_bytes(b"\xff")
    (folder.checkpoint_dir(9) / "checkpoint.json").write_text("{")
    checkpoints = Runs(tmp_path).checkpoints(folder)
    assert [checkpoint["step"] for checkpoint in checkpoints] == [7, 10, 11, 12], "8 and 9 cannot be read"
    assert len(folder.steps()) == KEPT_STEPS
    for checkpoint in checkpoints:
        files = folder.checkpoint_dir(checkpoint["step"]).iterdir()
        assert checkpoint["size_bytes"] == sum(file.stat().st_size for file in files)
        earned = [r["train/reward"] for r in rows.values() if r["sampled_step"] == checkpoint["step"]]
        assert checkpoint["reward"] == (earned[0] if earned else None) and len(earned) < 2
        assert checkpoint["val_reward"] == rows[checkpoint["step"]].get("val/reward")
        assert checkpoint["is_best"] == (checkpoint["step"] == Runs(tmp_path).history(folder).best_step("val/reward"))


def test_splits_list_the_steps_with_rollouts(tmp_path: Path) -> None:
    (folder,) = make_demo(tmp_path, runs=1, steps=10, rollouts=8)
    (folder.path / "trajectories" / "train" / "notes.jsonl").write_text("")
    assert Runs(tmp_path).splits(folder) == {"train": list(range(1, 11)), "val": [5, 10]}


@pytest.mark.parametrize("name", ["..", "../../etc", "a/b", "", ".hidden", "a" * 200, "a\0b"])
def test_names_that_leave_the_folder_are_refused(tmp_path: Path, name: str) -> None:
    make_demo(tmp_path, runs=1, steps=1, rollouts=8)
    runs = Runs(tmp_path)
    for project, model in ((name, "a"), ("demo", name)):
        with pytest.raises(InvalidInput):
            runs.folder(project, model)


def test_an_unknown_model_is_not_found(tmp_path: Path) -> None:
    with refused(NotFound, "unknown_model", "name"):
        Runs(tmp_path).folder("demo", "nothing")
