"""Log-probabilities from before a job's first optimizer step: the policy's own and the reference's."""

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import torch

from art_server.shared.trainer_messages import Progress, TrainTask
from art_server.trainer.batches import (
    MicroBatch,
    SampledTokens,
    TrainBatch,
    TrainSequence,
    make_sampled_tokens,
    make_train_batch,
)
from art_server.trainer.checking import make_checked_micro_batches
from art_server.trainer.gang_view import GangView
from art_server.trainer.loss import kl_estimate, shape_advantages
from art_server.trainer.policy import Policy


@dataclass(frozen=True, slots=True)
class OldLogprobs:
    """Log-probabilities from before the first optimizer step, for all sampled tokens of the job. None: not needed."""

    old_logprobs_S: torch.Tensor | None = None
    """Under the trainer's policy at the start of the job; only for a job of several optimizer steps."""
    reference_logprobs_S: torch.Tensor | None = None
    seconds: float = 0.0

    def of_sequences(self, sequences: Sequence[TrainSequence], indices: Sequence[int]) -> "OldLogprobs":
        """The log-probabilities of the sequences at `indices`."""
        if self.old_logprobs_S is None and self.reference_logprobs_S is None:
            return self
        sizes = [len(sequence.targets) for sequence in sequences]
        indices_S = torch.arange(sum(sizes)).split(sizes)
        chosen_S = torch.cat([indices_S[index] for index in indices])
        old_S, reference_S = self.old_logprobs_S, self.reference_logprobs_S
        return OldLogprobs(
            None if old_S is None else old_S[chosen_S],
            None if reference_S is None else reference_S[chosen_S],
        )

    def sampled_tokens(self, task: TrainTask, sequences: Sequence[TrainSequence]) -> SampledTokens:
        """The trained tokens of the sequences that these log-probabilities belong to."""
        moved = task.probe.moved if task.probe else ()
        return replace(
            make_sampled_tokens(sequences, task.config, task.start_step, moved),
            old_logprobs_S=self.old_logprobs_S,
            reference_logprobs_S=self.reference_logprobs_S,
        )


NOTHING_OLD = OldLogprobs()
"""For a job of one optimizer step without KL."""


def compute_old_and_reference_logprobs(
    policy: Policy,
    task: TrainTask,
    trained: TrainBatch,
    num_steps: int,
    max_tokens: int,
    report: Callable[[Progress], None],
    notes: list[str],
) -> OldLogprobs:
    """The log-probabilities from before the first optimizer step, by a forward pass without gradient: the policy's
    if the job takes several optimizer steps and has a ratio or a gap to judge, and the reference's if KL is on."""
    has_reference = task.config.beta > 0
    needs_old = num_steps > 1 and (task.config.objective == "policy" or _has_gap(task, trained))
    if not needs_old and not has_reference:
        return OldLogprobs()
    started = time.perf_counter()
    micro_batches = make_checked_micro_batches(policy, trained, max_tokens, notes)
    old_S = reference_S = None
    if needs_old:
        old_S = compute_logprobs(policy, micro_batches, lambda batch: policy.logprobs(batch)[0], report)
    if has_reference:
        reference_S = compute_logprobs(policy, micro_batches, policy.reference_logprobs, report)
    return OldLogprobs(old_S, reference_S, time.perf_counter() - started)


@torch.no_grad()
def compute_logprobs(
    policy: Policy,
    micro_batches: Sequence[MicroBatch],
    score: Callable[[MicroBatch], torch.Tensor],
    report: Callable[[Progress], None],
) -> torch.Tensor:
    """The log-probabilities of all S sampled tokens of the micro-batches, float32, without a gradient. `score` returns the
    log-probabilities of a micro-batch's predictions."""
    logprobs_S = torch.zeros(sum(len(batch.indices_S) for batch in micro_batches))
    rounds = policy.gang.rounds([batch.num_tokens for batch in micro_batches])
    with policy.gang.together():
        for number, (index, counts) in enumerate(rounds):
            report(Progress(phase="forward", completed=number, total=len(rounds)))
            batch = micro_batches[index]
            scored_S = score(batch).cpu()[batch.predictions_S]
            # Otherwise a sharded rank repeats a micro-batch of another rank, whose numbers are in the sum.
            if counts:
                logprobs_S[batch.indices_S] = scored_S
    return policy.gang.sum(logprobs_S)


def _has_gap(task: TrainTask, trained: TrainBatch) -> bool:
    """Whether the job has a gap to judge: limits, and tokens of known steps with the engine's log-probabilities."""
    if task.mismatch_limits is None:
        return False
    for sequence in trained.sequences:
        for step, logprob in zip(sequence.steps, sequence.sampled_logprobs, strict=True):
            if step is not None and logprob is not None:
                return True
    return False


def apply_kl_penalty(gang: GangView, task: TrainTask, trained: TrainBatch, old: OldLogprobs) -> TrainBatch:
    """The batch with the KL penalty in the advantages of groups with signal; unchanged where KL is a term of the loss, or
    off.

    This KL compares the sampled log-probabilities with the reference's.
    """
    config = task.config
    if old.reference_logprobs_S is None or config.kl_in == "loss":
        return trained
    tokens = make_sampled_tokens(trained.sequences)
    kl_S = kl_estimate(tokens.sampled_logprobs_S, old.reference_logprobs_S, config.kl_estimator)[0]
    # The KL decides which groups are trained, and so the plan, which must be equal on all ranks.
    kl_S = gang.of_first(torch.where(tokens.is_unknown_S, 0.0, kl_S))
    lengths = [len(sequence.targets) for sequence in trained.sequences]
    if config.kl_in == "reward":
        penalties = [0.0] * trained.num_trajectories
        for sequence, of_tokens in zip(trained.sequences, kl_S.split(lengths), strict=True):
            for value in of_tokens.tolist():
                penalties[sequence.trajectory] += config.beta * value
        return make_train_batch(task.batch, config, penalties)
    is_dead: list[bool] = []
    for sequence in trained.sequences:
        is_dead += [not sequence.has_signal] * len(sequence.targets)
    is_kept_S = tokens.is_unknown_S | torch.tensor(is_dead)
    shaped_S = shape_advantages(tokens.advantages_S, kl_S, config.beta, is_kept_S)
    shaped: list[TrainSequence] = []
    for sequence, of_tokens in zip(trained.sequences, shaped_S.split(lengths), strict=True):
        shaped.append(replace(sequence, advantages=of_tokens.tolist()))
    return replace(trained, sequences=shaped)
