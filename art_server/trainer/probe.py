"""The trainer's side of the probe: log-probabilities of a few tokens under the step that a job has just made.

The server has the engine score the same tokens when it has loaded the step, before the step serves (`shared/same_policy.py`).
The tokens are the end of the job's sequence that the update moves the most. They are kept for some steps, so that most
jobs compute them once. The same numbers show how far each job moves the policy, which is the allowance of stale tokens
(`movement_since`).

Scoring few tokens costs a pass over all weights: on a CPU some percent of a short step. So the first steps of an adapter
and the first step of a process have a probe, and so has a job with tokens of earlier steps, because the next such job judges
them by this movement. Any other job has a probe if the probes then cost less than a hundredth of the time.
"""

import math
import time
from collections import defaultdict
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from peft.helpers import rescale_adapter_scale
from torch.nn.modules.module import register_module_forward_hook

from art_protocol.wire import LoRAConfig
from art_server.shared.same_policy import least_effect
from art_server.shared.trainer_messages import MismatchLimits, Probe
from art_server.store.adapter_layers import layer_kind
from art_server.trainer.batches import TrainSequence
from art_server.trainer.policy import Policy

NUM_TOKENS = 32
"""Number of scored tokens. On a CPU fewer tokens would cost SmolLM2 the same time: its weights are read once for all tokens."""
FIRST_STEPS = 2
"""This number of an adapter's first steps have a probe, whatever it costs."""
STARTED_AT = time.time()
"""A process's first step of a model has a probe too: the server may have started with other arguments."""
SHARE = 0.005
"""Largest share of the time for the trainer's passes over probes. The engine's passes cost about as much again."""
STEPS_OF_TOKENS = 16
"""The tokens are chosen anew after this many steps, because the policy learns to avoid some of them."""
STEPS_OF_MOVEMENT = 64
"""The movements of this many steps are kept. Older tokens have the allowance of unknown movement."""
NUM_ROUNDINGS = 2
RANDOM_SCALE = 0.05
"""Standard deviation of a random adapter's B. Layers then change by some percent, log-probabilities by tenths."""
MAX_FACTOR = 2**12
"""Largest multiple of alpha. An adapter whose effect is too small even then is not compared: its weights are zero."""


def is_due(last: Probe | None) -> bool:
    """Whether the step after the step with the probe `last` is to have a probe."""
    if last is None or len(last.moved) < FIRST_STEPS or last.made_at < STARTED_AT:
        return True
    passed = time.time() - last.made_at
    return passed < 0 or passed >= last.seconds / SHARE  # the clock may have been set back


def start_probe(
    policy: Policy, last: Probe | None, sequences: Sequence[TrainSequence], limits: MismatchLimits
) -> Probe:
    """The tokens, and their log-probabilities under the policy at the start of a job. `last` is the probe of the step in
    the policy; its tokens and numbers are used again unless they are too old."""
    last = last or Probe()
    if last.token_ids and last.age < STEPS_OF_TOKENS:
        # After skipped steps these log-probabilities are older, and the difference is the movement of all these steps.
        return last.model_copy(update={"seconds": 0.0})
    started = time.perf_counter()
    token_ids = choose_tokens(sequences)
    logprobs_T = policy.sequence_logprobs(token_ids)
    with policy.model.disable_adapter():
        base_T = policy.sequence_logprobs(token_ids)
    return Probe(
        token_ids=token_ids,
        logprobs=logprobs_T.tolist(),
        base_logprobs=base_T.tolist(),
        rounding=_rounding(policy, token_ids, logprobs_T, limits.epsilon),
        moved=last.moved,
        seconds=time.perf_counter() - started,
    )


def finish_probe(policy: Policy, start: Probe, limits: MismatchLimits) -> Probe:
    """The probe of the step that the job makes, whose weights are in the policy.

    If the adapter's effect is not far above rounding, the tokens are also scored with a multiple of its alpha.
    """
    started = time.perf_counter()
    before_T, base_T = torch.tensor(start.logprobs), torch.tensor(start.base_logprobs)
    logprobs_T = policy.sequence_logprobs(start.token_ids).cpu()
    moved = with_movement(start.moved, _rms(logprobs_T - before_T))
    needed = least_effect(start, limits)
    factor, scaled_T = 1, logprobs_T
    # The first rank's effect counts: where ranks share the base's weights, all of them make these passes.
    while 0 < (effect := _effect(policy, scaled_T, base_T)) < needed and factor < MAX_FACTOR:
        factor = min(MAX_FACTOR, factor * 2 ** max(1, math.ceil(math.log2(needed / effect))))
        with rescale_adapter_scale(policy.model, factor):
            scaled_T = policy.sequence_logprobs(start.token_ids).cpu()
    return start.model_copy(
        update={
            "logprobs": logprobs_T.tolist(),
            "num_skipped": 0,
            "factor": factor,
            "scaled_logprobs": scaled_T.tolist() if factor > 1 else [],
            "moved": moved,
            "age": start.age + 1,
            "seconds": start.seconds + time.perf_counter() - started,
            "made_at": time.time(),
        }
    )


