"""Prefix trees: sequences with equal beginnings, whose common tokens are stored once.

Sequences are sorted, so that each shares its longest common prefix with a neighbour, and laid out one after the other,
each without the prefix that it shares with its predecessor. This is the forest in depth-first order. A token has two
numbers:

    position  its depth, which is the position that the engine's rotary embedding used
    end       the index after the last token of its subtree

Query q attends to key k exactly when k <= q < end[k]. Shared prompts, turns and beginnings of completions are all the
same case, at any depth and across groups.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

import numpy as np
import torch

MIN_SHARED_TOKENS = 8
"""Fewer tokens are not shared: on a CPU the calls for another node cost more than computing these tokens twice."""

MAX_REPEATED = 0.25
"""The largest share of tokens that cuts may repeat. The alternative is gradient checkpointing, whose second forward is about
a third of a step more."""


@dataclass(frozen=True, slots=True)
class Node:
    """A run of tokens without a branch, [start, stop). Its descendants are [stop, end)."""

    start: int
    stop: int
    end: int


@dataclass(frozen=True, slots=True)
class Forest:
    """Prefix trees of T tokens in depth-first order."""

    token_ids_T: torch.Tensor
    """int64."""
    positions_T: torch.Tensor
    """int64: depth, from 0 at a root."""
    ends_T: torch.Tensor
    """int64: the index after the last token of the token's subtree."""
    nodes: tuple[Node, ...]
    """In depth-first order; each token is in exactly one node."""
    paths: list[np.ndarray]
    """For each laid-out sequence, by ascending index, the index in the forest of each of its tokens."""

    @property
    def num_tokens(self) -> int:
        return len(self.token_ids_T)


@dataclass(frozen=True, slots=True)
class SequenceOrder:
    """The order in which sequences are laid out. `order_index` is a sequence's index in this order."""

    sequences: list[int]
    """Indices of the sequences."""
    shared: list[int]
    """Length of the prefix that each sequence shares with the sequence before it in this order."""


def sort_sequences(sequences: Sequence[list[int]], min_shared: int = MIN_SHARED_TOKENS) -> SequenceOrder:
    """The order that puts sequences with equal beginnings next to each other.

    A prefix that would make a branch of fewer than `min_shared` tokens is not shared.
    """
    order = sorted(range(len(sequences)), key=lambda index: sequences[index])
    arrays = [np.asarray(sequences[index], dtype=np.int64) for index in order]
    shared = [_common_length(one, other) for one, other in pairwise(arrays)]
    # A sequence that continues where the sequence before it ends makes no branch.
    # One sequence more than neighbours: nothing follows the last one.
    is_free = [length == len(array) for length, array in zip(shared, arrays, strict=False)]
    shared = _drop_short_branches(shared, is_free, min_shared)
    shared = _drop_short_branches(shared[::-1], is_free[::-1], min_shared)[::-1]
    return SequenceOrder(order, [0, *shared] if order else [])


def unshared(sequences: Sequence[list[int]]) -> SequenceOrder:
    """The order, longest first, in which no sequence shares tokens."""
    order = sorted(range(len(sequences)), key=lambda index: len(sequences[index]), reverse=True)
    return SequenceOrder(order, [0] * len(order))


def lay_out(sequences: Sequence[list[int]], order: SequenceOrder) -> Forest:
    """The forest of the sequences in `order`, which may leave some out."""
    length = max((len(sequences[index]) for index in order.sequences), default=0)
    total = sum(len(sequences[index]) for index in order.sequences) - sum(order.shared)
    token_ids = np.zeros(total, dtype=np.int64)
    positions = np.zeros(total, dtype=np.int64)
    ends = np.full(total, total, dtype=np.int64)
    path = np.zeros(length, dtype=np.int64)
    paths: dict[int, np.ndarray] = {}
    filled = path_length = 0
    for index, shared in zip(order.sequences, order.shared, strict=True):
        sequence = np.asarray(sequences[index], dtype=np.int64)
        ends[path[shared:path_length]] = filled
        stop = filled + len(sequence) - shared
        token_ids[filled:stop] = sequence[shared:]
        positions[filled:stop] = np.arange(shared, len(sequence))
        path[shared : len(sequence)] = np.arange(filled, stop)
        # The next sequence is written over this one.
        paths[index] = path[: len(sequence)].copy()
        filled, path_length = stop, len(sequence)
    return Forest(
        token_ids_T=torch.from_numpy(token_ids),
        positions_T=torch.from_numpy(positions),
        ends_T=torch.from_numpy(ends),
        nodes=_nodes(positions, ends),
        paths=[paths[index] for index in sorted(paths)],
    )


def pack_trees(
    sequences: Sequence[list[int]], order: SequenceOrder, max_tokens: int, fill_tokens: int | None = None
) -> list[SequenceOrder]:
    """The order divided into forests of at most `max_tokens` tokens each; forests with the largest trees come first.

    Trees are packed first-fit into forests of at most `fill_tokens` (default: `max_tokens`); a larger tree is alone.
    A tree above `max_tokens` is cut between sequences, and each part repeats the trunk. A sequence above it needs more than
    the budget in any case; it takes along what shares its beginning and adds at most half of the budget.
    """
    forests: list[tuple[int, list[int]]] = []
    parts = _cut_trees(sequences, order, max_tokens)
    for size, order_indices in sorted(parts, key=lambda part: part[0], reverse=True):
        for slot, (filled, held) in enumerate(forests):
            if filled + size <= min(max_tokens, fill_tokens or max_tokens):
                forests[slot] = (filled + size, held + order_indices)
                break
        else:
            forests.append((size, order_indices))
    return [_suborder(order, sorted(order_indices)) for _, order_indices in forests]


