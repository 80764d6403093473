"""The entries of a trajectory: message dictionaries, and choices of `openai` or of similar packages.

Any: an entry may be of a package that is not imported here, so its fields are read by name.
"""

from collections.abc import Container
from typing import Any, cast

from pydantic import BaseModel

from art import types
from art.types import Message
from art_protocol.wire import BY_REFERENCE, TOKEN_FIELDS


def is_choice(entry: Any) -> bool:
    """Whether an entry was sampled."""
    return {"message", "finish_reason"} <= _names(entry)


def _names(entry: Any) -> set[str]:
    if isinstance(entry, dict):
        return set(cast(dict[str, Any], entry))
    return set(type(entry).model_fields) if isinstance(entry, BaseModel) else set()


def parse_entry(entry: Any) -> Any:
    """The entry, and a choice that is a dictionary as an OpenAI `Choice`."""
    if isinstance(entry, BaseModel) or not is_choice(entry):
        return entry
    return types.Choice.model_construct(**entry)  # without validation, as the openai client does it


def dump_entry(entry: Any) -> dict[str, Any]:
    """The whole entry as a dictionary.

    Raises:
        ValueError: the entry is neither a message nor a choice.
    """
    if isinstance(entry, dict):
        return cast(dict[str, Any], entry)
    if isinstance(entry, BaseModel) and (is_choice(entry) or "role" in _names(entry)):
        return entry.model_dump(mode="json", exclude_unset=True)  # only what the server sent
    raise ValueError(
        f"messages_and_choices holds a {type(entry).__name__}; an entry is a message dict or an OpenAI choice "
        "(append completion.choices[0], not the completion)"
    )


def by_reference(entry: Any, whole: Container[str] = ()) -> dict[str, Any]:
    """An entry for a train request. A choice that a server recorded is without its tokens, unless its id is in `whole`: the
    server's record has the tokens."""
    identity = _get(_get(entry, "art"), "id") if is_choice(entry) else None
    if not isinstance(identity, str) or identity in whole:
        return dump_entry(entry)
    has_tokens = _get(entry, "token_ids") or _get(_get(entry, "logprobs"), "content")
    return readable(entry) | ({BY_REFERENCE: True} if has_tokens else {})


def readable(entry: Any) -> dict[str, Any]:
    """An entry as people read it: a choice without its tokens."""
    if not is_choice(entry):
        return dump_entry(entry)
    if isinstance(entry, BaseModel):
        return entry.model_dump(mode="json", exclude_unset=True, exclude=set(TOKEN_FIELDS))
    return {name: value for name, value in dump_entry(entry).items() if name not in TOKEN_FIELDS}


def to_message(entry: Any) -> Message:
    """The entry as a plain message, ready to be sent in the next request."""
    if not is_choice(entry):
        message = dump_entry(entry)
        return cast(Message, {**message, "content": message.get("content") or ""})
    sampled: Any = _get(entry, "message")
    message: dict[str, Any] = {"role": "assistant", "content": _get(sampled, "content") or ""}
    if tool_calls := _get(sampled, "tool_calls"):
        message["tool_calls"] = [
            call.model_dump(mode="json", exclude_none=True) if isinstance(call, BaseModel) else call
            for call in tool_calls
        ]
    return cast(Message, message)


def num_tokens(entry: Any) -> int:
    """The number of an entry's sampled tokens; 0 if nobody counted the tokens."""
    if not is_choice(entry):
        return 0
    tokens = _get(entry, "token_ids") or _get(_get(entry, "logprobs"), "content")
    return len(tokens) if tokens else _get(_get(entry, "art"), "num_tokens") or 0


def _get(value: Any, name: str) -> Any:
    """A field of an object or dict (a choice, or a part of one); None if it is absent."""
    if isinstance(value, dict):
        return cast(dict[str, Any], value).get(name)
    return getattr(value, name, None)
