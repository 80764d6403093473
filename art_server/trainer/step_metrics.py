"""The metrics of a step, under the names that ART's dashboards read: loss/, data/, time/, throughput/."""

import math
import resource
import statistics
import sys
import time
from collections.abc import Mapping, Sequence

import torch

from art_server.trainer.batches import MicroBatch, SampledTokens, TrainBatch
from art_server.trainer.loss import MAX_LOG_RATIO


def data_metrics(trained: TrainBatch) -> dict[str, float]:
    return {
        "data/step_num_groups_submitted": float(trained.num_groups),
        "data/step_num_groups_trainable": float(trained.num_groups_trainable),
        "data/step_num_groups_dead": float(trained.num_groups - trained.num_groups_trainable),
        "data/groups_identical": float(trained.num_groups_identical),
        "data/step_num_trajectories": float(trained.num_trajectories),
        "data/step_num_trajectories_masked": float(trained.num_trajectories_masked),
        "data/step_num_rows": float(len(trained.sequences)),
        "data/step_trainable_assistant_tokens": float(trained.num_tokens),
        "data/step_num_tokens_unpredicted": float(trained.num_tokens_unpredicted),
        "data/step_num_gradient_steps": 1.0 if trained.sequences else 0.0,
    }


def batch_metrics(micro_batches: Sequence[MicroBatch]) -> dict[str, float]:
    """How much was shared. Row tokens are the tokens of the separate sequences, computed tokens the tokens of their trees."""
    num_sequence_tokens = sum(batch.num_sequence_tokens for batch in micro_batches)
    num_computed = sum(batch.num_tokens for batch in micro_batches)
    return {
        "data/step_num_micro_batches": float(len(micro_batches)),
        "data/step_row_tokens": float(num_sequence_tokens),
        "data/step_computed_tokens": float(num_computed),
        "data/step_shared_token_saving": 1 - num_computed / num_sequence_tokens,
        "data/step_is_shared": 1.0 if all(batch.is_shared for batch in micro_batches) else 0.0,
    }


def loss_metrics(value: float, numbers: Mapping[str, torch.Tensor], *, has_reference: bool) -> dict[str, float]:
    """Loss, entropy, KL and the ratios that the clip bounds, over all tokens of an optimizer step."""
    metrics = {
        "loss/train": value,
        "loss/entropy": float(numbers["entropies"].mean()),
        "loss/clipped_token_fraction": float(numbers["clipped"].mean()),
        **_spread("loss/policy_ratio", numbers["ratios"]),
    }
    if has_reference:
        metrics["loss/kl_policy_ref"] = float(numbers["kl"].mean())
    return metrics


def sampler_metrics(old_logprobs_S: torch.Tensor, tokens: SampledTokens) -> dict[str, float]:
    """How the trainer at the start of the job differs from the engine, over tokens with sampled log-probability: pi_old
    / pi_sampled before any truncation, and |difference| of log-probabilities (the gap).

    The gap covers the fresh tokens or, without any, all tokens of unknown step. Stale tokens have a separate gap, because
    an earlier policy sampled them: the policy's movement since then is their mean allowance.
    """
    known_S = ~tokens.is_unknown_S
    differences_S = old_logprobs_S - tokens.sampled_logprobs_S
    metrics = {
        "data/step_num_tokens_without_logprob": float(tokens.is_unknown_S.sum()),
        "data/step_num_tokens_stale": float(tokens.is_stale_S.sum()),
        "loss/logprob_gap_num_tokens": float((tokens.is_fresh_S & known_S).sum()),
        "loss/logprob_gap_stale_num_tokens": float((tokens.is_stale_S & known_S).sum()),
    }
    ratios_S = differences_S[known_S].clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO).exp()
    metrics |= _spread("loss/importance_ratio", ratios_S if len(ratios_S) else torch.ones(1))
    of_start_S = tokens.is_fresh_S if bool((tokens.is_fresh_S & known_S).any()) else ~tokens.is_stale_S
    for name, chosen_S in (
        ("loss/logprob_gap", known_S & of_start_S),
        ("loss/logprob_gap_stale", known_S & tokens.is_stale_S),
    ):
        if bool(chosen_S.any()):
            gaps = differences_S[chosen_S].abs()
            metrics[f"{name}_mean"], metrics[f"{name}_max"] = float(gaps.mean()), float(gaps.max())
    if bool((known_S & tokens.is_stale_S).any()):
        allowances_S = tokens.allowances_S[known_S & tokens.is_stale_S]
        metrics["loss/logprob_gap_stale_allowance"] = float(allowances_S.mean())
    return metrics


def merge_steps(steps: Sequence[dict[str, float]]) -> dict[str, float]:
    """A job's metrics from its optimizer steps' metrics: work and time are sums, extremes maxima, the rest means."""
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
    """Peak memory in GiB: on CUDA since the last reset, elsewhere since the process started."""
    if device.type == "cuda":
        return {"data/step_peak_memory_gib": torch.cuda.max_memory_allocated(device) / 2**30}
    largest = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    # getrusage counts bytes on macOS, KiB on Linux.
    return {"data/step_peak_memory_gib": largest / (2**30 if sys.platform == "darwin" else 2**20)}


def synced_seconds_since(started: float) -> float:
    """Waits for the GPU first, so that the seconds include its work."""
    if torch.cuda.is_initialized():
        torch.cuda.synchronize()
    return time.perf_counter() - started


def check_finite(metrics: dict[str, float]) -> None:
    """Checks that every metric is a finite number.

    Raises:
        FloatingPointError: some are not; the message names them.
    """
    broken = {name: value for name, value in metrics.items() if not math.isfinite(value)}
    if broken:
        raise FloatingPointError(
            f"the step is not finite: {broken}; nothing was written. Check the batch's rewards and log-probabilities,"
            " or lower the learning rate"
        )
