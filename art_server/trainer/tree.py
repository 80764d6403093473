"""The token tree: rows that begin alike stand in memory once.

Rows are sorted, so that what two neighbours share is their longest common opening, and laid out one after the other,
each from where it leaves its predecessor: that is the forest depth-first. A token then needs two numbers:

    position  its depth, which is what the engine's rotary embedding saw
    end       the index after the last token of its subtree

and query q sees key k exactly when k <= q < end[k]. Prompts, turns, branches and equal openings of completions are all
the same case, at any depth and across groups.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

import numpy as np
import torch

MIN_SHARED_TOKENS = 8
"""A branch is not made for fewer tokens than these: on a CPU a node costs more calls than so few tokens cost."""


@dataclass(frozen=True, slots=True)
class Node:
    """A run of tokens without a branch: [start, stop), with its descendants at [stop, end)."""

    start: int
    stop: int
    end: int


@dataclass(frozen=True, slots=True)
class Forest:
    """Rows laid out depth-first over T tokens."""

    token_ids_T: torch.Tensor
    """int64."""
    positions_T: torch.Tensor
    """int64: depth, from 0 at a root."""
    ends_T: torch.Tensor
    """int64: the index after the last token of the token's subtree."""
    nodes: tuple[Node, ...]
    """Depth-first, covering every token once."""
    paths: list[np.ndarray]
    """For each row, in the order given, the index of each of its tokens."""

    @property
    def num_tokens(self) -> int:
        return len(self.token_ids_T)


@dataclass(frozen=True, slots=True)
class Order:
    """Rows in the order in which a tree lays them out."""

    rows: list[int]
    """Indices of the rows, sorted by their tokens."""
    shared: list[int]
    """How many first tokens each row shares with the one before it in this order."""


def sort_rows(rows: Sequence[list[int]], min_shared: int = MIN_SHARED_TOKENS) -> Order:
    """The order that brings rows with the same opening together.

    Openings that would make a branch of fewer than `min_shared` tokens are not shared.
    """
    order = sorted(range(len(rows)), key=lambda index: rows[index])
    arrays = [np.asarray(rows[index], dtype=np.int64) for index in order]
    shared = [_common_length(one, other) for one, other in pairwise(arrays)]
    # A row that goes on where the one before it ends makes no branch.
    is_free = [length == len(array) for length, array in zip(shared, arrays, strict=False)]
    shared = _drop_short_branches(shared, is_free, min_shared)
    shared = _drop_short_branches(shared[::-1], is_free[::-1], min_shared)[::-1]
    return Order(order, [0, *shared] if order else [])


def unshared(rows: Sequence[list[int]]) -> Order:
    """Every row a tree of its own, the longest first."""
    order = sorted(range(len(rows)), key=lambda index: len(rows[index]), reverse=True)
    return Order(order, [0] * len(order))


def lay_out(rows: Sequence[list[int]], order: Order) -> Forest:
    """The rows of `order` (some of those it was made for, in its order) as a forest."""
    length = max((len(rows[index]) for index in order.rows), default=0)
    total = sum(len(rows[index]) for index in order.rows) - sum(order.shared)
    token_ids = np.zeros(total, dtype=np.int64)
    positions = np.zeros(total, dtype=np.int64)
    ends = np.full(total, total, dtype=np.int64)
    path = np.zeros(length, dtype=np.int64)
    paths: dict[int, np.ndarray] = {}
    filled = path_length = 0
    for index, shared in zip(order.rows, order.shared, strict=True):
        row = np.asarray(rows[index], dtype=np.int64)
        ends[path[shared:path_length]] = filled
        stop = filled + len(row) - shared
        token_ids[filled:stop] = row[shared:]
        positions[filled:stop] = np.arange(shared, len(row))
        path[shared : len(row)] = np.arange(filled, stop)
        paths[index] = path[: len(row)].copy()
        filled, path_length = stop, len(row)
    return Forest(
        token_ids_T=torch.from_numpy(token_ids),
        positions_T=torch.from_numpy(positions),
        ends_T=torch.from_numpy(ends),
        nodes=_nodes(positions, ends),
        paths=[paths[index] for index in sorted(paths)],
    )


