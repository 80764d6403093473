"""A train call of a member of the GRPO family, from a task to a checkpoint: one optimizer step, or several.

The whole algorithm of an optimizer step is `compute_gradient`. It leaves out where rows come from (the server resolves
them) and when a checkpoint becomes visible (the server renames the folder).
"""

import functools
import gc
import logging
import random
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, fields, replace
from pathlib import Path
from typing import Any, TypeVar

import torch

from art.wire import TrainConfig
from art_server.shared.tasks import BetweenSteps, Done, Progress, TrainTask
from art_server.trainer.batches import (
    MicroBatch,
    TrainRow,
    TrainRows,
    Uses,
    drop_stale,
    largest_unit,
    make_micro_batches,
    make_train_rows,
    make_uses,
)
from art_server.trainer.checking import check_rows, check_trees, rows_to_check
from art_server.trainer.checkpoint import load_checkpoint, save_checkpoint
from art_server.trainer.gap import judge_gap
from art_server.trainer.loss import (
    TokenLoss,
    kl_estimate,
    needs_whole_trajectories,
    policy_loss,
    shape_advantages,
)
from art_server.trainer.memory import Budgets, budget_key, fill_tokens, is_out_of_memory
from art_server.trainer.metrics import (
    batch_metrics,
    check_finite,
    data_metrics,
    loss_metrics,
    merge_steps,
    peak_memory,
    reset_peak_memory,
    sampler_metrics,
)
from art_server.trainer.optimizer import steps_taken
from art_server.trainer.policy import Policy
from art_server.trainer.schedule import base_learning_rate, learning_rate_factor

logger = logging.getLogger(__name__)

T = TypeVar("T")

MIN_TOKENS_PER_MICRO_BATCH = 64
"""Below this, less memory cannot be asked for: the task fails."""


@dataclass(frozen=True, slots=True)
class Known:
    """What is fixed before the first optimizer step, for the uses of all rows of the job. None: not needed."""

    old_logprobs_U: torch.Tensor | None = None
    """The trainer's at the start of the job; only where it takes several optimizer steps."""
    reference_logprobs_U: torch.Tensor | None = None
    seconds: float = 0.0

    def of_rows(self, rows: Sequence[TrainRow], indices: Sequence[int]) -> "Known":
        """The part of some of the rows."""
        if self.old_logprobs_U is None and self.reference_logprobs_U is None:
            return self
        sizes = [len(row.targets) for row in rows]
        uses_U = torch.arange(sum(sizes)).split(sizes)
        chosen_U = torch.cat([uses_U[index] for index in indices])
        old_U, reference_U = self.old_logprobs_U, self.reference_logprobs_U
        return Known(
            None if old_U is None else old_U[chosen_U],
            None if reference_U is None else reference_U[chosen_U],
        )


@dataclass(slots=True)
class _Step:
    """An optimizer step under way: what `compute_gradient` adds to for the report."""

    rows: TrainRows
    uses: Uses
    micro_batches: list[MicroBatch]
    losses: list[tuple[MicroBatch, TokenLoss]] = field(default_factory=list)
    logprobs: list[torch.Tensor] = field(default_factory=list)
    """Of each micro-batch's uses."""
    entropies: list[torch.Tensor] = field(default_factory=list)
    """Of each micro-batch's uses."""
    seconds: dict[str, float] = field(default_factory=dict)

    def timed(self, phase: str, started: float) -> None:
        """Add the seconds since `started`; a GPU's work has ended by then, not only been asked for."""
        if torch.cuda.is_initialized():
            torch.cuda.synchronize()
        self.seconds[phase] = self.seconds.get(phase, 0.0) + time.perf_counter() - started


