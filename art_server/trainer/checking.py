"""Checks, once for each loaded model, that prefix trees give the same log-probabilities as separate sequences.

The check runs on the first batch, before the update. It detects any architecture that mixes tokens in a way that trees do not
support (`attention.py`, `states.py`) or computes its logits differently. The trainer then does not share prefixes, and the
job's report has a note of that.
"""

import itertools
import logging
from collections.abc import Iterator, Sequence
from dataclasses import replace

import torch

from art_server.trainer.agreement import check_plan
from art_server.trainer.batches import (
    MicroBatch,
    TrainBatch,
    TrainSequence,
    is_cheaply_divided,
    make_micro_batches,
)
from art_server.trainer.distributions import RAW
from art_server.trainer.policy import Policy

logger = logging.getLogger(__name__)

MAX_CHECKED_TOKENS = 256
"""At least two sequences are compared, and more up to this many tokens. The model's first step waits for the
check."""

MAX_CHECKED_POSITIONS = 32
"""About this many positions of a sequence are compared: the model's own logits take positions x vocabulary."""

MAX_GAP = {torch.float32: 1e-3, torch.bfloat16: 0.05, torch.float16: 0.02}
"""Largest accepted difference of log-probabilities. It bounds the maximum in float32, where another order of summation
changes about 1e-5, and the mean in 16 bits, where rounding alone changes single tokens by tenths."""


def make_checked_micro_batches(
    policy: Policy, trained: TrainBatch, max_tokens: int, notes: list[str]
) -> list[MicroBatch]:
    """The micro-batches of the batch: trees, if the check shows that they equal separate sequences.

    A tree above the budget is cut where its parts repeat only a short trunk, such as a system prompt that all groups
    share. Else gradient checkpointing raises the budget, and only trees above the raised budget are cut.

    Raises:
        UnlikeRanks: another rank has planned otherwise.
    """
    if not is_cheaply_divided(trained.sequences, max_tokens, shared=policy.shares_prefixes):
        policy.use_checkpointing(True)
        max_tokens = int(max_tokens * policy.checkpointing_factor)

    def make(chosen: Sequence[TrainSequence]) -> list[MicroBatch]:
        fill, shared = policy.fill_tokens, policy.shares_prefixes
        table, taught = trained.table, trained.taught
        return make_micro_batches(chosen, max_tokens, table=table, taught=taught, shared=shared, fill_tokens=fill)

    def plan() -> list[MicroBatch]:
        micro_batches = make(trained.sequences)
        check_plan(policy, micro_batches, max_tokens)
        return micro_batches

    # `plan` compares the ranks' plans before the checks, too: a check is a pass that all ranks make, or none.
    micro_batches, is_shared = plan(), policy.shares_prefixes

    def checked() -> Iterator[list[TrainSequence]]:
        """The sequences to check of each micro-batch that has several."""
        batches = micro_batches if policy.shares_prefixes == is_shared else make(trained.sequences)
        for batch in batches:
            chosen = sequences_to_check([trained.sequences[index] for index in batch.sequences])
            if len(chosen) > 1:
                yield chosen

    # `check_trees` below makes no backward pass, which is what some cards cannot compile.
    if policy.shares_prefixes and policy.attention_kind == "flex" and not policy.has_tried_trees:
        trial = make(sequences_to_check(trained.sequences))[0]
        failed = try_trees(policy, trial)
        if failed is not None:
            notes.append(failed)
    if policy.shares_prefixes and policy.tree_gap is None:
        # Without a branch in the whole job nothing could differ; a later job is checked then.
        for sequences in itertools.islice(checked(), 1):
            different = check_trees(policy, make(sequences)[0], sequences)
            if different is not None:
                notes.append(different)
    if not policy.shares_prefixes and policy.sequence_gap is None:
        sequences = next(checked(), sequences_to_check(trained.sequences))
        check_sequences(policy, make(sequences)[0], sequences)
    return micro_batches if policy.shares_prefixes == is_shared else plan()


def try_trees(policy: Policy, batch: MicroBatch) -> str | None:
    """Computes a gradient over trees: None if this works on every rank, else a note for the report, and unshared sequences
    from here on.

    FlexAttention is compiled for the GPU. Where a multiprocessor has 100 KB of shared memory, the backward pass does not
    fit for heads of more than 128 numbers.
    """
    from torch._dynamo.exc import TorchDynamoException  # imported here, because it takes seconds

    reason = ""
    try:
        with policy.gang.together(), torch.enable_grad():
            try:
                logprobs_N, _ = policy.logprobs(batch)
                logprobs_N.sum().backward()
            except NotImplementedError as error:
                reason = str(error)
            except TorchDynamoException as error:
                first_line = next(iter(str(error).splitlines()), type(error).__name__)
                reason = f"their attention cannot be compiled for this GPU: {first_line}"
    finally:
        policy.drop_gradients()
    reasons = policy.gang.gather(reason)
    for rank, of_rank in enumerate(reasons):
        if of_rank:
            where = f" (rank {rank} on {policy.gang.machines[rank]})" if len(reasons) > 1 else ""
            return _give_up(policy, of_rank + where)
    policy.has_tried_trees = True
    return None


