"""Conversations of four APIs as digests of one canonical form, by which sampled answers are found again.

Two assistant turns are equal if their texts without white space and their tool calls (name and arguments) are equal.
Thinking is left out, because templates and clients drop it.
"""

import hashlib
import itertools
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

RESPONSE_PREFIX = "resp_"
"""The beginning of a response's id, which continues with the request's id."""

_MARKUP = re.compile(r"</?(tool_call|tool_calls)>|<\|python_tag\|>|\[TOOL_CALLS\]")
_BETWEEN_CALLS = " \n\t[],;"
_OPENED_LIST = re.compile(r"\[\s*$")
"""The beginning of a JSON list whose first element is a call, as xLAM writes calls. Parsers take the list out of the text."""
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
    return _visible_digest(_without_thinking(text))


EMPTY_ANSWER = digest(b"")
"""Digest of an answer without text or tool calls."""


def message_digest(message: Message) -> bytes:
    """Digest of an assistant message. It equals `text_digest` of the text that the message was parsed from."""
    calls = [call_text(call) for call in as_list(message.get("tool_calls"))]
    return _visible_digest(_without_thinking(content_text(message.get("content"))) + "".join(calls))


def cut_digest(message: Message, stops: Sequence[str]) -> bytes | None:
    """Digest of an assistant message up to the first of these stop strings: the agent added the stop string, and all text
    behind it, to the answer. None if the message contains no stop string."""
    text = content_text(message.get("content"))
    ends = [end for stop in stops if (end := text.find(stop)) >= 0]
    return message_digest({**message, "content": text[: min(ends)]}) if ends else None


def _without_thinking(text: str) -> str:
    return text.partition(THINK_END)[2] if THINK_END in text else text


def _visible_digest(visible: str) -> bytes:
    # JSON may hold half of a surrogate pair, which UTF-8 refuses.
    return digest(_squeeze(_MARKUP.sub("", visible)).encode(errors="surrogatepass"))


def split_thinking(text: str) -> tuple[str | None, str]:
    """Thinking and answer of a text, such as `hm` and `Yes` of `<think>hm</think>Yes`. The thinking is None if the text does
    not begin with thinking."""
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
            before = _MARKUP.sub("", _OPENED_LIST.sub("", between))
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


def canonical_json(text: str) -> str | None:
    """A text that is one JSON object or list, in canonical form; None for any other text. A text that names a key twice is none
    either, because programs that parse the text lose one of the values."""
    try:
        value = json.loads(text, object_pairs_hook=_unique)
        return json.dumps(value, sort_keys=True) if isinstance(value, dict | list) else None
    except (ValueError, RecursionError):
        return None


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    value = dict(pairs)
    if len(value) < len(pairs):
        raise ValueError("a key is named twice")
    return value


def call_text(call: Any) -> str:
    """A tool call as models write it, such as `{"name": "add", "arguments": {"a": 1}}`."""
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
    """Text without white space, with each JSON object in canonical form: `Call {"b": 1, "a": 2}` is `Call{"a":2,"b":1`.

    After the first tool call only calls count, because parsers drop the rest. Closing braces at the end do not count,
    because parsers remove one from a call that is not JSON.
    """
    parts: list[str] = []
    position = 0
    has_calls = False
    for start, end, value in _json_objects(text):
        is_call = _is_call(value := _as_call(value))
        if not has_calls:
            before = text[position:start]
            parts.append(_OPENED_LIST.sub("", before) if is_call else before)
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


def content_text(content: Any) -> str:
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
    texts: list[str] = []
    for part in content if isinstance(content, list) else [content]:
        text = content_text([part] if isinstance(part, dict) else part)
        if text.startswith(BILLING_HEADER):
            text = text.partition("\n")[2]
        texts.append(text)
    return "".join(texts)


