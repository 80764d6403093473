"""Checks of an answer's text. Each function returns 1.0 or 0.0 and raises for a wrong check, such as an invalid pattern, never
for a wrong answer."""

import importlib
import json
import math
import re
from collections.abc import Mapping
from typing import Any

NUMBER = re.compile(r"(?a)(?:(?<!\w)[-+])?(?:(?:\d{1,3}(?:,\d{3})+(?!\d)|\d+)(?:\.\d+)?|\.\d+)(?:[eE][-+]?\d+)?")
"""A decimal number, also with commas between thousands. Behind a letter or a digit "-" is no sign: "2024-05-15"."""
MINUS = "\N{MINUS SIGN}"
"""Models also write this character."""
FENCE = re.compile(r"```(?:json)?[^\S\n]*\n(.*?)```", re.DOTALL)


def exact_match(answer: str | None, expected: str, *, ignore_case: bool = False) -> float:
    """1.0 if the answer is `expected`, apart from white space at both ends."""
    text, wanted = (answer or "").strip(), expected.strip()
    if ignore_case:
        text, wanted = text.casefold(), wanted.casefold()
    return 1.0 if text == wanted else 0.0


def contains(answer: str | None, expected: str, *, ignore_case: bool = False) -> float:
    """1.0 if `expected` is anywhere in the answer: "5" is in "15". `expected` counts without white space at both ends.

    Raises:
        ValueError: `expected` is empty.
    """
    text, wanted = answer or "", expected.strip()
    if not wanted:
        raise ValueError("is empty: each answer contains it")
    if ignore_case:
        text, wanted = text.casefold(), wanted.casefold()
    return 1.0 if wanted in text else 0.0


def number_match(answer: str | None, expected: float | str, *, absolute: float = 1e-9, relative: float = 1e-6) -> float:
    """1.0 if the last number of the answer is within the tolerances of `expected`, a number or a text whose last number
    counts.

    The tolerance is the larger of `absolute` and `relative` times the larger of the two numbers.

    Raises:
        ValueError: `expected` is a text without a number, or no finite number.
    """
    wanted = _last_number(expected) if isinstance(expected, str) else float(expected)
    if wanted is None or not math.isfinite(wanted):
        raise ValueError(f"{expected!r} has no finite number to compare with")
    number = _last_number(answer or "")
    is_close = number is not None and math.isclose(number, wanted, rel_tol=relative, abs_tol=absolute)
    return 1.0 if is_close else 0.0


def _last_number(text: str) -> float | None:
    numbers = NUMBER.findall(text.replace(MINUS, "-"))
    return float(numbers[-1].replace(",", "")) if numbers else None


def regex_match(answer: str | None, pattern: str | re.Pattern[str]) -> float:
    """1.0 if the pattern matches the whole answer, apart from white space at both ends.

    Raises:
        re.error: the pattern is not a regular expression.
    """
    return 1.0 if re.fullmatch(pattern, (answer or "").strip()) else 0.0


def json_match(answer: str | None, schema: Mapping[str, Any] | None = None) -> float:
    """1.0 if the answer is JSON, alone or in one Markdown fence, and fits the JSON schema.

    Raises:
        ImportError: a schema is given, and the package `jsonschema` is not installed.
        ValueError: the schema is not a JSON schema.
    """
    text = answer or ""
    fences = FENCE.findall(text)
    try:
        value = json.loads(fences[0] if len(fences) == 1 else text, parse_constant=_refuse)
    except (ValueError, RecursionError):
        return 0.0
    return 1.0 if schema is None or fits_schema(value, schema) else 0.0


def _refuse(constant: str) -> None:
    raise ValueError(f"{constant} is not JSON")


def fits_schema(value: Any, schema: Mapping[str, Any]) -> bool:  # Any: JSON
    """Whether a value fits a JSON schema (draft 2020-12 unless the schema names another)."""
    try:
        jsonschema: Any = importlib.import_module("jsonschema")  # an extra; Any: the package has no types
    except ModuleNotFoundError as error:
        raise ImportError(
            "json_match with a schema needs jsonschema: pip install '.[rewards]' in a clone of the repository"
        ) from error
    kind = jsonschema.validators.validator_for(schema)
    try:
        kind.check_schema(schema)
    except jsonschema.SchemaError as error:
        raise ValueError(f"not a JSON schema: {error.message}") from error
    try:
        return bool(kind(schema).is_valid(value))
    except (RecursionError, OverflowError):  # nested too deeply, or 1e999 with "multipleOf"
        return False
