"""The reader of a server's folder, against the files and against `ModelFolder`."""

import json
import math
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from art_server.errors import InvalidInput, NotFound
from art_server.observe import history as parser
from art_server.observe import runs as reader
from art_server.observe.history import HistoryFile
from art_server.observe.runs import Runs
from art_server.store.model_folder import ModelFolder
from tests.demo import HOSTILE_METRIC, KEPT_STEPS, make_demo


def rows_of(folder: ModelFolder) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (folder.path / "history.jsonl").read_text().splitlines()]


def test_columns_are_the_values_of_the_file(tmp_path: Path) -> None:
    (folder,) = make_demo(tmp_path, runs=1, steps=12, rollouts=8)
    rows, runs = rows_of(folder), Runs(tmp_path)
    history = runs.history(folder)
    names = history.names()
    assert {"train/reward", "val/reward", "sampled_step", HOSTILE_METRIC} <= set(names)
    assert not {"step", "training_step", "job_id", "recorded_at"} & set(names)
    found = history.columns(names)
    assert found["steps"] == [row["step"] for row in rows]
    assert found["recorded_at"] == [row["recorded_at"] for row in rows]
    for name in names:
        assert found["metrics"][name] == [row.get(name) for row in rows], name


def test_a_row_that_was_written_late_stands_at_its_step(tmp_path: Path) -> None:
    rows = [
        {"step": 1, "train/reward": 0.1, "recorded_at": "2026-01-01"},
        {"step": 2, "train/reward": 0.2, "recorded_at": "2026-01-02"},
        {"note": "no step"},
        {"step": 0, "val/reward": 0.5, "recorded_at": "2026-01-03"},
        {"step": 3, "recorded_at": "2026-01-04"},
    ]
    file = tmp_path / "history.jsonl"
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    history = HistoryFile.read(file).history
    assert history.steps == [0, 1, 2, None, 3]
    assert history.recorded_at == ["2026-01-03", "2026-01-01", "2026-01-02", None, "2026-01-04"]
    assert history.column("val/reward") == [0.5, None, None, None, None]
    assert history.column("train/reward") == [None, 0.1, 0.2, None, None]
    assert history.last("train/reward") == 0.2


def test_a_summary_has_the_newest_values_and_the_best_kept_step(tmp_path: Path) -> None:
    (folder,) = make_demo(tmp_path, runs=1, steps=12, rollouts=8)
    rows, found = rows_of(folder), Runs(tmp_path).summary(folder)
    assert (found["id"], found["base_model"], found["rank"]) == (
        f"demo/{folder.name}",
        "Qwen/Qwen3-8B",
        16,
    )
    assert (found["step"], found["num_rows"]) == (12, 12)
    assert found["reward"] == rows[-1]["train/reward"]
    assert found["val_reward"] == rows[9]["val/reward"], "the newest row that has it"
    assert found["rewards"] == [row["train/reward"] for row in rows]
    assert found["best"] == {"step": folder.best_step("val/reward"), "metric": "val/reward"}
    assert (found["first_at"], found["last_at"]) == (
        rows[0]["recorded_at"],
        rows[-1]["recorded_at"],
    )


numbers = st.floats(-5, 5) | st.integers(-3, 3) | st.booleans()
row_lists = st.lists(
    st.fixed_dictionaries(
        {"step": st.integers(0, 9)},
        optional={
            "train/reward": numbers,
            "val/reward": numbers,
            "sampled_step": st.integers(0, 9).map(float),
        },
    ),
    max_size=12,
)


@given(row_lists)
def test_the_ranking_is_that_of_the_model_folder(
    tmp_path_factory: pytest.TempPathFactory, rows: list[dict[str, Any]]
) -> None:
    folder = ModelFolder(tmp_path_factory.mktemp("ranking"), "p", "a")
    folder.path.mkdir(parents=True)
    file = folder.path / "history.jsonl"
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    metric, steps = HistoryFile.read(file).history.ranking()
    assert metric == folder.best_metric()
    assert steps == ([] if metric is None else folder.ranked_steps(metric))


def test_a_row_that_is_appended_or_merged_is_read(tmp_path: Path) -> None:
    (folder,) = make_demo(tmp_path, runs=1, steps=3, rollouts=8)
    runs = Runs(tmp_path)
    before, made = runs.marks(), rows_of(folder)[2]["recorded_at"]
    assert runs.history(folder).steps == [1, 2, 3]
    assert runs.history(folder) is runs.history(folder), "kept until the file changes"
    folder.add_history(4, {"train/reward": 0.25})
    folder.add_history(3, {"val/reward": 0.125})
    assert runs.marks() != before
    history = runs.history(folder)
    assert history.steps == [1, 2, 3, 4]
    assert history.last("train/reward") == 0.25
    assert history.column("val/reward")[2] == 0.125
    assert history.recorded_at[2] == made, "the step's time, not that of its late evaluation"
    assert runs.summary(folder)["val_reward"] == 0.125


def test_only_rows_that_were_appended_are_parsed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (folder,) = make_demo(tmp_path, runs=1, steps=5, rollouts=8)
    parsed: list[bytes] = []
    read = parser.read_json
    monkeypatch.setattr(parser, "read_json", lambda line: (parsed.append(line), read(line))[1])
    runs = Runs(tmp_path)
    for step, num_parsed in ((5, 5), (6, 1), (0, 1), (7, 1), (3, 8)):
        if step != 5:
            folder.add_history(step, {"val/reward": step / 8})
        parsed.clear()
        assert runs.summary(folder)["num_rows"] == len(runs.history(folder).steps)
        assert len(parsed) == num_parsed, "the merge into step 3 has changed the lines before"
    assert runs.history(folder).steps == list(range(8))
    assert runs.history(folder).last("val/reward") == 7 / 8


