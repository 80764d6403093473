"""Conversations as four APIs write them, in one canonical form, so that what was sampled is found again.

Two assistant turns are the same when they say the same: text without white space, tool calls by name and arguments.
Thinking is left out, for templates and clients drop it. Only digests leave this module.
"""

import hashlib
import json
import re
from collections.abc import Iterator, Sequence
from typing import Any

DIGEST_BYTES = 16

THINK_START, THINK_END = "<think>", "</think>"
"""Around the thinking of the model families that our reasoning parsers serve."""

MAX_BROKEN_OBJECTS = 32
"""A hostile text can make every brace cost its whole length; no honest one has so many that are not JSON."""

_MARKUP = re.compile(r"</?(tool_call|tool_calls)>|<\|python_tag\|>|\[TOOL_CALLS\]")
_BETWEEN_CALLS = " \n\t[],;"
_SPACE = re.compile(r"\s+")
_DECODER = json.JSONDecoder()

Message = dict[str, Any]


def digest(*parts: bytes) -> bytes:
    """16 bytes that name `parts`, each with its length, so that no two lists of parts look alike."""
    hasher = hashlib.blake2b(digest_size=DIGEST_BYTES)
    for part in parts:
        hasher.update(len(part).to_bytes(8, "little"))
        hasher.update(part)
    return hasher.digest()


EMPTY = digest()


# --- what an assistant said -----------------------------------------------------------------------------------------


def said(text: str) -> bytes:
    """Names what a text says: without thinking, tool-call markup and white space; JSON objects canonical."""
    return _name(_without_thinking(text))


SILENCE = digest(b"")
"""What an empty text says."""


def said_by(message: Message) -> bytes:
    """Names what an assistant message says; equal to `said` of the text that it was parsed from."""
    calls = [call_text(call) for call in as_list(message.get("tool_calls"))]
    return _name(_without_thinking(text_of(message.get("content"))) + "".join(calls))


def _without_thinking(text: str) -> str:
    return text.partition(THINK_END)[2] if THINK_END in text else text


def _name(visible: str) -> bytes:
    return digest(_squeeze(_MARKUP.sub("", visible)).encode(errors="surrogatepass"))


def split_thinking(text: str) -> tuple[str | None, str]:
    """Thinking and answer of a text; the thinking is None where the text does not begin with any."""
    thought, mark, answer = text.partition(THINK_END)
    before, opening, inside = thought.partition(THINK_START)
    if not mark or (opening and before.strip()):
        return None, text
    return inside if opening else thought, answer


def split_calls(text: str) -> tuple[str, list[str]] | None:
    """The text before the first tool call, and the calls in one way of writing; None without a call, or with anything but
    markup and white space between or behind calls."""
    calls: list[str] = []
    before, position = "", 0
    for start, end, value in _json_objects(text):
        if not _is_call(value := _as_call(value)):
            if calls:
                return None
            continue
        between = text[position:start]
        if not calls:
            before = _MARKUP.sub("", between)
        elif _MARKUP.sub("", between).strip(_BETWEEN_CALLS):
            return None
        try:
            calls.append(json.dumps(value, sort_keys=True))
        except RecursionError:
            return None
        position = end
    if not calls or _MARKUP.sub("", text[position:]).strip(_BETWEEN_CALLS):
        return None
    return before, calls


def call_text(call: Any) -> str:
    """A tool call as the models write it."""
    function = call.get("function") if isinstance(call, dict) else None
    function = function if isinstance(function, dict) else {}
    arguments = function.get("arguments", {})
    name = json.dumps(function.get("name"))
    if isinstance(arguments, str):
        try:
            arguments = json.loads(arguments)
        except ValueError:  # cut off, or not JSON: a stream hands on what was written
            return f'{{"name": {name}, "arguments": {arguments}'
    return f'{{"name": {name}, "arguments": {json.dumps(arguments)}}}'


