"""A training job, from a task to a checkpoint: one optimizer step, or several.

The server resolves the sequences beforehand, and makes the checkpoint visible afterwards by renaming its folder.
"""

import functools
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import torch

from art_protocol.wire import TrainConfig
from art_server.shared.same_policy import judge_gap
from art_server.shared.trainer_messages import BetweenSteps, Done, Probe, Progress, TrainTask
from art_server.store.adapter_layers import layer_kind
from art_server.trainer.agreement import agree_on_terms
from art_server.trainer.batches import (
    TrainBatch,
    drop_stale,
    make_sampled_tokens,
    make_train_batch,
    with_penalties,
)
from art_server.trainer.checking import make_checked_micro_batches
from art_server.trainer.checkpoint import load_checkpoint, save_checkpoint
from art_server.trainer.loss import policy_loss
from art_server.trainer.mini_batches import MiniBatch, split_mini_batches
from art_server.trainer.old_logprobs import (
    OldLogprobs,
    apply_kl_penalty,
    compute_logprobs,
    compute_old_and_reference_logprobs,
)
from art_server.trainer.optimizer import steps_taken
from art_server.trainer.policy import Policy
from art_server.trainer.probe import (
    finish_probe,
    is_due,
    skipped_probe,
    start_probe,
    unchanged_probe,
)
from art_server.trainer.schedule import FRESH_MOMENTS_STEPS, RateSchedule, base_learning_rate
from art_server.trainer.step import compute_gradient
from art_server.trainer.step_metrics import (
    data_metrics,
    merge_steps,
    peak_memory,
    reset_peak_memory,
    sampler_metrics,
    synced_seconds_since,
)
from art_server.trainer.token_budget import Learn, TokenBudget, learn_nothing
from art_server.trainer.token_record import TokenRecord


@dataclass(slots=True)
class _Job:
    """What the optimizer steps of a job share."""

    policy: Policy
    task: TrainTask
    optimizer: torch.optim.AdamW
    schedule: RateSchedule
    budget: TokenBudget
    record: TokenRecord
    report: Callable[[Progress], None]
    notes: list[str]


def train(
    policy: Policy,
    task: TrainTask,
    max_tokens_per_micro_batch: int,
    report: Callable[[Progress], None],
    *,
    between_steps: BetweenSteps = "stay",
    learn: Learn = learn_nothing,
    base_name: str | None = None,
) -> Done:
    """Takes the steps of one job from in_dir to out_dir; returns metrics and notes.

    A batch without trained tokens writes the same weights and optimizer state again. Unless `between_steps` is "stay", the
    policy leaves the device before "save" is reported. `learn` stores the budget that fitted after memory ran out, under
    `base_name` (None: the base's path).

    Raises:
        UnlikeRanks: another rank would compute otherwise, or has planned otherwise.
        FloatingPointError: the loss, its gradient or a metric is not finite. No checkpoint is written.
        ValueError: the engine adapts none of the layers that have an adapter.
        GapTooLarge: the engine's log-probabilities are not this policy's. No checkpoint is written.
    """
    terms = agree_on_terms(policy, max_tokens_per_micro_batch)
    policy.return_to_device()
    policy.use_context(task.max_seq_length)
    rate, rule = base_learning_rate(task.config, policy.model_type, policy.hidden_size)
    optimizer = load_checkpoint(policy, task.lora, Path(task.in_dir), rate)
    check_layers(policy, task.lost_layers)
    schedule = _schedule(task, rate, optimizer)
    # Not when the server resolves the batch: a job may wait in the queue while the model makes steps.
    task, num_too_stale = _drop_stale(task)
    trained = make_train_batch(task.batch, task.config)
    metrics = data_metrics(trained) | {"data/step_num_tokens_too_stale": float(num_too_stale)}
    notes = [rule] if rule else []
    reset_peak_memory(policy.device)
    held_out = make_train_batch(task.batch.model_copy(update={"groups": task.batch.held_out}), task.config)
    longest = max((len(sequence.token_ids) for sequence in [*trained.sequences, *held_out.sequences]), default=1)
    budget = TokenBudget.of_job(policy, task, terms, base_name or policy.base_model, longest, notes, learn)
    environment = _environment(policy, task, budget)
    record = TokenRecord(task.batch, policy.base_model)
    job = _Job(policy, task, optimizer, schedule, budget, record, report, notes)

    probe = unchanged_probe(task.probe) if task.mismatch_limits is not None else None
    losses: list[float] = []
    if trained.sequences:
        of_steps, losses, probe = _take_steps(job, trained)
        metrics |= of_steps
        # All ranks have the same budget.
        if policy.gang.is_first:
            budget.store()

    if held_out.sequences:
        started = time.perf_counter()
        metrics["val/loss"] = budget.run(functools.partial(_held_out_loss, job, held_out))
        metrics["time/step_validation_s"] = time.perf_counter() - started
    if between_steps != "stay":
        started = time.perf_counter()
        policy.leave_device(optimizer, keep_copy=between_steps == "leave")
        metrics["time/step_leave_s"] = time.perf_counter() - started
    policy.gang.meet()  # the engine returns only when all ranks have left their devices
    # At this report the server wakes the engine, which needs the device (`jobs/attempt.py`).
    report(Progress(phase="save", completed=0, total=1))
    started = time.perf_counter()
    if policy.gang.is_first:
        # Before `save_checkpoint`, which syncs all files of the folder to disk.
        record.write(Path(task.out_dir))
        save_checkpoint(policy, optimizer, Path(task.out_dir))
    metrics["time/step_save_s"] = time.perf_counter() - started
    return Done(
        metrics=metrics,
        losses=losses,
        unchanged=not metrics.get("loss/learning_rate"),  # no optimizer step, or all at rate 0
        optimizer_steps=schedule.num_steps,
        notes=notes,
        probe=probe,
        environment=environment | {"max_tokens_at_end": str(budget.tokens)},
    )


