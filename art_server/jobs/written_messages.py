"""Messages as the engine's route for tokens takes them, from the shapes that programs and data sets have.

A field that is null is absent: OpenAI's API returns such fields, and a table (Arrow, Parquet) fills them into every row
that lacks what another row has. Fields that the route does not know, such as other columns of a table, are left out.
"""

import json
from collections.abc import Sequence
from typing import Any

from art_protocol.demonstrations import SHAREGPT_ROLES, is_sharegpt
from art_server.jobs import reasons
from art_server.jobs.turns import UnusableTurn
from art_server.jobs.written_tools import Tools, schemas_by_name
from art_server.ledger.conversation import Message, as_list

TEXT_FIELDS = ("name", "tool_call_id")
THINKING_FIELDS = ("reasoning", "reasoning_content", "thinking")
"""The names of an answer's thinking: vLLM's, then older ones."""


def messages_for_engine(messages: Sequence[Message], tools: Tools | None) -> list[Message]:
    """A conversation in the route's form.

    Raises:
        UnusableTurn: a message has no such form; the reason names its field.
    """
    schemas = schemas_by_name(tools or [])
    return [_message(message, f"messages_and_choices[{index}]", schemas) for index, message in enumerate(messages)]


def thinking_of(message: Message) -> str | None:
    """The thinking that a message brings in a separate field."""
    values = (message.get(field) for field in THINKING_FIELDS)
    return next((value for value in values if isinstance(value, str) and value), None)


def calls_of(message: Message) -> list[Any]:
    """The tool calls of an answer, also a call in OpenAI's older form, which has one call."""
    calls = as_list(message.get("tool_calls"))
    older = message.get("function_call")
    if calls or older is None:
        return calls
    return [{"id": "call_0", "type": "function", "function": older}]


def without_calls(message: Message) -> Message:
    return {**message, "tool_calls": None, "function_call": None}


def without_thinking(message: Message) -> Message:
    return {**message, **dict.fromkeys(THINKING_FIELDS)}


def _message(message: Message, where: str, schemas: dict[str, Any]) -> Message:
    role = message.get("role")
    if is_sharegpt(message) or role in SHAREGPT_ROLES:
        raise UnusableTurn(reasons.sharegpt(where))
    if not isinstance(role, str):
        raise UnusableTurn(reasons.no_role(where))
    copied: Message = {"role": "tool" if role == "function" else role}
    for field in TEXT_FIELDS:
        if isinstance(message.get(field), str):
            copied[field] = message[field]
    if role == "function":
        # OpenAI's older form has no ids: this is the one that `calls_of` gives its call.
        copied.setdefault("tool_call_id", "call_0")
    # vLLM's chat messages have tools in this role (0.32, renderers/chat_utils.py).
    if role == "developer" and isinstance(message.get("tools"), list):
        copied["tools"] = message["tools"]
    content = _content(message.get("content"), f"{where}.content")
    calls = message.get("tool_calls")
    if calls is not None and not isinstance(calls, list):
        raise UnusableTurn(reasons.no_calls(where))
    if role == "assistant":
        if (thinking := thinking_of(message)) is not None:
            copied["reasoning"] = thinking
        calls = calls_of(message)
        if calls:
            copied["tool_calls"] = [
                _call(call, index, f"{where}.tool_calls[{index}]", schemas) for index, call in enumerate(calls)
            ]
        if not content and not calls and isinstance(message.get("refusal"), str):
            content = message["refusal"]
    if content is not None:
        copied["content"] = content
    return copied


def _content(content: Any, where: str) -> str | list[Any] | None:
    """A message's text, its parts, or None."""
    if content is None or isinstance(content, str):
        return content
    if not isinstance(content, list):
        raise UnusableTurn(reasons.no_content(where))
    parts: list[Any] = []
    for index, part in enumerate(content):
        if isinstance(part, str):
            part = {"type": "text", "text": part}
        if not isinstance(part, dict):
            raise UnusableTurn(reasons.no_part(f"{where}[{index}]"))
        present = {"type": "text"} | {name: value for name, value in part.items() if value is not None}
        if present["type"] == "text" and not isinstance(present.setdefault("text", ""), str):
            raise UnusableTurn(reasons.no_text(f"{where}[{index}]"))
        parts.append(present)
    return parts


def _call(call: Any, index: int, where: str, schemas: dict[str, Any]) -> dict[str, Any]:
    if not isinstance(call, dict):
        raise UnusableTurn(reasons.no_call(where))
    if (kind := call.get("type") or "function") != "function":
        raise UnusableTurn(reasons.no_function_call(where, kind))
    function = call.get("function")
    if not isinstance(function, dict) or not isinstance(function.get("name"), str):
        raise UnusableTurn(reasons.unnamed_call(where))
    arguments = function.get("arguments")
    if isinstance(arguments, dict):
        # As text, because the route takes no objects. A row's object can have fields that a table filled with null.
        arguments = json.dumps(_without_filled(arguments, schemas.get(function["name"])))
    elif arguments is not None and not isinstance(arguments, str):
        raise UnusableTurn(reasons.bad_arguments(where))
    identity = call.get("id")
    return {
        "id": identity if isinstance(identity, str) else f"call_{index}",
        "type": "function",
        "function": {"name": function["name"], "arguments": arguments or "{}"},
    }


def check_answer(message: Message, where: str) -> None:
    """Checks an answer that is trained.

    Raises:
        UnusableTurn: the answer is empty, or the arguments of a call are no JSON object: vLLM renders such a call without
            arguments.
    """
    fields = (message.get(name) for name in ("content", "refusal", "function_call"))
    is_written = any(field is not None for field in fields) or message.get("tool_calls") not in (None, [])
    if not is_written and thinking_of(message) is None:
        raise UnusableTurn(reasons.no_answer(where))
    for index, call in enumerate(calls_of(message)):
        function = call.get("function") if isinstance(call, dict) else None
        arguments = function.get("arguments") if isinstance(function, dict) else None
        if isinstance(arguments, str) and arguments.strip() and not _is_object(arguments):
            raise UnusableTurn(reasons.no_arguments_text(f"{where}.tool_calls[{index}]"))


def _is_object(text: str) -> bool:
    try:
        return isinstance(json.loads(text), dict)
    except (ValueError, RecursionError):
        return False


def _without_filled(value: Any, schema: Any) -> Any:
    """Arguments without the nulls that the schema does not allow: a table filled these nulls in. Without a schema all
    arguments are kept."""
    if not isinstance(schema, dict):
        return value
    if isinstance(value, list):
        return [_without_filled(item, schema.get("items")) for item in value]
    properties, required = schema.get("properties"), as_list(schema.get("required"))
    if not isinstance(value, dict) or not isinstance(properties, dict):
        return value
    return {
        name: _without_filled(item, properties.get(name))
        for name, item in value.items()
        if item is not None or name in required or _allows_null(properties.get(name))
    }


def _allows_null(schema: Any) -> bool:
    """Whether null fits a field's schema. A field without a schema allows no null; a schema without a type does."""
    if schema is None:
        return False
    if not isinstance(schema, dict):
        return True
    kinds = schema.get("type")
    if kinds is not None:
        return "null" in (kinds if isinstance(kinds, list) else [kinds]) or bool(schema.get("nullable"))
    for field in ("anyOf", "oneOf"):
        if isinstance(schema.get(field), list):
            return any(_allows_null(option) for option in schema[field])
    return None in schema["enum"] if isinstance(schema.get("enum"), list) else True
