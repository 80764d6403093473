"""Messages and choices in the form that people read."""

import json
from typing import Any

MAX_PREVIEW = 240
"""Characters of a rollout's last answer in the table of its group."""
Row = dict[str, Any]


def entry_row(entry: Row, trace: Row | None) -> Row:
    """A message, or a choice with its finish reason, in the form that people read."""
    message = entry["message"] if isinstance(entry.get("message"), dict) else entry
    calls = [dict_of(tool_call, "function") for tool_call in list_of(message, "tool_calls")]
    row: Row = {
        "role": str(message.get("role", "?")),
        "text": plain_text(message.get("content")),
        # vLLM 0.32 writes thinking as `reasoning`, and calls `reasoning_content` the deprecated name.
        "reasoning": plain_text(message.get("reasoning_content") or message.get("reasoning")),
        "tool_calls": [{"name": call.get("name"), "arguments": call.get("arguments")} for call in calls],
        "name": message.get("name"),
        "tool_call_id": message.get("tool_call_id"),
        "finish_reason": entry.get("finish_reason"),
        "turn": trace,
    }
    if message is not entry:
        row["sampled_by"] = dict_of(entry, "art") or None
    return row


def plain_text(content: object) -> str:
    """A message's content as text. A part that is no text appears as its type, in brackets: `[image_url]`."""
    if content is None:
        return ""
    if isinstance(content, str):
        return content
    if not isinstance(content, list):
        return json.dumps(content)
    return "\n".join(map(_part_text, content))


def _part_text(part: object) -> str:
    if not isinstance(part, dict):
        return str(part)
    return str(part["text"]) if "text" in part else f"[{part.get('type', 'part')}]"


def in_one_line(text: str) -> str:
    """The beginning of a text for an overview, with single spaces between its words."""
    return " ".join(text[: 4 * MAX_PREVIEW].split())[:MAX_PREVIEW]


def values_of(row: Row, name: str) -> list[Any]:
    value = row.get(name)
    return value if isinstance(value, list) else []


def list_of(row: Row, name: str) -> list[Row]:
    return [entry for entry in values_of(row, name) if isinstance(entry, dict)]


def dict_of(row: Row, name: str) -> Row:
    value = row.get(name)
    return value if isinstance(value, dict) else {}
