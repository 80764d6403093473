"""From a batch to what is trained: sequences, their sampled tokens, and micro-batches of prefix trees within a budget.

A *prediction* is a position in the forest, the next token and its distribution; the model gives it one log-probability.
A *sampled token* belongs to one trajectory and has its own advantage and sampled log-probability. Trajectories share a
prediction when they sampled the same token after the same tokens from the same distribution.
"""

import itertools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, fields
from typing import Any

import numpy as np
import torch

from art_protocol.wire import LossConfig
from art_server.process.shared.advantages import (
    GroupTokens,
    has_advantage,
    is_identical,
    is_masked,
    penalised_rewards,
    trained_positions,
    trained_tokens,
)
from art_server.process.shared.trainer_messages import Batch, TokenSequence, TrainableGroup
from art_server.trainer.distributions import RAW, SampledFrom, decode_distributions
from art_server.trainer.tree import (
    MIN_SHARED_TOKENS,
    Forest,
    largest_tree,
    lay_out,
    pack,
    pack_padded,
    sort_sequences,
    unshared,
)

UNKNOWN_MOVEMENT = 0.125
"""The movement of a step without one on record (an earlier version made it, or another program), in nats. The allowance
is eight times that (`gap.py`)."""
WINDOW_STEPS = 8
"""The movement of a step is taken as the largest of so many."""


@dataclass(frozen=True, slots=True)
class TrainSequence:
    """A sequence cut before its last trained token: what follows predicts no trained token."""

    token_ids: list[int]
    positions: list[int]
    """For each trained token the position that predicts it: the one before it."""
    targets: list[int]
    """The trained tokens, as many as `positions`."""
    sampled_logprobs: list[float | None]
    """None: unknown; the trainer takes its own at the start of the job instead."""
    distributions: list[int]
    """The distribution of each trained token: an index into `TrainBatch.table`, or RAW."""
    steps: list[int | None]
    """The model's step that sampled each trained token, by its record in the ledger; None without a record."""
    advantages: list[float]
    trajectory: int
    """Index among all trajectories of the batch."""
    number: int
    """Index among all sequences of the batch."""
    has_signal: bool = True
    """Whether a token of the sequence's group has an advantage; without, other terms of the loss train the group."""


@dataclass(frozen=True, slots=True)
class TrainBatch:
    """The part of a batch that is trained, and counts of the rest."""

    sequences: list[TrainSequence]
    num_groups: int
    num_groups_trainable: int
    """Those with signal: a token has an advantage."""
    num_groups_identical: int
    """Those whose trajectories all have the same sampled tokens."""
    num_trajectories: int
    num_tokens: int
    """Trained tokens: the denominator of token normalisation."""
    num_tokens_unpredicted: int
    """Sampled tokens at position 0 of a sequence. No token predicts them, so they cannot be trained."""
    num_trajectories_masked: int
    """Trajectories that are left out, wholly or in part, because they were cut at a length limit."""
    table: list[SampledFrom]
    """The distributions that tokens were sampled from."""


@dataclass(frozen=True, slots=True)
class SampledTokens:
    """S sampled tokens, sequence after sequence: all of an optimizer step, or a part of it."""

    sampled_logprobs_S: torch.Tensor
    """float32: under the behaviour policy, from the engine; 0 where unknown."""
    is_unknown_S: torch.Tensor
    """bool: the engine's log-probability is unknown."""
    advantages_S: torch.Tensor
    """float32."""
    weights_S: torch.Tensor
    """float32: the token's weight in the loss. Its denominators count the whole step."""
    trajectories_S: torch.Tensor
    """int64: the number of each token's trajectory, from 0 without gaps."""
    is_fresh_S: torch.Tensor
    """bool: sampled at the step that the job starts from, by its record in the ledger."""
    is_stale_S: torch.Tensor
    """bool: sampled at another step, by its record in the ledger."""
    allowances_S: torch.Tensor
    """float32: by how much the policy's own movement since a stale token's step may change its log-probability; else 0."""
    old_logprobs_S: torch.Tensor | None = None
    """float32: the trainer's at the start of the job. None in a job of one optimizer step: they are the policy's."""
    reference_logprobs_S: torch.Tensor | None = None
    """float32: under the reference policy; None without KL."""

    def to(self, device: torch.device) -> "SampledTokens":
        return self._each(lambda values: values.to(device))

    def select(self, indices: torch.Tensor) -> "SampledTokens":
        return self._each(lambda values: values[indices])

    def _each(self, change: Callable[[torch.Tensor], torch.Tensor]) -> "SampledTokens":
        changed: dict[str, Any] = {  # Any: tensors, and None for fields that are not needed
            each.name: None if values_S is None else change(values_S)
            for each in fields(self)
            for values_S in [getattr(self, each.name)]
        }
        return SampledTokens(**changed)


