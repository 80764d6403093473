"""Limits for the gap between engine and trainer: above them a job gets a note, or trains nothing (`trainer/gap.py`).

docs/precision.md has the measured gaps that the limits are derived from.
"""

import math
from collections.abc import Set

from art_server.engine.device.computing import ComputingDevices
from art_server.settings import NumberType, ServerConfig
from art_server.shared.trainer_messages import MismatchLimits
from art_server.store.base_models import BaseModel

WRONG_FACTOR = 4.0
"""A gap above this many times the largest measured one for a pair of number types is not rounding."""

LARGEST_MEASURED = {"bfloat16": 0.25, "float16": 0.03, "float32": 1e-4}
"""Largest measured mean gap of a step, with a margin, by the coarser number type of engine and trainer, the coarsest
first (docs/precision.md)."""

FACTORS = {"bfloat16": 2.0}
"""WRONG_FACTOR of number types whose largest gap was measured with the noisiest model known, SmolLM2."""

MANTISSA_BITS = {"bfloat16": 7, "float16": 10}

EXACT = MismatchLimits(high=1e-5, wrong=WRONG_FACTOR * 1e-5, largest=WRONG_FACTOR * 1e-4)
"""The limits of `--exact`, with float32 on both sides. Confident answers have a mean gap below 1e-6; incoherent text of a
model with 30 layers has a mean gap of 8e-6 (the largest measured)."""


def mismatch_limits_of(config: ServerConfig, devices: ComputingDevices, base: BaseModel) -> MismatchLimits | None:
    """The limits of a server for a base model, from the coarsest number types of all engines and all ranks. None while no
    machine with an engine has joined: then nothing samples or trains."""
    engines, ranks = devices.number_types(base)
    if not engines:
        return None
    return mismatch_limits((coarsest(engines), coarsest(ranks or engines)), config.exact, config.gap_limit)


def coarsest(number_types: Set[NumberType]) -> NumberType:
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
    coarser = next(number_type for number_type in LARGEST_MEASURED if number_type in number_types)
    measured = LARGEST_MEASURED[coarser]
    return MismatchLimits(
        high=measured,
        wrong=FACTORS.get(coarser, WRONG_FACTOR) * measured,
        epsilon=rounding_of(number_types),
    )


def rounding_of(number_types: tuple[str, str]) -> float:
    """The standard deviation, relative to a number, of the difference between its roundings to both number types; 0 for
    float32.

    The variance of rounding is a twelfth of the last place's square. The last place is 2**-bits to 2**-(bits + 1) of the
    number.
    """
    mantissas = [MANTISSA_BITS[number_type] for number_type in number_types if number_type in MANTISSA_BITS]
    return math.sqrt(sum(2.0 ** -(2 * bits + 1) / 12 for bits in mantissas))
