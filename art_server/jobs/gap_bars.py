"""How far the engine's log-probabilities may lie from the trainer's before a step trains nothing (`trainer/gap.py` judges).

docs/precision.md has the measured gaps that the bars are drawn from.
"""

from art_server.shared.tasks import GapBars

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


def gap_bars(
    number_types: tuple[str, str], is_exact: bool = False, limit: float | None = None
) -> GapBars | None:
    """The bars for an engine and a trainer of these number types, or from a mean that is given as the limit. None where
    nothing is judged: with a limit of 0."""
    if limit is not None:
        return GapBars(high=limit / WRONG_FACTOR, wrong=limit) if limit else None
    measured = LARGEST_MEASURED[number_types]
    return EXACT if is_exact else GapBars(high=measured, wrong=WRONG_FACTOR * measured)
