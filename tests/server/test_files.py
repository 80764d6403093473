import json
import os
from pathlib import Path

import pytest

from art_server.errors import StorageFull
from art_server.store import files


def test_a_written_file_replaces_the_old_one_and_leaves_no_temporary(tmp_path: Path) -> None:
    files.write_file(tmp_path / "a", b"one")
    files.write_file(tmp_path / "a", b"two")
    assert (tmp_path / "a").read_bytes() == b"two"
    assert [entry.name for entry in tmp_path.iterdir()] == ["a"]


def test_a_full_disk_is_told_and_keeps_the_old_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    files.write_file(tmp_path / "a", b"one")

    def no_space(_: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", no_space)
    with pytest.raises(StorageFull, match="does not take a"):
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


def test_unfinished_folders_are_cleared_and_finished_ones_kept(tmp_path: Path) -> None:
    (tmp_path / ".x.tmp").mkdir()
    (tmp_path / ".y.tmp").write_text("y")
    (tmp_path / "0001").mkdir()
    files.clear_temporary(tmp_path)
    assert [entry.name for entry in tmp_path.iterdir()] == ["0001"]
