"""How records look in a notebook: a `repr` of one line, and completion without names that do nothing here; numbers with
their nouns."""

from collections.abc import Iterable
from typing import Any, ClassVar

from pydantic import BaseModel

PYDANTIC_V1 = frozenset(
    {
        *("construct", "copy", "dict", "from_orm", "json", "parse_file", "parse_obj", "parse_raw"),
        *("schema", "schema_json", "update_forward_refs", "validate"),
    }
)
"""Old names that pydantic warns of."""
MAX_SHOWN = 60
"""Characters of one value's `repr`."""


def counted(number: int, noun: str) -> str:
    """A number with its noun: `1, "engine" -> "1 engine"`, `2, "trajectory" -> "2 trajectories"`."""
    if number == 1:
        return f"1 {noun}"
    return f"{number} {noun.removesuffix('y')}ies" if noun.endswith("y") else f"{number} {noun}s"


class Displayed:
    """For pydantic models: a record whose `repr` has only the fields that were set, and fits a line."""

    _hidden: ClassVar[frozenset[str]] = frozenset()
    """Fields that programs written for ART set, and that have no effect here."""

    def __repr_args__(self) -> Iterable[tuple[str | None, Any]]:
        assert isinstance(self, BaseModel)
        shown = self.model_fields_set - type(self)._hidden
        arguments = BaseModel.__repr_args__(self)
        return [(name, Short(value)) for name, value in arguments if name in shown]

    def __dir__(self) -> Iterable[str]:
        return sorted(set(object.__dir__(self)) - PYDANTIC_V1 - type(self)._hidden)


class Short:
    """A value whose `repr` is cut after MAX_SHOWN characters."""

    def __init__(self, value: object):
        self._value = value

    def __repr__(self) -> str:
        text = repr(self._value)
        return text if len(text) <= MAX_SHOWN else text[: MAX_SHOWN - 3] + "..."
