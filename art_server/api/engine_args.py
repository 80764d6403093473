"""The settings of the engine that a client may request, in ART's `_internal_config`."""

import re
from collections.abc import Mapping, Sequence, Set
from typing import Any

from art_server.errors import InvalidInput
from art_server.settings import ENGINE_ARGS, GPU_ENGINE_ARGS, OWN_ENGINE_ARGS, Device

MAX_NOTES = 50
VALUE = re.compile(r"[A-Za-z0-9][A-Za-z0-9_.+-]{0,63}")
"""A value must not begin with a dash, because it becomes an argument of vLLM's command line."""
VALUES = {
    "max_seq_length": re.compile(r"[1-9][0-9]{2,7}"),
    "record_distributions": re.compile("true|false"),
}


def requested_engine_args(options: Mapping[str, Any], devices: Set[Device]) -> tuple[dict[str, str], list[str]]:
    """The options that an engine can have, as text, and the names of all other options. The value None requests nothing.
    `devices` are the engines' devices; while there are none, an option for any device can have an effect.

    Raises:
        InvalidInput: a value cannot be an engine argument.
    """
    requested: dict[str, str] = {}
    unknown: list[str] = []
    for key, value in options.items():
        text = str(value).lower() if isinstance(value, bool) else str(value)
        is_known = key in ENGINE_ARGS or key in OWN_ENGINE_ARGS
        if not is_known or (key in GPU_ENGINE_ARGS and devices == {"cpu"}):
            unknown.append(f"engine_args.{key}")
        elif value is not None and not VALUES.get(key, VALUE).fullmatch(text):
            raise InvalidInput(f"_internal_config: {key} cannot be {text[:80]!r}", code="invalid_body", param=key)
        elif value is not None:
            requested[key] = text
    return requested, unknown


def no_effect(names: Sequence[str]) -> list[str]:
    return [f"{name[:200]} has no effect here" for name in names[:MAX_NOTES]]
