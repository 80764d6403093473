"""The output folder: what it keeps, after which deaths, and whom it refuses."""

import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from ruamel.yaml import YAML

import art
from art.files import write_whole
from art.finetune.errors import WrongInput
from art.finetune.folder import Folder, opened
from art.finetune.run_record import EpochRow, RolloutRecord, ValidationRow, validation_row

KILLING = Path(__file__).with_name("killed_at_lines.py")
CONFIG: dict[str, Any] = {
    "llms": {"policy": {"_type": "openai", "api_key": "sk-secret", "max_tokens": 64, "temperature": 1e-06}},
    "trainer_adapters": {"art": {"backend": {"api_key": None, "init_args": {"token": "hf_secret"}}}},
    "finetuning": {"num_epochs": 3, "seed": 1, "curriculum_learning": {"enabled": True, "initial_percentile": 0.3}},
}
CURRICULUM = {"current_percentile": 0.3, "last_expansion_epoch": 0, "total_groups": 4, "included_groups": [2, 0]}
EPOCH = EpochRow(
    epoch=0,
    run_id="run",
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
NEXT = EPOCH.model_copy(update={"epoch": 1, "curriculum_state": None})
VALIDATION = ValidationRow(
    epoch=0,
    avg_reward=0.4,
    min_reward=0.0,
    max_reward=1.0,
    num_examples=8,
    standard_error=0.1,
    interval=(0.2, 0.6),
    step=0,
)


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "out"


@pytest.fixture
def folder(path: Path) -> Iterator[Folder]:
    with opened(path, CONFIG) as folder:
        yield folder


def changed(**finetuning: object) -> dict[str, Any]:
    return CONFIG | {"finetuning": CONFIG["finetuning"] | finetuning}


def start(path: Path, config: dict[str, Any] = CONFIG, *, fresh: bool = False) -> Folder:
    """The folder of a process that ended."""
    with opened(path, config, fresh=fresh) as folder:
        return folder


def refused(path: Path, config: dict[str, Any] = CONFIG, *, fresh: bool = False) -> str:
    with pytest.raises(WrongInput) as refusal:
        start(path, config, fresh=fresh)
    return str(refusal.value)


def rollout(epoch: int, row: int, generation: int, **more: Any) -> RolloutRecord:
    session = f"{epoch}-{row}-{generation}"
    score: dict[str, Any] = {"reward": 0.5, "metrics": {"turns": 2}, "turn_rewards": [None, 0.5]}
    return RolloutRecord(epoch=epoch, row=str(row), generation=generation, session=session, **score | more)


def read(path: Path, name: str) -> Any:
    return json.loads((path / name).read_text())


def test_a_continued_run_has_its_record(path: Path) -> None:
    with opened(path, CONFIG) as folder:
        folder.save(epochs=[EPOCH])
        folder.save(validations=[VALIDATION], step=1)
        state = folder.state
    assert (state.epochs, state.validations, state.step) == ([EPOCH], [VALIDATION], 1)
    assert start(path).state == state


def test_a_new_process_has_the_unfinished_epochs_rollouts(path: Path) -> None:
    failed = rollout(1, 0, 0, error="timed out", reward=None)
    with opened(path, CONFIG) as folder:
        folder.save(epochs=[EPOCH])
        for row in (rollout(1, 3, 1), failed, rollout(0, 1, 0), rollout(1, 0, 0, reward=1.0), failed):
            folder.add_rollout(row)
    assert start(path).rollouts == {("train", 1, "3", 1): rollout(1, 3, 1), ("train", 1, "0", 0): failed}
    with opened(path, CONFIG) as folder:
        folder.forget_failed_rollouts()
    assert start(path).rollouts == {
        ("train", 1, "3", 1): rollout(1, 3, 1),
        ("train", 1, "0", 0): rollout(1, 0, 0, reward=1.0),
    }


def test_the_metrics_file_has_all_of_nvidias_fields_and_ours(folder: Folder) -> None:
    folder.save(epochs=[EPOCH, NEXT])
    first, second = map(json.loads, (folder.path / "training_metrics.jsonl").read_text().splitlines())
    assert list(first) == [
        *("epoch", "timestamp", "run_id", "avg_reward", "min_reward", "max_reward", "num_trajectories", "num_groups"),
        *("filtered_trajectories", "filtered_groups", "filtered_avg_reward", "filtered_min_reward"),
        *("filtered_max_reward", "curriculum_percentile", "curriculum_state", "step"),
        *("num_without_signal", "num_failed", "num_answers", "num_cut", "share_same", "failures"),
    ]
    assert first["curriculum_state"] == CURRICULUM and first["timestamp"].endswith("+00:00")
    assert set(first) - set(second) == {"curriculum_state"}


def test_the_reward_history_has_what_the_plot_shows(folder: Folder) -> None:
    folder.save(epochs=[EPOCH])
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
    folder.save(validations=[VALIDATION, failed])
    first, second = read(folder.path, "validation_history.json")
    assert first["interval"] == [0.2, 0.6] and first["num_examples"] == 8 and "error" not in first
    assert second == {"epoch": 5, "timestamp": "t", "num_examples": 0, "step": 5, "error": "3 of 8 rollouts failed"}


@pytest.mark.parametrize(("rewards", "error"), [([0.0, 1.0, None], 0.5), ([1.0], None)])
def test_a_validations_row_is_made_of_an_evaluation(rewards: list[float | None], error: float | None) -> None:
    known = [reward for reward in rewards if reward is not None]
    limit = float("inf") if error is None else 2.0
    estimate = art.Estimate(
        sum(known) / len(known), len(known), float("nan") if error is None else error, (-limit, limit)
    )
    row = validation_row({"epoch": 4}, art.Evaluation("a@4", 4, estimate, tuple(rewards), 3, 0, {}, []))
    assert (row.epoch, row.step, row.num_examples, row.max_reward) == (4, 4, len(known), 1.0)
    assert (row.avg_reward, row.min_reward) == (estimate.mean, min(known))
    assert (row.standard_error, row.interval) == (error, None if error is None else (-2.0, 2.0))


def test_the_curriculums_state_is_written_with_its_configuration(folder: Folder) -> None:
    folder.save(epochs=[EPOCH])
    assert read(folder.path, "curriculum_state.json") == CURRICULUM | {
        "config": {"enabled": True, "initial_percentile": 0.3}
    }


def test_secrets_are_left_out_of_the_configuration(folder: Folder) -> None:
    written = YAML(typ="safe").load(folder.path / "config.yml")
    assert written["llms"]["policy"] == {"_type": "openai", "max_tokens": 64, "temperature": 1e-06}
    assert written["trainer_adapters"]["art"]["backend"] == {"init_args": {}}
    assert all(b"secret" not in file.read_bytes() for file in folder.path.iterdir())


def test_another_secret_and_another_folder_are_the_same_configuration(path: Path) -> None:
    start(path, changed(output_dir="out"))
    policy = CONFIG["llms"]["policy"] | {"api_key": "sk-new", "password": "new"}
    start(path, CONFIG | {"llms": {"policy": policy}, "functions": {}, "general": None})


def test_a_folder_without_a_rollout_is_of_no_run(path: Path) -> None:
    first = start(path).state.run_id
    assert start(path, changed(seed=2)).state.run_id != first
    assert YAML(typ="safe").load(path / "config.yml")["finetuning"]["seed"] == 2


def test_the_first_fields_that_differ_are_listed(path: Path) -> None:
    start(path).add_rollout(rollout(0, 0, 0))
    before = (path / "state.json").read_bytes()
    *lines, last = refused(path, changed(seed=2, target_model="a", target_functions=["plan"])).splitlines()
    assert "--fresh" in last and lines == [
        "finetuning.seed: 1 in the folder, 2 here",
        'finetuning.target_model: not set in the folder, "a" here',
        'finetuning.target_functions.0: not set in the folder, "plan" here',
    ]
    *many, last = refused(path, changed(**{f"field_{number}": "x" * 100 for number in range(7)})).splitlines()
    assert len(many) == 6 and many[-1] == "and 2 more" and all(len(line) < 150 for line in many)
    assert "--fresh" in last
    assert (path / "state.json").read_bytes() == before


def test_a_run_may_get_more_epochs_and_not_fewer_than_it_has(path: Path) -> None:
    with opened(path, CONFIG) as folder:
        folder.save(epochs=[EPOCH, NEXT])
    start(path, changed(num_epochs=9))
    assert YAML(typ="safe").load(path / "config.yml")["finetuning"]["num_epochs"] == 9
    start(path, changed(num_epochs=2))
    assert "finetuning.num_epochs: 2 are done in the folder, 1 here" in refused(path, changed(num_epochs=1))


def test_rollouts_of_other_validations_are_forgotten_for_good(path: Path) -> None:
    with opened(path, CONFIG, validation="old") as folder:
        folder.add_rollout(rollout(0, 0, 0, split="val"))
        folder.add_rollout(rollout(0, 0, 1))
    for _ in range(2):
        with opened(path, CONFIG, validation="new") as folder:
            assert folder.rollouts == {("train", 0, "0", 1): rollout(0, 0, 1)}


def test_fresh_renames_the_folder(path: Path) -> None:
    runs = [start(path, changed(seed=number), fresh=True).state.run_id for number in range(3)]
    assert len(set(runs)) == 3
    assert [read(path.with_name(name), "state.json")["run_id"] for name in ("out.1", "out.2", "out")] == runs


def test_a_second_process_is_refused(path: Path) -> None:
    with opened(path, CONFIG):
        before = sorted(path.parent.rglob("*"))
        for fresh in (False, True):
            assert f"another process trains in {path}" in refused(path, fresh=fresh)
        assert sorted(path.parent.rglob("*")) == before
    with opened(path, CONFIG, fresh=True):
        assert "another process trains" in refused(path)
        assert "another process trains" in refused(path.with_name("out.1")), "one that waits to open it is refused too"
    start(path)


def test_files_of_another_program_are_not_replaced(path: Path) -> None:
    path.mkdir()
    (path / "training_metrics.jsonl").write_text("{}\n")
    assert "training_metrics.jsonl is not of a run" in refused(path)
    start(path, fresh=True)
    assert (path.with_name("out.1") / "training_metrics.jsonl").read_text() == "{}\n"


@pytest.mark.parametrize("num_written", range(4))
def test_a_folder_can_be_used_after_a_kill_between_its_first_files(
    path: Path, monkeypatch: pytest.MonkeyPatch, num_written: int
) -> None:
    left = iter(range(num_written))

    def dies(file: Path, content: bytes) -> None:
        if next(left, None) is None:
            raise KeyboardInterrupt
        write_whole(file, content)

    with monkeypatch.context() as patch:
        patch.setattr("art.finetune.folder.write_whole", dies)
        with pytest.raises(KeyboardInterrupt):
            start(path)
    assert start(path).state.config


@pytest.mark.parametrize("content", ["", "[]", "{}", '{"run_id": "a", "config": {}, "epochs": [{}]}'])
def test_a_broken_record_is_refused(path: Path, content: str) -> None:
    start(path)
    (path / "state.json").write_text(content)
    assert "state.json is not the record of a run" in refused(path)


def test_a_path_that_cannot_be_a_folder_is_refused(path: Path) -> None:
    path.write_text("a file")
    assert f"finetuning.output_dir: {path} cannot be used" in refused(path)
    assert f"finetuning.output_dir: {path / 'inner'} cannot be used" in refused(path / "inner")


def test_all_files_are_those_of_the_record_after_the_next_start(path: Path) -> None:
    with opened(path, CONFIG) as folder:
        folder.save(validations=[VALIDATION], epochs=[EPOCH])
    current = {file.name: file.read_bytes() for file in path.iterdir()}
    assert current.keys() == {
        *(".lock", "config.yml", "reward_history.json", "reward_plot.png", "rollouts.jsonl", "state.json"),
        *("training_metrics.jsonl", "validation_history.json", "curriculum_state.json"),
    }
    for name in set(current) - {".lock", "state.json", "rollouts.jsonl"}:
        (path / name).unlink()
    (path / "reward_history.json").write_text("old")
    start(path)
    assert {file.name: file.read_bytes() for file in path.iterdir()} == current


@pytest.mark.parametrize("damage", [b"", b"\0" * 40, b"\n", b'{"epoch": 0}\n'])
def test_a_damaged_end_is_cut_off(path: Path, damage: bytes) -> None:
    with opened(path, CONFIG) as folder:
        folder.add_rollout(rollout(0, 0, 0))
        folder.add_rollout(rollout(0, 0, 1))
    whole = (path / "rollouts.jsonl").read_bytes()
    start_of_second = whole.index(b"\n") + 1
    for end in range(start_of_second, len(whole), 10):
        (path / "rollouts.jsonl").write_bytes(whole[:end] + damage)
        with opened(path, CONFIG) as folder:
            assert folder.rollouts == {("train", 0, "0", 0): rollout(0, 0, 0)}
            folder.add_rollout(rollout(0, 0, 1))
        assert (path / "rollouts.jsonl").read_bytes() == whole


def test_nothing_is_lost_or_doubled_whatever_line_a_kill_hits(tmp_path: Path) -> None:
    done = subprocess.run([sys.executable, KILLING, tmp_path, "37"], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert int(done.stdout.split()[0]) > 10
