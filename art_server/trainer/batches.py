"""From a batch to what is trained: rows, their uses of tokens, and micro-batches of trees under a token budget.

A *prediction* is a (place in the forest, next token, what it was sampled from) of which the model gives one
log-probability. A *use* is one trajectory's sampled token: several uses share a prediction when trajectories sampled the
same token after the same tokens, from the same distribution, each with its own advantage and sampled log-probability.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields
from typing import Any

import numpy as np
import torch

from art.wire import LossConfig
from art_server.shared.advantages import (
    group_advantages,
    has_signal,
    is_masked,
    penalised_rewards,
    row_advantages,
    scale_over_batch,
    trained_positions,
    turn_advantages,
    turn_rewards,
)
from art_server.shared.tasks import Batch, Row
from art_server.trainer.distributions import RAW, SampledFrom, decode_distributions
from art_server.trainer.tree import (
    MIN_SHARED_TOKENS,
    Forest,
    largest_tree,
    lay_out,
    pack,
    pack_padded,
    sort_rows,
    unshared,
)


@dataclass(frozen=True, slots=True)
class TrainRow:
    """A row cut to what its trained tokens need: the tokens before the last trained one."""

    token_ids: list[int]
    positions: list[int]
    """Index of the token that predicts each trained token: the one before it."""
    targets: list[int]
    """The trained tokens, as many as positions."""
    sampled_logprobs: list[float | None]
    """None: unknown, the trainer's own at the start of the job stands for it."""
    distributions: list[int]
    """What each trained token was sampled from: an index into `TrainRows.table`, or RAW."""
    steps: list[int | None]
    """The model's step that sampled each trained token, by a record of the ledger; None where there is none."""
    advantages: list[float]
    trajectory: int
    """Index among all trajectories of the batch."""


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
    num_trajectories_masked: int
    """Left out, wholly or in part, because they were cut at a length limit."""
    table: list[SampledFrom]
    """What tokens were sampled from."""


@dataclass(frozen=True, slots=True)
class Uses:
    """All uses of an optimizer step, row after row."""

    sampled_logprobs_U: torch.Tensor
    """float32: under the distribution that the engine sampled from; 0 where unknown."""
    is_unknown_U: torch.Tensor
    """bool: the engine's log-probability is unknown."""
    advantages_U: torch.Tensor
    """float32."""
    weights_U: torch.Tensor
    """float32: the use's share of the step's loss; its denominators are those of the whole step."""
    trajectories_U: torch.Tensor
    """int64: from 0, without gaps."""
    is_fresh_U: torch.Tensor
    """bool: sampled, by a record of the ledger, at the step that the job starts from."""
    is_stale_U: torch.Tensor
    """bool: sampled, by a record of the ledger, at another step."""
    old_logprobs_U: torch.Tensor | None = None
    """float32: the trainer's own at the start of the job. None on a first pass, where they are the policy's."""
    reference_logprobs_U: torch.Tensor | None = None
    """float32: the reference's; None without KL."""

    def to(self, device: torch.device) -> "Uses":
        return self._each(lambda values: values.to(device))

    def select(self, indices: torch.Tensor) -> "Uses":
        return self._each(lambda values: values[indices])

    def _each(self, change: Callable[[torch.Tensor], torch.Tensor]) -> "Uses":
        changed: dict[str, Any] = {  # Any: tensors, and None for what is not needed
            each.name: None if values_U is None else change(values_U)
            for each in fields(self)
            for values_U in [getattr(self, each.name)]
        }
        return Uses(**changed)


@dataclass(frozen=True, slots=True)
class MicroBatch:
    """A forest of T tokens with N predictions and U uses."""

    forest: Forest
    is_shared: bool
    """False: every row is a tree of its own."""
    places_N: torch.Tensor
    """int64: the place in the forest whose output predicts."""
    targets_N: torch.Tensor
    """int64: the predicted token."""
    distributions_N: torch.Tensor
    """int64: what it was sampled from, an index into `table` or RAW."""
    table: Sequence[SampledFrom]
    uses_U: torch.Tensor
    """int64: which of the step's uses these are."""
    predictions_U: torch.Tensor
    """int64: the prediction of each use."""
    rows: list[int]
    """The train rows in it."""
    num_row_tokens: int
    """What the rows hold one by one."""

    @property
    def num_tokens(self) -> int:
        return self.forest.num_tokens


