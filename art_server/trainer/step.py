"""A training job of the GRPO family, from a task to a checkpoint: one optimizer step, or several.

`compute_gradient` is the whole algorithm of an optimizer step. The server resolves the sequences beforehand, and makes
the checkpoint visible afterwards by renaming its folder.
"""

import functools
import gc
import itertools
import logging
import math
import random
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, fields, replace
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

import torch

from art_protocol.wire import TrainConfig
from art_server.shared.tasks import BetweenSteps, Done, Probe, Progress, TrainTask
from art_server.trainer.batches import (
    MicroBatch,
    SampledTokens,
    TrainBatch,
    TrainSequence,
    drop_stale,
    largest_unit,
    make_micro_batches,
    make_sampled_tokens,
    make_train_batch,
    with_penalties,
)
from art_server.trainer.checking import (
    check_sequences,
    check_trees,
    sequences_to_check,
    try_trees,
)
from art_server.trainer.checkpoint import load_checkpoint, save_checkpoint
from art_server.trainer.gap import judge_gap
from art_server.trainer.layers import layer_kind
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
from art_server.trainer.probe import (
    finish_probe,
    is_due,
    skipped_probe,
    start_probe,
    unchanged_probe,
)
from art_server.trainer.schedule import (
    FRESH_MOMENTS_STEPS,
    base_learning_rate,
    fresh_moments_factor,
    learning_rate_factor,
)
from art_server.trainer.token_record import TokenRecord

logger = logging.getLogger(__name__)

T = TypeVar("T")

MIN_TOKENS_PER_MICRO_BATCH = 64
"""The token budget is not halved below this: the task fails instead."""

LARGEST_WEIGHT = 1 / 64
"""The loss is scaled to about this weight of a token in float16: far above its smallest and below its largest number."""


@dataclass(frozen=True, slots=True)
class Known:
    """Log-probabilities from before the first optimizer step, for all sampled tokens of the job. None: not needed."""

    old_logprobs_S: torch.Tensor | None = None
    """The trainer's at the start of the job; only for a job of several optimizer steps."""
    reference_logprobs_S: torch.Tensor | None = None
    seconds: float = 0.0

    def of_sequences(self, sequences: Sequence[TrainSequence], indices: Sequence[int]) -> "Known":
        """The log-probabilities of the sequences at `indices`."""
        if self.old_logprobs_S is None and self.reference_logprobs_S is None:
            return self
        sizes = [len(sequence.targets) for sequence in sequences]
        indices_S = torch.arange(sum(sizes)).split(sizes)
        chosen_S = torch.cat([indices_S[index] for index in indices])
        old_S, reference_S = self.old_logprobs_S, self.reference_logprobs_S
        return Known(
            None if old_S is None else old_S[chosen_S],
            None if reference_S is None else reference_S[chosen_S],
        )


def seconds_since(started: float) -> float:
    """Waits for the GPU first, so that the seconds include its work."""
    if torch.cuda.is_initialized():
        torch.cuda.synchronize()
    return time.perf_counter() - started


@dataclass(slots=True)
class _Step:
    """An optimizer step in progress: `compute_gradient` collects here what its metrics need."""

    trained: TrainBatch
    tokens: SampledTokens
    micro_batches: list[MicroBatch]
    losses: list[tuple[MicroBatch, TokenLoss]] = field(default_factory=list)
    logprobs: list[torch.Tensor] = field(default_factory=list)
    entropies: list[torch.Tensor] = field(default_factory=list)
    is_likeliest: list[torch.Tensor] = field(default_factory=list)
    """logprobs, entropies and is_likeliest: one tensor for each micro-batch, over its sampled tokens."""
    seconds: dict[str, float] = field(default_factory=dict)

    def in_order(self, of_micro_batches: Sequence[torch.Tensor]) -> torch.Tensor:
        """The values of all micro-batches' tokens, in the order of `tokens`. float32."""
        values_S = torch.zeros_like(self.tokens.advantages_S)
        for batch, part_S in zip(self.micro_batches, of_micro_batches, strict=True):
            values_S[batch.indices_S] = part_S.to(values_S).cpu()
        return values_S

    def timed(self, phase: str, started: float) -> None:
        """Adds the seconds since `started` to the phase."""
        self.seconds[phase] = self.seconds.get(phase, 0.0) + seconds_since(started)


