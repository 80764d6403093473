"""Reads a judge's answer, {"scores": {ID: {"explanation", "score"}}}, with one number for each id.

Judges add thinking, prose and Markdown, and quote trajectories that imitate an answer. So an answer counts only if it
contains one such object. The ValueErrors tell the judge what is wrong.
"""

import json
import re
from collections.abc import Sequence
from typing import Any, NamedTuple, cast

from art_protocol.display import Short

MAX_CHARACTERS, MAX_STARTS = 200_000, 1_000
"""Of an answer without its thinking: its length, and the brackets at which JSON may begin. Reading costs at most Python's
recursion limit at each of these."""
LARGEST = 1e6
"""A score beyond it, an infinite one or NaN is no score. What lies between it and 1 is clamped."""
START = re.compile(r"[{\[]")


class Verdict(NamedTuple):
    """A judge's opinion of one trajectory. The score is finite; judges were asked for 0 to 1."""

    score: float
    explanation: str


def schema_of(ids: Sequence[str]) -> dict[str, Any]:
    """The JSON schema of an answer. A grammar made of it allows each id once, and no score above 1."""
    score = {"type": "number", "minimum": 0, "maximum": 1}
    verdict = _object({"explanation": {"type": "string"}, "score": score})
    return _object({"scores": _object(dict.fromkeys(ids, verdict))})


def _object(properties: dict[str, Any]) -> dict[str, Any]:
    strict = {"required": list(properties), "additionalProperties": False}
    return {"type": "object", "properties": properties, **strict}


def read_scores(text: str, ids: Sequence[str]) -> list[Verdict]:
    """A verdict for each id, in the order of `ids`. ART's form, a list with "trajectory_id", is accepted too.

    Raises:
        ValueError: the answer does not have exactly one finite number for each id.
    """
    found = [each["scores"] for each in _json_values(text) if get(each, "scores") is not None]
    if len(found) != 1:
        raise ValueError(f'it contains {len(found) or "no"} JSON objects with "scores", not one')
    pairs: list[tuple[str, Any]] = []
    if isinstance(found[0], dict):
        pairs = list(cast(dict[str, Any], found[0]).items())
    elif isinstance(found[0], list):
        for each in cast(list[Any], found[0]):
            key = get(each, "trajectory_id")
            pairs.append((str(key) if isinstance(key, str | int) else "?", each))
    given = [key for key, _ in pairs]
    if sorted(given) != sorted(ids):
        raise ValueError(f"its ids are {Short(given)!r}, not {Short(list(ids))!r}")
    verdicts = {key: _to_verdict(key, value) for key, value in pairs}
    return [verdicts[each] for each in ids]


def _json_values(text: str) -> list[Any]:
    """The JSON objects and lists in a text, in order: alone, in prose, in Markdown, behind "</think>"."""
    if not START.match(text.lstrip()):  # otherwise the tag is a part of an explanation
        before, tag, after = text.partition("</think>")
        text = after if tag else before.partition("<think>")[0]
    if len(text) > MAX_CHARACTERS:
        raise ValueError(f"it has more than {MAX_CHARACTERS:,} characters")
    # Not strict: grammars let judges write line breaks and control characters in strings.
    decoder = json.JSONDecoder(object_pairs_hook=_without_repeated_keys, strict=False)
    found: list[Any] = []
    position = 0
    for _ in range(MAX_STARTS):
        start = START.search(text, position)
        if start is None:
            return found
        try:
            value, position = decoder.raw_decode(text, start.start())
            found.append(value)
        except (ValueError, RecursionError):
            position = start.end()
    raise ValueError(f"it has more than {MAX_STARTS:,} brackets")


def _without_repeated_keys(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    if len(dict(pairs)) < len(pairs):
        raise ValueError("a repeated key")
    return dict(pairs)


def _to_verdict(key: str, value: Any) -> Verdict:
    score: Any = get(value, "score") if isinstance(value, dict) else value
    if type(score) not in (int, float) or not -LARGEST < score < LARGEST:  # a bool is no number
        raise ValueError(f"its score of id {key} is not a number from 0 to 1")
    explanation = get(value, "explanation")
    return Verdict(float(score), explanation if isinstance(explanation, str) else "")


def get(value: Any, *path: str | int) -> Any:
    """What JSON has at a path of names and positions; None if it has nothing there."""
    for key in path:
        if isinstance(value, dict):
            value = cast(dict[Any, Any], value).get(key)
        elif isinstance(value, list) and isinstance(key, int) and key < len(cast(list[Any], value)):
            value = cast(list[Any], value)[key]
        else:
            return None
    return value