def pack(
    rows: Sequence[list[int]], order: Order, max_tokens: int, fill_tokens: int | None = None
) -> list[Order]:
    """The order cut into forests of at most `max_tokens` tokens each, largest first.

    Whole trees go first-fit into forests of at most `fill_tokens` (by default as many as may be). A tree above the budget is cut between rows, and each part repeats the
    trunk; a row above the budget goes alone.
    """
    parts: list[tuple[int, list[int]]] = []
    start = 0
    while start < len(order.rows):
        stop = start + 1
        while stop < len(order.rows) and order.shared[stop] > 0:
            stop += 1
        parts += _cut_tree(rows, order, start, stop, max_tokens)
        start = stop
    forests: list[tuple[int, list[int]]] = []
    for size, places in sorted(parts, key=lambda part: part[0], reverse=True):
        for slot, (used, held) in enumerate(forests):
            if used + size <= min(max_tokens, fill_tokens or max_tokens):
                forests[slot] = (used + size, held + places)
                break
        else:
            forests.append((size, places))
    return [_suborder(order, sorted(places)) for _, places in forests]


def largest_tree(rows: Sequence[list[int]], order: Order) -> int:
    """Tokens of the largest tree: what a forest must hold for nothing to be computed twice."""
    largest = size = 0
    for index, shared in zip(order.rows, order.shared, strict=True):
        size = size + len(rows[index]) - shared if shared else len(rows[index])
        largest = max(largest, size)
    return largest


def pack_padded(rows: Sequence[list[int]], order: Order, max_tokens: int) -> list[Order]:
    """Unshared rows, longest first, in batches whose padded size is at most `max_tokens`."""
    batches: list[list[int]] = []
    for place, index in enumerate(order.rows):
        longest = len(rows[order.rows[batches[-1][0]]]) if batches else len(rows[index])
        if batches and (len(batches[-1]) + 1) * longest <= max_tokens:
            batches[-1].append(place)
        else:
            batches.append([place])
    return [_suborder(order, places) for places in batches]


def pad_forest(forest: Forest, num_tokens: int) -> Forest:
    """The forest with a tree of so many tokens at its end that nothing looks at."""
    start, stop = forest.num_tokens, forest.num_tokens + num_tokens
    return Forest(
        token_ids_T=torch.cat([forest.token_ids_T, torch.zeros(num_tokens, dtype=torch.int64)]),
        positions_T=torch.cat([forest.positions_T, torch.arange(num_tokens)]),
        ends_T=torch.cat([forest.ends_T, torch.full((num_tokens,), stop)]),
        nodes=(*forest.nodes, Node(start, stop, stop)),
        paths=forest.paths,
    )


def _cut_tree(
    rows: Sequence[list[int]], order: Order, start: int, stop: int, max_tokens: int
) -> list[tuple[int, list[int]]]:
    """Runs of the tree's rows within the budget, with their sizes."""
    parts: list[tuple[int, list[int]]] = []
    for place in range(start, stop):
        length = len(rows[order.rows[place]])
        added = length - order.shared[place]
        if parts and parts[-1][0] + added <= max_tokens:
            parts[-1] = (parts[-1][0] + added, [*parts[-1][1], place])
        else:
            parts.append((length, [place]))
    return parts


def _suborder(order: Order, places: list[int]) -> Order:
    """Two rows share what all rows between them share."""
    shared = [min(order.shared[before + 1 : place + 1]) for before, place in pairwise(places)]
    return Order([order.rows[place] for place in places], [0, *shared] if places else [])


def _drop_short_branches(shared: list[int], is_free: list[bool], min_shared: int) -> list[int]:
    """Lengths lowered to the nearest branch above on the path, where that is nearer than `min_shared`.

    It sees the branches that earlier entries made; called once in each direction it sees all.
    """
    kept: list[int] = []
    branches: list[int] = []
    """Depths at which the path of the row before branches, ascending."""
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
    """Maximal runs of consecutive depth with the same end."""
    if not len(ends):
        return ()
    begins = np.flatnonzero((np.diff(ends) != 0) | (np.diff(positions) != 1)) + 1
    starts = [0, *begins.tolist()]
    stops = [*begins.tolist(), len(ends)]
    return tuple(
        Node(start, stop, int(ends[start])) for start, stop in zip(starts, stops, strict=True)
    )
