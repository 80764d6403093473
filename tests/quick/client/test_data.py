import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

import art


def batches(*arguments, **options) -> list[tuple]:
    iterator = art.iterate_dataset(*arguments, use_tqdm=False, **options)
    return [(batch.step, batch.epoch, batch.epoch_step, batch.items) for batch in iterator]


def test_batches_are_those_of_art() -> None:
    """Worked out with `random.Random(epoch).shuffle`, which older programs rely on."""
    assert batches("abcde", 2, 2) == [
        (0, 0, 0, ["c", "b"]),
        (1, 0, 1, ["a", "e"]),
        (2, 0, 2, ["d"]),
        (3, 1, 0, ["c", "d"]),
        (4, 1, 1, ["e", "a"]),
        (5, 1, 2, ["b"]),
    ]


sizes = st.tuples(st.integers(1, 40), st.integers(1, 50), st.integers(1, 4))


@given(sizes)
def test_every_epoch_has_every_item_once_in_the_order_of_its_seed(size: tuple[int, int, int]):
    num_items, groups_per_step, num_epochs = size
    batch_rows = batches(range(num_items), groups_per_step, num_epochs)
    for epoch in range(num_epochs):
        expected = list(range(num_items))
        random.Random(epoch).shuffle(expected)
        rows_of_epoch = [row for row in batch_rows if row[1] == epoch]
        assert [item for row in rows_of_epoch for item in row[3]] == expected
        assert [row[2] for row in rows_of_epoch] == list(range(len(batch_rows) // num_epochs))
    assert [row[0] for row in batch_rows] == list(range(len(batch_rows)))


@given(sizes, st.integers(0, 200))
def test_a_program_that_resumes_anywhere_gets_the_same_batches(size: tuple[int, int, int], initial_step: int):
    num_items, groups_per_step, num_epochs = size
    options = {"groups_per_step": groups_per_step, "num_epochs": num_epochs}
    resumed = batches(range(num_items), **options, initial_step=initial_step)
    assert resumed == batches(range(num_items), **options)[initial_step:]


def test_the_global_random_state_is_left_alone() -> None:
    state = random.getstate()
    batches(range(9), 2, 2)
    assert random.getstate() == state


def test_a_batch_unpacks_as_in_older_releases() -> None:
    unpacked = [
        (items, epoch, step, epoch_step)
        for items, epoch, step, epoch_step in art.iterate_dataset(range(3), 2, 2, use_tqdm=False)
    ]
    assert [row[1:] for row in unpacked] == [(0, 0, 0), (0, 1, 1), (1, 2, 0), (1, 3, 1)]


def test_a_dataset_smaller_than_a_batch_makes_one_batch_per_epoch() -> None:
    assert [len(items) for *_, items in batches(range(3), 10, 2)] == [3, 3]


def test_nothing_is_left_after_the_last_step(caplog: pytest.LogCaptureFixture) -> None:
    assert batches(range(4), 2, initial_step=2) == [] == caplog.messages
    assert batches(range(4), 2, initial_step=7) == []
    assert caplog.messages == [
        "initial_step 7 is after the last step, 2: no batches are left; a larger num_epochs adds steps"
    ]


@pytest.mark.parametrize(
    ("dataset", "options", "field"),
    [
        ([], {}, "dataset"),
        (range(3), {"groups_per_step": 0}, "groups_per_step"),
        (range(3), {"num_epochs": 0}, "num_epochs"),
        (range(3), {"initial_step": -1}, "initial_step"),
    ],
)
def test_what_cannot_be_iterated_is_refused_at_the_call(dataset, options: dict, field: str):
    with pytest.raises(ValueError, match=field):
        art.iterate_dataset(dataset, **options)


def test_a_dataset_without_a_length_is_refused() -> None:
    with pytest.raises(TypeError, match="generator"):
        art.iterate_dataset(index for index in range(3))  # type: ignore[arg-type]


def test_the_bar_starts_where_the_program_resumes(capsys: pytest.CaptureFixture[str]) -> None:
    bar = art.iterate_dataset(range(10), 2, initial_step=3)
    next(bar)
    assert "3/5" in capsys.readouterr().err
    assert len(list(bar)) == 1
    assert "5/5" in capsys.readouterr().err.splitlines()[-1]
