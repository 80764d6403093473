"""One optimizer step of GRPO, from a task to a checkpoint.

The whole algorithm is `train`. It leaves out where rows come from (the server resolves them) and when a step becomes
visible (the server renames the folder).
"""

import math
import time
from collections.abc import Callable
from pathlib import Path

import torch

from art_server.training.batches import TrainRows, make_micro_batches, make_train_rows
from art_server.training.checkpoint import load_checkpoint, save_checkpoint
from art_server.training.loss import TokenLoss, grpo_loss
from art_server.training.policy import Policy
from art_server.training.task import Done, InitTask, Progress, TrainTask


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

    A batch without learning signal writes the same weights and optimizer state again.
    Raises FloatingPointError, with nothing written, when the loss, its gradient or a metric is not finite.
    """
    config = task.config
    optimizer = load_checkpoint(policy, task.lora, Path(task.in_dir), config.learning_rate)
    optimizer.zero_grad(set_to_none=True)
    train_rows = make_train_rows(task.batch)
    metrics = _data_metrics(train_rows)
    micro_batches = make_micro_batches(train_rows.rows, max_tokens_per_micro_batch)

    if micro_batches:
        started = time.perf_counter()
        losses: list[TokenLoss] = []
        entropies: list[torch.Tensor] = []
        gaps: list[torch.Tensor] = []
        for index, micro_batch in enumerate(micro_batches):
            batch = micro_batch.to(policy.device)
            reference_logprobs_N = policy.reference_logprobs(batch) if config.beta > 0 else None
            logprobs_N, entropies_N = policy.logprobs(batch)
            loss = grpo_loss(
                logprobs_N.detach(),
                batch.sampled_logprobs_N,
                batch.advantages_N,
                reference_logprobs_N,
                config,
                train_rows.num_tokens,
            )
            (loss.coefficients_N * logprobs_N).sum().backward()
            losses.append(loss)
            entropies.append(entropies_N)
            gaps.append((logprobs_N.detach() - batch.sampled_logprobs_N).abs())
            report(Progress(phase="train", completed=index + 1, total=len(micro_batches)))

        grad_norm = torch.nn.utils.clip_grad_norm_(policy.parameters.values(), config.max_grad_norm)
        metrics |= _loss_metrics(losses, torch.cat(entropies), torch.cat(gaps))
        metrics |= {"loss/grad_norm": float(grad_norm), "loss/learning_rate": config.learning_rate}
        metrics["time/step_forward_backward_s"] = time.perf_counter() - started
        _check_finite(metrics)

        started = time.perf_counter()
        optimizer.step()
        metrics["time/step_optimizer_s"] = time.perf_counter() - started
        metrics["throughput/avg_trainer_tok_per_s"] = sum(
            each.num_tokens for each in micro_batches
        ) / (metrics["time/step_forward_backward_s"] + metrics["time/step_optimizer_s"])

    report(Progress(phase="save", completed=0, total=1))
    started = time.perf_counter()
    save_checkpoint(policy, optimizer, Path(task.out_dir))
    metrics["time/step_save_s"] = time.perf_counter() - started
    return Done(metrics=metrics, unchanged=not micro_batches)


def _data_metrics(train_rows: TrainRows) -> dict[str, float]:
    return {
        "data/step_num_groups_submitted": float(train_rows.num_groups),
        "data/step_num_groups_trainable": float(train_rows.num_groups_trainable),
        "data/step_num_trajectories": float(train_rows.num_trajectories),
        "data/step_num_rows": float(len(train_rows.rows)),
        "data/step_trainable_assistant_tokens": float(train_rows.num_tokens),
        "data/step_num_tokens_unpredicted": float(train_rows.num_tokens_unpredicted),
        "data/step_num_gradient_steps": 1.0 if train_rows.rows else 0.0,
    }


def _loss_metrics(
    losses: list[TokenLoss], entropies_N: torch.Tensor, gaps_N: torch.Tensor
) -> dict[str, float]:
    """Over all trained tokens of the step; gaps are |trainer - engine| log-probabilities before the update."""
    ratios_N = torch.cat([loss.ratios_N for loss in losses]).sort().values
    metrics = {
        "loss/train": float(sum(loss.value for loss in losses)),
        "loss/entropy": float(entropies_N.mean()),
        "loss/importance_ratio_mean": float(ratios_N.mean()),
        "loss/importance_ratio_p95": float(ratios_N[int(0.95 * (len(ratios_N) - 1))]),
        "loss/importance_ratio_p99": float(ratios_N[int(0.99 * (len(ratios_N) - 1))]),
        "loss/clipped_token_fraction": float(
            torch.cat([loss.is_clipped_N for loss in losses]).float().mean()
        ),
        "loss/logprob_gap_mean": float(gaps_N.mean()),
        "loss/logprob_gap_max": float(gaps_N.max()),
    }
    kl = [loss.kl_N for loss in losses if loss.kl_N is not None]
    if kl:
        metrics["loss/kl_policy_ref"] = float(torch.cat(kl).mean())
    return metrics


def _check_finite(metrics: dict[str, float]) -> None:
    broken = {name: value for name, value in metrics.items() if not math.isfinite(value)}
    if broken:
        raise FloatingPointError(
            f"the step is not finite: {broken}; nothing was written. Look at the batch's rewards and log-probabilities,"
            " or lower the learning rate"
        )