def check_layers(policy: Policy, lost: Sequence[str]) -> None:
    """Checks that the engine adapts some kind of layer that has an adapter; `lost` are the kinds that it does not adapt.

    Raises:
        ValueError: the engine adapts none, so nothing could be trained.
    """
    if {layer_kind(name.partition(".lora_")[0]) for name in policy.parameters} <= {*lost}:
        raise ValueError(
            f"the engine adapts none of the model's layers ({', '.join(lost)}), so nothing can be trained: register it with "
            "other lora.target_modules, or leave them out"
        )


def _schedule(task: TrainTask, rate: float, optimizer: torch.optim.AdamW) -> RateSchedule:
    age = steps_taken(optimizer)
    taken = age if task.optimizer_steps is None else task.optimizer_steps
    return RateSchedule(task.config, rate, taken, age)


def _drop_stale(task: TrainTask) -> tuple[TrainTask, int]:
    """The task with tokens beyond `max_staleness` as context, and their number. The penalty for long trajectories counts
    these tokens too, so the penalty is put into the rewards first."""
    config, batch = task.config, task.batch
    if config.max_staleness is None:
        return task, 0
    oldest = task.start_step - config.max_staleness
    if config.overlong == "soft_penalty":
        batch = with_penalties(batch, config)
        config = config.model_copy(update={"overlong": "keep"})
    batch, num_too_stale = drop_stale(batch, oldest)
    return task.model_copy(update={"batch": batch, "config": config}), num_too_stale


def _environment(policy: Policy, task: TrainTask, budget: TokenBudget) -> dict[str, str]:
    """What decides the last bits of the step, as the job begins."""
    return {
        "ranks": str(policy.gang.size),
        "is_sharded": str(policy.gang.is_sharded),
        "max_tokens": str(budget.tokens),
        "checkpointing": str(budget.has_checkpointing),
        "checkpointing_factor": str(policy.checkpointing_factor),
        "max_seq_length": str(task.max_seq_length),
        "optimizer_steps": str(task.optimizer_steps),
        "lost_layers": " ".join(task.lost_layers),
    }


def _take_steps(job: _Job, trained: TrainBatch) -> tuple[dict[str, float], list[float], Probe | None]:
    """Takes all optimizer steps; returns the job's metrics, the loss of each step, and the new step's probe."""
    policy, task, notes = job.policy, job.task, job.notes
    if job.schedule.num_steps and not job.schedule.moments_age:
        notes.append(
            f"the optimizer state of step {task.start_step} is not kept: the moments of AdamW start at zero, and the "
            f"learning rate rises to its schedule's value over {FRESH_MOMENTS_STEPS} optimizer steps"
        )
    mini_batches = split_mini_batches(task, trained, notes)
    old = job.budget.run(
        lambda max_tokens: compute_old_and_reference_logprobs(
            policy, task, trained, len(mini_batches), max_tokens, job.report, notes
        )
    )
    trained = apply_kl_penalty(policy.gang, task, trained, old)
    gap: dict[str, float] = {}
    if old.old_logprobs_S is not None:
        gap = sampler_metrics(old.old_logprobs_S, old.sampled_tokens(task, trained.sequences))
        notes += judge_gap(gap, task)

    start: Probe | None = None
    steps: list[dict[str, float]] = []
    for index, mini_batch in enumerate(mini_batches):
        phase = "train" if len(mini_batches) == 1 else f"train {index + 1} of {len(mini_batches)}"
        part, of_part = _part(trained, old, mini_batch)
        if index == 0:  # pi_old is pi_new here: computed in another order, it would round the ratios away from 1
            of_part = replace(of_part, old_logprobs_S=None)
        metrics = job.budget.run(functools.partial(_gradient, job, part, of_part, phase))
        if index == 0:
            if old.old_logprobs_S is None:
                notes += judge_gap(metrics, task)
            # A job with stale tokens has a probe: the next job will have some too, and judges them by this step's movement.
            is_stale = (metrics | gap)["loss/logprob_gap_stale_num_tokens"] > 0
            # `is_due` reads the machine's clock, and a probe is a pass that all ranks make, or none.
            if task.mismatch_limits is not None and policy.gang.any(is_stale or is_due(task.probe)):
                start = start_probe(policy, task.probe, trained.sequences, task.mismatch_limits)
        else:
            metrics = _without_gap(metrics)
        steps.append(metrics | _optimizer_step(job, mini_batch.number))

    notes += _behind_the_schedule(task.config, steps, job.schedule.num_steps - len(steps))
    probe: Probe | None = None
    if start is not None and task.mismatch_limits is not None:
        probe = finish_probe(policy, start, task.mismatch_limits)
        steps[-1]["loss/probe_moved"] = probe.moved[-1]
        steps[-1]["time/step_probe_s"] = probe.seconds
    elif task.probe is not None and task.mismatch_limits is not None:
        probe = skipped_probe(task.probe)
    return _job_metrics(job, steps, old) | gap, [step["loss/train"] for step in steps], probe


