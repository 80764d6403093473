"""Bars for the gap between engine and trainer: above them a job gets a note, or trains nothing (`trainer/gap.py`).

docs/precision.md has the measured gaps that the bars are derived from.
"""

from art_server.shared.tasks import GapBars

WRONG_FACTOR = 4.0
"""A gap above this many times the largest measured one for a pair of number types is not rounding."""

LARGEST_MEASURED = {"bfloat16": 0.25, "float16": 0.03, "float32": 1e-4}
"""Largest measured mean gap of a step, with a margin, by the coarser number type of engine and trainer, the coarsest
first (docs/precision.md)."""

EXACT = GapBars(high=1e-5, wrong=WRONG_FACTOR * 1e-5, largest=WRONG_FACTOR * 1e-4)
"""The bars of `--exact`, with float32 on both sides. Confident answers have a mean gap below 1e-6, incoherent text of a
model with 30 layers one of 8e-6 (the largest measured)."""


def gap_bars(
    number_types: tuple[str, str], is_exact: bool = False, limit: float | None = None
) -> GapBars | None:
    """The bars for these number types of engine and trainer. A `limit` replaces them: a larger mean gap trains nothing.
    None for a limit of 0, which turns the check off."""
    if limit is not None:
        return GapBars(high=limit / WRONG_FACTOR, wrong=limit) if limit else None
    measured = next(gap for kind, gap in LARGEST_MEASURED.items() if kind in number_types)
    return EXACT if is_exact else GapBars(high=measured, wrong=WRONG_FACTOR * measured)
