"""From a batch to what is trained: sequences, their sampled tokens, and micro-batches of prefix trees within a budget.

A *prediction* is a position in the forest, the next token and its distribution; the model gives it one log-probability.
A *sampled token* belongs to one trajectory and has its own advantage and sampled log-probability. Trajectories share a
prediction when they sampled the same token after the same tokens from the same distribution.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, fields
from typing import Any

import numpy as np
import torch

from art_protocol.wire import LossConfig
from art_server.shared.advantages import (
    GroupTokens,
    count_masked,
    is_identical,
    penalised_reward,
    teaches,
    trained_positions,
    trained_tokens,
)
from art_server.shared.same_policy import movement_since
from art_server.shared.trainer_messages import Batch, TokenSequence, TrainableGroup, TrainableTrajectory
from art_server.trainer.distributions import RAW, BehaviourDistribution, decode_distributions
from art_server.trainer.teacher import NO_TARGETS, NOT_TAUGHT, TargetCollector, Targets
from art_server.trainer.tree import (
    MIN_SHARED_TOKENS,
    Forest,
    SequenceOrder,
    is_cheaply_cut,
    lay_out,
    pack_padded,
    pack_trees,
    sort_sequences,
    unshared,
)


@dataclass(frozen=True, slots=True)
class TrainSequence:
    """A sequence cut before its last trained token: what follows predicts no trained token."""

    token_ids: list[int]
    positions: list[int]
    """For each trained token the position before it, which predicts the token."""
    targets: list[int]
    """The trained tokens, as many as `positions`."""
    sampled_logprobs: list[float | None]
    """None: unknown; the trainer's own log-probability at the start of the job is used instead."""
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
    """Whether a token of the sequence's group has an advantage or a teacher. Other terms of the loss train a group without
    signal."""
    taught: list[int] = field(default_factory=list)
    """The teacher's target of each trained token: an index into `TrainBatch.taught`, or NOT_TAUGHT. Empty: no token has one."""


@dataclass(frozen=True, slots=True)
class TrainBatch:
    """The part of a batch that is trained, and counts of the rest."""

    sequences: list[TrainSequence]
    num_groups: int
    num_groups_trainable: int
    """Groups with signal: one of their tokens has an advantage or a teacher."""
    num_groups_identical: int
    """Groups whose trajectories all have the same sampled tokens."""
    num_trajectories: int
    num_tokens: int
    """Trained tokens: the denominator of token normalisation."""
    num_tokens_unpredicted: int
    """Sampled tokens at position 0 of a sequence. No token predicts them, so they cannot be trained."""
    num_trajectories_masked: int
    """Trajectories that are left out, wholly or in part, because they were cut at a length limit."""
    table: list[BehaviourDistribution]
    """The distributions that tokens were sampled from."""
    taught: Targets = NO_TARGETS
    """The teacher's targets."""


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
    """float32: each token's weight in the loss. The weights' denominators count the whole step."""
    trajectories_S: torch.Tensor
    """int64: the number of each token's trajectory, from 0 without gaps."""
    is_fresh_S: torch.Tensor
    """bool: sampled at the step that the job starts from, by its record in the ledger."""
    is_stale_S: torch.Tensor
    """bool: sampled at another step, by its record in the ledger."""
    allowances_S: torch.Tensor
    """float32: by how much the policy's own movement since a stale token's step may change its log-probability; else 0."""
    old_logprobs_S: torch.Tensor | None = None
    """float32: under the trainer's policy at the start of the job. None in a job of one optimizer step: that is the policy."""
    reference_logprobs_S: torch.Tensor | None = None
    """float32: under the reference policy; None without KL."""

    def to(self, device: torch.device) -> "SampledTokens":
        return self._changed(lambda values: values.to(device))

    def select(self, indices: torch.Tensor) -> "SampledTokens":
        return self._changed(lambda values: values[indices])

    def _changed(self, change: Callable[[torch.Tensor], torch.Tensor]) -> "SampledTokens":
        changed: dict[str, Any] = {}  # Any: tensors, and None for fields that are not needed
        for part in fields(self):
            values_S = getattr(self, part.name)
            changed[part.name] = None if values_S is None else change(values_S)
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
    """int64: the distribution that the predicted token was sampled from, an index into `table` or RAW."""
    table: Sequence[BehaviourDistribution]
    taught_N: torch.Tensor
    """int64: the teacher's target of the prediction, an index into `taught` or NOT_TAUGHT."""
    taught: Targets
    indices_S: torch.Tensor
    """int64: index of each sampled token in the step's `SampledTokens`."""
    predictions_S: torch.Tensor
    """int64: index of each sampled token's prediction."""
    sequences: list[int]
    """Indices of the micro-batch's train sequences, ascending."""
    num_sequence_tokens: int
    """Number of tokens of these sequences, each counted by itself."""

    @property
    def num_tokens(self) -> int:
        return self.forest.num_tokens


