"""What a step tells of itself, under the names that ART's dashboards read: loss/, data/, time/, throughput/."""

import math
import resource
import sys
from collections.abc import Sequence

import torch

from art_server.training.batches import MicroBatch, TrainRows, Uses
from art_server.training.loss import TokenLoss


def data_metrics(rows: TrainRows) -> dict[str, float]:
    return {
        "data/step_num_groups_submitted": float(rows.num_groups),
        "data/step_num_groups_trainable": float(rows.num_groups_trainable),
        "data/step_num_groups_dead": float(rows.num_groups - rows.num_groups_trainable),
        "data/step_num_trajectories": float(rows.num_trajectories),
        "data/step_num_trajectories_masked": float(rows.num_trajectories_masked),
        "data/step_num_rows": float(len(rows.rows)),
        "data/step_trainable_assistant_tokens": float(rows.num_tokens),
        "data/step_num_tokens_unpredicted": float(rows.num_tokens_unpredicted),
        "data/step_num_gradient_steps": 1.0 if rows.rows else 0.0,
    }


def batch_metrics(micro_batches: Sequence[MicroBatch]) -> dict[str, float]:
    """How much was shared: row tokens are what separate rows hold, computed tokens what the trees hold."""
    num_row_tokens = sum(each.num_row_tokens for each in micro_batches)
    num_computed = sum(each.num_tokens for each in micro_batches)
    return {
        "data/step_num_micro_batches": float(len(micro_batches)),
        "data/step_row_tokens": float(num_row_tokens),
        "data/step_computed_tokens": float(num_computed),
        "data/step_shared_token_saving": 1 - num_computed / num_row_tokens,
        "data/step_is_shared": float(all(each.is_shared for each in micro_batches)),
    }


def loss_metrics(
    losses: Sequence[TokenLoss],
    uses: Uses,
    micro_batches: Sequence[MicroBatch],
    logprobs: Sequence[torch.Tensor],
    entropies: Sequence[torch.Tensor],
) -> dict[str, float]:
    """Over all uses of the step. Gaps are |trainer - engine| log-probabilities before the update, where the engine's
    is known."""
    order_U = torch.cat([each.uses_U for each in micro_batches])
    gaps_U = (torch.cat(list(logprobs)).cpu() - uses.sampled_logprobs_U[order_U]).abs()
    gaps_U = gaps_U[~uses.is_unknown_U[order_U]]
    ratios_U = torch.cat([loss.ratios_U for loss in losses]).cpu().sort().values
    corrections_U = torch.cat([loss.corrections_U for loss in losses]).cpu()
    metrics = {
        "loss/train": float(sum(loss.value for loss in losses)),
        "loss/entropy": float(torch.cat(list(entropies)).mean()),
        "loss/importance_ratio_mean": float(ratios_U.mean()),
        "loss/importance_ratio_p95": float(ratios_U[int(0.95 * (len(ratios_U) - 1))]),
        "loss/importance_ratio_p99": float(ratios_U[int(0.99 * (len(ratios_U) - 1))]),
        "loss/clipped_token_fraction": float(
            torch.cat([loss.is_clipped_U for loss in losses]).float().mean()
        ),
        "loss/corrected_token_fraction": float((corrections_U != 1).float().mean()),
    }
    if len(gaps_U):
        metrics["loss/logprob_gap_mean"] = float(gaps_U.mean())
        metrics["loss/logprob_gap_max"] = float(gaps_U.max())
    kl = [loss.kl_U for loss in losses if loss.kl_U is not None]
    if kl:
        metrics["loss/kl_policy_ref"] = float(torch.cat(kl).mean())
    return metrics


def reset_peak_memory(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)


def peak_memory(device: torch.device) -> dict[str, float]:
    """On CUDA of this step, elsewhere the largest that the process ever took: GiB."""
    if device.type == "cuda":
        return {"data/step_peak_memory_gib": torch.cuda.max_memory_allocated(device) / 2**30}
    largest = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return {"data/step_peak_memory_gib": largest / (2**30 if sys.platform == "darwin" else 2**20)}


def check_finite(metrics: dict[str, float]) -> None:
    """Raises FloatingPointError that names what is not a finite number."""
    broken = {name: value for name, value in metrics.items() if not math.isfinite(value)}
    if broken:
        raise FloatingPointError(
            f"the step is not finite: {broken}; nothing was written. Look at the batch's rewards and log-probabilities,"
            " or lower the learning rate"
        )