def make_train_rows(
    batch: Batch, config: LossConfig | None = None, penalties: Sequence[float] | None = None
) -> TrainRows:
    """The rows of all groups that carry signal, each token with its advantage.

    A group is trainable when any of its tokens that can be trained has an advantage. `penalties`, one for each
    trajectory of the batch, lower the rewards of groups that carry signal without them.
    Raises ValueError for a row whose log-probabilities and tokens differ in number, FloatingPointError for rewards
    beyond arithmetic.
    """
    config = config or LossConfig()
    rows: list[TrainRow] = []
    num_groups_trainable = num_tokens_unpredicted = num_masked = first = 0
    advantages_of_groups = _advantages(batch, config, penalties)
    for group, advantages_G in zip(batch.groups, advantages_of_groups, strict=True):
        group_rows: list[TrainRow] = []
        if has_signal(group, config):
            turns_G = turn_advantages([turn_rewards(each) for each in group.trajectories], config)
            for index, trajectory in enumerate(group.trajectories):
                outcome = 0.0 if advantages_G is None else advantages_G[index]
                advantages = row_advantages(trajectory, outcome, turns_G[index])
                group_rows += [
                    _cut_row(row, values, first + index)
                    for row, values in zip(trajectory.rows, advantages, strict=True)
                    if values and not is_masked(row, config)
                ]
                num_tokens_unpredicted += sum(
                    bool(row.logprobs) and row.logprobs[0] is not None for row in trajectory.rows
                )
        num_masked += sum(
            any(is_masked(row, config) for row in each.rows) for each in group.trajectories
        )
        num_groups_trainable += bool(group_rows)
        rows += group_rows
        first += len(group.trajectories)
    return TrainRows(
        rows=rows,
        num_groups=len(batch.groups),
        num_groups_trainable=num_groups_trainable,
        num_trajectories=first,
        num_tokens=sum(len(row.targets) for row in rows),
        num_tokens_unpredicted=num_tokens_unpredicted,
        num_trajectories_masked=num_masked,
        table=decode_distributions(batch.distributions),
    )


def drop_stale(batch: Batch, oldest: int) -> tuple[Batch, int]:
    """The batch with the tokens that were sampled before step `oldest` as context only, and how many those are."""
    num_dropped = 0

    def cut(row: Row) -> Row:
        nonlocal num_dropped
        stale = {
            i for each in row.spans if each.step < oldest for i in range(each.start, each.stop)
        }
        stale &= set(trained_positions(row))
        if not stale:
            return row
        num_dropped += len(stale)
        return row.model_copy(
            update={
                "logprobs": [None if i in stale else value for i, value in enumerate(row.logprobs)],
                "recompute": [i for i in row.recompute if i not in stale],
            }
        )

    groups = [
        group.model_copy(
            update={
                "trajectories": [
                    each.model_copy(update={"rows": [cut(row) for row in each.rows]})
                    for each in group.trajectories
                ]
            }
        )
        for group in batch.groups
    ]
    return batch.model_copy(update={"groups": groups}), num_dropped


def make_uses(
    rows: Sequence[TrainRow], config: LossConfig | None = None, start_step: int | None = None
) -> Uses:
    """All uses of the rows, with the weights of the normalisation. `start_step` tells fresh tokens from stale ones.

    Source: Yu et al. 2025, arXiv:2503.14476, eq. 8 (tokens); Shao et al. 2024, arXiv:2402.03300, eq. 3 (trajectory);
    Liu et al. 2025, arXiv:2503.20783, section 3.2 (constant).
    """
    config = config or LossConfig()
    names = np.array([row.trajectory for row in rows for _ in row.targets], dtype=np.int64)
    trajectories_U = torch.from_numpy(np.unique(names, return_inverse=True)[1].reshape(-1))
    lengths = torch.bincount(trajectories_U)
    if config.normalisation == "tokens":
        weights_U = torch.full((len(names),), 1 / max(1, len(names)))
    elif config.normalisation == "trajectory":
        weights_U = 1 / (len(lengths) * lengths[trajectories_U].float())
    else:
        weights_U = torch.full((len(names),), 1 / (max(1, len(lengths)) * config.constant_length))
    sampled = [value for row in rows for value in row.sampled_logprobs]
    steps = [step for row in rows for step in row.steps]
    return Uses(
        sampled_logprobs_U=torch.tensor([0.0 if each is None else each for each in sampled]),
        is_unknown_U=torch.tensor([each is None for each in sampled], dtype=torch.bool),
        advantages_U=torch.tensor([value for row in rows for value in row.advantages]),
        weights_U=weights_U,
        trajectories_U=trajectories_U,
        is_fresh_U=torch.tensor([each == start_step for each in steps], dtype=torch.bool),
        is_stale_U=torch.tensor(
            [each not in (None, start_step) for each in steps], dtype=torch.bool
        ),
    )


