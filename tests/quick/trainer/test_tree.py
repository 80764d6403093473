import random

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from art_server.trainer.tree import MAX_REPEATED, Node, is_cheaply_cut, lay_out, pack_trees, pad_forest, sort_sequences

TOKENS = st.lists(st.integers(0, 2), min_size=1, max_size=12)
BUDGETS = given(
    sequences=st.lists(TOKENS, min_size=1, max_size=12), min_shared=st.integers(1, 6), max_tokens=st.integers(1, 60)
)


def test_layout_by_hand() -> None:
    # 7 8 is shared by all, 7 8 1 by two of them; the last sequence is another tree.
    sequences = [[7, 8, 2], [7, 8, 1, 5], [7, 8, 1, 4, 4], [9]]
    forest = lay_out(sequences, sort_sequences(sequences, min_shared=1))
    assert forest.token_ids_T.tolist() == [7, 8, 1, 4, 4, 5, 2, 9]
    assert forest.positions_T.tolist() == [0, 1, 2, 3, 4, 3, 2, 0]
    assert forest.ends_T.tolist() == [7, 7, 6, 5, 5, 6, 7, 8]
    assert forest.nodes == (
        Node(0, 2, 7),
        Node(2, 3, 6),
        Node(3, 5, 5),
        Node(5, 6, 6),
        Node(6, 7, 7),
        Node(7, 8, 8),
    )
    assert [path.tolist() for path in forest.paths] == [
        [0, 1, 6],
        [0, 1, 2, 5],
        [0, 1, 2, 3, 4],
        [7],
    ]


def test_siblings_share_a_prompt_above_the_budget() -> None:
    prompt = list(range(100))
    siblings = [[*prompt, *[200 + number] * 5] for number in range(8)]
    packs = pack_trees(siblings, sort_sequences(siblings, 1), 80)
    assert [lay_out(siblings, pack).num_tokens for pack in packs] == [100 + 8 * 5]
    few = pack_trees(siblings, sort_sequences(siblings, 1), 20)
    assert [len(pack.sequences) for pack in few] == [3, 3, 2], "half of a budget beside the sequence that needs more"


def test_equal_rows_and_openings_of_others_take_no_room() -> None:
    sequences = [[1, 2, 3], [1, 2], [1, 2, 3], [1, 2, 3, 4]]
    forest = lay_out(sequences, sort_sequences(sequences))
    assert forest.token_ids_T.tolist() == [1, 2, 3, 4]
    assert forest.nodes == (Node(0, 4, 4),)


def test_short_openings_are_not_shared_but_long_ones_at_their_end_are() -> None:
    trunk = list(range(10))
    sequences = [[*trunk, 1, 50], [*trunk, 1, 60], [*trunk, 2], [0, 5]]
    order = sort_sequences(sequences, min_shared=4)
    forest = lay_out(sequences, order)
    # The token 1 that two sequences share after the trunk, and 0 before it, stand once for each sequence.
    assert sorted(order.shared) == [0, 0, 10, 10]
    assert forest.num_tokens == 10 + 2 + 2 + 1 + 2


@settings(deadline=None)
@given(sequences=st.lists(TOKENS, min_size=1, max_size=12), min_shared=st.integers(1, 6))
def test_each_row_lies_on_a_path_of_its_tokens(sequences: list[list[int]], min_shared: int) -> None:
    forest = lay_out(sequences, sort_sequences(sequences, min_shared))
    assert len(forest.paths) == len(sequences)
    for sequence, path in zip(sequences, forest.paths, strict=True):
        assert forest.token_ids_T[torch.from_numpy(path)].tolist() == sequence
        assert forest.positions_T[torch.from_numpy(path)].tolist() == list(range(len(sequence)))
    covered = [index for node in forest.nodes for index in range(node.start, node.stop)]
    assert covered == list(range(forest.num_tokens))
    if min_shared == 1:
        openings = {tuple(sequence[: length + 1]) for sequence in sequences for length in range(len(sequence))}
        assert forest.num_tokens == len(openings)


@settings(deadline=None)
@BUDGETS
def test_packs_hold_every_row_once_within_the_budget(
    sequences: list[list[int]], min_shared: int, max_tokens: int
) -> None:
    order = sort_sequences(sequences, min_shared)
    packs = pack_trees(sequences, order, max_tokens)
    assert sorted(index for pack in packs for index in pack.sequences) == list(range(len(sequences)))
    sizes = []
    for pack in packs:
        forest = lay_out(sequences, pack)
        sizes.append(forest.num_tokens)
        longest = max(len(sequences[index]) for index in pack.sequences)
        assert forest.num_tokens <= (max_tokens if longest <= max_tokens else longest + max_tokens // 2)
    if max_tokens >= lay_out(sequences, order).num_tokens:
        assert len(packs) == 1


def test_tree_above_the_budget_repeats_its_trunk() -> None:
    trunk = [5] * 10
    sequences = [[*trunk, leaf, leaf] for leaf in range(6)]
    packs = pack_trees(sequences, sort_sequences(sequences), 16)
    assert [len(pack.sequences) for pack in packs] == [3, 3]
    assert [lay_out(sequences, pack).num_tokens for pack in packs] == [16, 16]


@settings(deadline=None)
@BUDGETS
def test_a_cut_is_cheap_if_its_forests_hold_few_tokens_twice(
    sequences: list[list[int]], min_shared: int, max_tokens: int
) -> None:
    order = sort_sequences(sequences, min_shared)
    sizes = [lay_out(sequences, pack).num_tokens for pack in pack_trees(sequences, order, max_tokens)]
    whole = lay_out(sequences, order).num_tokens
    is_cheap = max(sizes) <= max_tokens and sum(sizes) <= (1 + MAX_REPEATED) * whole
    assert is_cheaply_cut(sequences, order, max_tokens) == is_cheap


def test_a_short_trunk_of_all_groups_is_cut_and_a_long_one_of_a_group_is_not() -> None:
    leaves = [[leaf] * 20 for leaf in range(8)]
    short, long = ([[5] * length + leaf for leaf in leaves] for length in (4, 40))
    assert is_cheaply_cut(short, sort_sequences(short, 1), 50)
    assert not is_cheaply_cut(long, sort_sequences(long, 1), 80)


def test_padding_is_a_tree_of_its_own() -> None:
    sequences = [[1, 2, 3]]
    forest = pad_forest(lay_out(sequences, sort_sequences(sequences)), 2)
    assert forest.ends_T.tolist() == [3, 3, 3, 5, 5]
    assert forest.positions_T.tolist() == [0, 1, 2, 0, 1]
    assert forest.nodes[-1] == Node(3, 5, 5)


@pytest.mark.parametrize("seed", range(3))
def test_order_of_rows_does_not_matter(seed: int) -> None:
    rng = random.Random(seed)
    sequences = [[rng.randrange(2) for _ in range(rng.randint(1, 9))] for _ in range(10)]
    shuffled = rng.sample(sequences, len(sequences))
    one, other = (lay_out(rows, sort_sequences(rows, 1)) for rows in (sequences, shuffled))
    assert torch.equal(one.token_ids_T, other.token_ids_T)
    assert torch.equal(one.ends_T, other.ends_T)
