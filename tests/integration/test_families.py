"""Each family of models trains and serves, at toy size with random weights: with the trained adapter, vLLM and the
trainer compute the same log-probabilities."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from art_server.base_models import NOT_ON_CPU
from tests.toy_models import FAMILIES

pytestmark = [pytest.mark.engine, pytest.mark.slow]

ROOT = Path(__file__).resolve().parents[2]
QUICK = ("gemma3_text", "qwen3_moe")
"""Families of every run. vLLM inspects each new architecture for 20 s, so all of them run only with ART_TEST_FULL=1."""
SIXTEEN_BITS = {"qwen3_5_text"}
"""Families that the engine computes in bfloat16."""


def test_what_was_trained_is_what_is_served() -> None:
    is_full = os.environ.get("ART_TEST_FULL") == "1"
    families = [each for each in FAMILIES if each not in NOT_ON_CPU] if is_full else QUICK
    command = [sys.executable, "-m", "tests.integration.family_engine", *families]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-3000:]
    said = [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]
    lines = [line for line in said if "trained" in line]
    assert [line["family"] for line in lines] == list(families)
    for line in lines:
        assert line["moved"] > 0.1, line
        largest = 0.5 if line["family"] in SIXTEEN_BITS else 1e-3
        assert line["base"] < largest and line["trained"] < largest, line


@pytest.mark.long
@pytest.mark.parametrize(
    ("family", "folded"), [("deepseek_v3", {"self_attn.kv_b_proj"}), ("gemma3", set())]
)
def test_an_adapter_that_vllm_applies_otherwise_or_ignores_is_found_at_its_first_load(
    family: str, folded: set[str]
) -> None:
    command = [sys.executable, "-m", "tests.integration.planted_layers", family]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-3000:]
    kinds, changes = map(json.loads, done.stdout.splitlines()[-2:])
    assert {kind for kind, fault in kinds.items() if fault is not None} == folded and len(kinds) > 3
    assert (
        set(changes) == {"alpha", "layer numbers", "tower", "base"} and None not in changes.values()
    )
