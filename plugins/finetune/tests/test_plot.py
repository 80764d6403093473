"""The reward plot."""

import struct
from dataclasses import replace

from art.finetune.history import EpochRow, ValidationRow
from art.finetune.plot import draw


def epoch(number: int, mean: float | None = 0.5, trained: float | None = 0.6) -> EpochRow:
    return EpochRow(
        epoch=number,
        timestamp="2026-11-28T00:00:00+00:00",
        avg_reward=mean,
        min_reward=0.0,
        max_reward=1.0,
        num_trajectories=8,
        num_groups=2,
        filtered_trajectories=4,
        filtered_groups=1,
        filtered_avg_reward=trained,
        filtered_min_reward=0.0,
        filtered_max_reward=1.0,
        curriculum_percentile=0.3,
        step=number + 1,
    )


def validation(number: int, mean: float) -> ValidationRow:
    return ValidationRow(
        epoch=number, avg_reward=mean, num_examples=64, interval=[mean - 0.06, mean + 0.06], step=number
    )


def test_the_picture_has_the_size_of_nvidias_and_its_mark() -> None:
    epochs = [epoch(number, 0.3 + 0.05 * number, 0.35 + 0.05 * number) for number in range(10)]
    picture = draw(epochs, [validation(0, 0.28), validation(5, 0.5), validation(10, 0.8)], "mark of the rewards")
    assert picture.startswith(b"\x89PNG") and picture.endswith(b"IEND\xaeB`\x82")
    assert struct.unpack(">II", picture[16:24]) == (1800, 1050)
    assert b"mark of the rewards" in picture


def test_the_same_rows_give_the_same_picture_and_others_another() -> None:
    first, second = [epoch(0)], [epoch(0), epoch(1, 0.9)]
    single = [validation(0, 0.4)]
    pictures = {
        "epochs": draw(second, [], ""),
        "validation": draw(second, single, ""),
        "another mean": draw([epoch(0), epoch(1, 0.8)], [], ""),
        "another mean of what was trained": draw([epoch(0), epoch(1, 0.9, 0.7)], [], ""),
        "no interval": draw(second, [replace(single[0], interval=None)], ""),
        "one epoch": draw(first, [], ""),
        "validation alone": draw([], single, ""),
    }
    assert len(set(pictures.values())) == len(pictures)
    assert pictures["validation"] == draw(second, single, "")


def test_epochs_and_validations_without_rewards_are_gaps() -> None:
    failed = ValidationRow(epoch=0, error="the server stopped")
    assert draw([epoch(0), epoch(1, None, None)], [failed], "") == draw([epoch(0)], [], "")
    assert draw([epoch(0, None, None)], [], "").startswith(b"\x89PNG")