def _held_out_loss(job: _Job, held_out: TrainBatch, max_tokens: int) -> float:
    """The mean cross-entropy of held-out demonstrations under the weights as they are, without a gradient."""
    policy = job.policy
    micro_batches = make_checked_micro_batches(policy, held_out, max_tokens, job.notes)
    logprobs_S = compute_logprobs(policy, micro_batches, lambda batch: policy.logprobs(batch)[0], job.report)
    return float(
        policy_loss(logprobs_S, make_sampled_tokens(held_out.sequences, job.task.config), job.task.config).value
    )


def _behind_the_schedule(config: TrainConfig, steps: Sequence[dict[str, float]], num_before: int) -> list[str]:
    """A note if a cosine was over before the job's last optimizer step. `num_before` are the model's steps before the job."""
    num_at_zero = sum(1 for step in steps if not step["loss/learning_rate"])
    if config.schedule != "cosine" or not num_at_zero:
        return []
    begins = f" from schedule_begins={config.schedule_begins}" if config.schedule_begins else ""
    return [
        f"the learning rate was 0 in {num_at_zero} of {len(steps)} optimizer steps, which change nothing: schedule_steps is "
        f"{config.schedule_steps}{begins}, and the model had taken {num_before} optimizer steps before this job. For a schedule that "
        f"begins with this job set schedule_begins={num_before}, else raise schedule_steps"
    ]


def _part(trained: TrainBatch, old: OldLogprobs, mini_batch: MiniBatch) -> tuple[TrainBatch, OldLogprobs]:
    """The sequences of one optimizer step, with their log-probabilities from before the first step."""
    sequences = [trained.sequences[index] for index in mini_batch.sequences]
    num_tokens = sum(len(sequence.targets) for sequence in sequences)
    part = replace(trained, sequences=sequences, num_tokens=num_tokens)
    return part, old.of_sequences(trained.sequences, mini_batch.sequences)


def _gradient(job: _Job, part: TrainBatch, old: OldLogprobs, phase: str, max_tokens: int) -> dict[str, float]:
    job.optimizer.zero_grad(set_to_none=True)
    return compute_gradient(job.policy, job.task, part, max_tokens, job.report, job.notes, old, phase, job.record)


def _optimizer_step(job: _Job, number: int) -> dict[str, float]:
    started = time.perf_counter()
    rate = job.schedule.rate(number)
    for group in job.optimizer.param_groups:
        group["lr"] = rate
    job.optimizer.step()
    job.schedule.advance()
    return {"loss/learning_rate": rate, "time/step_optimizer_s": synced_seconds_since(started)}


def _without_gap(metrics: dict[str, float]) -> dict[str, float]:
    """The metrics of a later optimizer step without the comparison with the engine, which is about the weights at the start
    of the job."""
    of_start = ("loss/logprob_gap", "loss/importance_ratio")
    return {name: value for name, value in metrics.items() if not name.startswith(of_start)}


def _job_metrics(job: _Job, steps: Sequence[dict[str, float]], old: OldLogprobs) -> dict[str, float]:
    metrics = merge_steps(steps)
    metrics["time/step_forward_backward_s"] += old.seconds
    seconds = metrics["time/step_forward_backward_s"] + metrics["time/step_optimizer_s"]
    metrics["throughput/avg_trainer_tok_per_s"] = metrics["data/step_row_tokens"] / seconds
    metrics["data/step_num_out_of_memory_retries"] = float(job.budget.num_retries)
    metrics["data/step_num_gradient_steps"] = float(len(steps))
    return metrics | peak_memory(job.policy.device)
