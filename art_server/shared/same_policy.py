"""Whether the engine computes the policy that the trainer trains: all limits, and the rules that judge by them.

Two programs that compute the same policy differ only by rounding. A wrong adapter, template, kernel or step makes a far larger
gap. docs/precision.md has the measured gaps from which all numbers here follow. The question is asked three times:

- before a job's first update, of the tokens that the engine sampled (`judge_gap`, in the trainer);
- before a step serves, of its probe (`find_fault`, in the server): tokens that the trainer scored (`trainer/probe.py`) and the
  engine scores again (`Engine._compare`);
- before a base model's first job, of each kind of layer, by the probe of a random adapter (`jobs/layer_check.py`).

Another question is whether the trainer's prefix trees equal separate sequences (`trainer/checking.py`).
"""

import math
from collections.abc import Iterable, Sequence

from art_server.shared.trainer_messages import MismatchLimits, Probe, TrainTask

LARGEST_MEASURED = {"bfloat16": 0.25, "float16": 0.03, "float32": 1e-4}
"""Largest measured mean gap of a step, with a margin, by the coarser number type of engine and trainer."""
WRONG_FACTOR = 4.0
"""A gap above this many times the largest measured one for a pair of number types is not rounding."""
FACTORS = {"bfloat16": 2.0}
"""WRONG_FACTOR of number types whose largest gap was measured with the noisiest model known, SmolLM2."""
EXACT = MismatchLimits(high=1e-5, wrong=WRONG_FACTOR * 1e-5, largest=WRONG_FACTOR * 1e-4)
"""The limits of `--exact`, with float32 on both sides. Confident answers have a mean gap below 1e-6; incoherent text of a
model with 30 layers has a mean gap of 8e-6 (the largest measured)."""
MANTISSA_BITS = {"bfloat16": 7, "float16": 10}

MIN_TOKENS = 64
"""With fewer sampled tokens the mean is not judged."""
MOVEMENT_FACTOR = 8.0
"""The mean gap of stale tokens may exceed the limit by this many times the measured movement, because a step moves rare
tokens and the tokens that it trained on more than the probe's tokens: up to 3.6 times in honest training."""
UNKNOWN_MOVEMENT = 0.125
"""The movement, in nats, of a step whose movement is not on record, because another program made the step."""
WINDOW_STEPS = 8
"""A step counts with the largest movement of this number of steps."""

ROUNDING_FACTOR = 3.0
"""A gap of the probe above this many times the measured effect of rounding to 16 bits is another policy."""
NUM_SIGMAS_OF_EFFECT = 16.0
"""An adapter's effect on the probe is compared if it is this many times as large as rounding. A 16-bit engine rounds away
most of a smaller effect: with SmolLM2 it applies 0.3 of an effect as large as rounding, 0.7 of one five times as large, and
0.99 of one sixteen times as large."""
EFFECT_TOLERANCE = 0.2
"""The engine's effect of the adapter is within this of the trainer's. Half the alpha gives at most 0.6, twice the alpha
at least 1.3, the base's weights 0, and the right adapter 0.98 to 1.04."""

ADVICE = (
    "Nothing was trained: the engine samples from another policy than the one that is trained. Check that both have the "
    "same base weights and adapter and that no --engine-arg changes the model (quantization), or compute both in "
    "float32; --gap-limit 0 turns this off"
)


class GapTooLarge(Exception):
    """The engine's log-probabilities are not the policy's. Nothing was trained."""


# --- limits ---


def coarsest(number_types: Iterable[str]) -> str:
    """The number type that rounds the most."""
    return max(number_types, key=lambda number_type: LARGEST_MEASURED[number_type])


def mismatch_limits(
    number_types: tuple[str, str], is_exact: bool = False, limit: float | None = None
) -> MismatchLimits | None:
    """The limits for these number types of engine and trainer. A `limit` replaces these limits: a step with a larger mean gap
    trains nothing. None for a limit of 0, which turns the check off."""
    if limit is not None:
        return MismatchLimits(high=limit / WRONG_FACTOR, wrong=limit) if limit else None
    if is_exact:
        return EXACT
    coarser = coarsest(number_types)
    measured = LARGEST_MEASURED[coarser]
    return MismatchLimits(
        high=measured,
        wrong=FACTORS.get(coarser, WRONG_FACTOR) * measured,
        epsilon=_rounding_of(number_types),
    )


def _rounding_of(number_types: tuple[str, str]) -> float:
    """The standard deviation, relative to a number, of the difference between its roundings to both number types; 0 for
    float32.

    The variance of rounding is a twelfth of the last place's square. The last place is 2**-bits to 2**-(bits + 1) of the
    number.
    """
    mantissas = [MANTISSA_BITS[number_type] for number_type in number_types if number_type in MANTISSA_BITS]
    return math.sqrt(sum(2.0 ** -(2 * bits + 1) / 12 for bits in mantissas))


# --- sampled tokens ---