@dataclass(slots=True)
class _Memory:
    """How many tokens go through the model at a time: fewer after each failed allocation."""

    policy: Policy
    notes: list[str]
    budget: int
    learn: Callable[[int], None]
    """Told of a budget that fitted where a larger one did not."""
    num_retries: int = 0
    has_shrunk: bool = False

    def run(self, compute: Callable[[int], T]) -> T:
        """What `compute` makes of the budget; tried again with half of it and with gradient checkpointing when it runs out
        of memory."""
        while True:
            try:
                result = compute(self.budget)
            except (RuntimeError, MemoryError) as error:
                if not is_out_of_memory(error) or self.budget // 2 < MIN_TOKENS_PER_MICRO_BATCH:
                    raise
            else:
                if self.has_shrunk:
                    self.learn(self.budget)
                    self.has_shrunk = False
                return result
            # Outside of the handler: its traceback holds the failed step's tensors.
            self.budget, self.num_retries = self.budget // 2, self.num_retries + 1
            self.policy.use_checkpointing(True)
            gc.collect()
            if self.policy.device.type == "cuda":
                torch.cuda.empty_cache()
            self.has_shrunk = True
            self.notes.append(f"out of memory: tried again with {self.budget} tokens at a time")
            logger.warning(self.notes[-1])


def train(
    policy: Policy,
    task: TrainTask,
    max_tokens_per_micro_batch: int,
    report: Callable[[Progress], None],
    *,
    between_steps: BetweenSteps = "stay",
    budgets: Budgets | None = None,
) -> Done:
    """Take the steps of one job from in_dir to out_dir and tell what happened.

    A batch without learning signal writes the same weights and optimizer state again. A policy that does not stay
    gives the device up before it reports that it saves. `budgets` remembers what fitted after memory ran out.
    Raises FloatingPointError, with nothing written, when the loss, its gradient or a metric is not finite;
    GapTooLarge when the engine's log-probabilities are not those of this policy.
    """
    config = task.config
    policy.come_back()
    rate, rule = base_learning_rate(config, policy.model_type, policy.hidden_size)
    optimizer = load_checkpoint(policy, task.lora, Path(task.in_dir), rate)
    num_too_stale = 0
    if config.max_staleness is not None:
        batch, num_too_stale = drop_stale(task.batch, task.start_step - config.max_staleness)
        task = task.model_copy(update={"batch": batch})
    rows = make_train_rows(task.batch, config)
    metrics, notes = data_metrics(rows), [rule] if rule else []
    metrics["data/step_num_tokens_too_stale"] = float(num_too_stale)
    reset_peak_memory(policy.device)
    budgets = budgets or Budgets(None)
    longest = max((len(row.token_ids) for row in rows.rows), default=1)
    key = budget_key(policy.device, policy.base_model, task.lora.rank, longest)
    learned = budgets.find(key)
    # An earlier step may have needed it.
    policy.use_checkpointing(learned is not None)
    budget = min(max_tokens_per_micro_batch, learned or max_tokens_per_micro_batch)
    memory = _Memory(policy, notes, budget, functools.partial(budgets.learn, key))
    if learned is not None:
        notes.append(
            f"{budget} tokens at a time, with gradient checkpointing: an earlier step ran out of memory with more. "
            f"{budgets.file} remembers it; delete it to try again"
        )

    if rows.rows:
        parts = divide(task, rows, notes)
        known = memory.run(lambda budget: look_ahead(policy, task, rows, len(parts), budget, notes))
        rows = shape(task, rows, known)
        of_job: dict[str, float] = {}
        if known.old_logprobs_U is not None:
            of_job = sampler_metrics(known.old_logprobs_U, _uses(task, rows.rows, known))
            notes += judge_gap(of_job, task)

        def compute(part: TrainRows, of_part: Known, phase: str, budget: int) -> dict[str, float]:
            optimizer.zero_grad(set_to_none=True)
            return compute_gradient(policy, task, part, budget, report, notes, of_part, phase)

        steps: list[dict[str, float]] = []
        for index, part in enumerate(parts):
            chosen = [rows.rows[each] for each in part]
            num_tokens = sum(len(row.targets) for row in chosen)
            these = replace(rows, rows=chosen, num_tokens=num_tokens)
            phase = "train" if len(parts) == 1 else f"train {index + 1} of {len(parts)}"
            of_part = known.of_rows(rows.rows, part)
            steps.append(memory.run(functools.partial(compute, these, of_part, phase)))
            if known.old_logprobs_U is None:
                notes += judge_gap(steps[-1], task)
            started = time.perf_counter()
            for group in optimizer.param_groups:
                group["lr"] = rate * learning_rate_factor(config, steps_taken(optimizer))
            steps[-1]["loss/learning_rate"] = optimizer.param_groups[0]["lr"]
            optimizer.step()
            steps[-1]["time/step_optimizer_s"] = time.perf_counter() - started
        metrics |= merge_steps(steps) | of_job
        metrics["time/step_forward_backward_s"] += known.seconds
        seconds = metrics["time/step_forward_backward_s"] + metrics["time/step_optimizer_s"]
        metrics["throughput/avg_trainer_tok_per_s"] = metrics["data/step_row_tokens"] / seconds
        metrics["data/step_num_out_of_memory_retries"] = float(memory.num_retries)
        metrics["data/step_num_gradient_steps"] = float(len(parts))
        metrics |= peak_memory(policy.device)

    if between_steps != "stay":
        started = time.perf_counter()
        policy.leave_device(optimizer, keep_copy=between_steps == "leave")
        metrics["time/step_leave_s"] = time.perf_counter() - started
    report(Progress(phase="save", completed=0, total=1))
    started = time.perf_counter()
    save_checkpoint(policy, optimizer, Path(task.out_dir))
    metrics["time/step_save_s"] = time.perf_counter() - started
    return Done(metrics=metrics, unchanged=not rows.rows, notes=notes)