@dataclass(frozen=True, slots=True)
class MicroBatch:
    """A forest of T tokens with N predictions and S sampled tokens."""

    forest: Forest
    is_shared: bool
    """False: each sequence is a separate tree."""
    forest_indices_N: torch.Tensor
    """int64: the index in the forest whose output predicts."""
    targets_N: torch.Tensor
    """int64: the predicted token."""
    distributions_N: torch.Tensor
    """int64: the distribution that it was sampled from, an index into `table` or RAW."""
    table: Sequence[SampledFrom]
    indices_S: torch.Tensor
    """int64: index of each sampled token in the step's `SampledTokens`."""
    predictions_S: torch.Tensor
    """int64: index of each sampled token's prediction."""
    sequences: list[int]
    """Indices of its train sequences, ascending."""
    num_sequence_tokens: int
    """Tokens of its sequences, counted separately."""

    @property
    def num_tokens(self) -> int:
        return self.forest.num_tokens


def make_train_batch(
    batch: Batch, config: LossConfig | None = None, penalties: Sequence[float] | None = None
) -> TrainBatch:
    """The trained sequences of all groups, with the advantages of their tokens (`trained_tokens`).

    `penalties`, one for each trajectory of the batch, are subtracted from the rewards. Whether a group has signal is
    decided without them.

    Raises:
        ValueError: tokens and log-probabilities of a sequence differ in number, or contradict `recompute`.
        FloatingPointError: a reward is not finite, or too large for a standard deviation.
    """
    config = config or LossConfig()
    sequences: list[TrainSequence] = []
    num_groups_trainable = num_identical = num_tokens_unpredicted = num_masked = first = 0
    numbers = itertools.count()
    tokens_of_groups = trained_tokens(batch.groups, config, penalties)
    for group, tokens in zip(batch.groups, tokens_of_groups, strict=True):
        num_identical += is_identical(group)
        if tokens is not None:
            num_groups_trainable += has_advantage(tokens)
            num_tokens_unpredicted += sum(
                bool(sequence.logprobs) and sequence.logprobs[0] is not None
                for each in group.trajectories
                for sequence in each.sequences
            )
        num_masked += sum(
            any(is_masked(sequence, config) for sequence in each.sequences) for each in group.trajectories
        )
        sequences += _cut_group(group, tokens, first, numbers)
        first += len(group.trajectories)
    return TrainBatch(
        sequences=sequences,
        num_groups=len(batch.groups),
        num_groups_trainable=num_groups_trainable,
        num_groups_identical=num_identical,
        num_trajectories=first,
        num_tokens=sum(len(sequence.targets) for sequence in sequences),
        num_tokens_unpredicted=num_tokens_unpredicted,
        num_trajectories_masked=num_masked,
        table=decode_distributions(batch.distributions),
    )


def with_penalties(batch: Batch, config: LossConfig) -> Batch:
    """The batch with the soft penalty for long trajectories in its rewards. It counts every sampled token, also those
    that `drop_stale` turns into context."""
    groups = [
        group.model_copy(
            update={
                "trajectories": [
                    each.model_copy(update={"reward": reward})
                    for each, reward in zip(group.trajectories, penalised_rewards(group, config), strict=True)
                ]
            }
        )
        for group in batch.groups
    ]
    return batch.model_copy(update={"groups": groups})