def make_train_batch(
    batch: Batch, config: LossConfig | None = None, penalties: Sequence[float] | None = None
) -> TrainBatch:
    """The trained sequences of all groups, with the advantages of their tokens (`trained_tokens`).

    `penalties`, one for each trajectory of the batch, are subtracted from the rewards. Whether a group has signal is
    decided without the penalties.

    Raises:
        ValueError: tokens and log-probabilities of a sequence differ in number, or contradict `recompute`.
        FloatingPointError: a reward is not finite, or too large for a standard deviation.
    """
    config = config or LossConfig()
    sequences: list[TrainSequence] = []
    num_groups_trainable = num_identical = num_tokens_unpredicted = num_masked = 0
    num_trajectories = num_sequences = 0
    taught = TargetCollector()
    tokens_of_groups = trained_tokens(batch.groups, config, penalties)
    for group, tokens in zip(batch.groups, tokens_of_groups, strict=True):
        if is_identical(group):
            num_identical += 1
        num_masked += count_masked(group, config)
        if tokens is not None:
            if teaches(group, tokens):
                num_groups_trainable += 1
            num_tokens_unpredicted += _num_unpredicted(group)
            sequences += _cut_group(group, tokens, taught, num_trajectories, num_sequences)
        num_trajectories += len(group.trajectories)
        num_sequences += sum(len(trajectory.sequences) for trajectory in group.trajectories)
    return TrainBatch(
        sequences=sequences,
        num_groups=len(batch.groups),
        num_groups_trainable=num_groups_trainable,
        num_groups_identical=num_identical,
        num_trajectories=num_trajectories,
        num_tokens=sum(len(sequence.targets) for sequence in sequences),
        num_tokens_unpredicted=num_tokens_unpredicted,
        num_trajectories_masked=num_masked,
        table=decode_distributions(batch.distributions),
        taught=taught.targets(),
    )


def _num_unpredicted(group: TrainableGroup) -> int:
    """The number of sampled tokens at position 0 of a sequence."""
    num = 0
    for trajectory in group.trajectories:
        for sequence in trajectory.sequences:
            if sequence.logprobs and sequence.logprobs[0] is not None:
                num += 1
    return num


def with_penalties(batch: Batch, config: LossConfig) -> Batch:
    """The batch with the soft penalty for long trajectories in its rewards. The penalty counts every sampled token,
    also tokens that `drop_stale` turns into context."""

    def lower(trajectory: TrainableTrajectory) -> TrainableTrajectory:
        return trajectory.model_copy(update={"reward": penalised_reward(trajectory, config)})

    return _change_trajectories(batch, lower)


def drop_stale(batch: Batch, oldest: int) -> tuple[Batch, int]:
    """The batch with tokens that were sampled before step `oldest` as context, and the number of these tokens."""
    num_dropped = 0

    def drop(trajectory: TrainableTrajectory) -> TrainableTrajectory:
        nonlocal num_dropped
        sequences: list[TokenSequence] = []
        for sequence in trajectory.sequences:
            stale = _stale_positions(sequence, oldest)
            num_dropped += len(stale)
            sequences.append(_as_context(sequence, stale) if stale else sequence)
        return trajectory.model_copy(update={"sequences": sequences})

    return _change_trajectories(batch, drop), num_dropped


def _change_trajectories(batch: Batch, change: Callable[[TrainableTrajectory], TrainableTrajectory]) -> Batch:
    groups: list[TrainableGroup] = []
    for group in batch.groups:
        trajectories = [change(trajectory) for trajectory in group.trajectories]
        groups.append(group.model_copy(update={"trajectories": trajectories}))
    return batch.model_copy(update={"groups": groups})


