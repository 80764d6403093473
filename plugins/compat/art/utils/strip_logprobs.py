"""`strip_logprobs`: values without log-probabilities, to print or store them."""

import copy
import logging
from typing import Any, cast

logger = logging.getLogger(__name__)


def strip_logprobs(obj: Any) -> Any:
    """A deep copy without `logprobs`: in dictionaries the key is left out, in objects the attribute is None. A value that
    cannot be copied is returned as it is, with a warning."""
    try:
        copied = copy.deepcopy(obj)
    except Exception as error:
        logger.warning(
            "Failed to deepcopy object in strip_logprobs (%s): %s. Returning original object unchanged.",
            type(obj).__name__,
            error,
        )
        return obj
    return _strip(copied)


def _strip(value: Any) -> Any:
    if isinstance(value, dict):
        items = cast("dict[Any, Any]", value).items()
        return {key: _strip(entry) for key, entry in items if key != "logprobs"}
    if isinstance(value, list | tuple):
        stripped = [_strip(entry) for entry in cast("list[Any]", value)]
        return tuple(stripped) if isinstance(value, tuple) else stripped
    fields: dict[str, Any] = getattr(value, "__dict__", {})
    for name, field in list(fields.items()):
        setattr(value, name, None if name == "logprobs" else _strip(field))
    return value