def divide(task: TrainTask, rows: TrainRows, notes: list[str]) -> list[list[int]]:
    """The rows of each optimizer step: each pass goes through all groups, in an order that the task's seed fixes."""
    config = task.config
    if config.passes == config.mini_batches == 1:
        return [list(range(len(rows.rows)))]
    group_of = [index for index, group in enumerate(task.batch.groups) for _ in group.trajectories]
    rows_of: dict[int, list[int]] = {}
    for index, row in enumerate(rows.rows):
        rows_of.setdefault(group_of[row.trajectory], []).append(index)
    num = min(config.mini_batches, len(rows_of))
    if num < config.mini_batches:
        notes.append(
            f"mini_batches is {config.mini_batches}, and {num} groups carry a signal: each pass takes {num} optimizer steps"
        )
    chance = random.Random(task.seed)
    parts: list[list[int]] = []
    for _ in range(config.passes):
        groups = list(rows_of)
        chance.shuffle(groups)
        for first in range(num):
            parts.append(sorted(row for group in groups[first::num] for row in rows_of[group]))
    return parts


def look_ahead(
    policy: Policy,
    task: TrainTask,
    rows: TrainRows,
    num_steps: int,
    max_tokens: int,
    notes: list[str],
) -> Known:
    """What the loss needs from before the first optimizer step, by a pass without gradient: the policy's own
    log-probabilities where it takes several, and the reference's where KL is on."""
    has_reference = task.config.beta > 0
    if num_steps == 1 and not has_reference:
        return Known()
    started = time.perf_counter()
    uses = make_uses(rows.rows)
    old_U = torch.zeros_like(uses.advantages_U) if num_steps > 1 else None
    reference_U = torch.zeros_like(uses.advantages_U) if has_reference else None
    with torch.no_grad():
        for batch in _plan(policy, rows, max_tokens, notes):
            if old_U is not None:
                old_U[batch.uses_U] = policy.logprobs(batch)[0].cpu()[batch.predictions_U]
            if reference_U is not None:
                reference_N = policy.reference_logprobs(batch).cpu()
                reference_U[batch.uses_U] = reference_N[batch.predictions_U]
    return Known(old_U, reference_U, time.perf_counter() - started)


