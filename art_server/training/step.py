"""One optimizer step of a member of the GRPO family, from a task to a checkpoint.

The whole algorithm is `compute_gradient`. It leaves out where rows come from (the server resolves them) and when a step
becomes visible (the server renames the folder).
"""

import gc
import logging
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

import torch
from safetensors.torch import load_file

from art.wire import TrainConfig
from art_server.training.batches import (
    MicroBatch,
    TrainRows,
    Uses,
    largest_unit,
    make_micro_batches,
    make_train_rows,
    make_uses,
)
from art_server.training.checking import check_trees
from art_server.training.checkpoint import load_checkpoint, save_checkpoint
from art_server.training.loss import (
    TokenLoss,
    kl_estimate,
    needs_whole_trajectories,
    policy_loss,
    shape_advantages,
)
from art_server.training.memory import CHECKPOINTING_FACTOR, fill_tokens, is_out_of_memory
from art_server.training.metrics import (
    batch_metrics,
    check_finite,
    data_metrics,
    loss_metrics,
    peak_memory,
    reset_peak_memory,
)
from art_server.training.optimizer import steps_taken
from art_server.training.policy import ADAPTER_FILE, Policy
from art_server.training.schedule import base_learning_rate, learning_rate_factor
from art_server.training.task import Done, InitTask, Progress, TrainTask

logger = logging.getLogger(__name__)

MIN_TOKENS_PER_MICRO_BATCH = 64
"""Below this, less memory cannot be asked for: the task fails."""


@dataclass(slots=True)
class _Step:
    """A step under way: what `compute_gradient` adds to for the report."""

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
        self.seconds[phase] = self.seconds.get(phase, 0.0) + time.perf_counter() - started


def init(policy: Policy, task: InitTask) -> Done:
    """Write step 0: an adapter that changes nothing, without optimizer state."""
    policy.init_adapter(task.lora, task.seed)
    save_checkpoint(policy, None, Path(task.out_dir))
    return Done(metrics={})


def train(
    policy: Policy,
    task: TrainTask,
    max_tokens_per_micro_batch: int,
    report: Callable[[Progress], None],
) -> Done:
    """Take one step from in_dir to out_dir and tell what happened.

    A batch without learning signal writes the same weights and optimizer state again. A step that runs out of memory
    is tried again with half the tokens at a time and with gradient checkpointing.
    Raises FloatingPointError, with nothing written, when the loss, its gradient or a metric is not finite.
    """
    config = task.config
    rate, rule = base_learning_rate(config, policy.model_type, policy.hidden_size)
    optimizer = load_checkpoint(policy, task.lora, Path(task.in_dir), rate)
    rate *= learning_rate_factor(config, steps_taken(optimizer))
    for group in optimizer.param_groups:
        group["lr"] = rate
    rows = make_train_rows(task.batch, config)
    metrics = data_metrics(rows)
    notes = [rule] if rule else []
    reset_peak_memory(policy.device)
    # An earlier step may have needed it.
    policy.use_checkpointing(False)

    budget, num_retries = max_tokens_per_micro_batch, 0
    while rows.rows:
        optimizer.zero_grad(set_to_none=True)
        try:
            metrics |= compute_gradient(policy, task, rows, budget, report, notes)
            break
        except (RuntimeError, MemoryError) as error:
            if not is_out_of_memory(error) or budget // 2 < MIN_TOKENS_PER_MICRO_BATCH:
                raise
        # Outside of the handler: its traceback holds the failed step's tensors.
        budget, num_retries = budget // 2, num_retries + 1
        policy.use_checkpointing(True)
        gc.collect()
        if policy.device.type == "cuda":
            torch.cuda.empty_cache()
        notes.append(f"out of memory: tried again with {budget} tokens at a time")
        logger.warning(notes[-1])

    if rows.rows:
        started = time.perf_counter()
        optimizer.step()
        metrics["time/step_optimizer_s"] = time.perf_counter() - started
        seconds = metrics["time/step_forward_backward_s"] + metrics["time/step_optimizer_s"]
        metrics["throughput/avg_trainer_tok_per_s"] = metrics["data/step_row_tokens"] / seconds
        metrics["loss/learning_rate"] = rate
        metrics["data/step_num_out_of_memory_retries"] = float(num_retries)
        metrics |= peak_memory(policy.device)

    report(Progress(phase="save", completed=0, total=1))
    started = time.perf_counter()
    save_checkpoint(policy, optimizer, Path(task.out_dir))
    metrics["time/step_save_s"] = time.perf_counter() - started
    return Done(metrics=metrics, unchanged=not rows.rows, notes=notes)


