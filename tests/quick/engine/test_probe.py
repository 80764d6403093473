"""Which differences between engine and trainer a probe shows."""

import json
import math
from pathlib import Path

from art_server.engine.engine import make_scaled_adapter
from art_server.shared.same_policy import find_fault, mismatch_limits
from art_server.shared.trainer_messages import MismatchLimits, Probe

BASE = [-1.0, -2.0, -3.0, -0.5] * 8
EFFECT = [0.1, -0.2, 0.3, 0.0] * 8
ROUNDING = [0.02, -0.03, 0.01, 0.02] * 8


def limits(engine: str) -> MismatchLimits:
    known = mismatch_limits((engine, "float32"))
    assert known is not None
    return known


def plus(values: list[float], other: list[float], factor: float = 1.0) -> list[float]:
    return [value + factor * change for value, change in zip(values, other, strict=True)]


IDS = list(range(33))
EXACT = Probe(token_ids=IDS, logprobs=plus(BASE, EFFECT), base_logprobs=BASE)
ROUNDED = Probe(
    token_ids=IDS,
    logprobs=plus(BASE, EFFECT, 0.01),
    base_logprobs=BASE,
    rounding=0.02,
    factor=64,
    scaled_logprobs=plus(BASE, EFFECT, 3.0),
)


def test_an_engine_that_differs_by_rounding_has_no_fault() -> None:
    assert find_fault(EXACT, plus(EXACT.logprobs, ROUNDING, 1e-3), [], limits("float32")) is None
    near = plus(ROUNDED.logprobs, ROUNDING)
    scaled = plus(ROUNDED.scaled_logprobs, ROUNDING)
    assert find_fault(ROUNDED, near, scaled, limits("bfloat16")) is None


def test_another_policy_is_a_fault() -> None:
    seen = find_fault(EXACT, plus(EXACT.logprobs, ROUNDING), [], limits("float32"))
    assert seen is not None and "0.021 (root mean square); rounding explains at most 0.0004" in seen
    seen = find_fault(ROUNDED, plus(ROUNDED.logprobs, ROUNDING, 4.0), ROUNDED.scaled_logprobs, limits("bfloat16"))
    assert seen is not None and "rounding explains at most 0.06" in seen
    assert find_fault(EXACT, [math.nan] * 32, [], limits("float32")) is not None


def test_another_alpha_and_no_adapter_are_faults_although_rounding_hides_them() -> None:
    for factor, seen in ((0.0, "0.00 times"), (0.5, "0.50 times"), (2.0, "2.00 times")):
        scaled = plus(BASE, EFFECT, 3.0 * factor)
        near = plus(BASE, EFFECT, 0.01 * factor)
        fault = find_fault(ROUNDED, near, scaled, limits("bfloat16"))
        assert fault is not None and seen in fault


def test_an_adapter_without_effect_has_only_its_gap_judged() -> None:
    zero = Probe(token_ids=IDS, logprobs=BASE, base_logprobs=BASE)
    assert find_fault(zero, BASE, [], limits("float32")) is None
    assert find_fault(zero, plus(BASE, ROUNDING), [], limits("float32")) is not None


def test_a_scaled_adapter_has_the_same_weights_and_a_multiple_of_alpha(tmp_path: Path) -> None:
    source, target = tmp_path / "source", tmp_path / "target"
    source.mkdir()
    target.mkdir()
    (source / "adapter_config.json").write_text('{"r": 8, "lora_alpha": 16}')
    (source / "adapter_model.safetensors").write_bytes(b"weights")
    make_scaled_adapter(source, target, 4)
    assert json.loads((target / "adapter_config.json").read_text()) == {"r": 8, "lora_alpha": 64}
    assert (target / "adapter_model.safetensors").read_bytes() == b"weights"