def skipped_probe(last: Probe) -> Probe:
    """The probe of a step that is not scored."""
    return last.model_copy(
        update={
            "num_skipped": last.num_skipped + 1,
            "moved": with_movement(last.moved, last.moved[-1]),
            "age": last.age + 1,
        }
    )


def unchanged_probe(last: Probe | None) -> Probe:
    """The probe of a step with the same weights as the step before."""
    last = last or Probe()
    return last.model_copy(update={"moved": with_movement(last.moved, 0.0)})


def with_movement(moved: Sequence[float], value: float) -> list[float]:
    """The movements of the newest steps, of which `value` is the last."""
    return [*moved, value][-STEPS_OF_MOVEMENT:]


def write_layer_probes(policy: Policy, lora: LoRAConfig, out_dir: Path, limits: MismatchLimits) -> dict[str, Probe]:
    """Writes an adapter for each kind of layer into a folder named after the kind: random by seed at layers of this kind,
    zero at all others. Returns the adapters' probes by kind. The policy then has an adapter that changes nothing."""
    policy.init_adapter(lora, seed=0)
    chance = torch.Generator().manual_seed(0)
    num_vocabulary = policy.model.get_input_embeddings().num_embeddings
    token_ids = torch.randint(num_vocabulary, (NUM_TOKENS + 1,), generator=chance).tolist()
    base_T = policy.sequence_logprobs(token_ids)
    base = base_T.tolist()
    rounding = _rounding(policy, token_ids, base_T, limits.epsilon)
    start = Probe(token_ids=token_ids, logprobs=base, base_logprobs=base, rounding=rounding)
    kinds: dict[str, list[torch.nn.Parameter]] = defaultdict(list)
    for name, parameter in policy.parameters.items():
        if ".lora_B." in name:
            kinds[layer_kind(name.partition(".lora_")[0])].append(parameter)
    probes: dict[str, Probe] = {}
    for kind, parameters in kinds.items():
        for parameter in parameters:
            parameter.data.copy_(RANDOM_SCALE * torch.randn(parameter.shape, generator=chance))
        probes[kind] = finish_probe(policy, start, limits)
        if policy.gang.is_first:
            (out_dir / kind).mkdir()
            policy.save_adapter(out_dir / kind)
        for parameter in parameters:
            parameter.data.zero_()
    return probes


def choose_tokens(sequences: Sequence[TrainSequence]) -> list[int]:
    """The last tokens, at most NUM_TOKENS + 1, of the sequence whose trained tokens there the update moves the most.

    A token's log-probability has a gradient of about 1 - p by its own logit, times its advantage in the loss.
    """

    def movement(sequence: TrainSequence) -> float:
        first = len(sequence.token_ids) - NUM_TOKENS
        movements: list[float] = []
        for position, advantage, logprob in zip(
            sequence.positions, sequence.advantages, sequence.sampled_logprobs, strict=True
        ):
            if position >= first:
                slope = 1.0 if logprob is None else 1 - math.exp(min(0.0, logprob))
                movements.append(abs(advantage) * slope)
        return sum(movements)

    chosen = max(sequences, key=movement)
    return [*chosen.token_ids[-NUM_TOKENS:], chosen.targets[-1]]


def _effect(policy: Policy, logprobs_T: torch.Tensor, base_T: torch.Tensor) -> float:
    effect = torch.tensor(_rms(logprobs_T - base_T), dtype=torch.float64)
    return float(policy.gang.of_first(effect))


def _rms(values_T: torch.Tensor) -> float:
    return float(values_T.square().mean().sqrt())


def _rounding(policy: Policy, token_ids: list[int], logprobs_T: torch.Tensor, epsilon: float) -> float:
    """Root mean square of the changes of the log-probabilities if every layer's output is rounded to 16 bits; 0 for an
    epsilon of 0."""
    if not epsilon:
        return 0.0
    changes = []
    for seed in range(NUM_ROUNDINGS):
        with _with_rounding(epsilon, seed):
            changes.append(policy.sequence_logprobs(token_ids) - logprobs_T)
    return _rms(torch.cat(changes))


@contextmanager
def _with_rounding(epsilon: float, seed: int) -> Iterator[None]:
    """Adds normal noise to what each module of this process returns as one tensor; `epsilon` is its standard deviation
    relative to a number. On numbers that are already in 16 bits it has the same variance: they are rounded again."""
    chances: dict[torch.device, torch.Generator] = {}

    def disturb(_: torch.nn.Module, __: Any, output: Any) -> Any:  # Any: what a model's layers return
        if not isinstance(output, torch.Tensor) or not output.is_floating_point():
            return output
        if output.device not in chances:
            chances[output.device] = torch.Generator(output.device).manual_seed(seed)
        noise = torch.empty_like(output, dtype=torch.float32)
        noise.normal_(0, epsilon, generator=chances[output.device])
        return (output.float() * (1 + noise)).to(output.dtype)

    # Of all modules, because `sequence_logprobs` of an Unsloth policy builds a model of its own.
    hook = register_module_forward_hook(disturb)
    try:
        yield
    finally:
        hook.remove()