def largest_unit(rows: Sequence[TrainRow], *, shared: bool = True) -> int:
    """Tokens that one micro-batch must hold for nothing to be computed twice: the largest tree, or row."""
    token_ids = [row.token_ids for row in rows]
    return largest_tree(token_ids, sort_rows(token_ids) if shared else unshared(token_ids))


def make_micro_batches(
    rows: Sequence[TrainRow],
    max_tokens: int,
    *,
    table: Sequence[SampledFrom] = (),
    shared: bool = True,
    min_shared: int = MIN_SHARED_TOKENS,
    fill_tokens: int | None = None,
) -> list[MicroBatch]:
    """The rows in forests of at most `max_tokens` tokens (with padding, where nothing is shared), largest first.

    Trees and rows are joined only up to `fill_tokens`. A row above the budget goes alone. The largest come first so that a batch that does not fit fails at once.
    """
    token_ids = [row.token_ids for row in rows]
    firsts = np.cumsum([0, *(len(row.targets) for row in rows)])
    if shared:
        orders = pack(token_ids, sort_rows(token_ids, min_shared), max_tokens, fill_tokens)
    else:
        fill = min(max_tokens, fill_tokens or max_tokens)
        orders = pack_padded(token_ids, unshared(token_ids), fill)
    micro_batches: list[MicroBatch] = []
    for order in orders:
        forest = lay_out(token_ids, order)
        indices = sorted(order.rows)
        places = [
            path[rows[index].positions] for index, path in zip(indices, forest.paths, strict=True)
        ]
        targets = [rows[index].targets for index in indices]
        uses = [np.arange(firsts[index], firsts[index + 1]) for index in indices]
        sampled_from = [rows[index].distributions for index in indices]
        triples = np.stack([np.concatenate(each) for each in (places, targets, sampled_from)])
        predictions, of_uses = np.unique(triples, axis=1, return_inverse=True)
        micro_batches.append(
            MicroBatch(
                forest=forest,
                is_shared=shared,
                places_N=torch.from_numpy(predictions[0].copy()),
                targets_N=torch.from_numpy(predictions[1].copy()),
                distributions_N=torch.from_numpy(predictions[2].copy()),
                table=table,
                uses_U=torch.from_numpy(np.concatenate(uses)),
                predictions_U=torch.from_numpy(of_uses.reshape(-1)),
                rows=indices,
                num_row_tokens=sum(len(token_ids[index]) for index in indices),
            )
        )
    return micro_batches


def _advantages(
    batch: Batch, config: LossConfig, penalties: Sequence[float] | None
) -> list[list[float] | None]:
    advantages: list[list[float] | None] = []
    first = 0
    for group in batch.groups:
        rewards_G = penalised_rewards(group, config)
        advantages_G = group_advantages(rewards_G, config)
        if penalties is not None and advantages_G is not None:
            lowered = penalties[first : first + len(rewards_G)]
            advantages_G = group_advantages(
                [reward - each for reward, each in zip(rewards_G, lowered, strict=True)], config
            )
        advantages.append(advantages_G)
        first += len(rewards_G)
    return scale_over_batch(advantages, config)


def _cut_row(row: Row, advantages: list[float], trajectory: int) -> TrainRow:
    trained = [(index, row.logprobs[index]) for index in trained_positions(row)]
    steps: list[int | None] = [None] * len(row.token_ids)
    for span in row.spans:
        steps[span.start : span.stop] = [span.step] * (span.stop - span.start)
    return TrainRow(
        token_ids=row.token_ids[: trained[-1][0]] if trained else [],
        positions=[index - 1 for index, _ in trained],
        targets=[row.token_ids[index] for index, _ in trained],
        sampled_logprobs=[value for _, value in trained],
        distributions=[
            row.distributions[index] if row.distributions else RAW for index, _ in trained
        ],
        steps=[steps[index] for index, _ in trained],
        advantages=advantages,
        trajectory=trajectory,
    )