def drop_stale(batch: Batch, oldest: int) -> tuple[Batch, int]:
    """The batch, in which tokens sampled before step `oldest` become context, and the number of these tokens."""
    num_dropped = 0

    def cut(sequence: TokenSequence) -> TokenSequence:
        nonlocal num_dropped
        stale = {i for each in sequence.spans if each.step < oldest for i in range(each.start, each.stop)}
        stale &= set(trained_positions(sequence))
        if not stale:
            return sequence
        num_dropped += len(stale)
        return sequence.model_copy(
            update={
                "logprobs": [None if i in stale else value for i, value in enumerate(sequence.logprobs)],
                "recompute": [i for i in sequence.recompute if i not in stale],
            }
        )

    groups = [
        group.model_copy(
            update={
                "trajectories": [
                    each.model_copy(update={"sequences": [cut(sequence) for sequence in each.sequences]})
                    for each in group.trajectories
                ]
            }
        )
        for group in batch.groups
    ]
    return batch.model_copy(update={"groups": groups}), num_dropped


def make_sampled_tokens(
    sequences: Sequence[TrainSequence],
    config: LossConfig | None = None,
    start_step: int | None = None,
    moved: Sequence[float] = (),
) -> SampledTokens:
    """The trained tokens of the sequences, with weights by `config.normalisation`. Those of `start_step` are fresh.
    `moved` is `Probe.moved` of this step.

    Source: Yu et al. 2025, arXiv:2503.14476, eq. 8 (tokens); Shao et al. 2024, arXiv:2402.03300, eq. 3 (trajectory);
    Liu et al. 2025, arXiv:2503.20783, section 3.2 (constant).
    """
    config = config or LossConfig()
    names = np.array([sequence.trajectory for sequence in sequences for _ in sequence.targets], dtype=np.int64)
    trajectories_S = torch.from_numpy(np.unique(names, return_inverse=True)[1].reshape(-1))
    lengths = torch.bincount(trajectories_S)
    if config.normalisation == "tokens":
        weights_S = torch.full((len(names),), 1 / max(1, len(names)))
    elif config.normalisation == "trajectory":
        weights_S = 1 / (len(lengths) * lengths[trajectories_S].float())
    else:
        weights_S = torch.full((len(names),), 1 / (max(1, len(lengths)) * config.constant_length))
    sampled = [value for sequence in sequences for value in sequence.sampled_logprobs]
    steps = [step for sequence in sequences for step in sequence.steps]
    return SampledTokens(
        sampled_logprobs_S=torch.tensor([0.0 if each is None else each for each in sampled]),
        is_unknown_S=torch.tensor([each is None for each in sampled], dtype=torch.bool),
        advantages_S=torch.tensor([value for sequence in sequences for value in sequence.advantages]),
        weights_S=weights_S,
        trajectories_S=trajectories_S,
        is_fresh_S=torch.tensor([each == start_step for each in steps], dtype=torch.bool),
        is_stale_S=torch.tensor([each not in (None, start_step) for each in steps], dtype=torch.bool),
        allowances_S=torch.tensor([_movement_since(each, start_step, moved) for each in steps], dtype=torch.float32),
    )


def _movement_since(step: int | None, start_step: int | None, moved: Sequence[float]) -> float:
    """How far the policy has moved at most since a token's step; 0 for fresh tokens and those of unknown step.

    For each step it takes the largest movement of the last steps, because one step can move the probe's few tokens much
    less than others.
    """
    if step is None or start_step is None:
        return 0.0
    age = max(0, start_step - step)
    known = min(age, len(moved))
    largest = max(moved[-max(age, WINDOW_STEPS) :], default=0.0)
    return known * largest + UNKNOWN_MOVEMENT * (age - known)


def largest_unit(sequences: Sequence[TrainSequence], *, shared: bool = True) -> int:
    """Size in tokens of the largest tree or, if not `shared`, sequence. A budget below it cuts the tree."""
    token_ids = [sequence.token_ids for sequence in sequences]
    return largest_tree(token_ids, sort_sequences(token_ids) if shared else unshared(token_ids))


