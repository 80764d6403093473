"""What a judge sees of a conversation or an answer: JSON that closes no tag, without images, sounds and files."""

import json
import re
from typing import Any, cast

from pydantic_core import to_jsonable_python

MEDIA = re.compile(r"image|audio|video|(^|_)file")
"""Types of message parts that a judge does not get."""


def to_shown_json(value: Any) -> str:
    """JSON without "<", so that no tag begins or ends in the text, and without characters that UTF-8 cannot write."""
    shown = _without_media(to_jsonable_python(value, fallback=str))
    text = json.dumps(shown, ensure_ascii=False).replace("<", "\\u003c")
    return text.encode(errors="backslashreplace").decode()


def _without_media(value: Any) -> Any:
    if isinstance(value, list):
        return [_without_media(entry) for entry in cast(list[Any], value)]
    if not isinstance(value, dict):
        return value
    part = cast(dict[str, Any], value)
    kind = part.get("type")
    if isinstance(kind, str) and MEDIA.search(kind):
        return {"type": kind, "omitted": True}
    return {name: _without_media(content) for name, content in part.items()}
