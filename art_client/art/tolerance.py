"""Records that leave out unknown fields with one warning, so that a program of another release runs."""

import difflib
import logging
from collections.abc import Mapping
from typing import Any, ClassVar, cast

from pydantic import BaseModel, model_validator

logger = logging.getLogger(__name__)

_said: set[tuple[str, str]] = set()


class Tolerant(BaseModel):
    """A record that leaves out unknown fields, with one warning for each name. `_renamed` maps other names to its own."""

    _renamed: ClassVar[Mapping[str, str]] = {}

    @model_validator(mode="before")
    @classmethod
    def _leave_out_unknown(cls, given: Any) -> Any:  # Any: the input is not validated yet
        if not isinstance(given, dict):
            return given
        fields = cast("dict[str, Any]", given)
        if fields.keys() <= cls.model_fields.keys() or cls.model_config.get("extra") == "allow":
            return fields
        fields = {cls._renamed.get(name, name): value for name, value in fields.items()}
        for name in [name for name in fields if name not in cls.model_fields]:
            del fields[name]
            _say(cls, name)
        return fields


def _say(kind: type[BaseModel], name: str) -> None:
    if (kind.__qualname__, name) in _said:
        return
    _said.add((kind.__qualname__, name))
    near = difflib.get_close_matches(name, kind.model_fields, n=1)
    hint = f"; did you mean {near[0]!r}?" if near else ""
    logger.warning("%s has no field %r: its value is left out%s", kind.__name__, name, hint)