def _stale_positions(sequence: TokenSequence, oldest: int) -> set[int]:
    """The positions of trained tokens that were sampled before step `oldest`."""
    stale: set[int] = set()
    for span in sequence.spans:
        if span.step < oldest:
            stale.update(range(span.start, span.stop))
    return stale.intersection(trained_positions(sequence))


def _as_context(sequence: TokenSequence, positions: set[int]) -> TokenSequence:
    """The sequence, of which the tokens at these positions are not trained."""
    logprobs = list(sequence.logprobs)
    for position in positions:
        logprobs[position] = None
    recompute = [position for position in sequence.recompute if position not in positions]
    return sequence.model_copy(update={"logprobs": logprobs, "recompute": recompute})


def make_sampled_tokens(
    sequences: Sequence[TrainSequence],
    config: LossConfig | None = None,
    start_step: int | None = None,
    moved: Sequence[float] = (),
) -> SampledTokens:
    """The trained tokens of the sequences, with weights by `config.normalisation`. Tokens of `start_step` are fresh.
    `moved` is `Probe.moved` of this step.

    Source: Yu et al. 2025, arXiv:2503.14476, eq. 8 (tokens); Shao et al. 2024, arXiv:2402.03300, eq. 3 (trajectory);
    Liu et al. 2025, arXiv:2503.20783, section 3.2 (constant).
    """
    trajectories: list[int] = []
    sampled: list[float | None] = []
    advantages: list[float] = []
    steps: list[int | None] = []
    for sequence in sequences:
        trajectories += [sequence.trajectory] * len(sequence.targets)
        sampled += sequence.sampled_logprobs
        advantages += sequence.advantages
        steps += sequence.steps
    _, numbers = np.unique(np.array(trajectories, dtype=np.int64), return_inverse=True)
    trajectories_S = torch.from_numpy(numbers)
    return SampledTokens(
        sampled_logprobs_S=torch.tensor([0.0 if value is None else value for value in sampled]),
        is_unknown_S=torch.tensor([value is None for value in sampled], dtype=torch.bool),
        advantages_S=torch.tensor(advantages),
        weights_S=_weights(trajectories_S, config or LossConfig()),
        trajectories_S=trajectories_S,
        is_fresh_S=torch.tensor([step == start_step for step in steps], dtype=torch.bool),
        is_stale_S=torch.tensor([step not in (None, start_step) for step in steps], dtype=torch.bool),
        allowances_S=torch.tensor([movement_since(step, start_step, moved) for step in steps], dtype=torch.float32),
    )


def _weights(trajectories_S: torch.Tensor, config: LossConfig) -> torch.Tensor:
    """Each token's weight in the loss. float32."""
    num_tokens = len(trajectories_S)
    if config.normalisation == "tokens":
        return torch.full((num_tokens,), 1 / max(1, num_tokens))
    lengths = torch.bincount(trajectories_S)
    if config.normalisation == "trajectory":
        return 1 / (len(lengths) * lengths[trajectories_S].float())
    return torch.full((num_tokens,), 1 / (max(1, len(lengths)) * config.constant_length))


def is_cheaply_divided(sequences: Sequence[TrainSequence], max_tokens: int, *, shared: bool = True) -> bool:
    """Whether micro-batches of `max_tokens` hold each sequence whole, and repeat few of the tokens that sequences share."""
    token_ids = [sequence.token_ids for sequence in sequences]
    order = sort_sequences(token_ids) if shared else unshared(token_ids)
    return is_cheaply_cut(token_ids, order, max_tokens)


def make_micro_batches(
    sequences: Sequence[TrainSequence],
    max_tokens: int,
    *,
    table: Sequence[BehaviourDistribution] = (),
    taught: Targets = NO_TARGETS,
    shared: bool = True,
    min_shared: int = MIN_SHARED_TOKENS,
    fill_tokens: int | None = None,
) -> list[MicroBatch]:
    """The sequences in micro-batches of at most `max_tokens` tokens; unshared sequences count with their padding.

    Trees, or unshared sequences, are packed together only up to `fill_tokens`. A sequence above the budget is a
    micro-batch by itself, or with siblings that add little (`pack_trees`). The largest trees come first, so that a step
    that does not fit fails early.
    """
    token_ids = [sequence.token_ids for sequence in sequences]
    firsts = np.cumsum([0, *(len(sequence.targets) for sequence in sequences)])
    if shared:
        orders = pack_trees(token_ids, sort_sequences(token_ids, min_shared), max_tokens, fill_tokens)
    else:
        fill = min(max_tokens, fill_tokens or max_tokens)
        orders = pack_padded(token_ids, unshared(token_ids), fill)
    return [_lay_out_micro_batch(sequences, order, firsts, table, taught, is_shared=shared) for order in orders]


