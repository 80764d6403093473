"""Rows of data sets: the forms that are read besides OpenAI's, and the remedy for ShareGPT's form, which is not read."""

import json
from typing import Any, cast

SHAREGPT_ROLES = {"human": "user", "gpt": "assistant"}
SHAREGPT = (
    "write each message as {'role': ..., 'content': ...}, for example [{'role': {'human': 'user', 'gpt': 'assistant'}"
    ".get(m['from'], m['from']), 'content': m['value']} for m in row['conversations']]"
)
"""The remedy for a row of ShareGPT's form."""


def is_sharegpt(entry: Any) -> bool:
    """Whether an entry is a message of ShareGPT's form: `from` and `value` in place of `role` and `content`."""
    return isinstance(entry, dict) and "role" not in entry and {"from", "value"} <= entry.keys()


def read_tools(tools: Any) -> Any:
    """Tools as they are, or parsed where the list or a single tool is JSON text, as in columns of data sets. An empty text
    is None.

    Raises:
        ValueError: a text is not JSON.
    """
    if isinstance(tools, str):
        return read_tools(_read(tools, "tools")) if tools.strip() else None
    if isinstance(tools, list):
        entries = cast(list[Any], tools)
        return [_read(tool, f"tools[{index}]") if isinstance(tool, str) else tool for index, tool in enumerate(entries)]
    return tools


def _read(text: str, where: str) -> Any:
    try:
        return json.loads(text)
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{where} is a text, but not of JSON ({error}): give a list of tools") from error
