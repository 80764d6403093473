"""Reads a judge's answer, {"scores": {ID: {"explanation", "score"}}}, with one number for each id.

Judges add thinking, prose and Markdown, and quote trajectories that imitate an answer. So an answer counts only if it
contains exactly one such object. The ValueErrors tell the judge what is wrong.
"""

import json
import re
from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple, cast

from art_protocol.display import Short

MAX_CHARACTERS, MAX_STARTS = 200_000, 1_000
"""Limits on an answer without its thinking: the length, and the number of brackets at which JSON may begin. At each bracket,
reading costs at most Python's recursion limit."""
LARGEST = 1e6
"""A score outside of -LARGEST to LARGEST, or NaN, makes the answer unusable. Inside, a score below 0 or above 1 is clamped."""
START = re.compile(r"[{\[]")


class Verdict(NamedTuple):
    """A judge's opinion of one trajectory. The score is finite; judges were asked for 0 to 1."""

    score: float
    explanation: str


def schema_of(ids: Sequence[str]) -> dict[str, Any]:
    """The JSON schema of an answer. A grammar that is made of the schema allows each id once, and no score above 1."""
    score = {"type": "number", "minimum": 0, "maximum": 1}
    verdict = _object({"explanation": {"type": "string"}, "score": score})
    return _object({"scores": _object(dict.fromkeys(ids, verdict))})


def _object(properties: dict[str, Any]) -> dict[str, Any]:
    # OpenAI's strict schemas have both in each object.
    strict = {"required": list(properties), "additionalProperties": False}
    return {"type": "object", "properties": properties, **strict}


def read_scores(text: str, ids: Sequence[str]) -> list[Verdict]:
    """A verdict for each id, in the order of `ids`. ART's form, a list with "trajectory_id", is accepted too.

    Raises:
        ValueError: the answer does not have exactly one finite number for each id.
    """
    candidates = [value["scores"] for value in _json_values(text) if get(value, "scores") is not None]
    if not candidates:
        raise ValueError('it contains no JSON object with "scores"')
    if len(candidates) > 1:
        raise ValueError(f'it contains {len(candidates)} JSON objects with "scores", and one was asked for')
    scores: Any = candidates[0]
    pairs: list[tuple[str, Any]] = []
    if isinstance(scores, dict):
        pairs = list(cast(dict[str, Any], scores).items())
    elif isinstance(scores, list):
        for entry in cast(list[Any], scores):
            key = get(entry, "trajectory_id")
            pairs.append((str(key) if isinstance(key, str | int) else "?", entry))
    keys = [key for key, _ in pairs]
    if sorted(keys) != sorted(ids):
        raise ValueError(f"its ids are {Short(keys)!r}, not {Short(list(ids))!r}")
    verdicts = {key: _to_verdict(key, value) for key, value in pairs}
    return [verdicts[trajectory_id] for trajectory_id in ids]


def clamped(verdicts: Iterable[Verdict]) -> tuple[list[Verdict], int]:
    """The verdicts with scores from 0 to 1, and how many scores were outside."""
    inside: list[Verdict] = []
    num_outside = 0
    for verdict in verdicts:
        score = min(max(verdict.score, 0.0), 1.0)
        if score != verdict.score:
            num_outside += 1
        inside.append(verdict._replace(score=score))
    return inside, num_outside


def _json_values(text: str) -> list[Any]:
    """The JSON objects and lists in a text, in order: alone, in prose, in Markdown, behind "</think>"."""
    if not START.match(text.lstrip()):  # in an answer that begins with JSON, the tag is part of an explanation
        before, tag, after = text.partition("</think>")
        text = after if tag else before.partition("<think>")[0]
    if len(text) > MAX_CHARACTERS:
        raise ValueError(f"it has more than {MAX_CHARACTERS:,} characters")
    # Not strict: grammars let judges write line breaks and control characters in strings.
    decoder = json.JSONDecoder(object_pairs_hook=_without_repeated_keys, strict=False)
    values: list[Any] = []
    position = 0
    for _ in range(MAX_STARTS):
        start = START.search(text, position)
        if start is None:
            return values
        try:
            value, position = decoder.raw_decode(text, start.start())
            values.append(value)
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
    """The part of a JSON value at a path of names and positions, None if there is none: `get({"a": [3]}, "a", 0)` is 3."""
    for key in path:
        if isinstance(value, dict):
            value = cast(dict[Any, Any], value).get(key)
        elif isinstance(value, list) and isinstance(key, int) and key < len(cast(list[Any], value)):
            value = cast(list[Any], value)[key]
        else:
            return None
    return value
