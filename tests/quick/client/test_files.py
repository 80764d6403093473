"""Files that are whole or absent."""

import errno
import os
from pathlib import Path

import pytest

from art.files import write_whole


def test_a_write_that_fails_leaves_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_whole(tmp_path / "a" / "file", b"first")

    failure = OSError(errno.ENOSPC, "no space left on device")

    def full(_: int) -> None:
        raise failure

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(OSError) as caught:
        write_whole(tmp_path / "a" / "file", b"second")
    assert caught.value is failure
    assert [entry.name for entry in (tmp_path / "a").iterdir()] == ["file"]
    assert (tmp_path / "a" / "file").read_bytes() == b"first"
