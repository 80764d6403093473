import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from art_server.training.batches import make_micro_batches, make_train_rows, make_uses
from art_server.training.task import Batch, Row, TrainableGroup, TrainableTrajectory


def group(*rewards_and_rows: tuple[float, list[Row]]) -> TrainableGroup:
    return TrainableGroup(
        trajectories=[
            TrainableTrajectory(reward=reward, rows=rows) for reward, rows in rewards_and_rows
        ]
    )


ROW = Row(token_ids=[5, 6, 7, 8, 9], logprobs=[None, None, -0.5, -0.25, None])


def test_row_is_cut_before_its_last_trained_token() -> None:
    train_rows = make_train_rows(Batch(groups=[group((1.0, [ROW]), (0.0, []))]))
    (row,) = train_rows.rows
    assert row.token_ids == [5, 6, 7]
    assert row.positions == [1, 2]
    assert row.targets == [7, 8]
    assert row.sampled_logprobs == [-0.5, -0.25]
    assert row.advantages == pytest.approx([1.0, 1.0], abs=1e-5)


def test_groups_without_signal_are_outside_rows_and_denominators_and_are_counted() -> None:
    live, dead, single = (
        group((1.0, [ROW]), (0.0, [ROW])),
        group((2.0, [ROW]), (2.0, [ROW])),
        group((9.0, [ROW])),
    )
    train_rows = make_train_rows(Batch(groups=[dead, live, single]))
    assert train_rows.num_groups == 3
    assert train_rows.num_groups_trainable == 1
    assert train_rows.num_trajectories == 5
    assert len(train_rows.rows) == 2
    assert train_rows.num_tokens == 4


def test_group_whose_tokens_are_all_context_is_not_trainable() -> None:
    context = Row(token_ids=[1, 2], logprobs=[None, None])
    train_rows = make_train_rows(Batch(groups=[group((1.0, [context]), (0.0, [])), group()]))
    assert train_rows.rows == []
    assert train_rows.num_groups_trainable == 0
    assert train_rows.num_groups == 2


def test_token_at_position_zero_cannot_be_trained_and_is_counted() -> None:
    row = Row(token_ids=[3, 4], logprobs=[-1.0, -2.0])
    train_rows = make_train_rows(Batch(groups=[group((1.0, [row]), (0.0, [row]))]))
    assert [each.targets for each in train_rows.rows] == [[4], [4]]
    assert train_rows.num_tokens == 2
    assert train_rows.num_tokens_unpredicted == 2


def test_row_with_more_tokens_than_logprobs_is_refused() -> None:
    row = Row(token_ids=[3, 4], logprobs=[None])
    with pytest.raises(ValueError, match="2 tokens and 1 log-probabilities"):
        make_train_rows(Batch(groups=[group((1.0, [row]), (0.0, [row]))]))


@settings(deadline=None)
@given(
    seed=st.integers(0, 10_000),
    max_tokens=st.integers(1, 200),
    shared=st.booleans(),
    min_shared=st.integers(1, 9),
)
def test_micro_batches_hold_each_trained_token_once_within_the_budget(
    make_batch, seed: int, max_tokens: int, shared: bool, min_shared: int
) -> None:
    train_rows = make_train_rows(make_batch(seed, num_openings=2))
    uses = make_uses(train_rows.rows)
    expected = [
        (row.token_ids[: position + 1], target)
        for row in train_rows.rows
        for position, target in zip(row.positions, row.targets, strict=True)
    ]
    seen: list[int] = []
    for batch in make_micro_batches(
        train_rows.rows, max_tokens, shared=shared, min_shared=min_shared
    ):
        forest = batch.forest
        longest = max(len(train_rows.rows[index].token_ids) for index in batch.rows)
        size = forest.num_tokens if shared else longest * len(batch.rows)
        assert size <= max_tokens or len(batch.rows) == 1
        assert batch.num_row_tokens == sum(
            len(train_rows.rows[index].token_ids) for index in batch.rows
        )
        for use, prediction in zip(
            batch.uses_U.tolist(), batch.predictions_U.tolist(), strict=True
        ):
            place = int(batch.places_N[prediction])
            visible = [key for key in range(place + 1) if place < int(forest.ends_T[key])]
            assert forest.positions_T[visible].tolist() == list(range(len(visible)))
            assert forest.token_ids_T[visible].tolist() == expected[use][0]
            assert int(batch.targets_N[prediction]) == expected[use][1]
            seen.append(use)
    assert sorted(seen) == list(range(len(expected)))
    assert len(uses.weights_U) == len(expected) == train_rows.num_tokens
