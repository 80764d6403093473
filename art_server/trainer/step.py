"""One optimizer step of the GRPO family: `compute_gradient` is the whole algorithm."""

import math
import time
from collections.abc import Callable
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any

import torch

from art_protocol.wire import TrainConfig
from art_server.shared.trainer_messages import Progress, TrainTask
from art_server.store.adapter_layers import layer_kind
from art_server.trainer.batches import MicroBatch, SampledTokens, TrainBatch
from art_server.trainer.checking import make_checked_micro_batches
from art_server.trainer.gang_view import GangView
from art_server.trainer.loss import TokenLoss, needs_whole_trajectories, policy_loss
from art_server.trainer.old_logprobs import NOTHING_OLD, OldLogprobs, compute_logprobs
from art_server.trainer.policy import Policy
from art_server.trainer.step_metrics import (
    batch_metrics,
    check_finite,
    loss_metrics,
    sampler_metrics,
    synced_seconds_since,
)
from art_server.trainer.teacher import divergence, is_taught
from art_server.trainer.token_record import TokenRecord

LARGEST_WEIGHT = 1 / 64
"""In float16 the loss is scaled so that the largest weight of a token is about this: far above the smallest number of float16,
and far below the largest."""


NUMBERS = ("logprobs", "entropies", "likeliest", "ratios", "clipped", "corrected", "kl", "taught", "divergences")


@dataclass(slots=True)
class _Step:
    """An optimizer step in progress: `compute_gradient` collects here what its metrics need."""

    trained: TrainBatch
    tokens: SampledTokens
    micro_batches: list[MicroBatch]
    value: float = 0.0
    """The loss of this rank's tokens."""
    numbers: dict[str, torch.Tensor] = field(default_factory=dict)
    """The numbers of each token by name (`NUMBERS`), in the order of `tokens`: S, float32, 0 where another rank computed."""
    seconds: dict[str, float] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.numbers = {name: torch.zeros_like(self.tokens.advantages_S) for name in NUMBERS}

    def add(self, indices_S: torch.Tensor, loss: TokenLoss, **numbers_S: torch.Tensor) -> None:
        """Adds a micro-batch's loss and the numbers of its tokens."""
        self.value += float(loss.value)
        numbers_S |= {"ratios": loss.policy_ratios_S, "clipped": loss.is_clipped_S, "corrected": loss.is_corrected_S}
        if loss.kl_S is not None:
            numbers_S["kl"] = loss.kl_S
        for name, part_S in numbers_S.items():
            self.numbers[name][indices_S] = part_S.float().cpu()

    def add_divergences(self, batch: MicroBatch, divergences_S: torch.Tensor, weights_S: torch.Tensor) -> None:
        """Adds the term of the loss for teachers' targets, of a micro-batch's tokens. Tokens without a target have divergence 0."""
        self.value += float((divergences_S * weights_S).sum())
        self.numbers["divergences"][batch.indices_S] = divergences_S.float().cpu()
        self.numbers["taught"][batch.indices_S] = is_taught(batch.taught_N)[batch.predictions_S].float()

    def sum(self, gang: GangView) -> None:
        """Adds up what the ranks have computed."""
        self.value = float(gang.sum(torch.tensor(self.value, dtype=torch.float64)))
        if gang.size > 1:
            summed = gang.sum(torch.stack([*self.numbers.values()]))
            self.numbers = dict(zip(self.numbers, summed, strict=True))

    def timed(self, phase: str, started: float) -> None:
        """Adds the seconds since `started` to the phase."""
        self.seconds[phase] = self.seconds.get(phase, 0.0) + synced_seconds_since(started)


def compute_gradient(
    policy: Policy,
    task: TrainTask,
    trained: TrainBatch,
    max_tokens: int,
    report: Callable[[Progress], None],
    notes: list[str],
    old: OldLogprobs = NOTHING_OLD,
    phase: str = "train",
    record: TokenRecord | None = None,
) -> dict[str, float]:
    """Puts the clipped gradient of one optimizer step into the policy's parameters; returns the step's metrics. Adds
    the step's tokens to the record."""
    config = task.config
    started = time.perf_counter()
    step = _Step(
        trained,
        old.sampled_tokens(task, trained.sequences),
        make_checked_micro_batches(policy, trained, max_tokens, notes),
    )
    if config.plot_tensors:
        # Imported here, because only the picture needs matplotlib.
        from art_server.trainer.tensor_plot import plot_micro_batches

        plot_micro_batches(step.micro_batches, trained.sequences, Path(task.out_dir))
    step.timed("plan", started)
    scale = _loss_scale(policy.dtype, step.tokens.weights_S)
    whole = _whole_loss(policy, step, config, report)
    rounds = policy.gang.rounds([batch.num_tokens for batch in step.micro_batches])
    with policy.gang.together():
        for number, (index, counts) in enumerate(rounds):
            _add_gradient(policy, step, step.micro_batches[index], config, whole, scale if counts else 0.0)
            # A cancelled job ends here (`Worker._report`).
            report(Progress(phase=phase, completed=number + 1, total=len(rounds)))
    started_sum = time.perf_counter()
    sum_gradients(policy)
    step.sum(policy.gang)
    step.timed("sum", started_sum)
    grad_norm = _finish_gradient(policy, task, scale)
    start_logprobs_S = step.tokens.old_logprobs_S
    if start_logprobs_S is None:
        start_logprobs_S = step.numbers["logprobs"]
    if record is not None:
        _write(record, step, start_logprobs_S)
    metrics = _metrics(policy, step, config, start_logprobs_S) | {"loss/grad_norm": grad_norm}
    metrics["time/step_forward_backward_s"] = time.perf_counter() - started
    metrics |= {f"time/step_{name}_s": value for name, value in step.seconds.items()}
    check_finite(metrics)
    return metrics