@dataclass(slots=True)
class _Memory:
    """The token budget of a micro-batch, halved after each failed allocation."""

    policy: Policy
    notes: list[str]
    budget: int
    num_retries: int = 0

    def run(self, compute: Callable[[int], T]) -> T:
        """Returns `compute(budget)`. When it runs out of memory, it is retried with half the budget and gradient
        checkpointing."""
        # Tokens without gradient checkpointing, which fits some times more.
        least = max(1.0, MIN_TOKENS_PER_MICRO_BATCH / max(1.0, self.policy.checkpointing_factor))
        while True:
            try:
                return compute(self.budget)
            except (RuntimeError, MemoryError) as error:
                if not is_out_of_memory(error) or self.budget // 2 < least:
                    raise
            # Outside the handler, whose traceback keeps the failed step's tensors alive.
            self.budget, self.num_retries = self.budget // 2, self.num_retries + 1
            self.policy.use_checkpointing(True)
            gc.collect()
            if self.policy.device.type == "cuda":
                torch.cuda.empty_cache()
            self.notes.append(f"out of memory: tried again with {self.budget} tokens at a time")
            logger.warning(self.notes[-1])


def check_layers(policy: Policy, lost: Sequence[str]) -> None:
    """Checks that the engine adapts some kind of layer that has an adapter; `lost` are the kinds that it does not.

    Raises:
        ValueError: it adapts none, so nothing could be trained.
    """
    if {layer_kind(name.partition(".lora_")[0]) for name in policy.parameters} <= {*lost}:
        raise ValueError(
            f"the engine adapts none of the model's layers ({', '.join(lost)}), so nothing can be trained: register it with "
            "other lora.target_modules, or leave them out"
        )