def shape(task: TrainTask, rows: TrainRows, known: Known) -> TrainRows:
    """The rows with advantages from which KL was taken, at the sampler's log-probabilities; as they are where KL is a term
    of the loss, or off."""
    config = task.config
    if known.reference_logprobs_U is None or config.kl_in == "loss":
        return rows
    uses = make_uses(rows.rows)
    kl_U = kl_estimate(uses.sampled_logprobs_U, known.reference_logprobs_U, config.kl_estimator)[0]
    kl_U = torch.where(uses.is_unknown_U, 0.0, kl_U)
    if config.kl_in == "reward":
        penalties = [0.0] * rows.num_trajectories
        names = [row.trajectory for row in rows.rows for _ in row.targets]
        for name, value in zip(names, kl_U.tolist(), strict=True):
            penalties[name] += config.beta * value
        return make_train_rows(task.batch, config, penalties)
    shaped_U = shape_advantages(uses.advantages_U, kl_U, config.beta, uses.is_unknown_U)
    parts = shaped_U.split([len(row.targets) for row in rows.rows])
    shaped = [
        replace(row, advantages=part.tolist()) for row, part in zip(rows.rows, parts, strict=True)
    ]
    return replace(rows, rows=shaped)


def compute_gradient(
    policy: Policy,
    task: TrainTask,
    rows: TrainRows,
    max_tokens: int,
    report: Callable[[Progress], None],
    notes: list[str],
    known: Known = Known(),
    phase: str = "train",
) -> dict[str, float]:
    """Put the gradient of one optimizer step, clipped, into the policy's parameters; returns its metrics."""
    config = task.config
    started = whole_step = time.perf_counter()
    step = _Step(rows, _uses(task, rows.rows, known), _plan(policy, rows, max_tokens, notes))
    if config.plot_tensors:
        # Here, because only who asks for the picture pays for matplotlib.
        from art_server.trainer.plot import plot_micro_batches

        plot_micro_batches(step.micro_batches, rows.rows, Path(task.out_dir))
    step.timed("plan", started)
    whole = _whole_loss(policy, step, config)

    num = len(step.micro_batches)
    for index, batch in enumerate(step.micro_batches):
        started = time.perf_counter()
        logprobs_N, entropies_N = policy.logprobs(
            batch, with_entropy_gradient=config.entropy_bonus > 0
        )
        predictions_U = batch.predictions_U.to(policy.device)
        uses = step.uses.select(batch.uses_U).to(policy.device)
        logprobs_U = logprobs_N.detach()[predictions_U]
        if whole is None:
            loss = policy_loss(logprobs_U, uses, config)
        else:
            loss = _part(whole, batch.uses_U.to(policy.device))
        step.losses.append((batch, loss))
        step.logprobs.append(logprobs_U)
        step.entropies.append(entropies_N.detach()[predictions_U])
        step.timed("forward", started)

        started = time.perf_counter()
        # Uses of one prediction add up to one coefficient.
        coefficients_N = torch.zeros_like(entropies_N).index_add(
            0, predictions_U, loss.coefficients_U
        )
        objective = (coefficients_N * logprobs_N).sum()
        if config.entropy_bonus > 0:
            weights_N = torch.zeros_like(coefficients_N).index_add(0, predictions_U, uses.weights_U)
            objective = objective - config.entropy_bonus * (weights_N * entropies_N).sum()
        objective.backward()
        step.timed("backward", started)
        report(Progress(phase=phase, completed=index + 1, total=num))

    grad_norm = torch.nn.utils.clip_grad_norm_(policy.parameters.values(), config.max_grad_norm)
    losses = [loss for _, loss in step.losses]
    metrics = loss_metrics(losses, step.entropies)
    logprobs_U = torch.zeros_like(step.uses.advantages_U)
    for batch, values_U in zip(step.micro_batches, step.logprobs, strict=True):
        logprobs_U[batch.uses_U] = values_U.cpu()
    old_U = step.uses.old_logprobs_U
    metrics |= sampler_metrics(logprobs_U if old_U is None else old_U, step.uses)
    corrected_U = torch.cat([loss.is_corrected_U for loss in losses])
    metrics["loss/corrected_token_fraction"] = float(corrected_U.float().mean())
    if config.entropy_bonus > 0:
        weights = torch.cat([step.uses.weights_U[batch.uses_U] for batch in step.micro_batches])
        bonus = float((weights * torch.cat(step.entropies).cpu()).sum())
        metrics["loss/train"] -= config.entropy_bonus * bonus
    metrics["loss/grad_norm"] = float(grad_norm)
    metrics |= batch_metrics(step.micro_batches)
    if policy.tree_gap is not None:
        metrics["data/step_tree_gap"] = policy.tree_gap
    metrics["time/step_forward_backward_s"] = time.perf_counter() - whole_step
    metrics |= {f"time/step_{phase}_s": value for phase, value in step.seconds.items()}
    check_finite(metrics)
    return metrics


