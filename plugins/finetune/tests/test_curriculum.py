"""The curriculum, against a model of its own with exact fractions."""

import math
from fractions import Fraction

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from art.finetune.curriculum import Chosen, choose, last_expansion, percentile, samples_all_rows
from art.finetune.sections import Curriculum

HUNDREDTHS = st.integers(1, 100)
REWARDS = st.lists(st.lists(st.integers(0, 20), min_size=0, max_size=5), max_size=12)


def fraction(hundredths: int) -> Fraction:
    return Fraction(hundredths, 100)


@settings(max_examples=150, deadline=None)
@given(
    initial=HUNDREDTHS,
    increment=HUNDREDTHS,
    interval=st.integers(1, 4),
    least=st.integers(0, 10),
    ascending=st.booleans(),
    share=st.none() | HUNDREDTHS,
    keeps=st.booleans(),
    epoch=st.integers(0, 12),
    tenths=REWARDS,
)
def test_it_is_that_of_exact_fractions(
    initial: int,
    increment: int,
    interval: int,
    least: int,
    ascending: bool,
    share: int | None,
    keeps: bool,
    epoch: int,
    tenths: list[list[int]],
) -> None:
    curriculum = Curriculum(
        enabled=True,
        initial_percentile=initial / 100,
        increment_percentile=increment / 100,
        expansion_interval=interval,
        min_reward_diff=least / 10,
        sort_ascending=ascending,
        random_subsample=None if share is None else share / 100,
        rank="on_expansion" if keeps else "every_epoch",
    )
    shares = [min(Fraction(1), fraction(initial) + fraction(increment) * (number // interval)) for number in range(13)]
    assert percentile(curriculum, epoch) == pytest.approx(float(shares[epoch]))
    grew = [earlier for earlier in range(epoch + 1) if earlier == 0 or shares[earlier] > shares[earlier - 1]]
    assert last_expansion(curriculum, epoch) == grew[-1]

    left: list[tuple[Fraction, int]] = []
    for index, rewards in enumerate(tenths):
        if rewards and max(rewards) - min(rewards) >= least:
            mean = Fraction(sum(rewards), len(rewards))
            left.append((mean if ascending else -mean, index))
    left.sort()
    if not keeps or grew[-1] == epoch:
        left = left[: math.ceil(len(left) * shares[epoch])]
    chosen = choose(curriculum, [[tenth / 10 for tenth in rewards] for rewards in tenths], epoch, "seed")
    assert [chosen_group.group for chosen_group in chosen] == [index for _, index in left]
    for chosen_group in chosen:
        size = len(tenths[chosen_group.group])
        wanted = size if share is None else min(size, max(2, math.ceil(size * fraction(share))))
        assert len(set(chosen_group.trajectories)) == wanted and set(chosen_group.trajectories) <= set(range(size))


def test_the_guides_example_reaches_all_rows_in_epoch_20() -> None:
    curriculum = Curriculum(enabled=True)
    assert [percentile(curriculum, epoch) for epoch in (0, 4, 5, 9, 10, 15, 19, 20)] == [
        *(0.3, 0.3, 0.5, 0.5, 0.7, 0.9, 0.9, 1.0)
    ]


def test_on_expansion_samples_about_half_in_the_first_ten_epochs() -> None:
    curriculum = Curriculum(enabled=True, rank="on_expansion")
    rewards = [[0.0, index / 100] for index in range(100, 200)]
    sampled, kept = 0, 0
    for epoch in range(10):
        all_rows = samples_all_rows(curriculum, epoch)
        sampled += 100 if all_rows else kept
        if all_rows:
            kept = len(choose(curriculum, rewards, epoch, ""))
    assert sampled / 1000 <= 0.55


def test_without_it_all_groups_are_trained() -> None:
    assert choose(Curriculum(), [[1.0, 1.0], []], 3, "") == [Chosen(0, (0, 1)), Chosen(1, ())]


def test_the_same_trajectories_are_drawn_again() -> None:
    curriculum = Curriculum(enabled=True, initial_percentile=1.0, random_subsample=0.5)
    drawn = [choose(curriculum, [[float(reward) for reward in range(40)]] * 2, 0, "3") for _ in range(2)]
    assert drawn[0] == drawn[1] and drawn[0][0].trajectories != drawn[0][1].trajectories
