"""How the rows of an epoch are divided into batches."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from art.finetune.batches import Batches
from art.finetune.curriculum import choose, last_expansion, percentile
from art.finetune.sections import Curriculum


@given(num_rows=st.integers(1, 40), rows_per_step=st.integers(1, 50), epoch=st.integers(0, 3), seed=st.integers(0, 9))
def test_the_batches_of_an_epoch_have_each_row_once(num_rows: int, rows_per_step: int, epoch: int, seed: int) -> None:
    batches = Batches(num_rows, rows_per_step)
    numbers = range(epoch * batches.per_epoch, (epoch + 1) * batches.per_epoch)
    parts = [batches.rows_of(number, seed) for number in numbers]
    assert sorted(row for part in parts for row in part) == list(range(num_rows))
    assert all(len(part) == rows_per_step for part in parts[:-1]) and 0 < len(parts[-1]) <= rows_per_step
    assert [batches.rows_before(number) for number in numbers] == [
        epoch * num_rows + sum(map(len, parts[:index])) for index in range(len(parts))
    ]
    assert {batches.epoch_of(number) for number in numbers} == {epoch}


def test_each_epoch_has_another_order_which_the_seed_decides() -> None:
    batches = Batches(20, 20)
    orders = [batches.rows_of(number, seed) for seed in (1, 2) for number in (0, 1)]
    assert len({tuple(order) for order in orders}) == 4
    assert batches.rows_of(1, 2) == orders[3]


INTERVALS = [
    (Batches(7), 5, [0, 5, 10]),
    (Batches(7), 1.5, [0, 2, 3, 5, 6, 8, 9, 11]),
    (Batches(7), 0.5, list(range(12))),
    (Batches(10, 4), 1, [0, 3, 6, 9]),
    (Batches(10, 4), 0.5, [0, 2, 3, 5, 6, 8, 9, 11]),
    (Batches(10, 1), 0.3, [0, 3, 6, 9]),
]


@pytest.mark.parametrize(("batches", "interval", "numbers"), INTERVALS)
def test_intervals_count_in_rows(batches: Batches, interval: float, numbers: list[int]) -> None:
    assert [number for number in range(12) if batches.begins_interval(number, interval)] == numbers


def test_titles() -> None:
    assert Batches(10).title(1, 3) == "epoch 2/3"
    assert [Batches(10, 4).title(number) for number in (0, 2, 4)] == [
        "epoch 1, rows 1 to 4",
        "epoch 1, rows 9 to 10",
        "epoch 2, rows 5 to 8",
    ]


def test_a_curriculum_expands_within_an_epoch() -> None:
    batches = Batches(10, 1)
    curriculum = Curriculum(enabled=True, initial_percentile=0.5, increment_percentile=0.25, expansion_interval=0.4)
    shares = [0.5] * 4 + [0.75] * 4 + [1.0] * 4
    assert [percentile(curriculum, number, batches) for number in range(12)] == shares
    assert [last_expansion(curriculum, number, batches) for number in (3, 4, 7, 8, 11)] == [0, 4, 4, 8, 8]
    rewards = [[0.0, index / 10] for index in range(1, 5)]
    assert [len(choose(curriculum, rewards, number, "", batches)) for number in (0, 4, 8)] == [2, 3, 4]


def test_the_end_of_a_batch_is_told_in_trained_rows() -> None:
    batches = Batches(num_rows=5, rows_per_step=2)
    ends = ["2 of 5 training rows of epoch 1", "4 of 5 training rows of epoch 1", "epoch 1"]
    assert [batches.end(number) for number in range(3)] == ends
    assert Batches(num_rows=5).end(1) == "epoch 2"