def make_micro_batches(
    sequences: Sequence[TrainSequence],
    max_tokens: int,
    *,
    table: Sequence[SampledFrom] = (),
    shared: bool = True,
    min_shared: int = MIN_SHARED_TOKENS,
    fill_tokens: int | None = None,
) -> list[MicroBatch]:
    """The sequences in micro-batches of at most `max_tokens` tokens; unshared sequences count with their padding.

    Trees, or unshared sequences, are packed together only up to `fill_tokens`. A sequence above the budget is a
    micro-batch by itself. The largest trees come first, so that a step that does not fit fails early.
    """
    token_ids = [sequence.token_ids for sequence in sequences]
    firsts = np.cumsum([0, *(len(sequence.targets) for sequence in sequences)])
    if shared:
        orders = pack(token_ids, sort_sequences(token_ids, min_shared), max_tokens, fill_tokens)
    else:
        fill = min(max_tokens, fill_tokens or max_tokens)
        orders = pack_padded(token_ids, unshared(token_ids), fill)
    micro_batches: list[MicroBatch] = []
    for order in orders:
        forest = lay_out(token_ids, order)
        indices = sorted(order.sequences)
        predicting = [path[sequences[index].positions] for index, path in zip(indices, forest.paths, strict=True)]
        targets = [sequences[index].targets for index in indices]
        tokens = [np.arange(firsts[index], firsts[index + 1]) for index in indices]
        sampled_from = [sequences[index].distributions for index in indices]
        triples = np.stack([np.concatenate(each) for each in (predicting, targets, sampled_from)])
        predictions, predictions_S = np.unique(triples, axis=1, return_inverse=True)
        micro_batches.append(
            MicroBatch(
                forest=forest,
                is_shared=shared,
                forest_indices_N=torch.from_numpy(predictions[0].copy()),
                targets_N=torch.from_numpy(predictions[1].copy()),
                distributions_N=torch.from_numpy(predictions[2].copy()),
                table=table,
                indices_S=torch.from_numpy(np.concatenate(tokens)),
                predictions_S=torch.from_numpy(predictions_S.reshape(-1)),
                sequences=indices,
                num_sequence_tokens=sum(len(token_ids[index]) for index in indices),
            )
        )
    return micro_batches


def _cut_group(
    group: TrainableGroup, tokens: GroupTokens | None, first: int, numbers: Iterator[int]
) -> list[TrainSequence]:
    """The trained sequences of a group, whose trajectories have indices from `first`. `numbers` gives each sequence of
    the batch, trained or not, its index."""
    numbered = [[(next(numbers), s) for s in each.sequences] for each in group.trajectories]
    if tokens is None:
        return []
    has_signal = has_advantage(tokens)
    return [
        _cut_sequence(sequence, chosen, has_signal, trajectory, number)
        for trajectory, of_trajectory in enumerate(zip(numbered, tokens, strict=True), first)
        for (number, sequence), chosen in zip(*of_trajectory, strict=True)
        if chosen
    ]


def _cut_sequence(
    sequence: TokenSequence,
    chosen: Sequence[tuple[int, float]],
    has_signal: bool,
    trajectory: int,
    number: int,
) -> TrainSequence:
    """The sequence with its trained positions and their advantages."""
    trained = [(index, sequence.logprobs[index]) for index, _ in chosen]
    steps: list[int | None] = [None] * len(sequence.token_ids)
    for span in sequence.spans:
        steps[span.start : span.stop] = [span.step] * (span.stop - span.start)
    return TrainSequence(
        token_ids=sequence.token_ids[: trained[-1][0]],
        positions=[index - 1 for index, _ in trained],
        targets=[sequence.token_ids[index] for index, _ in trained],
        sampled_logprobs=[value for _, value in trained],
        distributions=[sequence.distributions[index] if sequence.distributions else RAW for index, _ in trained],
        steps=[steps[index] for index, _ in trained],
        advantages=[value for _, value in chosen],
        trajectory=trajectory,
        number=number,
        has_signal=has_signal,
    )