def message_from(text: str) -> Message:
    """The assistant message of a sampled text, with tool calls and thinking in separate fields."""
    thinking, mark, visible = text.partition(THINK_END)
    if not mark:
        thinking, visible = "", text
    calls: list[dict[str, Any]] = []
    texts: list[str] = []
    position = 0
    for start, end, value in _json_objects(visible):
        value = _as_call(value)
        if _is_call(value):
            texts.append(visible[position:start])
            function = {"name": value["name"], "arguments": json.dumps(value["arguments"])}
            calls.append({"id": f"call_{len(calls)}", "type": "function", "function": function})
            position = end
    texts.append(visible[position:])
    if calls:
        texts = [_MARKUP.sub("", text) for text in [_OPENED_LIST.sub("", texts[0]), *texts[1:]]]
        texts[1:] = [text for text in texts[1:] if text.strip(_BETWEEN_CALLS)]
    content = "".join(texts)
    message: Message = {"role": "assistant", "content": content.strip() if calls else content}
    if mark:
        message["reasoning_content"] = thinking.replace("<think>", "").strip()
    return message | ({"tool_calls": calls} if calls else {})


@dataclass(frozen=True, slots=True)
class PastAnswer:
    """An assistant's message of a request, by what identifies the choice that it repeats."""

    prefix_digest: bytes
    """Digest of the conversation before the message."""
    answer_digest: bytes
    cut_digest: bytes | None = None
    """Digest of the answer if the agent added a stop string to it (`cut_digest`)."""
    ids: tuple[str, ...] = ()
    """The ids in the message: of its tool calls, and of its choice."""
    has_calls: bool = False
    has_thinking: bool = False
    """The agent returns the thinking, too."""

    @property
    def digests(self) -> tuple[bytes, ...]:
        """The digests of the answers that the message may repeat."""
        return (self.answer_digest,) if self.cut_digest is None else (self.answer_digest, self.cut_digest)


OPENING_ROLES = frozenset({"system", "developer", "user"})
"""A conversation of only these roles contains no answer."""


@dataclass(frozen=True, slots=True)
class RequestConversation:
    """The conversation that a request carries, in the form in which the ledger searches and stores it."""

    messages: Sequence[Message] = ()
    """The conversation as chat messages, for each of the four APIs."""
    digest: bytes = EMPTY
    answers: Sequence[PastAnswer] = ()
    """The assistant's messages in the conversation, oldest first."""
    is_first_turn: bool = False
    """The request cannot continue an earlier answer: its conversation contains none, or its prompt consists of token ids, which
    are used unchanged."""


def conversation_of(api: str, body: dict[str, Any]) -> RequestConversation:
    """The conversation of a request."""
    messages = messages_of(api, body)
    whole_digest, answers = past_answers(messages, stops_of(api, body))
    if api == "completions":
        is_first_turn = is_token_ids(body.get("prompt"))
    else:
        roles = [message.get("role") for message in messages]
        is_first_turn = all(isinstance(role, str) and role in OPENING_ROLES for role in roles)
    return RequestConversation(messages, whole_digest, answers, is_first_turn)


def is_token_ids(prompt: Any) -> bool:
    """Whether a prompt is a list of token ids, or a list of such prompts."""
    if not isinstance(prompt, list) or not prompt:
        return False
    return all(isinstance(entry, int) or is_token_ids(entry) for entry in prompt)


def past_answers(messages: Sequence[Message], stops: Sequence[str] = ()) -> tuple[bytes, list[PastAnswer]]:
    """The digest of a conversation, and the assistant's messages in it, oldest first. `stops` are the stop strings of the
    request."""
    prefix, answers = EMPTY, list[PastAnswer]()
    for message in messages:
        if message.get("role") != "assistant":
            prefix = extend(prefix, message)
            continue
        answer_digest = message_digest(message)
        answer = PastAnswer(
            prefix,
            answer_digest,
            cut_digest(message, stops),
            tuple(ids_in(message)),
            has_calls=bool(message.get("tool_calls")),
            has_thinking=has_thinking(message),
        )
        answers.append(answer)
        prefix = after(prefix, answer_digest)
    return prefix, answers


