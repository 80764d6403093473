import math

import pytest
import torch

from art_protocol.wire import TrainConfig
from art_server.trainer.optimizer import make_optimizer
from art_server.trainer.schedule import (
    FRESH_MOMENTS_STEPS,
    base_learning_rate,
    fresh_moments_factor,
    learning_rate_factor,
)


def test_given_rate_is_taken_as_it_is() -> None:
    assert base_learning_rate(TrainConfig(learning_rate=3e-5), "qwen3", 256) == (3e-5, "")


@pytest.mark.parametrize(
    ("model_type", "width", "expected"),
    [("qwen3", 2000, 5e-4), ("llama", 1000, 5e-4 * 2**0.781), ("gemma3_text", 1000, 5e-4 * 2**0.0775)],
)
def test_auto_rate_follows_the_published_rule_and_says_so(model_type: str, width: int, expected: float) -> None:
    rate, rule = base_learning_rate(TrainConfig(learning_rate="auto"), model_type, width)
    assert rate == pytest.approx(expected)
    assert f"2000 / {width}" in rule and f"{rate:.3g}" in rule


def test_schedule_by_hand() -> None:
    config = TrainConfig(warmup_steps=4, schedule="cosine", schedule_steps=12)
    factors = [learning_rate_factor(config, step) for step in (0, 3, 4, 8, 12, 99)]
    assert factors == pytest.approx([0.25, 1.0, 1.0, (1 + math.cos(math.pi / 2)) / 2, 0.0, 0.0])
    assert learning_rate_factor(TrainConfig(), 10**6) == 1.0


def test_a_run_that_continues_a_model_has_a_schedule_of_its_own() -> None:
    config = TrainConfig(warmup_steps=4, schedule="cosine", schedule_steps=12, schedule_begins=90)
    factors = [learning_rate_factor(config, step) for step in (80, 90, 93, 94, 98, 102)]
    assert factors == pytest.approx([0.25, 0.25, 1.0, 1.0, 0.5, 0.0])


def test_cosine_without_an_end_is_refused() -> None:
    with pytest.raises(ValueError, match="schedule_steps"):
        TrainConfig(schedule="cosine")


def test_the_rate_rises_after_the_moments_were_lost_and_not_at_the_models_own_start() -> None:
    assert [fresh_moments_factor(step, step) for step in (0, 1, 90)] == [1.0, 1.0, 1.0]
    lost = [fresh_moments_factor(90 + age, age) for age in (0, 1, 8, 9, 10, 99)]
    assert lost == pytest.approx([0.1, 0.2, 0.9, 1.0, 1.0, 1.0])


def step_lengths(num_steps: int, has_rise: bool) -> list[float]:
    """The root mean square of AdamW's steps from zero moments, for gradients that are noise, in units of the rate."""
    chance = torch.Generator().manual_seed(0)
    weights = torch.nn.Parameter(torch.zeros(20_000))
    optimizer = make_optimizer({"w": weights}, 1.0)
    lengths: list[float] = []
    for age in range(num_steps):
        before = weights.detach().clone()
        weights.grad = torch.randn(weights.shape, generator=chance)
        factor = fresh_moments_factor(1000, age) if has_rise else 1.0
        optimizer.param_groups[0]["lr"] = factor
        optimizer.step()
        lengths.append(float((weights.detach() - before).square().mean().sqrt()))
    return lengths


def test_no_step_from_zero_moments_is_much_longer_than_later_ones() -> None:
    usual = step_lengths(300, has_rise=False)[-1]
    first, risen = step_lengths(1, has_rise=False)[0], step_lengths(60, has_rise=True)
    assert first / usual == pytest.approx(math.sqrt(1.9 / 0.1), rel=0.05)
    assert max(risen) < 1.5 * usual
    assert risen[FRESH_MOMENTS_STEPS * 3] == pytest.approx(usual, rel=0.1)
