"""Checks before the first update that the engine samples from the policy that is trained, by the gap of each token.

Two programs that compute the same policy differ only by rounding. A wrong adapter, template, kernel or step makes a far
larger gap. Tokens of earlier steps also differ by the policy's own movement since then, which each job measures
(`probe.py`). docs/precision.md has the measured gaps from which the thresholds follow.
"""

from art_server.shared.trainer_messages import MismatchLimits, TrainTask

MIN_TOKENS = 64
"""With fewer tokens the mean is not judged."""
MOVEMENT_FACTOR = 8.0
"""The mean gap of stale tokens may exceed the limit by this many times the measured movement, because a step moves rare
tokens and the tokens that it trained on more than the probe's tokens: up to 3.6 times in honest training
(docs/precision.md)."""


class GapTooLarge(Exception):
    """The engine's log-probabilities are not the policy's. Nothing was trained."""


def judge_gap(metrics: dict[str, float], task: TrainTask) -> list[str]:
    """A note for the report if the gap is high; no note if it is normal or cannot be judged.

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


def _judge_fresh(metrics: dict[str, float], limits: MismatchLimits, step: int) -> list[str]:
    mean, largest = metrics["loss/logprob_gap_mean"], metrics["loss/logprob_gap_max"]
    seen = f"{_seen(metrics, 'loss/logprob_gap')} of step {step}"
    at_most = "" if limits.largest is None else f" on average and {limits.largest:.2g} for one token"
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


ADVICE = (
    "Nothing was trained: the engine samples from another policy than the one that is trained. Check that both have the "
    "same base weights and adapter and that no --engine-arg changes the model (quantization), or compute both in "
    "float32; --gap-limit 0 turns this off"
)