def compute_gradient(
    policy: Policy,
    task: TrainTask,
    rows: TrainRows,
    max_tokens: int,
    report: Callable[[Progress], None],
    notes: list[str],
) -> dict[str, float]:
    """Put the step's gradient, clipped, into the policy's parameters; returns its metrics."""
    config = task.config
    started = whole_step = time.perf_counter()
    step = _plan(policy, rows, config, max_tokens, notes)
    if config.plot_tensors:
        # Here, because only who asks for the picture pays for matplotlib.
        from art_server.training.plot import plot_micro_batches

        plot_micro_batches(step.micro_batches, rows.rows, Path(task.out_dir))
    step.timed("plan", started)

    references = _references(policy, task, step)
    if references and config.kl_in != "loss":
        step.uses = _shape(step, task, references)
    whole = _whole_loss(policy, step, references, config)

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
            reference_U = references[index][predictions_U] if references else None
            loss = policy_loss(logprobs_U, uses, reference_U, config)
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
        report(Progress(phase="train", completed=index + 1, total=num))

    grad_norm = torch.nn.utils.clip_grad_norm_(policy.parameters.values(), config.max_grad_norm)
    losses = [loss for _, loss in step.losses]
    metrics = loss_metrics(losses, step.uses, step.micro_batches, step.logprobs, step.entropies)
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


def _plan(
    policy: Policy, rows: TrainRows, config: TrainConfig, max_tokens: int, notes: list[str]
) -> _Step:
    """Micro-batches; of trees, once they have been seen to equal rows.

    A tree above the budget is not cut at once: that would compute its trunk again and again. With gradient
    checkpointing more tokens fit, and only what is larger still is cut.
    """
    if largest_unit(rows.rows, shared=policy.shares_prefixes) > max_tokens:
        policy.use_checkpointing(True)
        max_tokens *= CHECKPOINTING_FACTOR
    fill = fill_tokens(policy.device)
    micro_batches = make_micro_batches(
        rows.rows, max_tokens, shared=policy.shares_prefixes, fill_tokens=fill
    )
    if policy.shares_prefixes and policy.tree_gap is None:
        different = check_trees(policy, micro_batches[0], rows.rows)
        if different is not None:
            notes.append(different)
            micro_batches = make_micro_batches(
                rows.rows, max_tokens, shared=False, fill_tokens=fill
            )
    return _Step(rows, make_uses(rows.rows, config), micro_batches)


def _references(policy: Policy, task: TrainTask, step: _Step) -> list[torch.Tensor]:
    """The reference's log-probability of each prediction, by micro-batch; empty where KL is off."""
    if task.config.beta == 0:
        return []
    started = time.perf_counter()
    adapter = None
    if task.reference_dir is not None:
        adapter = load_file(Path(task.reference_dir) / ADAPTER_FILE)
    references = [policy.reference_logprobs(batch, adapter) for batch in step.micro_batches]
    step.timed("reference", started)
    return references


def _shape(step: _Step, task: TrainTask, references: list[torch.Tensor]) -> Uses:
    """The uses with advantages from which KL, at the sampler's log-probabilities, was taken."""
    config, uses = task.config, step.uses
    kl_U = torch.zeros_like(uses.advantages_U)
    for batch, reference_N in zip(step.micro_batches, references, strict=True):
        reference_U = reference_N.cpu()[batch.predictions_U]
        sampled_U = uses.sampled_logprobs_U[batch.uses_U]
        kl_U[batch.uses_U] = kl_estimate(sampled_U, reference_U, config.kl_estimator)[0]
    kl_U = torch.where(uses.is_unknown_U, 0.0, kl_U)
    if config.kl_in == "reward":
        penalties = [0.0] * step.rows.num_trajectories
        names = [row.trajectory for row in step.rows.rows for _ in row.targets]
        for name, value in zip(names, kl_U.tolist(), strict=True):
            penalties[name] += config.beta * value
        return make_uses(make_train_rows(task.batch, config, penalties).rows, config)
    shaped_U = shape_advantages(uses.advantages_U, kl_U, config.beta, uses.is_unknown_U)
    return Uses(
        uses.sampled_logprobs_U, uses.is_unknown_U, shaped_U, uses.weights_U, uses.trajectories_U
    )


@torch.no_grad()
def _whole_loss(
    policy: Policy, step: _Step, references: list[torch.Tensor], config: TrainConfig
) -> TokenLoss | None:
    """The loss over the whole step, where a trajectory that it must see whole lies in several micro-batches: an extra
    pass without gradient. None where each micro-batch can tell its own share."""
    if not needs_whole_trajectories(config) or not _spans(step):
        return None
    started = time.perf_counter()
    logprobs_U = torch.zeros_like(step.uses.advantages_U, device=policy.device)
    reference_U = torch.zeros_like(logprobs_U) if references else None
    for index, batch in enumerate(step.micro_batches):
        uses_U, predictions_U = (
            batch.uses_U.to(policy.device),
            batch.predictions_U.to(policy.device),
        )
        logprobs_U[uses_U] = policy.logprobs(batch)[0][predictions_U]
        if reference_U is not None:
            reference_U[uses_U] = references[index][predictions_U]
    loss = policy_loss(logprobs_U, step.uses.to(policy.device), reference_U, config)
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
    return TokenLoss(
        value=loss.value * share,
        coefficients_U=loss.coefficients_U[uses_U],
        ratios_U=loss.ratios_U[uses_U],
        is_clipped_U=loss.is_clipped_U[uses_U],
        corrections_U=loss.corrections_U[uses_U],
        kl_U=None if loss.kl_U is None else loss.kl_U[uses_U],
    )
