"""Conversations of four APIs as digests of one canonical form, by which sampled answers are found again.

Two assistant turns are equal if their texts without white space and their tool calls (name and arguments) are equal.
Thinking is left out, because templates and clients drop it.
"""

import hashlib
import json
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

DIGEST_BYTES = 16

THINK_START, THINK_END = "<think>", "</think>"
"""The tags around thinking, in the model families that our reasoning parsers support."""

MAX_BROKEN_OBJECTS = 32
"""The search for JSON stops after this many braces that begin none: each can cost the whole length of a text."""

BILLING_HEADER = "x-anthropic-billing-header"

_MARKUP = re.compile(r"</?(tool_call|tool_calls)>|<\|python_tag\|>|\[TOOL_CALLS\]")
_BETWEEN_CALLS = " \n\t[],;"
_DECODER = json.JSONDecoder()

Message = dict[str, Any]


def digest(*parts: bytes) -> bytes:
    """A digest of `parts` with 16 bytes. It includes each part's length, so that no two lists of parts are confused."""
    hasher = hashlib.blake2b(digest_size=DIGEST_BYTES)
    for part in parts:
        hasher.update(len(part).to_bytes(8, "little"))
        hasher.update(part)
    return hasher.digest()


EMPTY = digest()


# --- answers --------------------------------------------------------------------------------------------------------


def text_digest(text: str) -> bytes:
    """Digest of an answer's text, with canonical JSON objects, without thinking, tool-call markup and white space."""
    return _name(_without_thinking(text))


EMPTY_ANSWER = digest(b"")
"""Digest of an answer without text or tool calls."""


def message_digest(message: Message) -> bytes:
    """Digest of an assistant message. It equals `text_digest` of the text that the message was parsed from."""
    calls = [call_text(call) for call in as_list(message.get("tool_calls"))]
    return _name(_without_thinking(text_of(message.get("content"))) + "".join(calls))


def _without_thinking(text: str) -> str:
    return text.partition(THINK_END)[2] if THINK_END in text else text


def _name(visible: str) -> bytes:
    return digest(_squeeze(_MARKUP.sub("", visible)).encode(errors="surrogatepass"))


def split_thinking(text: str) -> tuple[str | None, str]:
    """Thinking and answer of a text; the thinking is None if the text does not begin with any."""
    thought, mark, answer = text.partition(THINK_END)
    before, opening, inside = thought.partition(THINK_START)
    if not mark or (opening and before.strip()):
        return None, text
    return inside if opening else thought, answer


def split_calls(text: str) -> tuple[str, list[str]] | None:
    """The text before the first tool call, and the calls as canonical JSON. None without a call, or if other text than
    markup and separators is between or after the calls."""
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
    """A tool call as models write it."""
    function = call.get("function") if isinstance(call, dict) else None
    function = function if isinstance(function, dict) else {}
    arguments = function.get("arguments", {})
    name = json.dumps(function.get("name"))
    if isinstance(arguments, str):
        try:
            arguments = json.loads(arguments)
        except ValueError:  # cut off, or not JSON: streams pass on the text unchanged
            return f'{{"name": {name}, "arguments": {arguments}'
    return f'{{"name": {name}, "arguments": {json.dumps(arguments)}}}'


def _squeeze(text: str) -> str:
    """Text without white space, with each JSON object in canonical form.

    After the first tool call only calls count, because parsers drop the rest. Closing braces at the end do not count,
    because parsers remove one from a call that is not JSON.
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
    return without_space("".join(parts)).rstrip("}")


def _is_call(value: dict[str, Any]) -> bool:
    return set(value) == {"name", "arguments"}


def _json_objects(text: str) -> Iterator[tuple[int, int, dict[str, Any]]]:
    """The outermost JSON objects in a text: start, end, value. Stops after too many braces that are not JSON."""
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
    """Renames `parameters`, as Llama calls a tool call's arguments."""
    if set(value) == {"name", "parameters"}:
        return {"name": value["name"], "arguments": value["parameters"]}
    return value


def text_of(content: Any) -> str:
    """The text of a message's content: a string, or a list of parts whose texts are joined."""
    if isinstance(content, str):
        return content
    if isinstance(content, list):
        texts = [part.get("text") for part in content if isinstance(part, dict)]
        return "".join(text for text in texts if isinstance(text, str))
    return ""


def system_text(content: Any) -> str:
    """The text of a system message without Claude Code's billing line, which changes with each request and which vLLM
    does not render."""
    parts = content if isinstance(content, list) else [content]
    texts = (text_of([part]) if isinstance(part, dict) else text_of(part) for part in parts)
    return "".join(
        text.partition("\n")[2] if text.startswith(BILLING_HEADER) else text for text in texts
    )


def message_from(text: str) -> Message:
    """The assistant message of a sampled text, with tool calls and thinking in separate fields."""
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


