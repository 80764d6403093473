"""Each family of models trains and serves, at toy size with random weights: with the trained adapter, vLLM and the
trainer compute the same log-probabilities."""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from art_server.store.base_models import NOT_ON_CPU
from tests.long.integration.family_engine import agree
from tests.makers.toy_models import FAMILIES, PUBLISHED, ROPES, WITHOUT_TREES

ROOT = Path(__file__).resolve().parents[3]
QUICK = ("gemma3_text", "qwen3_moe")


@pytest.mark.parametrize("toy", QUICK)
def test_what_was_trained_is_what_is_served(toy: str) -> None:
    assert_served(toy)


@pytest.mark.parametrize("toy", [toy for toy in (*FAMILIES, *PUBLISHED, *ROPES) if toy not in QUICK])
def test_what_was_trained_is_what_is_served_or_a_cpu_refuses_it(toy: str) -> None:
    assert_served(toy)


def assert_served(toy: str) -> None:
    step, served = run("family_engine", toy)
    assert step["grad_norm"] > 0 and step["trees"] == (toy not in WITHOUT_TREES)
    assert step["counted"] == step["there"] and step["kv_tokens"] > 0, "the memory plan's numbers"
    assert step["changed"] == []
    if "refused" in served:
        assert toy.partition(" ")[0] in NOT_ON_CPU
        return
    assert served["moved"] > 0.01, served
    assert agree(step | served), served


def run(program: str, toy: str) -> list[dict[str, Any]]:
    """The JSON lines that a program of this folder prints, among vLLM's."""
    command = [sys.executable, "-m", f"tests.long.integration.{program}", toy]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-3000:]
    return [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]


@pytest.mark.parametrize(("family", "folded"), [("deepseek_v3", {"self_attn.kv_b_proj"}), ("gemma3", set())])
def test_an_adapter_that_vllm_applies_otherwise_or_ignores_is_found_at_its_first_load(
    family: str, folded: set[str]
) -> None:
    kinds, changes = run("planted_layers", family)
    assert {kind for kind, fault in kinds.items() if fault is not None} == folded and len(kinds) > 3
    assert set(changes) == {"alpha", "layer numbers", "tower", "base"} and None not in changes.values()
