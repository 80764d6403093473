"""Files that are whole or absent."""

import os
from pathlib import Path

import pytest

from art.files import write_whole


def test_a_write_that_fails_leaves_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_whole(tmp_path / "a" / "file", b"first")

    def full(_: int) -> None:
        raise OSError("no space left on device")

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(OSError, match="no space"):
        write_whole(tmp_path / "a" / "file", b"second")
    assert [each.name for each in (tmp_path / "a").iterdir()] == ["file"]
    assert (tmp_path / "a" / "file").read_bytes() == b"first"