def train(
    policy: Policy,
    task: TrainTask,
    max_tokens_per_micro_batch: int,
    report: Callable[[Progress], None],
    *,
    between_steps: BetweenSteps = "stay",
    budgets: Budgets | None = None,
) -> Done:
    """Takes the steps of one job from in_dir to out_dir; returns metrics and notes.

    A batch without trained tokens writes the same weights and optimizer state again. Unless `between_steps` is "stay", the
    policy leaves the device before "save" is reported. `budgets` stores what fitted after memory ran out.

    Raises:
        FloatingPointError: the loss, its gradient or a metric is not finite. No checkpoint is written.
        ValueError: the engine adapts none of the layers that have an adapter.
        GapTooLarge: the engine's log-probabilities are not those of this policy. No checkpoint is written.
    """
    config = task.config
    policy.return_to_device()
    policy.use_context(task.max_seq_length)
    rate, rule = base_learning_rate(config, policy.model_type, policy.hidden_size)
    optimizer = load_checkpoint(policy, task.lora, Path(task.in_dir), rate)
    taken, age = task.optimizer_steps, steps_taken(optimizer)
    taken = age if taken is None else taken
    check_layers(policy, task.lost_layers)
    num_too_stale = 0
    if config.max_staleness is not None:
        whole, oldest = task.batch, task.start_step - config.max_staleness
        if config.overlong == "soft_penalty":
            whole = with_penalties(whole, config)
            config = config.model_copy(update={"overlong": "keep"})
        batch, num_too_stale = drop_stale(whole, oldest)
        task = task.model_copy(update={"batch": batch, "config": config})
    trained = make_train_batch(task.batch, config)
    record = TokenRecord(task.batch, policy.base_model)
    metrics, notes = data_metrics(trained), [rule] if rule else []
    metrics["data/step_num_tokens_too_stale"] = float(num_too_stale)
    reset_peak_memory(policy.device)
    budgets = budgets or Budgets(None)
    longest = max((len(sequence.token_ids) for sequence in trained.sequences), default=1)
    key = budget_key(policy.device, policy.base_model, task.lora.rank, longest)
    learned = budgets.find(key)
    most = min(max_tokens_per_micro_batch, learned or max_tokens_per_micro_batch)
    budget = max(1, most // task.budget_divisor)
    has_checkpointing = task.checkpointing or learned is not None or task.budget_divisor > 1
    policy.use_checkpointing(has_checkpointing)  # an earlier job may have switched it on
    memory = _Memory(policy, notes, budget)
    if learned is not None:
        notes.append(
            f"{budget} tokens at a time, with gradient checkpointing: an earlier job ran out of memory with more. "
            f"{budgets.file} stores this limit; delete the file to try more tokens again"
        )

    if task.budget_divisor > 1:
        notes.append(
            f"{budget} tokens at a time, with gradient checkpointing: the trainer's process died several times"
        )

    probe = unchanged_probe(task.probe) if task.gap_bars is not None else None
    if trained.sequences:
        if taken and not age:
            notes.append(
                f"the optimizer state of step {task.start_step} is not kept: the moments of AdamW start at zero, and the "
                f"learning rate rises to its schedule's value over {FRESH_MOMENTS_STEPS} optimizer steps"
            )
        parts = divide(task, trained, notes)
        known = memory.run(
            lambda budget: look_ahead(policy, task, trained, len(parts), budget, report, notes)
        )
        trained = shape(task, trained, known)
        of_job: dict[str, float] = {}
        if known.old_logprobs_S is not None:
            of_job = sampler_metrics(
                known.old_logprobs_S, _sampled_tokens(task, trained.sequences, known)
            )
            notes += judge_gap(of_job, task)

        def compute(part: TrainBatch, of_part: Known, phase: str, budget: int) -> dict[str, float]:
            optimizer.zero_grad(set_to_none=True)
            return compute_gradient(
                policy, task, part, budget, report, notes, of_part, phase, record
            )

        start: Probe | None = None
        steps: list[dict[str, float]] = []
        for index, (number, part) in enumerate(parts):
            chosen = [trained.sequences[each] for each in part]
            num_tokens = sum(len(sequence.targets) for sequence in chosen)
            these = replace(trained, sequences=chosen, num_tokens=num_tokens)
            phase = "train" if len(parts) == 1 else f"train {index + 1} of {len(parts)}"
            of_part = known.of_sequences(trained.sequences, part)
            if not index:  # the policy at the start: another order of computation would round its ratios away from 1
                of_part = replace(of_part, old_logprobs_S=None)
            steps.append(memory.run(functools.partial(compute, these, of_part, phase)))
            if known.old_logprobs_S is None and index == 0:
                notes += judge_gap(steps[0], task)
            elif index:  # the gap is that of the start: later steps have other weights
                steps[-1] = {
                    name: value
                    for name, value in steps[-1].items()
                    if not name.startswith(("loss/logprob_gap", "loss/importance_ratio"))
                }
            if index == 0 and task.gap_bars is not None and is_due(task.probe):
                start = start_probe(policy, task.probe, trained.sequences, task.gap_bars)
            started = time.perf_counter()
            own_rate = (
                config.learning_rate[number] if isinstance(config.learning_rate, list) else rate
            )
            own_rate *= learning_rate_factor(config, taken) * fresh_moments_factor(taken, age)
            for group in optimizer.param_groups:
                group["lr"] = own_rate
            steps[-1]["loss/learning_rate"] = own_rate
            optimizer.step()
            taken, age = taken + 1, age + 1
            steps[-1]["time/step_optimizer_s"] = seconds_since(started)
        if start is not None and task.gap_bars is not None:
            probe = finish_probe(policy, start, task.gap_bars)
            steps[-1]["loss/probe_moved"] = probe.moved[-1]
            steps[-1]["time/step_probe_s"] = probe.seconds
        elif task.probe is not None and task.gap_bars is not None:
            probe = skipped_probe(task.probe)
        if memory.budget < most:
            budgets.learn(key, memory.budget)
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
    record.write(Path(task.out_dir))
    save_checkpoint(policy, optimizer, Path(task.out_dir))
    metrics["time/step_save_s"] = time.perf_counter() - started
    environment = {
        "max_tokens": str(budget),
        "max_tokens_at_end": str(memory.budget),
        "checkpointing": str(has_checkpointing),
        "checkpointing_factor": str(policy.checkpointing_factor),
        "max_seq_length": str(task.max_seq_length),
        "optimizer_steps": str(task.optimizer_steps),
        "lost_layers": " ".join(task.lost_layers),
    }
    return Done(
        metrics=metrics,
        unchanged=not trained.sequences,
        optimizer_steps=taken,
        notes=notes,
        probe=probe,
        environment=environment,
    )


class Part(NamedTuple):
    """The sequences of one optimizer step."""

    number: int
    """The step's index if all groups of the request were trained, and so the index of its learning rate."""
    sequences: list[int]


def divide(task: TrainTask, trained: TrainBatch, notes: list[str]) -> list[Part]:
    """The optimizer steps of the job. Each pass covers all groups, with `batch_size` in the order of the request, else in
    an order that the task's seed fixes. With `batch_size`, groups that are not trained leave their places empty."""
    config = task.config
    if config.passes == config.mini_batches == 1 and config.batch_size is None:
        return [Part(0, list(range(len(trained.sequences))))]
    group_of = [index for index, group in enumerate(task.batch.groups) for _ in group.trajectories]
    sequences_of: dict[int, list[int]] = {}
    for index, sequence in enumerate(trained.sequences):
        sequences_of.setdefault(group_of[sequence.trajectory], []).append(index)
    if config.batch_size is not None:
        one_pass: dict[int, list[int]] = {}
        for index, sequences in sequences_of.items():
            number = task.batch.groups[index].number
            place = (index if number is None else number) // config.batch_size
            one_pass.setdefault(place, []).extend(sequences)
        of_pass = -(-(task.batch.num_groups or group_of[-1] + 1) // config.batch_size)
        return [
            Part(turn * of_pass + place, sequences)
            for turn in range(config.passes)
            for place, sequences in one_pass.items()
        ]
    num = min(config.mini_batches, len(sequences_of))
    if num < config.mini_batches:
        notes.append(
            f"mini_batches is {config.mini_batches}, and {num} groups are trained: each pass takes {num} optimizer steps"
        )
    chance = random.Random(task.seed)
    parts: list[Part] = []
    for turn in range(config.passes):
        groups = list(sequences_of)
        chance.shuffle(groups)
        for first in range(num):
            chosen = [each for group in groups[first::num] for each in sequences_of[group]]
            parts.append(Part(turn * config.mini_batches + first, sorted(chosen)))
    return parts


def look_ahead(
    policy: Policy,
    task: TrainTask,
    trained: TrainBatch,
    num_steps: int,
    max_tokens: int,
    report: Callable[[Progress], None],
    notes: list[str],
) -> Known:
    """The log-probabilities from before the first optimizer step, by a forward pass without gradient: the policy's
    if the job takes several optimizer steps and has a ratio or a gap to judge, and the reference's if KL is on."""
    has_reference = task.config.beta > 0
    needs_old = num_steps > 1 and (task.config.objective == "policy" or _has_gap(task, trained))
    if not needs_old and not has_reference:
        return Known()
    started = time.perf_counter()
    tokens = make_sampled_tokens(trained.sequences)
    old_S = torch.zeros_like(tokens.advantages_S) if needs_old else None
    reference_S = torch.zeros_like(tokens.advantages_S) if has_reference else None
    micro_batches = _plan(policy, trained, max_tokens, notes)
    with torch.no_grad():
        for index, batch in enumerate(micro_batches):
            report(Progress(phase="forward", completed=index, total=len(micro_batches)))
            if old_S is not None:
                old_S[batch.indices_S] = policy.logprobs(batch)[0].cpu()[batch.predictions_S]
            if reference_S is not None:
                reference_N = policy.reference_logprobs(batch).cpu()
                reference_S[batch.indices_S] = reference_N[batch.predictions_S]
    return Known(old_S, reference_S, time.perf_counter() - started)


def _has_gap(task: TrainTask, trained: TrainBatch) -> bool:
    """Whether the job has a gap to judge: limits, and tokens of known steps with the engine's log-probabilities."""
    return task.gap_bars is not None and any(
        step is not None and value is not None
        for each in trained.sequences
        for step, value in zip(each.steps, each.sampled_logprobs, strict=True)
    )


def shape(task: TrainTask, trained: TrainBatch, known: Known) -> TrainBatch:
    """The batch with the KL penalty in the advantages of groups with signal; unchanged where KL is a term of the loss, or
    off.

    This KL compares the sampled log-probabilities with the reference's.
    """
    config = task.config
    if known.reference_logprobs_S is None or config.kl_in == "loss":
        return trained
    tokens = make_sampled_tokens(trained.sequences)
    kl_S = kl_estimate(tokens.sampled_logprobs_S, known.reference_logprobs_S, config.kl_estimator)[
        0
    ]
    kl_S = torch.where(tokens.is_unknown_S, 0.0, kl_S)
    if config.kl_in == "reward":
        penalties = [0.0] * trained.num_trajectories
        names = [sequence.trajectory for sequence in trained.sequences for _ in sequence.targets]
        for name, value in zip(names, kl_S.tolist(), strict=True):
            penalties[name] += config.beta * value
        return make_train_batch(task.batch, config, penalties)
    is_dead_S = torch.tensor(
        [not sequence.has_signal for sequence in trained.sequences for _ in sequence.targets]
    )
    is_kept_S = tokens.is_unknown_S | is_dead_S
    shaped_S = shape_advantages(tokens.advantages_S, kl_S, config.beta, is_kept_S)
    parts = shaped_S.split([len(sequence.targets) for sequence in trained.sequences])
    shaped = [
        replace(sequence, advantages=part.tolist())
        for sequence, part in zip(trained.sequences, parts, strict=True)
    ]
    return replace(trained, sequences=shaped)


def compute_gradient(
    policy: Policy,
    task: TrainTask,
    trained: TrainBatch,
    max_tokens: int,
    report: Callable[[Progress], None],
    notes: list[str],
    known: Known = Known(),
    phase: str = "train",
    record: TokenRecord | None = None,
) -> dict[str, float]:
    """Puts the clipped gradient of one optimizer step into the policy's parameters; returns the step's metrics. Adds
    the step's tokens to the record."""
    config = task.config
    started = whole_step = time.perf_counter()
    step = _Step(
        trained,
        _sampled_tokens(task, trained.sequences, known),
        _plan(policy, trained, max_tokens, notes),
    )
    if config.plot_tensors:
        # Here, so that matplotlib is only imported for the picture.
        from art_server.trainer.plot import plot_micro_batches

        plot_micro_batches(step.micro_batches, trained.sequences, Path(task.out_dir))
    step.timed("plan", started)
    scale = _loss_scale(policy.dtype, step.tokens.weights_S)
    whole = _whole_loss(policy, step, config, report)

    num = len(step.micro_batches)
    for index, batch in enumerate(step.micro_batches):
        started = time.perf_counter()
        logprobs_N, entropies_N, is_likeliest_N = policy.scores(
            batch, with_entropy_gradient=config.entropy_bonus > 0
        )
        predictions_S = batch.predictions_S.to(policy.device)
        tokens = step.tokens.select(batch.indices_S).to(policy.device)
        logprobs_S = logprobs_N.detach()[predictions_S]
        if whole is None:
            loss = policy_loss(logprobs_S, tokens, config)
        else:
            loss = _part(whole, batch.indices_S.to(policy.device))
        step.losses.append((batch, loss))
        step.logprobs.append(logprobs_S)
        step.entropies.append(entropies_N.detach()[predictions_S])
        step.is_likeliest.append(is_likeliest_N[predictions_S])
        step.timed("forward", started)

        started = time.perf_counter()
        # A prediction's coefficient is the sum over the sampled tokens that share it.
        coefficients_N = torch.zeros_like(entropies_N).index_add(
            0, predictions_S, loss.coefficients_S
        )
        objective = (coefficients_N * logprobs_N).sum()
        if config.entropy_bonus > 0:
            weights_N = torch.zeros_like(coefficients_N).index_add(
                0, predictions_S, tokens.weights_S
            )
            objective = objective - config.entropy_bonus * (weights_N * entropies_N).sum()
        (objective * scale).backward()
        step.timed("backward", started)
        report(Progress(phase=phase, completed=index + 1, total=num))

    for name, each in policy.parameters.items():
        if task.lost_layers and layer_kind(name.partition(".lora_")[0]) in task.lost_layers:
            each.grad = None
        if scale > 1 and each.grad is not None:
            each.grad /= scale
    grad_norm = torch.nn.utils.clip_grad_norm_(policy.parameters.values(), config.max_grad_norm)
    losses = [loss for _, loss in step.losses]
    metrics = loss_metrics(losses, step.entropies)
    logprobs_S, old_S = step.in_order(step.logprobs), step.tokens.old_logprobs_S
    start_logprobs_S = logprobs_S if old_S is None else old_S
    metrics |= sampler_metrics(start_logprobs_S, step.tokens)
    if record is not None:
        record.add(
            trained.sequences,
            start_logprobs_S,
            ratios=step.in_order([loss.policy_ratios_S for loss in losses]),
            entropies=step.in_order(step.entropies),
            is_clipped=step.in_order([loss.is_clipped_S for loss in losses]),
        )
    if config.objective == "likelihood":
        metrics["loss/token_accuracy"] = float(torch.cat(step.is_likeliest).float().mean())
    corrected_S = torch.cat([loss.is_corrected_S for loss in losses])
    metrics["loss/corrected_token_fraction"] = float(corrected_S.float().mean())
    if config.entropy_bonus > 0:
        weights = torch.cat(
            [step.tokens.weights_S[batch.indices_S] for batch in step.micro_batches]
        )
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


def _loss_scale(dtype: torch.dtype, weights_S: torch.Tensor) -> float:
    """The power of two by which the loss is multiplied for backward: float16 has no numbers below 6e-8, and a gradient is
    about as large as its token's weight."""
    if dtype != torch.float16:
        return 1.0
    return max(1.0, 2.0 ** math.floor(math.log2(LARGEST_WEIGHT / float(weights_S.max()))))


def _plan(
    policy: Policy, trained: TrainBatch, max_tokens: int, notes: list[str]
) -> list[MicroBatch]:
    """The micro-batches of the batch: trees, if the check shows that they equal separate sequences.

    Cutting a tree above the budget would compute its trunk in each part. So gradient checkpointing raises the budget
    first, and only trees above the raised budget are cut.
    """
    if largest_unit(trained.sequences, shared=policy.shares_prefixes) > max_tokens:
        policy.use_checkpointing(True)
        max_tokens = int(max_tokens * policy.checkpointing_factor)

    def make(chosen: Sequence[TrainSequence]) -> list[MicroBatch]:
        fill, shared = fill_tokens(policy.device), policy.shares_prefixes
        return make_micro_batches(
            chosen, max_tokens, table=trained.table, shared=shared, fill_tokens=fill
        )

    def checked() -> Iterator[list[TrainSequence]]:
        """Of each micro-batch with several sequences, some that fill one micro-batch."""
        for batch in make(trained.sequences):
            found = sequences_to_check([trained.sequences[index] for index in batch.sequences])
            if len(found) > 1:
                yield found

    if policy.shares_prefixes and policy.attention_kind == "flex" and not policy.has_tried_trees:
        trial = make(sequences_to_check(trained.sequences))[0]
        failed = try_trees(policy, trial)
        notes += [failed] if failed is not None else []
    if policy.shares_prefixes and policy.tree_gap is None:
        # Without a branch in the whole job nothing could differ; a later job is checked then.
        for sequences in itertools.islice(checked(), 1):
            different = check_trees(policy, make(sequences)[0], sequences)
            notes += [different] if different is not None else []
    if not policy.shares_prefixes and policy.sequence_gap is None:
        sequences = next(checked(), sequences_to_check(trained.sequences))
        check_sequences(policy, make(sequences)[0], sequences)
    return make(trained.sequences)


def _sampled_tokens(
    task: TrainTask, sequences: Sequence[TrainSequence], known: Known
) -> SampledTokens:
    return replace(
        make_sampled_tokens(
            sequences, task.config, task.start_step, task.probe.moved if task.probe else ()
        ),
        old_logprobs_S=known.old_logprobs_S,
        reference_logprobs_S=known.reference_logprobs_S,
    )


@torch.no_grad()
def _whole_loss(
    policy: Policy, step: _Step, config: TrainConfig, report: Callable[[Progress], None]
) -> TokenLoss | None:
    """The loss over the whole step, by an extra forward pass without gradient: needed for sequence-level ratios and
    masks if a trajectory spans several micro-batches. None if not."""
    if not needs_whole_trajectories(config) or not _spans(step):
        return None
    started = time.perf_counter()
    logprobs_S = torch.zeros_like(step.tokens.advantages_S)
    for index, batch in enumerate(step.micro_batches):
        report(Progress(phase="forward", completed=index, total=len(step.micro_batches)))
        logprobs_S[batch.indices_S] = policy.logprobs(batch)[0].cpu()[batch.predictions_S]
    tokens = step.tokens.to(policy.device)
    loss = policy_loss(logprobs_S.to(policy.device), tokens, config)
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
    parts: dict[str, Any] = {  # Any: tensors, and None without a reference
        each.name: None if values_S is None else values_S[indices_S]
        for each in fields(loss)
        if each.name != "value"
        for values_S in [getattr(loss, each.name)]
    }
    return TokenLoss(value=loss.value * share, **parts)
