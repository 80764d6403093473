"""The reward in the files that the tests of a task wrote, by Harbor's rules: reward.json first, then reward.txt.

What is missing, empty, no number or not finite is an error, and never 0.
"""

import json
import math
from collections.abc import Mapping
from typing import Any, cast

from art.harbor.errors import RewardInvalid

JSON_FILE, TEXT_FILE = "reward.json", "reward.txt"
NAME = "reward"
SHOWN = 80
"""Characters of a wrong file that an error shows."""


def read_reward(files: Mapping[str, bytes | None]) -> tuple[float, dict[str, float]]:
    """The reward, and the other numbers of reward.json by their names.

    `files` are the files in /logs/verifier. None is in place of a file that cannot be read: a link, a folder, or too large.

    Raises:
        RewardInvalid: there is no reward, or it is no finite number.
    """
    for name, read in ((JSON_FILE, _read_json), (TEXT_FILE, _read_text)):
        if name in files:
            content = files[name]
            if content is None:
                raise RewardInvalid(f"{name} is no plain file of at most 1 MiB")
            try:
                text = content.decode()
            except UnicodeDecodeError as error:
                raise RewardInvalid(f"{name} is not UTF-8") from error
            if not text.strip():
                raise RewardInvalid(f"{name} is empty")
            return read(text)
    raise RewardInvalid(f"the tests wrote neither {JSON_FILE} nor {TEXT_FILE} into /logs/verifier")


def _read_text(text: str) -> tuple[float, dict[str, float]]:
    try:
        return _finite(float(text), TEXT_FILE), {}
    except ValueError as error:
        raise RewardInvalid(f"{TEXT_FILE} has no number: {text.strip()[:SHOWN]!r}") from error


def _read_json(text: str) -> tuple[float, dict[str, float]]:
    try:
        content = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise RewardInvalid(f"{JSON_FILE} is no JSON: {text.strip()[:SHOWN]!r}") from error
    if not isinstance(content, dict):
        raise RewardInvalid(f"{JSON_FILE} is no object of numbers: {text.strip()[:SHOWN]!r}")
    parts = cast("dict[str, Any]", content)
    numbers = {name: _number(value, f"{JSON_FILE}: {name}") for name, value in parts.items()}
    if NAME not in numbers and len(numbers) != 1:
        names = ", ".join(numbers) or "none"
        raise RewardInvalid(f"{JSON_FILE} has no key {NAME!r} and not exactly one number (its keys: {names})")
    reward = numbers.pop(NAME) if NAME in numbers else next(iter(numbers.values()))
    return reward, numbers


def _number(value: Any, where: str) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise RewardInvalid(f"{where} is no number: {str(value)[:SHOWN]!r}")
    try:
        return _finite(float(value), where)
    except OverflowError as error:
        raise RewardInvalid(f"{where} is not finite") from error


def _finite(number: float, where: str) -> float:
    if not math.isfinite(number):
        raise RewardInvalid(f"{where} is not finite: {number}")
    return number
