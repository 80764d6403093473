"""The history's table: what it adds, replaces and ranks, and how a history.jsonl is imported."""

import json
import statistics
from collections import defaultdict
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from art_server.errors import StorageFull
from art_server.store.history import BEST_METRICS, HistoryTable, MetricHistory
from art_server.store.model_folder import CheckpointRecord, ModelFolder
from art_server.store.registry import Registry
from art_server.store.server_database import open_server_database
from tests.quick.store.model_folders import make_model


def make_history(root: Path, steps: int = 0, name: str = "a") -> MetricHistory:
    folder = ModelFolder(root, "p", name)
    for step in range(steps):
        folder.commit_checkpoint(folder.new_checkpoint_dir(), CheckpointRecord(step=step))
    return HistoryTable(open_server_database(None)).of(1, folder)


def lines_of(folder: ModelFolder) -> list[dict[str, Any]]:
    return [json.loads(line) for line in folder.history_file.read_text().splitlines()]


def imported(root: Path, content: bytes | str) -> MetricHistory:
    """The history of a file with this content."""
    folder = ModelFolder(root, "p", "a")
    folder.path.mkdir(parents=True, exist_ok=True)
    folder.history_file.write_bytes(content.encode() if isinstance(content, str) else content)
    table = HistoryTable(open_server_database(None))
    table.replace(1, folder)
    return table.of(1, folder)


def test_a_later_value_replaces_an_earlier_one_and_the_file_has_a_line_for_each_call(
    tmp_path: Path,
) -> None:
    history, folder = make_history(tmp_path), ModelFolder(tmp_path, "p", "a")
    history.add(1, {"val/reward": 0.25})
    history.add(1, {"train/reward": 1.0, "sampled_step": 0.0}, "job")
    history.add(2, {"train/reward": 2.0}, "next")
    history.add(1, {"val/reward": 0.5, "test/reward": 0.75})
    first = {"sampled_step": 0.0, "test/reward": 0.75, "train/reward": 1.0, "val/reward": 0.5}
    assert history.values([1, 2]) == {1: first, 2: {"train/reward": 2.0}}
    assert history.names() == ["sampled_step", "test/reward", "train/reward", "val/reward"]
    lines = lines_of(folder)
    assert [(line["step"], line["training_step"]) for line in lines] == [
        (1, 1),
        (1, 1),
        (2, 2),
        (1, 1),
    ]
    assert [line.get("job_id") for line in lines] == [None, "job", "next", None]
    assert lines[3]["val/reward"] == 0.5 and "train/reward" not in lines[3]
    columns = history.columns(["val/reward", "missing"])
    assert columns["recorded_at"] == [lines[0]["recorded_at"], lines[2]["recorded_at"]]
    assert columns["metrics"] == {"val/reward": [0.5, None], "missing": [None, None]}
    assert history.span() == (2, lines[0]["recorded_at"], lines[2]["recorded_at"])


def test_a_job_s_step_is_added_once(tmp_path: Path) -> None:
    history = make_history(tmp_path)
    history.add(1, {"train/reward": 1.0}, "job")
    history.add(1, {"train/reward": 2.0}, "job")
    assert history.values([1]) == {1: {"train/reward": 1.0}}
    assert len(lines_of(ModelFolder(tmp_path, "p", "a"))) == 1


def test_a_line_that_cannot_be_written_adds_nothing(tmp_path: Path) -> None:
    history = make_history(tmp_path)
    file = ModelFolder(tmp_path, "p", "a").history_file
    file.mkdir(parents=True)
    with pytest.raises((OSError, StorageFull)):
        history.add(1, {"train/reward": 1.0}, "job")
    assert history.span()[0] == 0
    file.rmdir()
    history.add(1, {"train/reward": 1.0}, "job")
    assert history.span()[0] == 1


def test_models_have_rows_of_their_own_which_are_rolled_back(tmp_path: Path) -> None:
    table = HistoryTable(open_server_database(None))
    one, other = (table.of(number, ModelFolder(tmp_path, "p", name)) for number, name in ((1, "a"), (2, "b")))
    for step in range(4):
        one.add(step, {"val/reward": step / 4})
        other.add(step, {"val/reward": step / 4})
    one.roll_back(1)
    assert (one.columns(())["steps"], one.ranking()) == ([0, 1], ("val/reward", [1, 0]))
    one.roll_back(-1)
    assert (one.names(), one.span()[0], one.ranking()) == ([], 0, (None, []))
    assert other.columns(())["steps"] == [0, 1, 2, 3]


