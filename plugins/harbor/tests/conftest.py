"""Boxes of tests have their folders in the test's folder."""

import os
from collections.abc import Iterator
from pathlib import Path

import pytest


@pytest.fixture(autouse=True)
def home(umask: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The user's home, where the folders of boxes are."""
    folder = tmp_path / "home"
    folder.mkdir()
    monkeypatch.setenv("HOME", str(folder))
    return folder


@pytest.fixture(autouse=True)
def umask() -> Iterator[None]:
    """The usual umask: as root, a box's user reads of the host's folders what all may read."""
    before = os.umask(0o022)
    yield
    os.umask(before)