def _lay_out_micro_batch(
    sequences: Sequence[TrainSequence],
    order: SequenceOrder,
    firsts: np.ndarray,
    table: Sequence[BehaviourDistribution],
    taught: Targets,
    *,
    is_shared: bool,
) -> MicroBatch:
    """The micro-batch of a forest. `firsts` is the index of each sequence's first sampled token in the step."""
    forest = lay_out([sequence.token_ids for sequence in sequences], order)
    indices = sorted(order.sequences)
    chosen = [sequences[index] for index in indices]
    predicting = [path[sequence.positions] for sequence, path in zip(chosen, forest.paths, strict=True)]
    targets = [sequence.targets for sequence in chosen]
    sampled_from = [sequence.distributions for sequence in chosen]
    taught_by = [sequence.taught or [NOT_TAUGHT] * len(sequence.targets) for sequence in chosen]
    tokens = [np.arange(firsts[index], firsts[index + 1]) for index in indices]
    # Sampled tokens with the same prediction share it: the same position, token, distribution and teacher's target.
    parts = [np.concatenate(part) for part in (predicting, targets, sampled_from, taught_by)]
    predictions, predictions_S = np.unique(np.stack(parts), axis=1, return_inverse=True)
    is_raw_N, is_taught_N = predictions[2] == RAW, predictions[3] != NOT_TAUGHT
    assert bool((is_raw_N | ~is_taught_N).all()), (
        "a token with a teacher's target was sampled from another distribution"
    )
    return MicroBatch(
        forest=forest,
        is_shared=is_shared,
        forest_indices_N=torch.from_numpy(predictions[0].copy()),
        targets_N=torch.from_numpy(predictions[1].copy()),
        distributions_N=torch.from_numpy(predictions[2].copy()),
        table=table,
        taught_N=torch.from_numpy(predictions[3].copy()),
        taught=taught,
        indices_S=torch.from_numpy(np.concatenate(tokens)),
        predictions_S=torch.from_numpy(predictions_S.reshape(-1)),
        sequences=indices,
        num_sequence_tokens=sum(len(sequence.token_ids) for sequence in chosen),
    )


def _cut_group(
    group: TrainableGroup, tokens: GroupTokens, taught: TargetCollector, num_trajectories: int, num_sequences: int
) -> list[TrainSequence]:
    """The trained sequences of a group. Before the group the batch has `num_trajectories` and `num_sequences`."""
    has_signal = teaches(group, tokens)
    cut: list[TrainSequence] = []
    number = num_sequences
    for index, (trajectory, of_trajectory) in enumerate(zip(group.trajectories, tokens, strict=True)):
        for sequence, chosen in zip(trajectory.sequences, of_trajectory, strict=True):
            if chosen:
                cut.append(_cut_sequence(sequence, chosen, has_signal, taught, num_trajectories + index, number))
            number += 1
    return cut


def _cut_sequence(
    sequence: TokenSequence,
    chosen: Sequence[tuple[int, float]],
    has_signal: bool,
    taught: TargetCollector,
    trajectory: int,
    number: int,
) -> TrainSequence:
    """The sequence with its trained positions and their advantages."""
    indices = [index for index, _ in chosen]
    distributions = sequence.distributions or [RAW] * len(sequence.token_ids)
    targets = taught.add(sequence) if sequence.taught else []
    steps: list[int | None] = [None] * len(sequence.token_ids)
    for span in sequence.spans:
        steps[span.start : span.stop] = [span.step] * (span.stop - span.start)
    return TrainSequence(
        token_ids=sequence.token_ids[: indices[-1]],
        positions=[index - 1 for index in indices],
        targets=[sequence.token_ids[index] for index in indices],
        sampled_logprobs=[sequence.logprobs[index] for index in indices],
        distributions=[distributions[index] for index in indices],
        steps=[steps[index] for index in indices],
        advantages=[advantage for _, advantage in chosen],
        trajectory=trajectory,
        number=number,
        has_signal=has_signal,
        taught=[targets[index] for index in indices] if targets else [],
    )
