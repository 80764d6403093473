"""What a step tells of itself, under the names that ART's dashboards read: loss/, data/, time/, throughput/."""

import math
import resource
import statistics
import sys
from collections.abc import Sequence

import torch

from art_server.trainer.batches import MicroBatch, TrainRows, Uses
from art_server.trainer.loss import MAX_LOG_RATIO, TokenLoss


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
    losses: Sequence[TokenLoss], entropies: Sequence[torch.Tensor]
) -> dict[str, float]:
    """Over all uses of an optimizer step: what the update does. Ratios are those that the clip bounds."""
    metrics = {
        "loss/train": float(sum(loss.value for loss in losses)),
        "loss/entropy": float(torch.cat(list(entropies)).mean()),
        "loss/clipped_token_fraction": float(
            torch.cat([loss.is_clipped_U for loss in losses]).float().mean()
        ),
        **_spread("loss/policy_ratio", torch.cat([loss.policy_ratios_U for loss in losses]).cpu()),
    }
    kl = [loss.kl_U for loss in losses if loss.kl_U is not None]
    if kl:
        metrics["loss/kl_policy_ref"] = float(torch.cat(kl).mean())
    return metrics


def sampler_metrics(old_logprobs_U: torch.Tensor, uses: Uses) -> dict[str, float]:
    """What separates the trainer at the start of the job from the sampler, over uses whose sampled log-probability is
    known: pi_old / pi_sampled before any truncation, and |difference| of log-probabilities.

    The gap is that of tokens whose record says that the job's start sampled them; without such, of all whose step is
    unknown. Tokens of another step have a gap of their own: the policies differ there.
    """
    known_U = ~uses.is_unknown_U
    differences_U = old_logprobs_U - uses.sampled_logprobs_U
    metrics = {
        "data/step_num_tokens_without_logprob": float(uses.is_unknown_U.sum()),
        "data/step_num_tokens_stale": float(uses.is_stale_U.sum()),
        "loss/logprob_gap_num_tokens": float((uses.is_fresh_U & known_U).sum()),
    }
    ratios_U = differences_U[known_U].clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO).exp()
    metrics |= _spread("loss/importance_ratio", ratios_U if len(ratios_U) else torch.ones(1))
    of_start_U = uses.is_fresh_U if bool((uses.is_fresh_U & known_U).any()) else ~uses.is_stale_U
    for name, chosen_U in (
        ("loss/logprob_gap", known_U & of_start_U),
        ("loss/logprob_gap_stale", known_U & uses.is_stale_U),
    ):
        if bool(chosen_U.any()):
            gaps = differences_U[chosen_U].abs()
            metrics[f"{name}_mean"], metrics[f"{name}_max"] = float(gaps.mean()), float(gaps.max())
    return metrics


def merge_steps(steps: Sequence[dict[str, float]]) -> dict[str, float]:
    """The metrics of several optimizer steps as those of one job: work and time add up, extremes stay, the rest is the mean."""
    merged: dict[str, float] = {}
    for name in dict.fromkeys(name for step in steps for name in step):
        values = [step[name] for step in steps if name in step]
        if name.startswith(("time/", "data/step_num_", "data/step_row_", "data/step_computed_")):
            merged[name] = sum(values)
        elif name.endswith(("_p95", "_p99", "_max", "_gap")):
            merged[name] = max(values)
        elif len(values) > 1:
            merged[name] = statistics.fmean(values)
        else:
            merged[name] = values[0]
    return merged


def _spread(name: str, values: torch.Tensor) -> dict[str, float]:
    ordered = values.sort().values
    return {
        f"{name}_mean": float(values.mean()),
        f"{name}_p95": float(ordered[int(0.95 * (len(ordered) - 1))]),
        f"{name}_p99": float(ordered[int(0.99 * (len(ordered) - 1))]),
    }


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