# --- a history.jsonl ---


def test_a_folder_with_files_only_is_imported_once_at_the_start(tmp_path: Path) -> None:
    folder = ModelFolder(tmp_path, "p", "a")
    folder.path.mkdir(parents=True)
    row = {
        "train/reward": 0.25,
        "step": 1,
        "training_step": 1,
        "recorded_at": "then",
        "job_id": "j",
    }
    folder.history_file.write_text(json.dumps(row) + "\n")
    database = open_server_database(tmp_path)
    table = HistoryTable(database)
    table.import_missing(1, folder)
    history = table.of(1, folder)
    assert history.values([1]) == {1: {"train/reward": 0.25}}
    history.add(1, {"train/reward": 9.0}, "j")
    assert history.values([1])[1] == {"train/reward": 0.25}, "the job has made it"
    history.add(2, {"val/reward": 0.5})
    database.close()
    with folder.history_file.open("a") as file:
        file.write('{"step": 9}\n')
    again = HistoryTable(open_server_database(tmp_path))
    again.import_missing(1, folder)
    assert again.of(1, folder).columns(["val/reward"]) == {
        "steps": [1, 2],
        "recorded_at": ["then", lines_of(folder)[1]["recorded_at"]],
        "metrics": {"val/reward": [None, 0.5]},
    }


def test_an_import_is_whole_or_absent(tmp_path: Path) -> None:
    for name in ("a", "b"):
        make_model(tmp_path, "p", name).append_history({"step": 1, "val/reward": 0.5})
    file = ModelFolder(tmp_path, "p", "b").history_file
    content = file.read_bytes()
    file.unlink()
    file.mkdir()
    with pytest.raises(OSError):
        Registry(tmp_path)
    database = open_server_database(tmp_path)
    assert database.select("SELECT * FROM models") == database.select("SELECT * FROM steps") == []
    database.close()
    file.rmdir()
    file.write_bytes(content)
    assert [model.history.span()[0] for model in Registry(tmp_path).all()] == [1, 1]


@pytest.mark.parametrize(
    "line",
    [
        b'{"step": 2, "train/rew',
        b"[1, 2]",
        b'"text"',
        b"\xff\xfe",
        b"[" * 100_000,
        b'{"train/reward": 1}',
        b'{"step": true}',
        b'{"step": -1}',
        b'{"step": 1e3}',
        b'{"step": 10000000000000000000000}',
    ],
)
def test_lines_that_are_no_rows_are_left_out_and_counted(
    tmp_path: Path, line: bytes, caplog: pytest.LogCaptureFixture
) -> None:
    good = b'{"step": 1, "train/reward": 0.5}\n'
    history = imported(tmp_path, good + line + b"\n\n" + b'{"step": 3}')
    columns = history.columns(["train/reward"])
    assert (columns["steps"], columns["metrics"]["train/reward"]) == ([1, 3], [0.5, None])
    (record,) = caplog.records
    assert record.args is not None and record.args[1] == 1  # type: ignore[index]


def test_values_that_are_no_finite_numbers_are_none(tmp_path: Path) -> None:
    history = imported(
        tmp_path,
        '{"step": 1, "a": NaN, "b": Infinity, "c": 1e999, "d": %s, "e": "text", "f": true}\n'
        '{"step": 2, "a": 2.5, "b": [1], "recorded_at": 7, "job_id": 8}\n' % ("9" * 400),
    )
    columns = history.columns(["a", "b", "c", "d", "e", "f", "missing"])
    assert columns["steps"] == [1, 2] and columns["recorded_at"] == [None, None]
    assert columns["metrics"]["a"] == [None, 2.5] and columns["metrics"]["f"] == [1.0, None]
    for name in ("b", "c", "d", "e", "missing"):
        assert columns["metrics"][name] == [None, None], name
    assert history.newest("a", 2) == [2.5] and history.newest("c", 1) == []


def test_halves_of_characters_become_question_marks(tmp_path: Path) -> None:
    history = imported(tmp_path, '{"step": 1, "x\\ud800y": 1, "\\ud83d\\ude00": 2}\n')
    assert history.names() == ["x?y", "😀"]