def is_cheaply_cut(sequences: Sequence[list[int]], order: SequenceOrder, max_tokens: int) -> bool:
    """Whether forests of at most `max_tokens` hold each sequence whole, and all of them together repeat at most
    MAX_REPEATED of the tokens."""
    sizes = [size for size, _ in _cut_trees(sequences, order, max_tokens)]
    unique = sum(map(len, sequences)) - sum(order.shared)
    return max(sizes, default=0) <= max_tokens and sum(sizes) <= (1 + MAX_REPEATED) * unique


def pack_padded(sequences: Sequence[list[int]], order: SequenceOrder, max_tokens: int) -> list[SequenceOrder]:
    """An order of unshared sequences, divided into batches of at most `max_tokens` tokens with padding."""
    batches: list[list[int]] = []
    for order_index, index in enumerate(order.sequences):
        longest = len(sequences[order.sequences[batches[-1][0]]]) if batches else len(sequences[index])
        if batches and (len(batches[-1]) + 1) * longest <= max_tokens:
            batches[-1].append(order_index)
        else:
            batches.append([order_index])
    return [_suborder(order, order_indices) for order_indices in batches]


def pad_forest(forest: Forest, num_tokens: int) -> Forest:
    """The forest, padded with a tree of `num_tokens` dummy tokens that no other token attends to."""
    start, stop = forest.num_tokens, forest.num_tokens + num_tokens
    return Forest(
        token_ids_T=torch.cat([forest.token_ids_T, torch.zeros(num_tokens, dtype=torch.int64)]),
        positions_T=torch.cat([forest.positions_T, torch.arange(num_tokens)]),
        ends_T=torch.cat([forest.ends_T, torch.full((num_tokens,), stop)]),
        nodes=(*forest.nodes, Node(start, stop, stop)),
        paths=forest.paths,
    )


def _cut_trees(sequences: Sequence[list[int]], order: SequenceOrder, max_tokens: int) -> list[tuple[int, list[int]]]:
    """The parts of all trees: each part's size and indices in the order. A tree within the budget is one part; a larger tree is cut."""
    parts: list[tuple[int, list[int]]] = []
    start = 0
    while start < len(order.sequences):
        stop = start + 1
        while stop < len(order.sequences) and order.shared[stop] > 0:
            stop += 1
        parts += _cut_tree(sequences, order, start, stop, max_tokens)
        start = stop
    return parts


def _cut_tree(
    sequences: Sequence[list[int]], order: SequenceOrder, start: int, stop: int, max_tokens: int
) -> list[tuple[int, list[int]]]:
    """The tree [start, stop) cut into parts within the budget: each part's size and indices in the order."""
    parts: list[tuple[int, list[int]]] = []
    most = max_tokens
    for order_index in range(start, stop):
        length = len(sequences[order.sequences[order_index]])
        added = length - order.shared[order_index]
        if parts and parts[-1][0] + added <= most:
            parts[-1] = (parts[-1][0] + added, [*parts[-1][1], order_index])
        else:
            parts.append((length, [order_index]))
            most = max_tokens if length <= max_tokens else length + max_tokens // 2
    return parts


def _suborder(order: SequenceOrder, order_indices: list[int]) -> SequenceOrder:
    """The order of the sequences at these indices alone. Two of its sequences share the shortest prefix that neighbours
    between them share."""
    shared = [min(order.shared[before + 1 : order_index + 1]) for before, order_index in pairwise(order_indices)]
    return SequenceOrder(
        [order.sequences[order_index] for order_index in order_indices], [0, *shared] if order_indices else []
    )


def _drop_short_branches(shared: list[int], is_free: list[bool], min_shared: int) -> list[int]:
    """The shared lengths, each lowered to the nearest branch above it if that is less than `min_shared` tokens away.

    Only branches of earlier entries count, so this function is called once in each direction. `is_free` marks entries that make
    no branch.
    """
    kept: list[int] = []
    branches: list[int] = []
    """Depths at which the previous sequence's path branches, ascending."""
    for length, free in zip(shared, is_free, strict=True):
        while branches and branches[-1] > length:
            branches.pop()
        nearest = branches[-1] if branches else 0
        if not free and nearest < length < nearest + min_shared:
            length = nearest
        elif not free and length > nearest:
            branches.append(length)
        kept.append(length)
    return kept


def _common_length(one: np.ndarray, other: np.ndarray) -> int:
    length = min(len(one), len(other))
    different = one[:length] != other[:length]
    return int(different.argmax()) if different.any() else length


def _nodes(positions: np.ndarray, ends: np.ndarray) -> tuple[Node, ...]:
    """The maximal runs of tokens with consecutive depths and the same end."""
    if not len(ends):
        return ()
    begins = np.flatnonzero((np.diff(ends) != 0) | (np.diff(positions) != 1)) + 1
    starts = [0, *begins.tolist()]
    stops = [*begins.tolist(), len(ends)]
    return tuple(Node(start, stop, int(ends[start])) for start, stop in zip(starts, stops, strict=True))
