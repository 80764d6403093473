"""Configurations whose error is one line: each wrong value, with what its field takes."""

import types
import typing
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Literal, cast

from pydantic import BaseModel, ValidationError
from pydantic.fields import FieldInfo

from art.unknown_fields import Strict
from art_protocol.display import Short

NAMES: Mapping[Any, str] = {bool: "True or False", str: "a text", dict: "a dictionary"}
"""Types without a range, in words. Any: types."""
BOUNDS = {"ge": "at least", "gt": "above", "le": "at most", "lt": "below"}
"""The attributes of pydantic's bounds, in words."""


class Configuration(Strict):
    """A record that a program writes.

    Raises:
        ValueError: fields are unknown or their values out of range; the message is one line with what each field takes.
    """

    def __init__(self, **fields: Any) -> None:
        try:
            super().__init__(**fields)
        except ValidationError as error:
            raise ValueError(_sentence(type(self), error, fields)) from None


def _sentence(kind: type[Strict], error: ValidationError, fields: Mapping[str, Any]) -> str:
    reasons: dict[object, str] = {}
    for problem in error.errors(include_url=False, include_input=False):
        name, key = (*problem["loc"], None, None)[:2]
        if problem["type"] == "value_error" or name not in kind.model_fields:
            reasons[name] = problem["msg"].removeprefix("Value error, ")
            continue
        value, field = fields.get(str(name)), kind.model_fields[str(name)]
        if problem["type"] == "missing":
            reasons[name] = f"{name} is missing: pass {name}=..., {allowed(field)}"
        elif isinstance(value, dict) and key in (entries := cast("dict[object, object]", value)):
            what = problem["msg"]
            if typing.get_origin(field.annotation) is dict:
                what = f"it must be {_either(_values(typing.get_args(field.annotation)[1], ()))}"
            reasons[name] = f"{name}[{key!r}] is {Short(entries[key])!r}: {what}"
        else:
            reasons[name] = f"{name} is {Short(cast('object', value))!r}: it must be {allowed(field)}"
    text = "; ".join(reasons.values())
    return text if text.startswith(kind.__name__) else f"{kind.__name__}: {text}"


def allowed(field: FieldInfo) -> str:
    """The values that a field takes: "a number above 0 and at most 1, or 'auto'"."""
    return _either(_values(field.annotation, field.metadata))


def _either(parts: Sequence[str]) -> str:
    return parts[0] if len(parts) == 1 else f"{', '.join(parts[:-1])} or {parts[-1]}"


def _values(annotation: Any, limits: Iterable[Any]) -> list[str]:  # Any: types, and pydantic's metadata
    """The values of a type in words; `limits` are the bounds of the type's numbers."""
    origin, arguments = typing.get_origin(annotation), typing.get_args(annotation)
    if origin is typing.Annotated:
        own: list[Any] = []
        for entry in arguments[1:]:
            own += entry.metadata if isinstance(entry, FieldInfo) else [entry]
        return _values(arguments[0], own)
    if origin in (types.UnionType, typing.Union):
        members = [member for member in arguments if not (float in arguments and member in (int, bool))]
        return [value for member in members for value in _values(member, limits)]
    if origin is Literal:
        return [repr(value) for value in arguments]
    if origin is list:
        member, *others = _values(arguments[0], limits)
        if others or not member.startswith(("a number", "a text")):
            return ["a list"]
        return [f"a list of {member.removeprefix('a ').replace('number', 'numbers').replace('text', 'texts')}"]
    if annotation in (int, float):
        return [f"{'an integer' if annotation is int else 'a number'}{_range(limits)}"]
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return [f"art.{annotation.__name__}(...)"]
    return ["None" if annotation is types.NoneType else NAMES.get(origin or annotation, "another value")]


def _range(limits: Iterable[Any]) -> str:
    """Bounds as text: " of at least 1 and at most 64", " above 0"."""
    numbers = {name: getattr(limit, name) for limit in limits for name in BOUNDS if hasattr(limit, name)}
    bounds = " and ".join(f"{BOUNDS[name]} {numbers[name]}" for name in BOUNDS if name in numbers)
    return f" {bounds}" if bounds.startswith(("above", "below")) else f" of {bounds}" if bounds else ""
