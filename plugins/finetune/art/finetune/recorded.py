"""A configuration as the output folder keeps it: without secrets, as YAML, and compared with another."""

import json
import re
from collections.abc import Iterator, Mapping
from io import StringIO
from typing import Any, cast

from ruamel.yaml import YAML

SECRET = re.compile(
    r".*api_?key|.*password|.*secret.*|authorization|((access|api|auth|bearer|hf)_)?token", re.IGNORECASE
)
"""Names of fields whose values are never written. max_tokens and pad_token are not among them."""
HIDDEN = "***"
MAX_CHARACTERS = 80
"""Of a value in a message."""


def to_record(config: Mapping[str, Any]) -> dict[str, Any]:
    """The configuration as JSON values, with its secrets as "***"."""
    return _hide(json.loads(json.dumps(config, default=str)))


def to_yaml(record: Mapping[str, Any]) -> bytes:
    text = StringIO()
    writer: Any = YAML()  # Any: ruamel.yaml declares parts of its methods as unknown
    writer.default_flow_style = False
    writer.dump(record, text)
    return text.getvalue().encode()


def find_differences(old: Mapping[str, Any], new: Mapping[str, Any]) -> list[tuple[str, str]]:
    """The dotted names of the fields that differ, each with a line about it.

    Secrets are not compared. Null, an empty mapping or list, and a field that is not there are the same.
    """
    before, now = dict(_leaves(old)), dict(_leaves(new))
    differences: list[tuple[str, str]] = []
    for name in dict.fromkeys([*before, *now]):
        values = before.get(name), now.get(name)
        if HIDDEN not in values and values[0] != values[1]:
            differences.append((name, f"{name}: {_text(values[0])} in the folder, {_text(values[1])} here"))
    return differences


def _leaves(value: Any, place: str = "") -> Iterator[tuple[str, Any]]:
    """The values of a tree with their dotted names."""
    if isinstance(value, list):
        value = dict(enumerate(cast(list[Any], value)))
    if not isinstance(value, dict):
        yield place, value
        return
    for name, each in cast(dict[Any, Any], value).items():
        yield from _leaves(each, f"{place}.{name}" if place else str(name))


def _text(value: Any) -> str:
    if value is None:
        return "not set"
    text = json.dumps(value, ensure_ascii=False)
    return text if len(text) <= MAX_CHARACTERS else f"{text[: MAX_CHARACTERS - 3]}..."


def _hide(value: Any) -> Any:
    if isinstance(value, list):
        return [_hide(each) for each in cast(list[Any], value)]
    if not isinstance(value, dict):
        return value
    shown: dict[str, Any] = {}
    for name, each in cast(dict[str, Any], value).items():
        shown[name] = HIDDEN if SECRET.fullmatch(name) and each is not None else _hide(each)
    return shown