def _add_gradient(
    policy: Policy,
    step: _Step,
    batch: MicroBatch,
    config: TrainConfig,
    whole: TokenLoss | None,
    scale: float,
) -> None:
    """Adds `scale` times a micro-batch's gradient to the policy's parameters, and its numbers to the step. A scale of 0 adds
    nothing: the passes run only because other ranks wait for them."""
    started = time.perf_counter()
    scores = policy.scores(batch, with_entropy_gradient=config.entropy_bonus > 0)
    logprobs_N, entropies_N = scores.logprobs_N, scores.entropies_N
    predictions_S = batch.predictions_S.to(policy.device)
    tokens = step.tokens.select(batch.indices_S).to(policy.device)
    logprobs_S = logprobs_N.detach()[predictions_S]
    if whole is None:
        loss = policy_loss(logprobs_S, tokens, config)
    else:
        loss = _part(whole, batch.indices_S.to(policy.device))
    divergences_N = _divergences(batch, scores.more_NK, config)
    if scale:
        entropies_S, likeliest_S = entropies_N.detach()[predictions_S], scores.is_likeliest_N[predictions_S]
        step.add(batch.indices_S, loss, logprobs=logprobs_S, entropies=entropies_S, likeliest=likeliest_S)
        if divergences_N is not None:
            step.add_divergences(
                batch, divergences_N.detach()[predictions_S], tokens.weights_S * loss.teacher_weights_S
            )
    step.timed("forward", started)

    started = time.perf_counter()
    # A prediction's coefficient is the sum over the sampled tokens that share it.
    zeros_N = torch.zeros_like(entropies_N)
    coefficients_N = zeros_N.index_add(0, predictions_S, loss.coefficients_S)
    objective = (coefficients_N * logprobs_N).sum()
    if config.entropy_bonus > 0:
        weights_N = zeros_N.index_add(0, predictions_S, tokens.weights_S)
        objective = objective - config.entropy_bonus * (weights_N * entropies_N).sum()
    if divergences_N is not None:
        weights_N = zeros_N.index_add(0, predictions_S, tokens.weights_S * loss.teacher_weights_S)
        objective = objective + (weights_N * divergences_N).sum()
    (objective * scale).backward()
    step.timed("backward", started)


def _divergences(batch: MicroBatch, more_NK: torch.Tensor, config: TrainConfig) -> torch.Tensor | None:
    """The divergence of each prediction from its teacher's target, 0 without a target; None if no prediction has one."""
    indices_n = is_taught(batch.taught_N).nonzero()[:, 0]
    if not len(indices_n):
        return None
    teacher_nK = batch.taught.logprobs_UK[batch.taught_N[indices_n]].to(more_NK.device)
    indices_n = indices_n.to(more_NK.device)
    divergences_n = divergence(more_NK[indices_n], teacher_nK, config.distill_alpha, config.distill_clip)
    return more_NK.new_zeros(len(more_NK)).index_add(0, indices_n, divergences_n)


def sum_gradients(policy: Policy) -> None:
    """Gives every rank the sum of all ranks' gradients. A parameter that has a gradient on no rank gets none, so
    that the optimizer leaves it alone."""
    if policy.gang.size == 1:
        return
    parameters = policy.parameters.values()
    # Joining allocates as much as all gradients: a rank may run out of memory here.
    with policy.gang.together():
        joined = join_gradients(policy)
    sizes = [parameter.numel() for parameter in parameters]
    *gradients, flags = policy.gang.sum(joined).split([*sizes, len(parameters)])
    for parameter, gradient, flag in zip(parameters, gradients, flags.tolist(), strict=True):
        parameter.grad = gradient.view_as(parameter) if flag else None