def ids_in(message: Message) -> list[str]:
    """The ids of a message's choice and of its tool calls."""
    ids: list[str] = []
    for part in [message.get("art"), *as_list(message.get("tool_calls"))]:
        if isinstance(part, dict) and isinstance(part.get("id"), str):
            ids.append(part["id"])
    return ids


def has_thinking(message: Message) -> bool:
    """Whether a message brings thinking, in a separate field or in its text."""
    fields = (message.get("reasoning"), message.get("reasoning_content"))
    return any(isinstance(field, str) and field for field in fields) or (
        THINK_END in content_text(message.get("content"))
    )


def stops_of(api: str, body: dict[str, Any]) -> list[str]:
    """The stop strings of a request."""
    stops = body.get("stop_sequences" if api == "messages" else "stop")
    listed = [stops] if isinstance(stops, str) else as_list(stops)
    return [stop for stop in listed if isinstance(stop, str) and stop]


# --- conversations --------------------------------------------------------------------------------------------------


def prefix_digests(messages: Sequence[Message]) -> list[bytes]:
    """The digests of all beginnings of a conversation: entry i is the digest of the first i messages."""
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
    """Like `digest`, but with the white space in the texts of all roles except the assistant: a repeated request has equal
    white space."""

    def __iter__(self) -> Iterator["Conversation"]:
        """The conversation and its beginnings, longest first."""
        beginning: Conversation | None = self
        while beginning is not None:
            yield beginning
            beginning = beginning.before


def grow(before: Conversation | None, message: Message) -> Conversation:
    """A conversation with `message` added."""
    loose, exact = (before.digest, before.exact) if before else (EMPTY, EMPTY)
    loose = extend(loose, message)
    is_answer = message.get("role") == "assistant"  # parsers and agents strip its white space
    text = b"" if is_answer else asked_text(message).encode(errors="surrogatepass")
    return Conversation(before, message, loose, digest(exact, loose, text))


def extend(before: bytes, message: Message) -> bytes:
    """The digest of a conversation with `message` added; `before` is the digest without `message`."""
    role = str(message.get("role"))
    if role == "assistant":
        return after(before, message_digest(message))
    role = "system" if role == "developer" else role
    text = without_space(asked_text(message))
    return digest(before, role.encode(), text.encode(errors="surrogatepass"))


def asked_text(message: Message) -> str:
    """The text of a message that is no answer."""
    if message.get("role") in ("system", "developer"):
        return system_text(message.get("content"))
    return content_text(message.get("content"))


def without_space(text: str) -> str:
    """`text` without its white space."""
    return "".join(text.split())  # a sixth of the time of a regular expression


def after(before: bytes, answer: bytes) -> bytes:
    """The digest of a conversation with an assistant's answer added; `answer` is the answer's digest."""
    return digest(before, b"assistant", answer)


def messages_of(api: str, body: dict[str, Any]) -> list[Message]:
    """The conversation of a request as chat messages, for each of the four APIs."""
    if api == "chat":
        return [message for message in as_list(body.get("messages")) if isinstance(message, dict)]
    if api == "messages":
        messages: list[Message] = []
        system = system_text(body.get("system"))
        if system:
            messages.append({"role": "system", "content": system})
        for message in as_list(body.get("messages")):
            messages += _from_anthropic(message)
        return messages
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
    messages: list[Message] = []
    texts: list[str] = []
    calls: list[dict[str, Any]] = []
    for block in content:
        if not isinstance(block, dict):
            continue
        if block.get("type") == "tool_result":
            result = content_text(block.get("content"))
            messages.append({"role": "tool", "tool_call_id": block.get("tool_use_id"), "content": result})
        elif block.get("type") == "tool_use":
            arguments = json.dumps(block.get("input", {}))
            function = {"name": block.get("name"), "arguments": arguments}
            calls.append({"id": block.get("id"), "type": "function", "function": function})
        elif isinstance(block.get("text"), str):
            texts.append(block["text"])
    if texts or calls or not messages:
        own: Message = {"role": message.get("role"), "content": "".join(texts)}
        messages.append(own | ({"tool_calls": calls} if calls else {}))
    return messages