def judge_gap(metrics: dict[str, float], task: TrainTask) -> list[str]:
    """A note for the report if the gap is high; no note if it is normal or cannot be judged. `metrics` are
    `step_metrics.sampler_metrics`.

    Raises:
        GapTooLarge: the mean or the largest gap is too large for rounding and, for tokens of earlier steps, movement.
    """
    if task.mismatch_limits is None:
        return []
    notes: list[str] = []
    if metrics["loss/logprob_gap_num_tokens"] >= MIN_TOKENS:
        notes = _judge_fresh(metrics, task.mismatch_limits, task.start_step)
    if metrics["loss/logprob_gap_stale_num_tokens"] >= MIN_TOKENS:
        _judge_stale(metrics, task.mismatch_limits, task.start_step)
    return notes


def movement_since(step: int | None, start_step: int | None, moved: Sequence[float]) -> float:
    """How far the policy has moved at most since a token's step; 0 for fresh tokens and for tokens of unknown step. `moved` is
    `Probe.moved` of the start step.

    Each step counts with the largest movement of the last WINDOW_STEPS steps or more, because one step can move the probe's
    few tokens much less than other tokens.
    """
    if step is None or start_step is None:
        return 0.0
    age = max(0, start_step - step)
    known = min(age, len(moved))
    largest = max(moved[-max(age, WINDOW_STEPS) :], default=0.0)
    return known * largest + UNKNOWN_MOVEMENT * (age - known)


def _judge_fresh(metrics: dict[str, float], limits: MismatchLimits, step: int) -> list[str]:
    mean, largest = metrics["loss/logprob_gap_mean"], metrics["loss/logprob_gap_max"]
    seen = f"{_seen(metrics, 'loss/logprob_gap')} of step {step}"
    at_most = "" if limits.largest is None else f" on average and {limits.largest:.2g} for one token"
    # "not <=", here and below: NaN is no agreement.
    if not mean <= limits.wrong or (limits.largest is not None and not largest <= limits.largest):
        raise GapTooLarge(f"{seen}; rounding explains at most {limits.wrong:.2g}{at_most}. {ADVICE}")
    if mean > limits.high:
        return [
            f"{seen}: more than is usual ({limits.high:.2g}); docs/precision.md has the figures of each pair of number types"
        ]
    return []


def _judge_stale(metrics: dict[str, float], limits: MismatchLimits, step: int) -> None:
    moved = metrics["loss/logprob_gap_stale_allowance"]
    if not metrics["loss/logprob_gap_stale_mean"] <= limits.wrong + MOVEMENT_FACTOR * moved:
        raise GapTooLarge(
            f"{_seen(metrics, 'loss/logprob_gap_stale')} of steps before {step}; rounding explains at most "
            f"{limits.wrong:.2g}, and the policy has moved by about {moved:.2g} since. {ADVICE}"
        )


def _seen(metrics: dict[str, float], name: str) -> str:
    return (
        f"the engine's log-probabilities differ from the trainer's by {metrics[f'{name}_mean']:.2g} on average, "
        f"{metrics[f'{name}_max']:.2g} at most, over {metrics[f'{name}_num_tokens']:.0f} tokens"
    )


# --- the probe ---


def find_fault(probe: Probe, logprobs: Sequence[float], scaled: Sequence[float], limits: MismatchLimits) -> str | None:
    """Why the engine's log-probabilities of the probe are not the trainer's; None if they are.

    `scaled` are the log-probabilities with `probe.factor` times the adapter's alpha; empty for a factor of 1. An adapter's
    effect can be smaller than the rounding of 16 bits, so there are two questions: do the log-probabilities agree, and is the
    effect of the adapter the trainer's, at its own alpha or at a multiple of it?
    """
    gap = _rms(_difference(logprobs, probe.logprobs))
    limit = ROUNDING_FACTOR * probe.rounding if probe.rounding else limits.wrong
    if not gap <= limit:
        return (
            f"its log-probabilities of {len(logprobs)} tokens differ from the trainer's by {gap:.2g} (root mean square); "
            f"rounding explains at most {limit:.2g}"
        )
    ratio = effect_ratio(probe, scaled or logprobs, limits)
    if ratio is not None and not abs(ratio - 1) <= EFFECT_TOLERANCE:
        return (
            f"the adapter changes its log-probabilities {ratio:.2f} times as much as the trainer's: it applies another "
            "alpha, another adapter or none"
        )
    return None


def effect_ratio(probe: Probe, logprobs: Sequence[float], limits: MismatchLimits) -> float | None:
    """The adapter's effect in the engine as a multiple of its effect in the trainer (least squares). None if the effect in
    the trainer is too close to rounding: the adapter is zero."""
    expected = _difference(probe.scaled_logprobs or probe.logprobs, probe.base_logprobs)
    if _rms(expected) < least_effect(probe, limits):
        return None
    measured = _difference(logprobs, probe.base_logprobs)
    products = (a * b for a, b in zip(measured, expected, strict=True))
    return math.fsum(products) / math.fsum(b * b for b in expected)


def least_effect(probe: Probe, limits: MismatchLimits) -> float:
    """The root mean square from which an adapter's effect on the probe is compared."""
    return NUM_SIGMAS_OF_EFFECT * (probe.rounding or limits.high)


def _rms(values: Sequence[float]) -> float:
    """Root mean square."""
    return math.sqrt(math.fsum(value * value for value in values) / len(values))


def _difference(one: Sequence[float], other: Sequence[float]) -> list[float]:
    return [a - b for a, b in zip(one, other, strict=True)]
