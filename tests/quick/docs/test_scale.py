"""The cost model of docs/scale.md is that of scripts/capacity, and its parts fill as they should."""

import importlib.machinery
import importlib.util
import json
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import pytest

ROOT = Path(__file__).parents[3]


@pytest.fixture(scope="module")
def capacity() -> ModuleType:
    loader = importlib.machinery.SourceFileLoader("capacity", str(ROOT / "scripts" / "capacity"))
    spec = importlib.util.spec_from_loader("capacity", loader)
    assert spec is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules["capacity"] = module  # dataclasses look their module up
    loader.exec_module(module)
    return module


def test_the_page_has_the_constants_and_the_scripts_that_measure_them(capacity: ModuleType) -> None:
    page = (ROOT / "docs" / "scale.md").read_text()
    for constant in capacity.CONSTANTS:
        assert (ROOT / constant.measured_by).is_file()
        assert f"| {constant.what} | {constant.value:g} {constant.unit} | `{constant.measured_by}` |" in page


def test_the_ledger_takes_the_bytes_that_the_model_says(capacity: ModuleType) -> None:
    command = [sys.executable, str(ROOT / "scripts/bench/constants.py"), "--completions", "300", "--commits", "10"]
    measured = json.loads(subprocess.run(command, check=True, stdout=subprocess.PIPE).stdout)
    assert measured.pop("commits_per_second") > 0
    known = (capacity.RECORD, capacity.PROMPT_TOKEN, capacity.SAMPLED_TOKEN)
    assert list(measured.values()) == [pytest.approx(constant.value, rel=0.1) for constant in known]


def test_parts_fill_with_their_load(capacity: ModuleType) -> None:
    def full(*flags: str) -> dict[str, float]:
        return {part.name: part.share for part in capacity.parts(capacity.read_flags(["--gpus", "8", *flags]))}

    usual = full()
    assert usual["trainer"] == pytest.approx(8 * 3000 / 6000)
    assert usual["gate"] == pytest.approx(80 * 0.35e-3), "80 answers a second"
    streams = full("--streamed", "1")
    assert streams["gate"] == pytest.approx(24_000 * 0.042e-3) and streams["gate"] > 30 * usual["gate"]
    assert full("--streamed", "1", "--engines", "4")["vLLM's API process, each"] == pytest.approx(6000 * 0.119e-3)
    many = full("--models", "600")
    assert many["adapters to engines"] == pytest.approx(10 * 0.024)
    assert many["checkpoints, disk"] == pytest.approx(600 * 2_727_936 * 16 * 4 * 54 / (2000 * 2**30))
    assert full("--train-gpus", "4")["trainer"] == usual["trainer"] / 4
