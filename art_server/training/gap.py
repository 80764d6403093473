"""Is the engine the policy that is trained? Its log-probabilities say so, token by token, before anything is trained.

Rounding separates two programs that compute the same policy; a wrong adapter, template, kernel or step separates them by
far more. docs/precision.md has the measured gaps that the bars are drawn from.
"""

from art_server.training.task import GapBars, TrainTask

MIN_TOKENS = 64
"""Fewer tokens than these say nothing of a mean."""

WRONG_FACTOR = 4.0
"""A gap so many times the largest that was measured for a pair of number types is not rounding."""

LARGEST_MEASURED: dict[tuple[str, str], float] = {
    ("float32", "float32"): 1e-4,
    ("float32", "bfloat16"): 0.25,
    ("float32", "float16"): 0.03,
    ("bfloat16", "float32"): 0.25,
    ("bfloat16", "bfloat16"): 0.25,
    ("bfloat16", "float16"): 0.25,
    ("float16", "float32"): 0.03,
    ("float16", "bfloat16"): 0.25,
    ("float16", "float16"): 0.03,
}
"""Mean gap of a step, by number type of engine and trainer: the largest over models and steps (docs/precision.md)."""

EXACT = GapBars(high=1e-5, wrong=WRONG_FACTOR * 1e-5, largest=WRONG_FACTOR * 1e-4)
"""What `--exact` demands, of float32 on both sides. Confident answers differ by less than 1e-6 on average, text without sense
of a model with 30 layers by 8e-6 (the largest measured)."""


class GapTooLarge(Exception):
    """The engine's log-probabilities are not those of the policy: nothing was trained."""


def gap_bars(
    number_types: tuple[str, str], is_exact: bool = False, limit: float | None = None
) -> GapBars | None:
    """The bars for an engine and a trainer of these number types, or from a mean that is given as the limit. None where
    nothing is judged: with a limit of 0."""
    if limit is not None:
        return GapBars(high=limit / WRONG_FACTOR, wrong=limit) if limit else None
    measured = LARGEST_MEASURED[number_types]
    return EXACT if is_exact else GapBars(high=measured, wrong=WRONG_FACTOR * measured)


def judge_gap(metrics: dict[str, float], task: TrainTask) -> list[str]:
    """The note that a high gap is worth, none for one that is fine or cannot be judged.

    Raises GapTooLarge for one that is wrong.
    """
    bars, num = task.gap_bars, int(metrics["loss/logprob_gap_num_tokens"])
    if bars is None or num < MIN_TOKENS:
        return []
    mean, largest = metrics["loss/logprob_gap_mean"], metrics["loss/logprob_gap_max"]
    seen = f"the engine's log-probabilities differ from the trainer's by {mean:.2g} on average, {largest:.2g} at most, over {num} tokens of step {task.start_step}"
    if mean > bars.wrong or (bars.largest is not None and largest > bars.largest):
        raise GapTooLarge(
            f"{seen}; at most {bars.wrong:.2g} is rounding. Nothing was trained: the engine samples from another policy than the "
            "one that is trained. Look whether both have the same base weights and adapter, whether --engine-arg changes "
            "the model (quantization), or compute both in float32; --gap-limit 0 turns this off"
        )
    if mean > bars.high:
        return [
            f"{seen}: more than was ever measured with these number types ({bars.high:.2g}); float32 closes it"
        ]
    return []