def join_gradients(policy: Policy) -> torch.Tensor:
    """All gradients in one vector, zeros for a parameter without a gradient. Behind them a flag for each parameter: 1.0 if
    it has a gradient, else 0.0."""
    gradients: list[torch.Tensor] = []
    flags: list[float] = []
    for parameter in policy.parameters.values():
        gradient = torch.zeros_like(parameter) if parameter.grad is None else parameter.grad
        gradients.append(gradient.flatten())
        flags.append(0.0 if parameter.grad is None else 1.0)
    return torch.cat([*gradients, torch.tensor(flags, device=policy.device)])


def _finish_gradient(policy: Policy, task: TrainTask, scale: float) -> float:
    """Divides the gradient by `scale`, leaves out layers that the engine does not adapt, and clips it; returns its norm
    before the clip."""
    for name, parameter in policy.parameters.items():
        if task.lost_layers and layer_kind(name.partition(".lora_")[0]) in task.lost_layers:
            # AdamW leaves a parameter without a gradient alone, and the norm does not count it.
            parameter.grad = None
        if scale > 1 and parameter.grad is not None:
            parameter.grad /= scale
    parameters = policy.parameters.values()
    return float(torch.nn.utils.clip_grad_norm_(parameters, task.config.max_grad_norm))


def _metrics(policy: Policy, step: _Step, config: TrainConfig, start_logprobs_S: torch.Tensor) -> dict[str, float]:
    """The step's metrics. `start_logprobs_S` are the trainer's log-probabilities at the start of the job."""
    metrics = loss_metrics(step.value, step.numbers, has_reference=step.tokens.reference_logprobs_S is not None)
    metrics |= sampler_metrics(start_logprobs_S, step.tokens)
    if config.objective == "likelihood":
        metrics["loss/token_accuracy"] = float(step.numbers["likeliest"].mean())
    metrics["loss/corrected_token_fraction"] = float(step.numbers["corrected"].mean())
    if num_taught := float(step.numbers["taught"].sum()):
        metrics["loss/teacher_divergence"] = float(step.numbers["divergences"].sum()) / num_taught
    if config.entropy_bonus > 0:
        bonus = float((step.tokens.weights_S * step.numbers["entropies"]).sum())
        metrics["loss/train"] -= config.entropy_bonus * bonus
    metrics |= batch_metrics(step.micro_batches)
    if policy.tree_gap is not None:
        metrics["data/step_tree_gap"] = policy.tree_gap
    return metrics


def _write(record: TokenRecord, step: _Step, start_logprobs_S: torch.Tensor) -> None:
    record.add(
        step.trained.sequences,
        start_logprobs_S,
        ratios=step.numbers["ratios"],
        entropies=step.numbers["entropies"],
        is_clipped=step.numbers["clipped"],
    )


def _loss_scale(dtype: torch.dtype, weights_S: torch.Tensor) -> float:
    """The power of two by which the loss is multiplied for backward: float16 has no numbers below 6e-8, and a gradient is
    about as large as its token's weight."""
    if dtype != torch.float16:
        return 1.0
    return max(1.0, 2.0 ** math.floor(math.log2(LARGEST_WEIGHT / float(weights_S.max()))))


@torch.no_grad()
def _whole_loss(
    policy: Policy, step: _Step, config: TrainConfig, report: Callable[[Progress], None]
) -> TokenLoss | None:
    """The loss over the whole step, by an extra forward pass without gradient: needed for sequence-level ratios and
    masks if a trajectory spans several micro-batches. None if that is not needed."""
    if not needs_whole_trajectories(config) or not _spans(step):
        return None
    started = time.perf_counter()
    logprobs_S = compute_logprobs(policy, step.micro_batches, lambda batch: policy.logprobs(batch)[0], report)
    with policy.gang.together():
        loss = policy_loss(logprobs_S.to(policy.device), step.tokens.to(policy.device), config)
    step.timed("extra_forward", started)
    return loss


def _spans(step: _Step) -> bool:
    """Whether a trajectory spans several micro-batches."""
    seen: set[int] = set()
    for batch in step.micro_batches:
        here = {step.trained.sequences[index].trajectory for index in batch.sequences}
        if seen & here:
            return True
        seen |= here
    return False


def _part(loss: TokenLoss, indices_S: torch.Tensor) -> TokenLoss:
    """The part of the whole step's loss at a micro-batch's tokens, with a share of its value by number of tokens."""
    share = len(indices_S) / len(loss.coefficients_S)
    parts: dict[str, Any] = {"value": loss.value * share}  # Any: tensors, and None without a reference
    for loss_field in fields(loss):
        values_S = getattr(loss, loss_field.name)
        if loss_field.name != "value":
            parts[loss_field.name] = None if values_S is None else values_S[indices_S]
    return TokenLoss(**parts)
