"""The output folder: what it keeps, after which deaths, and whom it refuses."""

import json
import logging
import os
import resource
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from ruamel.yaml import YAML

import art
from art.finetune.errors import WrongInput
from art.finetune.folder import Folder
from art.finetune.history import EpochRow, RolloutRow, ValidationRow, validation_row

KILLING = Path(__file__).with_name("killed_at_lines.py")
CONFIG: dict[str, Any] = {
    "llms": {"policy": {"_type": "openai", "api_key": "sk-secret", "max_tokens": 64, "temperature": 1e-06}},
    "eval": {"general": {"dataset": {"_type": "jsonl", "file_path": Path("train.jsonl")}}},
    "trainer_adapters": {"art": {"backend": {"api_key": None, "init_args": {"token": "hf_secret"}}}},
    "finetuning": {"num_epochs": 3, "seed": 1, "curriculum_learning": {"enabled": True, "initial_percentile": 0.3}},
}
CURRICULUM = {"current_percentile": 0.3, "last_expansion_epoch": 0, "total_groups": 4, "included_groups": [2, 0]}
EPOCH = EpochRow(
    epoch=0,
    avg_reward=0.5,
    min_reward=0.0,
    max_reward=1.0,
    num_trajectories=16,
    num_groups=4,
    filtered_trajectories=8,
    filtered_groups=2,
    filtered_avg_reward=0.6,
    filtered_min_reward=0.1,
    filtered_max_reward=0.9,
    curriculum_percentile=0.3,
    curriculum_state=CURRICULUM,
    step=1,
    num_failed=1,
    failures={"timed out": 1},
)
VALIDATION = ValidationRow(
    epoch=0,
    avg_reward=0.4,
    min_reward=0.0,
    max_reward=1.0,
    num_examples=8,
    standard_error=0.1,
    interval=[0.2, 0.6],
    step=0,
)


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "out"


@pytest.fixture
def folder(path: Path) -> Iterator[Folder]:
    with open_folder(path) as folder:
        yield folder


def open_folder(path: Path, *, fresh: bool = False, num_epochs: int = 3, **finetuning: object) -> Folder:
    section = CONFIG["finetuning"] | {"num_epochs": num_epochs} | finetuning
    return Folder.open(path, CONFIG | {"finetuning": section}, num_epochs, fresh=fresh)


def refused(path: Path, **options: Any) -> str:
    with pytest.raises(WrongInput) as refusal:
        open_folder(path, **options)
    return str(refusal.value)


def rollout(epoch: int, row: int, generation: int) -> RolloutRow:
    session = f"{epoch}-{row}-{generation}"
    return RolloutRow(epoch, str(row), generation, session, 0.5, {"turns": 2.0}, [None, 0.5])


def read(path: Path, name: str) -> Any:
    return json.loads((path / name).read_text())


def test_a_continued_run_has_its_id_rows_and_notes(path: Path) -> None:
    with open_folder(path) as folder:
        run_id = folder.run_id
        folder.add_validation(VALIDATION)
        folder.add_rollout(rollout(0, 0, 0))
        folder.note("first_step", 7)
        folder.note("key", "a")
        folder.note("key", None)
        folder.add_epoch(EPOCH)
        assert folder.noted("first_step") == 7 and folder.noted("key") is None
    assert run_id.startswith("art_run_") and len(run_id) == len("art_run_") + 8
    with open_folder(path) as folder:
        assert (folder.run_id, folder.epochs, folder.validations) == (run_id, [EPOCH], [VALIDATION])
        assert folder.rollouts(0) == [rollout(0, 0, 0)]
        assert folder.noted("first_step") == 7 and folder.noted("key") is None


def test_rollouts_are_of_their_epoch_and_the_last_of_a_generation_counts(folder: Folder) -> None:
    failed = RolloutRow(1, "0", 0, "1-0-0", error="timed out")
    for row in (rollout(1, 3, 1), failed, rollout(10, 0, 0), rollout(0, 0, 0), rollout(1, 0, 0)):
        folder.add_rollout(row)
    assert folder.rollouts(1) == [rollout(1, 3, 1), rollout(1, 0, 0)]
    assert folder.rollouts(2) == []


