import math

import pytest

from art.wire import TrainConfig
from art_server.trainer.schedule import base_learning_rate, learning_rate_factor


def test_given_rate_is_taken_as_it_is() -> None:
    assert base_learning_rate(TrainConfig(learning_rate=3e-5), "qwen3", 256) == (3e-5, "")


@pytest.mark.parametrize(
    ("model_type", "width", "expected"),
    [
        ("qwen3", 2000, 5e-4),
        ("llama", 1000, 5e-4 * 2**0.781),
        ("gemma3_text", 1000, 5e-4 * 2**0.0775),
    ],
)
def test_auto_rate_follows_the_published_rule_and_says_so(
    model_type: str, width: int, expected: float
) -> None:
    rate, rule = base_learning_rate(TrainConfig(learning_rate="auto"), model_type, width)
    assert rate == pytest.approx(expected)
    assert f"2000 / {width}" in rule and f"{rate:.3g}" in rule


def test_schedule_by_hand() -> None:
    config = TrainConfig(warmup_steps=4, schedule="cosine", schedule_steps=12)
    factors = [learning_rate_factor(config, step) for step in (0, 3, 4, 8, 12, 99)]
    assert factors == pytest.approx([0.25, 1.0, 1.0, (1 + math.cos(math.pi / 2)) / 2, 0.0, 0.0])
    assert learning_rate_factor(TrainConfig(), 10**6) == 1.0


def test_cosine_without_an_end_is_refused() -> None:
    with pytest.raises(ValueError, match="schedule_steps"):
        TrainConfig(schedule="cosine")