def _squeeze(text: str) -> str:
    """Text without white space, each JSON object in it written in one way.

    After the first tool call only calls count, for parsers drop the rest; the braces that end a call that is not JSON
    do not count, for parsers take one off.
    """
    parts: list[str] = []
    position = 0
    has_calls = False
    for start, end, value in _json_objects(text):
        is_call = _is_call(value := _as_call(value))
        if not has_calls:
            parts.append(text[position:start])
        if is_call:
            arguments = json.dumps(value["arguments"], sort_keys=True)
            parts.append(f'{{"name": {json.dumps(value["name"])}, "arguments": {arguments}}}')
        elif not has_calls:
            parts.append(json.dumps(value, sort_keys=True))
        has_calls = has_calls or is_call
        position = end
    if not has_calls:
        parts.append(text[position:])
    return _SPACE.sub("", "".join(parts)).rstrip("}")


def _is_call(value: dict[str, Any]) -> bool:
    return set(value) == {"name", "arguments"}


def _json_objects(text: str) -> Iterator[tuple[int, int, dict[str, Any]]]:
    """The JSON objects in a text, outermost ones only: start, end, value. Gives up on a text full of broken ones."""
    position = 0
    failures = 0
    while failures < MAX_BROKEN_OBJECTS and (start := text.find("{", position)) >= 0:
        try:
            value, position = _DECODER.raw_decode(text, start)
        except (ValueError, RecursionError):
            failures += 1
            position = start + 1
            continue
        yield start, position, value


def _as_call(value: dict[str, Any]) -> dict[str, Any]:
    """Llama writes a call's arguments as `parameters`."""
    if set(value) == {"name", "parameters"}:
        return {"name": value["name"], "arguments": value["parameters"]}
    return value


def text_of(content: Any) -> str:
    """The text of a message's content: a string, or parts of which the texts count."""
    if isinstance(content, str):
        return content
    if isinstance(content, list):
        texts = [part.get("text") for part in content if isinstance(part, dict)]
        return "".join(text for text in texts if isinstance(text, str))
    return ""


def message_from(text: str) -> Message:
    """The assistant message that a sampled text is parsed to: its tool calls out of it, its thinking beside it."""
    thinking, mark, visible = text.partition(THINK_END)
    if not mark:
        thinking, visible = "", text
    calls: list[dict[str, Any]] = []
    content = ""
    position = 0
    for start, end, value in _json_objects(visible):
        value = _as_call(value)
        if _is_call(value):
            content += visible[position:start]
            function = {"name": value["name"], "arguments": json.dumps(value["arguments"])}
            calls.append({"id": f"call_{len(calls)}", "type": "function", "function": function})
            position = end
    content += visible[position:]
    if calls:
        content = _MARKUP.sub("", content).strip()
    message: Message = {"role": "assistant", "content": content}
    if mark:
        message["reasoning_content"] = thinking.replace("<think>", "").strip()
    return message | ({"tool_calls": calls} if calls else {})


def names_in(messages: Sequence[Message], body: dict[str, Any]) -> list[str]:
    """What a conversation names of earlier choices: ids of tool calls and of choices, and that of an earlier response."""
    names: list[Any] = []
    for message in messages:
        mark = message.get("art")
        names.append(mark.get("id") if isinstance(mark, dict) else None)
        for call in as_list(message.get("tool_calls")):
            names.append(call.get("id") if isinstance(call, dict) else None)
    earlier = body.get("previous_response_id")
    if isinstance(earlier, str):
        names.append(earlier.removeprefix("resp_") + "-0")
    return [name for name in names if isinstance(name, str)]


def is_before_user(messages: Sequence[Message]) -> bool:
    """Whether a user's turn follows the last assistant's."""
    for message in reversed(messages):
        if message.get("role") in ("assistant", "tool"):
            return False
        if message.get("role") == "user":
            return True
    return False


# --- conversations --------------------------------------------------------------------------------------------------


def prefix_digests(messages: Sequence[Message]) -> list[bytes]:
    """Names every beginning of a conversation: entry i names the first i messages."""
    digests = [EMPTY]
    for message in messages:
        digests.append(extend(digests[-1], message))
    return digests