def test_the_metrics_file_has_all_of_nvidias_fields_and_ours(folder: Folder) -> None:
    folder.add_epoch(EPOCH)
    folder.add_epoch(replace(EPOCH, epoch=1, curriculum_state=None))
    first, second = map(json.loads, (folder.path / "training_metrics.jsonl").read_text().splitlines())
    assert list(first) == [
        *("epoch", "timestamp", "run_id", "avg_reward", "min_reward", "max_reward", "num_trajectories", "num_groups"),
        *("filtered_trajectories", "filtered_groups", "filtered_avg_reward", "filtered_min_reward"),
        *("filtered_max_reward", "curriculum_percentile", "curriculum_state", "step"),
        *("num_without_signal", "num_failed", "failures"),
    ]
    assert first["run_id"] == folder.run_id and first["curriculum_state"] == CURRICULUM
    assert first["timestamp"].endswith("+00:00") and first["failures"] == {"timed out": 1}
    assert set(first) - set(second) == {"curriculum_state"}


def test_the_reward_history_has_what_the_plot_shows(folder: Folder) -> None:
    folder.add_epoch(EPOCH)
    assert read(folder.path, "reward_history.json") == [
        {
            "epoch": 0,
            "timestamp": EPOCH.timestamp,
            "avg_reward": 0.5,
            "min_reward": 0.0,
            "max_reward": 1.0,
            "num_trajectories": 16,
            "filtered_avg_reward": 0.6,
            "curriculum_percentile": 0.3,
        }
    ]


def test_a_failed_validation_has_its_error_and_no_reward(folder: Folder) -> None:
    failed = ValidationRow(epoch=5, timestamp="t", error="3 of 8 rollouts failed", step=5)
    folder.add_validation(failed)
    folder.add_validation(VALIDATION)
    first, second = read(folder.path, "validation_history.json")
    assert first["interval"] == [0.2, 0.6] and first["num_examples"] == 8 and "error" not in first
    assert second == {"epoch": 5, "timestamp": "t", "num_examples": 0, "step": 5, "error": "3 of 8 rollouts failed"}
    folder.add_validation(replace(VALIDATION, epoch=5))
    assert [row.error for row in folder.validations] == [None, None]


@pytest.mark.parametrize(("rewards", "error"), [([0.0, 1.0, None], 0.5), ([1.0], None)])
def test_a_validations_row_is_made_of_an_evaluation(rewards: list[float | None], error: float | None) -> None:
    known = [reward for reward in rewards if reward is not None]
    limit = float("inf") if error is None else 2.0
    estimate = art.Estimate(
        sum(known) / len(known), len(known), float("nan") if error is None else error, (-limit, limit)
    )
    row = validation_row(4, art.Evaluation("a@4", 4, estimate, tuple(rewards), 3, 0, {}, []))
    assert (row.epoch, row.step, row.num_examples, row.max_reward) == (4, 4, len(known), 1.0)
    assert (row.avg_reward, row.min_reward) == (estimate.mean, min(known))
    assert (row.standard_error, row.interval) == (error, None if error is None else [-2.0, 2.0])


def test_the_curriculums_state_is_written_with_its_configuration(folder: Folder) -> None:
    folder.add_epoch(EPOCH)
    assert read(folder.path, "curriculum_state.json") == CURRICULUM | {
        "config": {"enabled": True, "initial_percentile": 0.3}
    }


def test_files_without_content_are_not_written(folder: Folder) -> None:
    assert not (folder.path / "reward_plot.png").exists()
    folder.add_epoch(replace(EPOCH, curriculum_state=None))
    names = {file.name for file in folder.path.iterdir()}
    assert names == {
        *(".lock", "config.yml", "reward_history.json", "reward_plot.png", "rollouts.jsonl", "state.json"),
        "training_metrics.jsonl",
    }