def _plan(policy: Policy, rows: TrainRows, max_tokens: int, notes: list[str]) -> list[MicroBatch]:
    """Micro-batches; of trees, once they have been seen to equal rows.

    A tree above the budget is not cut at once: that would compute its trunk again and again. With gradient
    checkpointing more tokens fit, and only what is larger still is cut.
    """
    if largest_unit(rows.rows, shared=policy.shares_prefixes) > max_tokens:
        policy.use_checkpointing(True)
        max_tokens = int(max_tokens * policy.checkpointing_factor)

    def make(chosen: Sequence[TrainRow]) -> list[MicroBatch]:
        fill, shared = fill_tokens(policy.device), policy.shares_prefixes
        return make_micro_batches(
            chosen, max_tokens, table=rows.table, shared=shared, fill_tokens=fill
        )

    if policy.shares_prefixes and policy.tree_gap is None:
        checked = rows_to_check(rows.rows)
        different = check_trees(policy, make(checked)[0], checked)
        notes += [different] if different is not None else []
    if not policy.shares_prefixes and policy.checks_rows and policy.row_gap is None:
        checked = rows_to_check(rows.rows)
        check_rows(policy, make(checked)[0], checked)
    return make(rows.rows)


def _uses(task: TrainTask, rows: Sequence[TrainRow], known: Known) -> Uses:
    return replace(
        make_uses(rows, task.config, task.start_step),
        old_logprobs_U=known.old_logprobs_U,
        reference_logprobs_U=known.reference_logprobs_U,
    )


@torch.no_grad()
def _whole_loss(policy: Policy, step: _Step, config: TrainConfig) -> TokenLoss | None:
    """The loss over the whole step, where a trajectory that it must see whole lies in several micro-batches: an extra
    pass without gradient. None where each micro-batch can tell its own share."""
    if not needs_whole_trajectories(config) or not _spans(step):
        return None
    started = time.perf_counter()
    logprobs_U = torch.zeros_like(step.uses.advantages_U)
    for batch in step.micro_batches:
        logprobs_U[batch.uses_U] = policy.logprobs(batch)[0].cpu()[batch.predictions_U]
    uses = step.uses.to(policy.device)
    loss = policy_loss(logprobs_U.to(policy.device), uses, config)
    step.timed("extra_forward", started)
    return loss


def _spans(step: _Step) -> bool:
    """Whether a trajectory lies in several micro-batches."""
    seen: set[int] = set()
    for batch in step.micro_batches:
        here = {step.rows.rows[index].trajectory for index in batch.rows}
        if seen & here:
            return True
        seen |= here
    return False


def _part(loss: TokenLoss, uses_U: torch.Tensor) -> TokenLoss:
    """A micro-batch's uses of the whole loss, with an even share of its value."""
    share = len(uses_U) / len(loss.coefficients_U)
    parts: dict[str, Any] = {  # Any: tensors, and None without a reference
        each.name: None if values_U is None else values_U[uses_U]
        for each in fields(loss)
        if each.name != "value"
        for values_U in [getattr(loss, each.name)]
    }
    return TokenLoss(value=loss.value * share, **parts)