contents = st.lists(
    st.sampled_from(
        [b'{"step": 2, "a": 1}\n', b'{"step": 1, "b": 2}\n', b'{"a": 3}\n', b'{"st', b"\n"]
    )
).map(b"".join)


@given(contents, contents, st.integers(0, 60))
def test_a_file_that_is_read_on_is_the_same_as_one_that_is_read_anew(
    tmp_path_factory: pytest.TempPathFactory, first: bytes, then: bytes, num_kept: int
) -> None:
    file = tmp_path_factory.mktemp("history") / "history.jsonl"
    file.write_bytes(first)
    before = HistoryFile.read(file)
    file.write_bytes(first[:num_kept] + then)
    found, anew = HistoryFile.read(file, before).history, HistoryFile.read(file).history
    assert found.names() == anew.names()
    assert found.columns(found.names()) == anew.columns(found.names())


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
        {"step": 3, "train/reward": 0.4, "sampled_step": 2.0},
    ]
    (folder.path / "history.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    found = {each["step"]: each for each in Runs(tmp_path).checkpoints(folder)}
    assert [found[step]["reward"] for step in (1, 2, 3)] == [0.9, pytest.approx(0.3), None]
    assert [step for step, each in found.items() if each["is_best"]] == [1]


@pytest.mark.parametrize(
    "line",
    [
        b'{"step": 2, "train/rew',
        b"[1, 2]",
        b'"text"',
        b"\xff\xfe",
        b"[" * 100_000,
        b"",
    ],
)
def test_lines_that_are_no_rows_are_left_out(tmp_path: Path, line: bytes) -> None:
    file = tmp_path / "history.jsonl"
    good = b'{"step": 1, "train/reward": 0.5}\n'
    file.write_bytes(good + line + b"\n" + b'{"step": 3}')
    history = HistoryFile.read(file).history
    assert history.steps == [1, 3]
    assert history.column("train/reward") == [0.5, None]


def test_values_that_are_no_finite_numbers_are_none(tmp_path: Path) -> None:
    file = tmp_path / "history.jsonl"
    file.write_text(
        '{"step": 1, "a": NaN, "b": Infinity, "c": 1e999, "d": %s, "e": "text", "f": true}\n'
        '{"step": "x", "a": 2.5, "b": [1], "recorded_at": 7}\n' % ("9" * 400)
    )
    history = HistoryFile.read(file).history
    assert history.steps == [1, None] and history.recorded_at == [None, None]
    found = history.columns(["a", "b", "c", "d", "e", "f", "missing"])["metrics"]
    assert found["a"] == [None, 2.5] and found["f"] == [1.0, None]
    for name in ("b", "c", "d", "e", "missing"):
        assert found[name] == [None, None], name
    assert history.last("a") == 2.5 and history.last("c") is None


def test_halves_of_characters_become_question_marks(tmp_path: Path) -> None:
    file = tmp_path / "history.jsonl"
    file.write_text('{"step": 1, "x\\ud800y": 1, "\\ud83d\\ude00": 2}\n')
    names = HistoryFile.read(file).history.names()
    assert names == ["x?y", "😀"]
    assert "".join(names).encode(), "it can be sent"


@pytest.mark.parametrize("content", [b"not JSON", b"\xff\xfe JSON"])
def test_a_model_without_files_is_empty_and_an_unreadable_one_is_listed(
    tmp_path: Path, content: bytes
) -> None:
    bare = tmp_path / "p" / "models" / "bare"
    bare.mkdir(parents=True)
    (bare / "model.json").write_bytes(content)
    runs = Runs(tmp_path)
    (folder,) = runs.folders()
    found = runs.summary(folder)
    assert (found["base_model"], found["num_rows"], found["step"], found["best"]) == (
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
    found = Runs(tmp_path).checkpoints(folder)
    assert [each["step"] for each in found] == [7, 10, 11, 12], "8 and 9 cannot be read"
    assert len(folder.steps()) == KEPT_STEPS
    for each in found:
        files = folder.checkpoint_dir(each["step"]).iterdir()
        assert each["size_bytes"] == sum(file.stat().st_size for file in files)
        earned = [r["train/reward"] for r in rows.values() if r["sampled_step"] == each["step"]]
        assert each["reward"] == (earned[0] if earned else None) and len(earned) < 2
        assert each["val_reward"] == rows[each["step"]].get("val/reward")
        assert each["is_best"] == (each["step"] == folder.best_step("val/reward"))


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
    with pytest.raises(NotFound, match="no model 'demo/nothing'"):
        Runs(tmp_path).folder("demo", "nothing")


def test_few_histories_are_kept_whole(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folders = make_demo(tmp_path, runs=3, steps=1, rollouts=8)
    monkeypatch.setattr(reader, "MAX_HISTORIES", 2)
    runs = Runs(tmp_path)
    first = runs.history(folders[0])
    assert not math.isnan(first.column("train/reward")[0] or 0)
    runs.history(folders[1])
    assert runs.history(folders[0]) is first
    runs.history(folders[2])
    assert runs.history(folders[0]) is first, "the one that was read longest ago has left"