def test_only_the_next_epoch_can_be_added(folder: Folder) -> None:
    folder.add_epoch(EPOCH)
    for number in (0, 2):
        with pytest.raises(ValueError, match=rf"epoch {number} cannot be added: 1 are done in {folder.path}"):
            folder.add_epoch(replace(EPOCH, epoch=number))
    assert folder.epochs == [EPOCH]


def test_the_configuration_is_written_without_secrets(folder: Folder) -> None:
    written = YAML(typ="safe").load(folder.path / "config.yml")
    assert written["llms"]["policy"] == {"_type": "openai", "api_key": "***", "max_tokens": 64, "temperature": 1e-06}
    assert written["trainer_adapters"]["art"]["backend"] == {"api_key": None, "init_args": {"token": "***"}}
    assert written["eval"]["general"]["dataset"]["file_path"] == "train.jsonl"
    for file in folder.path.iterdir():
        assert b"secret" not in file.read_bytes()


def test_another_secret_and_another_folder_are_the_same_configuration(path: Path) -> None:
    open_folder(path, output_dir="out").close()
    policy = CONFIG["llms"]["policy"] | {"api_key": "sk-new", "password": "new"}
    config = CONFIG | {"llms": {"policy": policy}, "functions": {}, "general": None}
    Folder.open(path, config, 3).close()


def test_the_first_fields_that_differ_are_listed(path: Path) -> None:
    open_folder(path).close()
    before = (path / "state.json").read_bytes()
    text = refused(path, seed=2, max_exceptions=3, target_functions=["plan"])
    assert text.splitlines() == [
        f"{path} has a run with another configuration: set another finetuning.output_dir, or add --fresh, which renames "
        "this folder",
        "finetuning.seed: 1 in the folder, 2 here",
        "finetuning.max_exceptions: not set in the folder, 3 here",
        'finetuning.target_functions.0: not set in the folder, "plan" here',
    ]
    many = refused(path, **{f"field_{number}": "x" * 100 for number in range(7)}).splitlines()
    assert len(many) == 7 and many[-1] == "and 2 more" and all(len(line) < 140 for line in many[1:])
    assert (path / "state.json").read_bytes() == before


def test_a_run_may_get_more_epochs_and_not_fewer_than_it_has(path: Path) -> None:
    with open_folder(path) as folder:
        folder.add_epoch(EPOCH)
        folder.add_epoch(replace(EPOCH, epoch=1))
    open_folder(path, num_epochs=9).close()
    assert YAML(typ="safe").load(path / "config.yml")["finetuning"]["num_epochs"] == 9
    open_folder(path, num_epochs=2).close()
    assert "finetuning.num_epochs: 2 are done in the folder, 1 here" in refused(path, num_epochs=1)


def test_fresh_renames_the_folder(path: Path) -> None:
    with open_folder(path, fresh=True) as folder:
        run_id = folder.run_id
    assert not path.with_name("out.1").exists()
    for number in (1, 2):
        with open_folder(path, fresh=True, seed=number) as folder:
            assert folder.run_id != run_id and folder.epochs == []
            folder.add_epoch(EPOCH)
            open_folder(path.with_name(f"out.{number}"), seed=number - 1 or 1).close()
    assert read(path.with_name("out.1"), "state.json")["run_id"] == run_id
    assert len(read(path.with_name("out.2"), "state.json")["epochs"]) == 1


def test_a_second_process_is_refused(path: Path) -> None:
    with open_folder(path):
        before = sorted(path.parent.rglob("*"))
        for fresh in (False, True):
            expected = f"process {os.getpid()} trains in {path}: stop it, or set another finetuning.output_dir"
            assert refused(path, fresh=fresh) == expected
        assert sorted(path.parent.rglob("*")) == before
    open_folder(path).close()


def test_files_of_another_program_are_not_replaced(path: Path) -> None:
    path.mkdir()
    (path / "training_metrics.jsonl").write_text("{}\n")
    assert "training_metrics.jsonl is not of a run that can be continued: set another" in refused(path)
    open_folder(path, fresh=True).close()
    assert (path.with_name("out.1") / "training_metrics.jsonl").read_text() == "{}\n"


