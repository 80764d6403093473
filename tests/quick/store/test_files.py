import json
import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from art_protocol.history import pack_rows, trajectory_row
from art_protocol.wire import LoRAConfig, TrajectoryBody, TrajectoryGroupBody
from art_server.errors import StorageFull
from art_server.ledger.ledger import Ledger
from art_server.store import files
from art_server.store.history import HistoryTable
from art_server.store.model_folder import CheckpointRecord, ModelFolder, ModelRecord
from art_server.store.server_database import open_server_database
from tests.quick.store.permissions import readable_by_others
from tests.refusals import refused


@pytest.fixture
def private(tmp_path: Path) -> Iterator[Path]:
    """A server's path, kept private."""
    before = os.umask(0o022)
    files.keep_private(tmp_path / "art")
    yield tmp_path / "art"
    os.umask(before)


def test_whatever_the_stores_write_is_their_user_s_only(private: Path) -> None:
    database = open_server_database(private)
    ledger = Ledger(private / ".server" / "ledger.sqlite")
    files.write_json(private / ".server" / "base.json", {})
    folder = ModelFolder(private, "p", "a")
    folder.commit_checkpoint(folder.new_checkpoint_dir(), CheckpointRecord(step=0))
    folder.create(
        ModelRecord(name="a", project="p", base_model="b", lora=LoRAConfig()),
        private / "logs" / "engine.log",
    )
    (folder.path / "logs" / "vllm.log").unlink()  # a link, whose own mode says nothing
    HistoryTable(database).of(1, folder).add(0, {"val/reward": 1.0})
    trajectory = TrajectoryBody(messages_and_choices=[], reward=1.0)
    folder.write_lines("val", 0, pack_rows(map(trajectory_row, [TrajectoryGroupBody(trajectories=[trajectory])])))
    assert len(list(private.rglob("*.sqlite-wal"))) == 2, "they are in use"
    assert readable_by_others(private) == []
    database.close()
    ledger.close()


def test_folders_from_before_are_shut_and_the_user_s_own_are_left(tmp_path: Path) -> None:
    before = os.umask(0o022)
    ours = [tmp_path / name for name in (".server", "logs", "p/models")]
    others = [tmp_path / name for name in ("p", "own/logs", "own")]
    for folder in (*ours, *others):
        folder.mkdir(parents=True, exist_ok=True)
    files.keep_private(tmp_path)
    os.umask(before)
    assert [folder.stat().st_mode & 0o777 for folder in ours] == [0o700] * 3
    assert [folder.stat().st_mode & 0o777 for folder in others] == [0o755] * 3


def test_a_written_file_replaces_the_old_one_and_leaves_no_temporary(tmp_path: Path) -> None:
    files.write_file(tmp_path / "a", b"one")
    files.write_file(tmp_path / "a", b"two")
    assert (tmp_path / "a").read_bytes() == b"two"
    assert [entry.name for entry in tmp_path.iterdir()] == ["a"]


def test_a_full_disk_is_reported_and_keeps_the_old_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    files.write_file(tmp_path / "a", b"one")

    def no_space(_: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", no_space)
    with refused(StorageFull, "no_disk_space"):
        files.write_file(tmp_path / "a", b"two")
    assert (tmp_path / "a").read_bytes() == b"one"
    assert [entry.name for entry in tmp_path.iterdir()] == ["a"]


def test_a_line_cut_by_a_crash_spoils_only_itself(tmp_path: Path) -> None:
    file = tmp_path / "rows.jsonl"
    files.append_line(file, {"step": 1})
    with open(file, "ab") as handle:
        handle.write(b'{"step": 2, "rew')
    files.append_line(file, {"step": 3})
    assert files.read_lines(file) == [{"step": 1}, {"step": 3}]
    assert json.loads(file.read_text().splitlines()[-1]) == {"step": 3}


def test_a_line_ends_only_at_a_line_feed(tmp_path: Path) -> None:
    file = tmp_path / "rows.jsonl"
    file.write_text('{"step": 1, "note": "a\u2028b"}\n', encoding="utf-8")
    assert files.read_lines(file) == [{"step": 1, "note": "a\u2028b"}]


def test_unfinished_folders_are_cleared_and_finished_ones_kept(tmp_path: Path) -> None:
    (tmp_path / ".x.tmp").mkdir()
    (tmp_path / ".y.tmp").write_text("y")
    (tmp_path / "0001").mkdir()
    files.clear_temporary(tmp_path)
    assert [entry.name for entry in tmp_path.iterdir()] == ["0001"]
