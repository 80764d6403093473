"""The tokens of a trained step: the sequences of a rollout, and a group's prefix tree.

Reads the record that the trainer writes (`trainer/token_record.py`).
"""

import contextlib
import itertools
import json
import math
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
from safetensors import SafetensorError, safe_open

from art_server.errors import NotFound
from art_server.store.model_folder import ModelFolder

NUMBERS = ("sampled_logprobs", "trainer_logprobs", "advantages", "ratios", "entropies")
NUM_DIGITS = 5
Row = dict[str, Any]


class TokenFile:
    """The record of a step's tokens, opened. Reads only the tokens that are requested."""

    def __init__(self, opened: Any):  # Any: safetensors has no types
        self._opened = opened
        metadata = opened.metadata()
        self._texts: dict[str, str] = json.loads(metadata["texts"])
        groups = json.loads(metadata["groups"])
        self.groups: dict[int, list[list[list[int]]]] = {group["number"]: group["trajectories"] for group in groups}
        """By group number: for each trajectory, [start, stop) of its sequences."""

    def column(self, name: str, start: int, stop: int) -> np.ndarray:
        return self._opened.get_slice(f"{name}_T")[start:stop]

    def text(self, token_ids: Sequence[int]) -> str:
        return "".join(map(self._text, token_ids))

    def _text(self, token: int) -> str:
        return self._texts.get(str(token), f"⟨{token}⟩")

    def sequences(self, group: int, rollout: int) -> list[Row]:
        """The token sequences of a rollout, column by column; None where a token has no number."""
        rollouts = self.groups.get(group, [])
        if rollout >= len(rollouts):
            return []
        return [self._sequence(start, stop) for start, stop in rollouts[rollout]]

    def _sequence(self, start: int, stop: int) -> Row:
        ids: list[int] = self.column("token_ids", start, stop).tolist()
        row: Row = {"ids": ids, "texts": list(map(self._text, ids))}
        for name in NUMBERS:
            values: list[float] = self.column(name, start, stop).tolist()
            row[name] = [round(value, NUM_DIGITS) if math.isfinite(value) else None for value in values]
        row["is_clipped"] = self.column("is_clipped", start, stop).astype(bool).tolist()
        return row


@contextlib.contextmanager
def opened_tokens(folder: ModelFolder, split: str, step: int) -> Iterator[TokenFile | None]:
    """The record of a trained step's tokens; None if there is none.

    Raises:
        NotFound: the file of the record is broken.
    """
    file = folder.tokens_file(step)
    if split != "train" or not file.exists():
        yield None
        return
    try:
        with safe_open(file, "numpy") as opened:
            yield TokenFile(opened)
    except (SafetensorError, OSError) as error:
        raise NotFound(
            f"the record of the tokens of step {step} cannot be read ({error}): move {file.name} away to see the "
            "rollouts without it",
            code="broken_record",
            param="step",
        ) from error


def tree(folder: ModelFolder, step: int, group: int) -> Row:
    """The prefix tree of a trained group. A node is a run of tokens that the same rollouts share; `trained` has the parts of
    the run that are trained in any of these rollouts.

    Raises:
        NotFound: the step has no record of tokens, or no such group.
    """
    with opened_tokens(folder, "train", step) as record:
        trajectories = None if record is None else record.groups.get(group)
        if record is None or trajectories is None:
            raise NotFound(
                f"there is no record of the tokens of group {group} at step {step}",
                code="unknown_group",
                param="group",
            )
        leaves = [(rollout, span) for rollout, sequences in enumerate(trajectories) for span in sequences]
        tokens = [record.column("token_ids", *span).tolist() for _, span in leaves]
        # The trainer writes NaN for tokens that it does not train.
        is_trained = [np.isfinite(record.column("trainer_logprobs", *span)) for _, span in leaves]
        nodes = _grow(tokens)
        for node in nodes:
            inside, members = slice(node["start"], node["stop"]), node.pop("sequences")
            node["text"] = record.text(tokens[members[0]][inside])
            trained = np.logical_or.reduce([is_trained[index][inside] for index in members])
            node["num_trained"] = int(trained.sum())
            node["trained"] = _spans(trained, node["start"])
            node["rollouts"] = sorted({leaves[index][0] for index in members})
    return {
        "nodes": nodes,
        "num_sequence_tokens": sum(map(len, tokens)),
        "num_tree_tokens": sum(node["stop"] - node["start"] for node in nodes),
    }


def _spans(is_marked: np.ndarray, first: int) -> list[tuple[int, int]]:
    """The runs of marked tokens, [start, stop), counted from `first`."""
    edges = np.flatnonzero(np.diff(np.concatenate([[False], is_marked, [False]]))) + first
    return list(zip(edges[::2].tolist(), edges[1::2].tolist(), strict=True))


def _grow(tokens: Sequence[list[int]]) -> list[Row]:
    """The nodes of the sequences' prefix tree. Each node comes after its parent, and has the indices of its sequences."""
    nodes: list[Row] = []
    order = sorted(range(len(tokens)), key=lambda index: tokens[index])
    waiting: list[tuple[int | None, int, list[int]]] = [(None, 0, order)]
    while waiting:
        parent, start, members = waiting.pop()
        longer = [index for index in members if len(tokens[index]) > start]
        for _, same in itertools.groupby(longer, key=lambda index: tokens[index][start]):
            children = list(same)
            first, last = tokens[children[0]], tokens[children[-1]]
            stop = start + 1  # `order` is sorted: all sequences share what the first and the last share
            shortest = min(len(tokens[index]) for index in children)
            while stop < shortest and first[stop] == last[stop]:
                stop += 1
            node = {"id": len(nodes), "parent": parent, "start": start, "stop": stop}
            nodes.append(node | {"sequences": children})
            waiting.append((node["id"], stop, children))
    return nodes