def _from_responses(body: dict[str, Any]) -> list[Message]:
    """The input of OpenAI's Responses API as chat messages."""
    messages: list[Message] = []
    if isinstance(body.get("instructions"), str):
        messages.append({"role": "system", "content": body["instructions"]})
    if isinstance(body.get("input"), str):
        return [*messages, {"role": "user", "content": body["input"]}]
    for item in as_list(body.get("input")):
        _add_item(messages, item)
    return messages


def _add_item(messages: list[Message], item: Any) -> None:
    """Adds an item of a conversation. A function call joins the assistant's message before it."""
    if not isinstance(item, dict):
        return
    kind = item.get("type", "message")
    if kind == "function_call":
        function = {"name": item.get("name"), "arguments": item.get("arguments")}
        call = {"id": item.get("call_id"), "type": "function", "function": function}
        if not (messages and messages[-1]["role"] == "assistant"):
            messages.append({"role": "assistant", "content": ""})
        messages[-1].setdefault("tool_calls", []).append(call)
    elif kind == "function_call_output":
        output = item.get("output")
        text = output if isinstance(output, str) else content_text(output)
        messages.append({"role": "tool", "tool_call_id": item.get("call_id"), "content": text})
    elif kind == "message":
        messages.append({"role": item.get("role"), "content": content_text(item.get("content"))})


def with_thinking(api: str, body: dict[str, Any], thoughts: Sequence[str | None]) -> dict[str, Any]:
    """A request's body with these thoughts in its assistant messages, in the form of the API. The thoughts are in the order
    of `past_answers`; None adds nothing. A message that brings thinking keeps it."""
    left = iter(thoughts)
    if api == "responses":
        return {**body, "input": _thinking_items(body["input"], left)}
    messages: list[Any] = []
    for message in body["messages"]:
        # A message of Anthropic's API can be several chat messages.
        num_answers = sum(chat_message.get("role") == "assistant" for chat_message in _as_chat(api, message))
        own = list(filter(None, itertools.islice(left, num_answers)))
        messages.append(_think(api, message, own[0]) if own else message)
    return {**body, "messages": messages}


def _as_chat(api: str, message: Any) -> list[Message]:
    return _from_anthropic(message) if api == "messages" else [message]


def _think(api: str, message: Message, thought: str) -> Message:
    if api == "chat":
        return message if has_thinking(message) else {**message, "reasoning": thought}
    content = message.get("content")
    blocks = content if isinstance(content, list) else [{"type": "text", "text": content}]
    if any("thinking" in str(block.get("type")) for block in blocks if isinstance(block, dict)):
        return message
    block = {"type": "thinking", "thinking": thought, "signature": ""}
    return {**message, "content": [block, *blocks]}


def _thinking_items(items: Sequence[Any], left: Iterator[str | None]) -> list[Any]:
    """The items of OpenAI's Responses API, with an item for each thought before its answer."""
    thinking_items: list[Any] = []
    messages: list[Message] = []
    for item in items:
        num = len(messages)
        _add_item(messages, item)
        is_new = len(messages) > num and messages[-1].get("role") == "assistant"
        thought = next(left, None) if is_new else None
        last = thinking_items[-1] if thinking_items else None
        has_own = isinstance(last, dict) and last.get("type") == "reasoning"
        if thought is not None and not has_own:
            content = [{"type": "reasoning_text", "text": thought}]
            name = f"rs_{len(thinking_items)}"
            thinking_items.append({"type": "reasoning", "id": name, "summary": [], "content": content})
        thinking_items.append(item)
    return thinking_items


def fingerprint(logprobs: Sequence[float]) -> bytes:
    """Digest of log-probabilities to five decimals, so that values that an agent sends back match."""
    return digest(",".join(f"{value:.5f}" for value in logprobs).encode())