def check_trees(policy: Policy, batch: MicroBatch, sequences: list[TrainSequence]) -> str | None:
    """Compares the trees of some sequences with the separate sequences: None if they agree, else a note for the report.

    If they differ, the policy uses unshared sequences from here on.
    """
    try:
        policy.tree_gap = _agreed_gap(policy, batch, sequences)
    except NotImplementedError as error:
        return _give_up(policy, str(error))
    if policy.tree_gap <= MAX_GAP[policy.dtype]:
        return None
    return _give_up(policy, f"log-probabilities differ by {policy.tree_gap:.2g} from those of single sequences")


def check_sequences(policy: Policy, batch: MicroBatch, sequences: list[TrainSequence]) -> None:
    """Compares unshared sequences with transformers' own code. There is nothing to fall back on.

    Raises:
        ValueError: the two differ.
    """
    policy.sequence_gap = _agreed_gap(policy, batch, sequences)
    if not policy.sequence_gap <= MAX_GAP[policy.dtype]:
        remedy = "choose another base model: this family transforms its logits in an unknown way"
        raise ValueError(
            f"--trainer {policy.name} computes another policy than {policy.base_model}: log-probabilities differ by "
            f"{policy.sequence_gap:.2g} from those of transformers with the same weights; rounding explains at most "
            f"{MAX_GAP[policy.dtype]:.2g}. Nothing was trained; "
            f"{remedy if policy.name == 'peft' else 'use --trainer peft'}"
        )


def _agreed_gap(policy: Policy, batch: MicroBatch, sequences: list[TrainSequence]) -> float:
    """The largest gap of all ranks. Each rank computes the same gap, but for rounding."""
    with policy.gang.together():
        gap = _gap(policy, batch, sequences)
    return policy.gang.most(gap)


@torch.no_grad()
def _gap(policy: Policy, batch: MicroBatch, sequences: list[TrainSequence]) -> float:
    """The difference between a micro-batch's log-probabilities and its separate sequences' (`Policy.sequence_logprobs`): the
    largest in float32, else the mean."""
    # `sequence_logprobs` knows neither kept sets nor temperatures.
    raw = replace(batch, distributions_N=torch.full_like(batch.distributions_N, RAW))
    logprobs_N, _ = policy.logprobs(raw)
    differences: list[torch.Tensor] = []
    sizes = [len(sequences[index].targets) for index in batch.sequences]
    for indices, index in zip(batch.predictions_S.split(sizes), batch.sequences, strict=True):
        sequence = sequences[index]
        chosen = torch.arange(0, len(indices), max(1, len(indices) // MAX_CHECKED_POSITIONS))
        positions = [sequence.positions[number] for number in chosen.tolist()]
        expected = policy.sequence_logprobs([*sequence.token_ids, sequence.targets[-1]], positions)
        differences.append((logprobs_N[indices[chosen].to(logprobs_N.device)] - expected).abs())
    gaps = torch.cat(differences)
    return float(gaps.max() if policy.dtype == torch.float32 else gaps.mean())


def sequences_to_check(sequences: Sequence[TrainSequence]) -> list[TrainSequence]:
    """The longest sequence, and the sequences that share the longest prefixes with it. No chosen sequence is the beginning
    of another, so that two of them are a tree with a branch, or two trees."""
    longest = max((sequence.token_ids for sequence in sequences), key=len)
    chosen: list[TrainSequence] = []
    num_tokens = 0
    for sequence in sorted(sequences, key=lambda sequence: _num_shared(sequence.token_ids, longest), reverse=True):
        ids = sequence.token_ids
        if any(_num_shared(ids, other.token_ids) == min(len(ids), len(other.token_ids)) for other in chosen):
            continue
        num_tokens += len(ids)
        if len(chosen) >= 2 and num_tokens > MAX_CHECKED_TOKENS:
            break
        chosen.append(sequence)
    return chosen


def _num_shared(one: Sequence[int], other: Sequence[int]) -> int:
    """The number of tokens with which both begin."""
    pairs = enumerate(zip(one, other, strict=False))
    return next((i for i, (a, b) in pairs if a != b), min(len(one), len(other)))


def _give_up(policy: Policy, reason: str) -> str:
    policy.use_trees(False)
    logger.warning("%s: prefixes are not shared: %s", policy.base_model, reason)
    return f"prefixes are not shared for {policy.base_model}: {reason}"
