import random
from typing import Any

import pytest
import torch
import torch._dynamo
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.nn.functional import scaled_dot_product_attention

from art_server.trainer import attention as attention_module
from art_server.trainer.attention import (
    ForestAttention,
    flex_padding,
    make_block_mask,
    make_segments,
    mask_function,
    tree_attention,
)
from art_server.trainer.facts import default_kind
from art_server.trainer.tree import Forest, lay_out, pad_forest, sort_sequences

CPU = torch.device("cpu")


def random_forest(seed: int, max_length: int = 30) -> Forest:
    rng = random.Random(seed)
    sequences: list[list[int]] = []
    for _ in range(rng.randint(1, 10)):
        opening = rng.choice(sequences)[: rng.randint(0, max_length)] if sequences else []
        sequences.append(opening + [rng.randrange(3) for _ in range(rng.randint(1, max_length // 2))])
    return lay_out(sequences, sort_sequences(sequences, min_shared=rng.choice([1, 4])))


def test_trees_use_flex_attention_on_cuda() -> None:
    assert default_kind(torch.device("cuda")) == "flex"
    assert default_kind(CPU) == "segments"


def test_no_model_falls_back_to_all_scores_unseen(monkeypatch: pytest.MonkeyPatch) -> None:
    """Above torch's recompile limit, or after an error where Unsloth was imported, FlexAttention would compute heads x T x T
    scores."""
    monkeypatch.setattr(attention_module, "_compiled_flex", [])
    monkeypatch.setattr(torch, "compile", lambda function, **_: function)
    with torch._dynamo.config.patch(recompile_limit=8, fail_on_recompile_limit_hit=False, suppress_errors=True):
        attention_module._flex()
        assert torch._dynamo.config.recompile_limit == attention_module.MAX_GRAPHS > 8
        assert torch._dynamo.config.fail_on_recompile_limit_hit
        assert not torch._dynamo.config.suppress_errors


def brute_force_mask(forest: Forest, window: int | None) -> torch.Tensor:
    """From the sequences: a token sees those before it on its own path, nearer than the window."""
    mask = torch.zeros(forest.num_tokens, forest.num_tokens, dtype=torch.bool)
    for path in forest.paths:
        for depth, query in enumerate(path.tolist()):
            first = 0 if window is None else max(0, depth - window + 1)
            mask[query, path[first : depth + 1].tolist()] = True
    return mask


@settings(deadline=None)
@given(seed=st.integers(0, 10_000), window=st.sampled_from([None, 1, 2, 5, 11]))
def test_segments_cover_every_visible_pair_once(seed: int, window: int | None) -> None:
    forest = random_forest(seed)
    covered = torch.zeros(forest.num_tokens, forest.num_tokens, dtype=torch.int64)
    for segment in make_segments(ForestAttention.of(forest, "segments", CPU), window):
        height, width = segment.query_stop - segment.query, segment.key_stop - segment.key
        sees = torch.ones(height, width, dtype=torch.bool)
        if segment.is_causal:
            sees = sees.tril()
        if segment.mask is not None:
            sees &= segment.mask == 0
        covered[segment.query : segment.query_stop, segment.key : segment.key_stop] += sees
    assert torch.equal(covered, brute_force_mask(forest, window).long())


@settings(deadline=None, max_examples=30)
@given(
    seed=st.integers(0, 10_000),
    window=st.sampled_from([None, 1, 3, 8]),
    num_key_heads=st.sampled_from([1, 2, 4]),
)
def test_segments_equal_dense_attention_forward_and_backward(seed: int, window: int | None, num_key_heads: int) -> None:
    forest = random_forest(seed)
    length = forest.num_tokens
    generator = torch.Generator().manual_seed(seed)
    query, key, value = (
        torch.randn(1, heads, length, 8, generator=generator, requires_grad=True)
        for heads in (4, num_key_heads, num_key_heads)
    )
    slopes = torch.randn(1, length, 4, 8, generator=generator)
    attention = ForestAttention.of(forest, "segments", CPU)
    ours, _ = tree_attention(
        torch.nn.Module(),
        query,
        key,
        value,
        None,
        scaling=0.3,
        sliding_window=window,
        forest=attention,
    )
    mask = brute_force_mask(forest, window)
    dense = scaled_dot_product_attention(query, key, value, attn_mask=mask, scale=0.3, enable_gqa=True).transpose(1, 2)
    results = [[out, *torch.autograd.grad(out, (query, key, value), slopes)] for out in (ours, dense)]
    for one, other in zip(*results, strict=True):
        torch.testing.assert_close(one, other, atol=2e-5, rtol=1e-4)


@pytest.mark.parametrize("window", [None, 5])
def test_flex_mask_is_that_of_the_rows(window: int | None) -> None:
    from torch.nn.attention.flex_attention import create_mask

    forest = random_forest(3)
    attention = ForestAttention.of(forest, "flex", CPU)
    length = forest.num_tokens
    mask = create_mask(mask_function(attention, window), None, None, length, length, "cpu")
    assert torch.equal(mask[0, 0], brute_force_mask(forest, window))


def blocks_of(numbers: torch.Tensor, indices: torch.Tensor) -> list[set[int]]:
    """For each block of queries its blocks of keys."""
    sequences = zip(numbers[0, 0].tolist(), indices[0, 0].tolist(), strict=True)
    return [set(sequence[:number]) for number, sequence in sequences]


@settings(deadline=None, max_examples=25)
@given(seed=st.integers(0, 10_000), window=st.sampled_from([None, 100, 300]))
def test_block_mask_is_that_which_torch_finds_by_looking_at_every_pair(seed: int, window: int | None) -> None:
    from torch.nn.attention.flex_attention import create_block_mask

    forest = random_forest(seed, max_length=500)
    forest = pad_forest(forest, flex_padding(forest.num_tokens))
    length = forest.num_tokens
    assert length % 128 == 0 and length >= 256
    attention = ForestAttention.of(forest, "flex", CPU)
    ours: Any = make_block_mask(attention, window)
    sees = mask_function(attention, window)
    theirs: Any = create_block_mask(sees, None, None, length, length, "cpu")
    assert ours.shape == theirs.shape and ours.BLOCK_SIZE == theirs.BLOCK_SIZE
    partial, full = (
        blocks_of(ours.kv_num_blocks, ours.kv_indices),
        blocks_of(ours.full_kv_num_blocks, ours.full_kv_indices),
    )
    assert full == blocks_of(theirs.full_kv_num_blocks, theirs.full_kv_indices)
    needed = blocks_of(theirs.kv_num_blocks, theirs.kv_indices)
    if window is None:
        assert partial == needed
    # A window is told by a block's first and last position: some blocks are looked at in vain.
    assert all(few <= many for few, many in zip(needed, partial, strict=True))


def test_block_mask_of_a_long_forest_takes_no_memory() -> None:
    """100,000 tokens: torch's own way would take 100 GB."""
    sequences = [[0] * 20_000 + [number] * 1000 for number in range(1, 81)]
    forest = lay_out(sequences, sort_sequences(sequences))
    forest = pad_forest(forest, flex_padding(forest.num_tokens))
    mask: Any = make_block_mask(ForestAttention.of(forest, "flex", CPU), None)
    seen = mask.kv_num_blocks.sum() + mask.full_kv_num_blocks.sum()
    assert seen <= (forest.num_tokens / 128) ** 2 / 4


def test_long_node_under_a_short_window_needs_no_large_mask() -> None:
    sequence = [[token % 7 for token in range(4000)]]
    attention = ForestAttention.of(lay_out(sequence, sort_sequences(sequence)), "segments", CPU)
    segments = make_segments(attention, 100)
    assert max(segment.mask.numel() for segment in segments if segment.mask is not None) <= 100 * 100
    pairs = sum((segment.query_stop - segment.query) * (segment.key_stop - segment.key) for segment in segments)
    assert pairs <= 4000 * 200


@pytest.mark.parametrize("options", [{"softcap": 30.0}, {"s_aux": torch.zeros(4)}, {"dropout": 0.1}, {"forest": None}])
def test_attention_that_trees_do_not_have_is_refused(options: dict) -> None:
    forest = ForestAttention.of(random_forest(0), "segments", CPU)
    states = torch.randn(1, 4, len(forest.ends_T), 8)
    with pytest.raises(NotImplementedError):
        tree_attention(torch.nn.Module(), states, states, states, None, **{"forest": forest, **options})


def test_single_row_is_plain_causal_attention() -> None:
    sequence = [[1, 2, 3, 4, 5]]
    forest = ForestAttention.of(lay_out(sequence, sort_sequences(sequence)), "segments", CPU)
    states = torch.randn(1, 2, 5, 8)
    out, _ = tree_attention(torch.nn.Module(), states, states, states, None, forest=forest)
    expected = scaled_dot_product_attention(states, states, states, is_causal=True)
    torch.testing.assert_close(out, expected.transpose(1, 2), atol=1e-6, rtol=1e-5)
