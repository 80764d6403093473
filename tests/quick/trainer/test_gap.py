import math

import pytest
import torch

from art_protocol.wire import LoRAConfig, TrainConfig
from art_server.settings import ServerConfig
from art_server.shared.same_policy import EXACT, GapTooLarge, judge_gap, mismatch_limits
from art_server.shared.trainer_messages import Probe, TrainTask
from art_server.trainer.batches import TrainSequence, make_sampled_tokens
from art_server.trainer.step_metrics import sampler_metrics


def test_bars_are_a_multiple_of_what_was_measured_unless_a_limit_is_given() -> None:
    limits = mismatch_limits(("bfloat16", "float32"))
    assert limits is not None
    assert (limits.high, limits.wrong) == (0.25, 0.5)
    limits = mismatch_limits(("float32", "float32"))
    assert limits is not None
    assert (limits.high, limits.wrong, limits.epsilon) == (1e-4, 4e-4, 0.0)
    limits = mismatch_limits(("bfloat16", "float32"), limit=0.4)
    assert limits is not None and (limits.high, limits.wrong) == (0.1, 0.4)
    assert mismatch_limits(("bfloat16", "float32"), limit=0.0) is None
    assert mismatch_limits(("float32", "float32"), is_exact=True) == EXACT


@pytest.mark.parametrize("engine", ["float32", "bfloat16", "float16"])
@pytest.mark.parametrize("trainer", ["float32", "bfloat16", "float16"])
def test_each_pair_of_number_types_has_a_bar(engine: str, trainer: str) -> None:
    assert mismatch_limits((engine, trainer)) is not None


def test_number_types_follow_the_device_unless_they_are_given() -> None:
    assert ServerConfig().number_types("cpu") == ("float32", "float32")
    assert ServerConfig().number_types("cuda") == ("bfloat16", "bfloat16")
    assert ServerConfig(exact=True).number_types("cuda") == ("float32", "float32")
    assert ServerConfig(dtype="bfloat16").number_types("cpu") == ("bfloat16", "float32")
    delta = {"has_delta_rule": True}
    assert ServerConfig().number_types("cpu", **delta) == ("bfloat16", "float32")
    assert ServerConfig().number_types("cuda", **delta) == ("bfloat16", "bfloat16")
    assert ServerConfig(dtype="float32").number_types("cpu", **delta) == ("float32", "float32")
    with pytest.raises(ValueError, match="--exact"):
        ServerConfig(exact=True, dtype="bfloat16")


def judge(types: tuple[str, str], gap: float, sampled_at: int, moved: list[float], num_tokens: int = 500) -> list[str]:
    """Judges tokens of one step whose log-probabilities all differ by `gap`, in a job that starts from step 8."""
    n = num_tokens
    sequence = TrainSequence([1] * n, [*range(n)], [1] * n, [-1.0] * n, [-1] * n, [sampled_at] * n, [1.0] * n, 0, 0)
    task = TrainTask(
        lora=LoRAConfig(),
        in_dir="",
        out_dir="",
        config=TrainConfig(),
        start_step=8,
        mismatch_limits=mismatch_limits(types),
        probe=Probe(moved=moved),
    )
    tokens = make_sampled_tokens([sequence], TrainConfig(), 8, moved)
    return judge_gap(sampler_metrics(torch.full((n,), -1.0 - gap), tokens), task)


@pytest.mark.parametrize("types", [("float32", "float32"), ("bfloat16", "bfloat16")])
@pytest.mark.parametrize("sampled_at", [8, 7, 4])
def test_three_nats_on_every_token_are_refused_fresh_and_stale(types: tuple[str, str], sampled_at: int) -> None:
    with pytest.raises(GapTooLarge, match="500 "):
        judge(types, 3.0, sampled_at, [0.05] * 8)


def test_stale_tokens_may_differ_by_the_policys_own_movement() -> None:
    assert judge(("float32", "float32"), 0.35, 7, [0.9, *[0.05] * 8]) == []
    assert judge(("float32", "float32"), 1.5, 6, [0.9, *[0.05] * 7, 0.1]) == [], "the largest of the last ones, twice"
    assert judge(("float32", "float32"), 0.064, 6, [0.06, 0.008, 0.007], 64) == [], "seen in honest training"
    with pytest.raises(GapTooLarge, match=r"0\.05"):
        judge(("float32", "float32"), 0.6, 7, [0.9, *[0.05] * 8])
    assert judge(("float32", "float32"), 0.6, 7, [0.9, *[0.05] * 8], num_tokens=63) == []


def test_a_step_without_a_recorded_movement_allows_one_nat() -> None:
    assert judge(("float32", "float32"), 0.9, 7, []) == []
    with pytest.raises(GapTooLarge):
        judge(("float32", "float32"), 1.1, 7, [])
    assert judge(("float32", "float32"), 1.1, 6, [0.05]) == [], "one of two is known"


def test_a_gap_that_is_no_number_is_refused() -> None:
    for sampled_at in (8, 7):
        with pytest.raises(GapTooLarge):
            judge(("bfloat16", "bfloat16"), math.nan, sampled_at, [0.1])
