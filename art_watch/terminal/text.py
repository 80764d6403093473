"""Values as people read them: numbers, ages, a line of small bars, and text whose control characters are visible."""

import math
import re
from collections.abc import Sequence

MIN_DECIMAL, MAX_DECIMAL = 0.01, 10_000
"""Numbers outside have three significant digits in place of three decimals, such as a learning rate."""
BARS = "▁▂▃▄▅▆▇█"
NOTHING = "-"

_INVISIBLE = re.compile(
    "[\x00-\x08\x0b-\x1f\x7f-\x9f\xad\u061c\u200b\u200e\u200f\u2028-\u202e\u2060-\u206f\ufeff\ufff9-\ufffb"
    "\ud800-\udfff\U000e0000-\U000e007f]"
)
"""Characters that change what a terminal does or shows: control characters except tab and line feed (ESC begins a terminal's
commands), marks that reverse the direction of text, and characters without a width."""


def visible(value: object) -> str:
    r"""A value as text that a terminal shows as it is, with control characters as pictures or escapes: `'\x1b[1m' -> '␛[1m'`."""
    return _INVISIBLE.sub(_picture, str(value))


def _picture(match: re.Match[str]) -> str:
    code = ord(match.group())
    if code < 0x20:
        return chr(0x2400 + code)
    return "␡" if code == 0x7F else f"\\u{code:04x}"


def number(value: float | None) -> str:
    if value is None:
        return NOTHING
    if math.isnan(value):
        return "nan"
    return f"{value:.3f}" if value == 0 or MIN_DECIMAL <= abs(value) < MAX_DECIMAL else f"{value:.3g}"


def age(seconds: float | None) -> str:
    """A duration in its largest unit: `7200 -> '2 h'`."""
    if seconds is None:
        return NOTHING
    for unit, length in (("d", 86400), ("h", 3600), ("min", 60)):
        if seconds >= length:
            return f"{seconds / length:.0f} {unit}"
    return f"{max(0.0, seconds):.0f} s"


def size(num_bytes: float) -> str:
    """A size in the largest unit of which the size is a tenth: `2**26 -> '64.0 MiB'`."""
    for unit, length in (("GiB", 2**30), ("MiB", 2**20)):
        if num_bytes >= length / 10:
            return f"{num_bytes / length:.1f} {unit}"
    return f"{num_bytes / 2**10:.1f} KiB"


def small_bars(values: Sequence[float | None]) -> str:
    """One bar for each value, between the lowest and the highest value; a space for a missing value:
    `[0, None, 1] -> '▁ █'`."""
    known = [value for value in values if value is not None and math.isfinite(value)]
    low = min(known, default=0.0)
    scale = (len(BARS) - 1) / ((max(known, default=0.0) - low) or 1.0)
    bars = ""
    for value in values:
        if value is None or not math.isfinite(value):
            bars += " "
        else:
            bars += BARS[round((value - low) * scale)]
    return bars