def test_a_line_that_was_written_late_stands_at_its_step(tmp_path: Path) -> None:
    rows = [
        {"step": 1, "train/reward": 0.1, "recorded_at": "2026-01-01"},
        {"step": 2, "train/reward": 0.2, "recorded_at": "2026-01-02"},
        {"step": 0, "val/reward": 0.5, "recorded_at": "2026-01-03"},
        {"step": 3, "recorded_at": "2026-01-04"},
    ]
    history = imported(tmp_path, "".join(json.dumps(row) + "\n" for row in rows))
    columns = history.columns(["val/reward", "train/reward"])
    assert columns["steps"] == [0, 1, 2, 3]
    assert columns["recorded_at"] == ["2026-01-03", "2026-01-01", "2026-01-02", "2026-01-04"]
    assert columns["metrics"]["val/reward"] == [0.5, None, None, None]
    assert columns["metrics"]["train/reward"] == [None, 0.1, 0.2, None]
    assert history.newest("train/reward", 1) == [0.2]


# --- the best step ---


def test_the_best_step_is_the_highest_among_kept_ones(tmp_path: Path) -> None:
    history = make_history(tmp_path, steps=4)
    for step, reward in ((0, 0.9), (1, 0.2), (1, 0.8), (2, 0.4), (9, 1.0)):
        history.add(step, {"val/reward": reward})
    assert history.best_step("val/reward") == history.best_step() == 0
    ModelFolder(tmp_path, "p", "a").remove_steps([0, 2])
    assert history.best_step("val/reward") == 1
    assert history.best_step("val/other") is None


def test_the_best_training_reward_is_that_of_the_step_that_sampled_it(tmp_path: Path) -> None:
    """The rollouts that step 1 earned 0.9 with are trained into step 2."""
    history = make_history(tmp_path, steps=4)
    for step, reward in ((1, 0.1), (2, 0.9), (3, 0.5)):
        history.add(step, {"train/reward": reward, "sampled_step": step - 1.0})
    assert history.best_step("train/reward") == 1


def test_the_best_step_of_examples_has_the_lowest_validation_loss_and_rewards_count_first(tmp_path: Path) -> None:
    history = make_history(tmp_path, steps=4)
    for step, loss in ((1, 0.9), (2, 0.4), (3, 0.5)):
        history.add(step, {"val/loss": loss, "loss/train": 0.1})
    assert history.ranking() == ("val/loss", [2, 3, 1]) and history.best_step() == history.best_step("val/loss") == 2
    history.add(3, {"train/reward": 0.0})
    assert history.ranking() == ("train/reward", [3])


def expected_ranking(rows: list[dict[str, Any]]) -> tuple[str | None, list[int]]:
    """The ranking by an independent formula."""
    values: dict[int, dict[str, float]] = defaultdict(dict)
    for row in rows:
        values[row["step"]] |= row
    for metric in BEST_METRICS:
        earned: dict[int, list[float]] = defaultdict(list)
        for step, row in values.items():
            if metric in row:
                sampled = row.get("sampled_step", step) if metric == "train/reward" else step
                earned[int(sampled)].append(row[metric])
        if earned:
            sign = 1 if metric == "val/loss" else -1
            means = {step: sign * statistics.fmean(rewards) for step, rewards in earned.items()}
            return metric, sorted(means, key=lambda step: (means[step], step))
    return None, []


numbers = st.integers(-3, 3).map(float)
row_lists = st.lists(
    st.fixed_dictionaries(
        {"step": st.integers(0, 9)},
        optional={
            "train/reward": numbers,
            "val/reward": numbers,
            "val/loss": numbers,
            "sampled_step": st.integers(0, 9).map(float),
        },
    ),
    max_size=12,
)


@settings(max_examples=50)
@given(row_lists)
def test_the_ranking_is_that_of_the_means(tmp_path_factory: pytest.TempPathFactory, rows: list[dict[str, Any]]) -> None:
    folder = ModelFolder(tmp_path_factory.mktemp("ranking"), "p", "a")
    database = open_server_database(None)
    table = HistoryTable(database)
    with table.changes(1):
        table.insert(1, rows)
    assert table.of(1, folder).ranking() == expected_ranking(rows)
    database.close()