def extend(before: bytes, message: Message) -> bytes:
    """Names the conversation that `message` makes of the one before it."""
    role = str(message.get("role"))
    if role == "assistant":
        return after(before, said_by(message))
    role = "system" if role == "developer" else role
    text = _SPACE.sub("", text_of(message.get("content")))
    return digest(before, role.encode(), text.encode(errors="surrogatepass"))


def after(before: bytes, what_was_said: bytes) -> bytes:
    """Names the conversation that an assistant turn makes of the one before it."""
    return digest(before, b"assistant", what_was_said)


def messages_of(api: str, body: dict[str, Any]) -> list[Message]:
    """The conversation of a request, as chat messages, whatever its API."""
    if api == "chat":
        return [m for m in as_list(body.get("messages")) if isinstance(m, dict)]
    if api == "messages":
        system = text_of(body.get("system"))
        first: list[Message] = [{"role": "system", "content": system}] if system else []
        return first + [m for one in as_list(body.get("messages")) for m in _from_anthropic(one)]
    if api == "responses":
        return _from_responses(body)
    prompt = body.get("prompt")
    return [{"role": "user", "content": prompt if isinstance(prompt, str) else json.dumps(prompt)}]


def as_list(value: Any) -> list[Any]:
    """`value` if it is a list, else nothing: bodies are whatever a client sent."""
    return value if isinstance(value, list) else []


def _from_anthropic(message: Any) -> list[Message]:
    """One message of Anthropic's API: tool results are messages of their own, tool uses are calls."""
    if not isinstance(message, dict):
        return []
    content = message.get("content")
    if not isinstance(content, list):
        return [{"role": message.get("role"), "content": content}]
    made: list[Message] = []
    texts: list[str] = []
    calls: list[dict[str, Any]] = []
    for block in content:
        if not isinstance(block, dict):
            continue
        if block.get("type") == "tool_result":
            result = text_of(block.get("content"))
            made.append(
                {"role": "tool", "tool_call_id": block.get("tool_use_id"), "content": result}
            )
        elif block.get("type") == "tool_use":
            arguments = json.dumps(block.get("input", {}))
            function = {"name": block.get("name"), "arguments": arguments}
            calls.append({"id": block.get("id"), "type": "function", "function": function})
        elif isinstance(block.get("text"), str):
            texts.append(block["text"])
    if texts or calls or not made:
        own: Message = {"role": message.get("role"), "content": "".join(texts)}
        made.append(own | ({"tool_calls": calls} if calls else {}))
    return made


def _from_responses(body: dict[str, Any]) -> list[Message]:
    """The input of OpenAI's Responses API: a text, or items of which neighbours of one assistant turn join."""
    made: list[Message] = []
    if isinstance(body.get("instructions"), str):
        made.append({"role": "system", "content": body["instructions"]})
    if isinstance(body.get("input"), str):
        return [*made, {"role": "user", "content": body["input"]}]
    for item in as_list(body.get("input")):
        if not isinstance(item, dict):
            continue
        kind = item.get("type", "message")
        if kind == "function_call":
            function = {"name": item.get("name"), "arguments": item.get("arguments")}
            call = {"id": item.get("call_id"), "type": "function", "function": function}
            if not (made and made[-1]["role"] == "assistant"):
                made.append({"role": "assistant", "content": ""})
            made[-1].setdefault("tool_calls", []).append(call)
        elif kind == "function_call_output":
            output = item.get("output")
            text = output if isinstance(output, str) else text_of(output)
            made.append({"role": "tool", "tool_call_id": item.get("call_id"), "content": text})
        elif kind == "message":
            made.append({"role": item.get("role"), "content": text_of(item.get("content"))})
    return made


def fingerprint(logprobs: Sequence[float]) -> bytes:
    """Names a list of log-probabilities as an agent sends them back, to five decimals."""
    return digest(",".join(f"{value:.5f}" for value in logprobs).encode())
