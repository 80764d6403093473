"""Rows with advantages, and rows packed into padded micro-batches under a token budget.

Rows stay separate and are padded on the right: causal attention never looks there, so no mask is needed and a token's
log-probability does not depend on what its row is batched with.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from art_server.training.advantages import group_advantages
from art_server.training.task import Batch


@dataclass(frozen=True, slots=True)
class TrainRow:
    """A row cut to what its trained tokens need: the tokens before the last trained one."""

    token_ids: list[int]
    positions: list[int]
    """Index of the token that predicts each trained token: the one before it."""
    targets: list[int]
    """The trained tokens, as many as positions."""
    sampled_logprobs: list[float]
    advantage: float


@dataclass(frozen=True, slots=True)
class TrainRows:
    """What of a batch is trained, and how much of it is not."""

    rows: list[TrainRow]
    num_groups: int
    num_groups_trainable: int
    num_trajectories: int
    num_tokens: int
    """Trained tokens: the denominator of token normalisation."""
    num_tokens_unpredicted: int
    """Sampled tokens at position 0 of a row: nothing before them predicts them, so they cannot be trained."""


@dataclass(frozen=True, slots=True)
class MicroBatch:
    """B rows of at most T tokens, with N trained tokens among them."""

    token_ids_BT: torch.Tensor
    """int64, 0 at padding."""
    rows_N: torch.Tensor
    """int64: the row of each trained token."""
    positions_N: torch.Tensor
    """int64: the position whose output predicts it."""
    targets_N: torch.Tensor
    """int64: its id."""
    sampled_logprobs_N: torch.Tensor
    """float32: what the engine sampled it with, temperature 1."""
    advantages_N: torch.Tensor
    """float32: its trajectory's advantage."""
    num_tokens: int
    """Without padding."""

    def to(self, device: torch.device) -> "MicroBatch":
        return MicroBatch(
            token_ids_BT=self.token_ids_BT.to(device),
            rows_N=self.rows_N.to(device),
            positions_N=self.positions_N.to(device),
            targets_N=self.targets_N.to(device),
            sampled_logprobs_N=self.sampled_logprobs_N.to(device),
            advantages_N=self.advantages_N.to(device),
            num_tokens=self.num_tokens,
        )


def make_train_rows(batch: Batch) -> TrainRows:
    """The rows of all groups that carry signal, each with its trajectory's advantage.

    A group is trainable when its rewards differ and at least one of its tokens can be trained.
    Raises ValueError for a row whose log-probabilities and tokens differ in number, FloatingPointError for rewards
    beyond arithmetic.
    """
    rows: list[TrainRow] = []
    num_groups_trainable = num_tokens_unpredicted = 0
    for group in batch.groups:
        advantages_G = group_advantages([each.reward for each in group.trajectories])
        if advantages_G is None:
            continue
        group_rows: list[TrainRow] = []
        for trajectory, advantage in zip(group.trajectories, advantages_G, strict=True):
            for row in trajectory.rows:
                if len(row.token_ids) != len(row.logprobs):
                    raise ValueError(
                        f"a row has {len(row.token_ids)} tokens and {len(row.logprobs)} log-probabilities"
                    )
                num_tokens_unpredicted += bool(row.logprobs) and row.logprobs[0] is not None
                train_row = _cut_row(row.token_ids, row.logprobs, advantage)
                if train_row.targets:
                    group_rows.append(train_row)
        num_groups_trainable += bool(group_rows)
        rows += group_rows
    return TrainRows(
        rows=rows,
        num_groups=len(batch.groups),
        num_groups_trainable=num_groups_trainable,
        num_trajectories=sum(len(group.trajectories) for group in batch.groups),
        num_tokens=sum(len(row.targets) for row in rows),
        num_tokens_unpredicted=num_tokens_unpredicted,
    )


def make_micro_batches(rows: Sequence[TrainRow], max_tokens: int) -> list[MicroBatch]:
    """The rows, longest first, in micro-batches of at most `max_tokens` tokens with padding.

    A row above the budget goes alone. The longest come first so that a batch that does not fit fails at once.
    """
    plans: list[list[TrainRow]] = []
    for row in sorted(rows, key=lambda row: len(row.token_ids), reverse=True):
        if plans and (len(plans[-1]) + 1) * len(plans[-1][0].token_ids) <= max_tokens:
            plans[-1].append(row)
        else:
            plans.append([row])
    return [_pad(plan) for plan in plans]


def _cut_row(token_ids: list[int], logprobs: list[float | None], advantage: float) -> TrainRow:
    trained = [
        (index, value) for index, value in enumerate(logprobs) if index > 0 and value is not None
    ]
    return TrainRow(
        token_ids=token_ids[: trained[-1][0]] if trained else [],
        positions=[index - 1 for index, _ in trained],
        targets=[token_ids[index] for index, _ in trained],
        sampled_logprobs=[value for _, value in trained],
        advantage=advantage,
    )


def _pad(rows: Sequence[TrainRow]) -> MicroBatch:
    token_ids_BT = torch.zeros(
        len(rows), max(len(row.token_ids) for row in rows), dtype=torch.int64
    )
    for index, row in enumerate(rows):
        token_ids_BT[index, : len(row.token_ids)] = torch.tensor(row.token_ids)
    return MicroBatch(
        token_ids_BT=token_ids_BT,
        rows_N=torch.tensor([index for index, row in enumerate(rows) for _ in row.targets]),
        positions_N=torch.tensor([position for row in rows for position in row.positions]),
        targets_N=torch.tensor([target for row in rows for target in row.targets]),
        sampled_logprobs_N=torch.tensor([value for row in rows for value in row.sampled_logprobs]),
        advantages_N=torch.tensor([row.advantage for row in rows for _ in row.targets]),
        num_tokens=sum(len(row.token_ids) for row in rows),
    )