@pytest.mark.parametrize("content", ["", "[]", "{}", '{"run_id": "a", "config": {}, "epochs": [{}]}'])
def test_a_broken_record_is_refused(path: Path, content: str) -> None:
    open_folder(path).close()
    (path / "state.json").write_text(content)
    assert "state.json is not the record of a run" in refused(path)


def test_a_path_that_cannot_be_a_folder_is_refused(path: Path) -> None:
    path.write_text("a file")
    assert f"finetuning.output_dir: {path} cannot be used" in refused(path)
    assert f"finetuning.output_dir: {path / 'inner'} cannot be used" in refused(path / "inner")


def test_each_missing_or_old_file_is_written_at_the_next_start(path: Path) -> None:
    with open_folder(path) as folder:
        folder.add_validation(VALIDATION)
        folder.add_epoch(EPOCH)
        old = {file.name: file.read_bytes() for file in path.iterdir()}
        folder.add_epoch(replace(EPOCH, epoch=1, avg_reward=0.7))
    current = {file.name: file.read_bytes() for file in path.iterdir()}
    changed = [name for name in old if old[name] != current[name]]
    assert set(changed) == {"state.json", "training_metrics.jsonl", "reward_history.json", "reward_plot.png"}
    for name in set(current) - {".lock", "state.json", "rollouts.jsonl"}:
        for content in (None, old[name]):
            (path / name).unlink()
            if content is not None:
                (path / name).write_bytes(content)
            open_folder(path).close()
            assert (path / name).read_bytes() == current[name], name


def test_files_that_are_current_are_not_written_again(path: Path) -> None:
    with open_folder(path) as folder:
        folder.add_epoch(EPOCH)
    before = {file.name: file.stat().st_ino for file in path.iterdir()}
    open_folder(path).close()
    assert {file.name: file.stat().st_ino for file in path.iterdir()} == before


def test_a_torn_last_line_is_cut_off(path: Path) -> None:
    with open_folder(path) as folder:
        folder.add_rollout(rollout(0, 0, 0))
        folder.add_rollout(rollout(0, 0, 1))
    whole = (path / "rollouts.jsonl").read_bytes()
    start = whole.index(b"\n") + 1
    for end in range(start, len(whole)):
        (path / "rollouts.jsonl").write_bytes(whole[:end])
        with open_folder(path) as folder:
            assert folder.rollouts(0) == [rollout(0, 0, 0)]
            folder.add_rollout(rollout(0, 0, 1))
        assert (path / "rollouts.jsonl").read_bytes() == whole


def test_a_line_that_the_disk_did_not_take_leaves_nothing(folder: Folder) -> None:
    folder.add_rollout(rollout(0, 0, 0))
    file = folder.path / "rollouts.jsonl"
    before = file.read_bytes()
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (len(before) + 10, hard))
    try:
        with pytest.raises(OSError, match="File too large"):
            folder.add_rollout(rollout(0, 0, 1))
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert file.read_bytes() == before
    folder.add_rollout(rollout(0, 0, 1))
    assert folder.rollouts(0) == [rollout(0, 0, 0), rollout(0, 0, 1)]


def test_without_matplotlib_there_is_one_warning_and_no_plot(
    folder: Folder, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    with caplog.at_level(logging.WARNING):
        folder.add_epoch(EPOCH)
        folder.add_epoch(replace(EPOCH, epoch=1))
    (record,) = caplog.records
    assert "pip install 'agent-reinforcement-trainer[finetune]'" in record.getMessage()
    assert not (folder.path / "reward_plot.png").exists()
    assert len((folder.path / "training_metrics.jsonl").read_text().splitlines()) == 2


def test_nothing_is_lost_or_doubled_whatever_line_a_kill_hits(tmp_path: Path) -> None:
    done = subprocess.run([sys.executable, KILLING, tmp_path, "37"], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert int(done.stdout.split()[0]) > 25
