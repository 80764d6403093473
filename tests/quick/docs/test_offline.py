"""docs/howto/offline.md: which base models are found without a network."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from art_server.store.base_models import TINY_DIR

FIND = """
import sys
from pathlib import Path
from art_server.store.base_models import find_base_model
from art_server.errors import InvalidInput
try:
    print(find_base_model(sys.argv[1], Path(sys.argv[2])).path)
except InvalidInput as error:
    print("refused:", error.message)
"""
NOWHERE = "http://127.0.0.1:9"


@pytest.fixture
def cache(tmp_path: Path) -> Path:
    """A HF_HOME with one model, laid out as the hub's client does it."""
    model = tmp_path / "hf" / "hub" / "models--somebody--small"
    (model / "refs").mkdir(parents=True)
    commit = "0" * 40
    (model / "refs" / "main").write_text(commit)
    shutil.copytree(TINY_DIR, model / "snapshots" / commit)
    return tmp_path / "hf"


def find(name: str, cache: Path, **variables: str) -> str:
    environment = os.environ | {"HF_HOME": str(cache), "HF_ENDPOINT": NOWHERE} | variables
    environment.pop("HF_HUB_OFFLINE", None)
    ran = subprocess.run(
        [sys.executable, "-c", FIND, name, str(cache / "converted")],
        env=environment | variables,
        capture_output=True,
        text=True,
        check=True,
    )
    return ran.stdout.splitlines()[-1]


@pytest.mark.parametrize("variables", [{"HF_HUB_OFFLINE": "1"}, {}], ids=["offline", "unreachable"])
def test_a_cached_model_is_found(cache: Path, variables: dict[str, str]) -> None:
    folder = Path(find("somebody/small", cache, **variables))
    assert folder.is_relative_to(cache) and (folder / "config.json").exists()


def test_art_tiny_and_folders_need_no_network(cache: Path) -> None:
    assert find("art/tiny", cache) == str(TINY_DIR)
    folder = shutil.copytree(TINY_DIR, cache / "qwen3-0.6b")
    assert find(str(folder), cache) == str(folder)


def test_a_model_that_is_not_cached_is_refused_with_what_was_tried(cache: Path) -> None:
    told = find("somebody/other", cache, HF_HUB_OFFLINE="1")
    assert told.startswith("refused: base_model 'somebody/other' cannot be loaded; tried: ")
    assert "its local cache" in told