def for_engine(message: Message) -> Message:
    """A message as vLLM's route for tokens takes it: thinking under its newer name, the arguments of tool calls as text."""
    made = dict(message)
    if message.get("reasoning_content") is not None:
        made.setdefault("reasoning", message["reasoning_content"])
    calls = [
        dict(call) if isinstance(call, dict) else call
        for call in as_list(message.get("tool_calls"))
    ]
    for call in calls:
        function = call.get("function") if isinstance(call, dict) else None
        if isinstance(function, dict) and isinstance(function.get("arguments"), dict | list):
            call["function"] = {**function, "arguments": json.dumps(function["arguments"])}
    return made | ({"tool_calls": calls} if calls else {})


def names_in(messages: Sequence[Message], body: dict[str, Any]) -> list[str]:
    """The ids by which a request refers to earlier choices: of tool calls, of choices and of an earlier response."""
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


def before_tool(messages: Sequence[Message], digests: Sequence[bytes]) -> frozenset[bytes]:
    """The digests of the conversation before each answer that no user message follows. `digests` are those of all its
    beginnings (`prefix_digests`)."""
    roles = [message.get("role") for message in messages]
    last_user = max((i for i, role in enumerate(roles) if role == "user"), default=-1)
    return frozenset(
        digests[i] for i, role in enumerate(roles) if role == "assistant" and i > last_user
    )


# --- conversations --------------------------------------------------------------------------------------------------


def prefix_digests(messages: Sequence[Message]) -> list[bytes]:
    """The digests of all beginnings of a conversation: entry i is that of the first i messages."""
    digests = [EMPTY]
    for message in messages:
        digests.append(extend(digests[-1], message))
    return digests


@dataclass(frozen=True, slots=True, eq=False)
class Conversation:
    """A conversation as its last message and the conversation before it, which others with the same beginning share."""

    before: "Conversation | None"
    message: Message
    digest: bytes
    exact: bytes
    """Equal only if the other roles' texts are equal to the last white space, as those of a repeated request are."""

    def __iter__(self) -> Iterator["Conversation"]:
        """The conversation and its beginnings, longest first."""
        each: Conversation | None = self
        while each is not None:
            yield each
            each = each.before


def grow(before: Conversation | None, message: Message) -> Conversation:
    """A conversation with `message` added."""
    loose, exact = (before.digest, before.exact) if before else (EMPTY, EMPTY)
    loose = extend(loose, message)
    is_answer = message.get("role") == "assistant"  # parsers and agents strip its white space
    text = b"" if is_answer else asked_text(message).encode(errors="surrogatepass")
    return Conversation(before, message, loose, digest(exact, loose, text))


def extend(before: bytes, message: Message) -> bytes:
    """The digest of a conversation with `message` added; `before` is its digest without."""
    role = str(message.get("role"))
    if role == "assistant":
        return after(before, message_digest(message))
    role = "system" if role == "developer" else role
    text = without_space(asked_text(message))
    return digest(before, role.encode(), text.encode(errors="surrogatepass"))


def asked_text(message: Message) -> str:
    """The text of a message that is no answer."""
    is_system = message.get("role") in ("system", "developer")
    return (system_text if is_system else text_of)(message.get("content"))


def without_space(text: str) -> str:
    """`text` without its white space."""
    return "".join(text.split())  # a sixth of the time of a regular expression


def after(before: bytes, answer: bytes) -> bytes:
    """The digest of a conversation with an assistant's answer added; `answer` is the answer's digest."""
    return digest(before, b"assistant", answer)


def messages_of(api: str, body: dict[str, Any]) -> list[Message]:
    """The conversation of a request as chat messages, for each of the four APIs."""
    if api == "chat":
        return [m for m in as_list(body.get("messages")) if isinstance(m, dict)]
    if api == "messages":
        system = system_text(body.get("system"))
        first: list[Message] = [{"role": "system", "content": system}] if system else []
        return first + [m for one in as_list(body.get("messages")) for m in _from_anthropic(one)]
    if api == "responses":
        return _from_responses(body)
    prompt = body.get("prompt")
    return [{"role": "user", "content": prompt if isinstance(prompt, str) else json.dumps(prompt)}]


def as_list(value: Any) -> list[Any]:
    """`value` if it is a list, else an empty list: bodies are not validated."""
    return value if isinstance(value, list) else []


def _from_anthropic(message: Any) -> list[Message]:
    """A message of Anthropic's API as chat messages: each tool result becomes a message, each tool use a tool call."""
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
    """The input of OpenAI's Responses API as chat messages; function calls join the assistant message before them."""
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
    """Digest of log-probabilities to five decimals, so that values that an agent sends back match."""
    return digest(",".join(f"{value:.5f}" for value in logprobs).encode())
