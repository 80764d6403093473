"""Capture of answers that do not come from an art-server: chat completions of any other address, read from the HTTP traffic.

A capture returns these answers where no registered model answered, for example to compare a prompted model with the trained
model, or to collect demonstrations. A capture with answers of registered models leaves out the answers of other servers,
which are often a judge's. Only httpx and httpx2 are read, which OpenAI's client and LiteLLM use.
"""

import functools
import json
import logging
import re
from collections.abc import AsyncIterator, Callable, Generator, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

from art.scopes import Scope, current_scope, is_registered
from art.trajectories import History, Trajectory

logger = logging.getLogger(__name__)

Fields = dict[str, Any]


class ProviderResponse:
    """A request to another server, and its answer. `tee` and `tee_sync` collect a streamed answer while the program reads."""

    def __init__(self, request: Any, response: Any) -> None:
        self._request, self._response = request, response
        self._parts: list[bytes] = []

    def tee(self, read: Callable[..., AsyncIterator[bytes]]) -> Callable[..., AsyncIterator[bytes]]:
        @functools.wraps(read)
        async def teed(*args: Any, **kwargs: Any) -> AsyncIterator[bytes]:
            async for part in read(*args, **kwargs):
                self._parts.append(part)
                yield part

        return teed

    def tee_sync(self, read: Callable[..., Iterator[bytes]]) -> Callable[..., Iterator[bytes]]:
        @functools.wraps(read)
        def teed(*args: Any, **kwargs: Any) -> Iterator[bytes]:
            for part in read(*args, **kwargs):
                self._parts.append(part)
                yield part

        return teed

    def parse(self) -> tuple[Fields, list[Fields]]:
        """The request's body, and the choices of the answer. Raises any exception if the two are no chat completion."""
        response = self._response
        if self._parts:  # the bytes of a streamed answer may be compressed: a new response decodes them
            response = type(response)(
                200, headers=response.headers, content=b"".join(self._parts), request=self._request
            )
        text = response.text
        request = json.loads(self._request.content)
        if request.get("stream"):
            return request, _join(_chunks(text))
        return request, [dict(choice) for choice in json.loads(text)["choices"]]


@dataclass(eq=False, slots=True)
class Capture(Scope):
    """A session whose conversations become a trajectory. Requests of patched HTTP clients belong to the session."""

    trajectory: Trajectory = field(default_factory=Trajectory)
    answers: list[ProviderResponse] = field(default_factory=list[ProviderResponse])
    """Answers of other servers."""


def watch(request: Any, response: Any) -> None:
    """Keeps an httpx response of another server's chat completions for the capture that is active."""
    scope = current_scope.get()
    if not isinstance(scope, Capture) or response.status_code != 200:
        return
    if not request.url.path.endswith("/chat/completions") or is_registered(str(request.url)):
        return
    answer = ProviderResponse(request, response)
    # httpx's other ways of reading a response all read these.
    if not response.is_stream_consumed:
        response.aiter_raw = answer.tee(response.aiter_raw)
        response.iter_raw = answer.tee_sync(response.iter_raw)
    scope.answers.append(answer)


def histories(answers: Iterable[ProviderResponse]) -> list[History]:
    """The conversations of these answers, in the order in which they began. A request whose messages begin
    with a whole conversation continues that conversation. An answer that is no chat completion is left out with a warning."""
    conversations: list[tuple[list[Any], Any]] = []
    for answer in answers:
        with _left_out_if_unreadable():
            request, choices = answer.parse()
            for choice in choices:
                roles = [message["role"] for message in (*request["messages"], choice["message"])]
                if roles[-1] != "assistant":
                    raise ValueError(f"a choice of role {roles[-1]!r}")
                # Without `finish_reason` an entry counts as a message (`entries.is_choice`).
                complete = {"index": 0, "finish_reason": "stop", "logprobs": None} | choice
                _add(conversations, request["messages"], request.get("tools"), complete)
    valid_histories: list[History] = []
    for entries, tools in conversations:
        with _left_out_if_unreadable():
            valid_histories.append(History.model_validate({"messages_and_choices": entries, "tools": tools}))
    return valid_histories


@contextmanager
def _left_out_if_unreadable() -> Generator[None]:
    try:
        yield
    except Exception as error:  # other servers may answer anything; the rollout continues
        logger.warning("an answer of another server is not captured: %r", error)


def _add(conversations: list[tuple[list[Any], Any]], messages: list[Any], tools: Any, choice: Fields) -> None:
    """Adds a request's messages and a choice to the conversation that the request continues, or begins a conversation."""
    for entries, known_tools in conversations:
        shown = [_shown(entry) for entry in entries]
        if known_tools == tools and shown == [_shown(message) for message in messages[: len(shown)]]:
            entries += [*messages[len(shown) :], choice]
            return
    conversations.append(([*messages, choice], tools))


def _shown(entry: Fields) -> tuple[Any, ...]:
    """The parts of an answer that do not change when the program sends the answer back in a later request."""
    message = entry.get("message", entry)
    calls = [(call["function"]["name"], call["function"]["arguments"]) for call in message.get("tool_calls") or ()]
    return message.get("role"), message.get("content") or None, message.get("tool_call_id"), calls


def _chunks(text: str) -> Iterator[Fields]:
    for line in re.split(r"\r\n|\n|\r", text):  # splitlines() also cuts at U+2028
        data = line.removeprefix("data:").strip()
        if line.startswith("data:") and data != "[DONE]":
            yield json.loads(data)


def _join(chunks: Iterable[Fields]) -> list[Fields]:
    """The choices of a streamed answer."""
    choices: dict[int, Fields] = {}
    for chunk in chunks:
        for part in chunk.get("choices") or ():
            message: Fields = {"role": "assistant", "content": None}
            index = part.get("index", 0)
            choice = choices.setdefault(index, {"index": index, "message": message})
            _extend(choice["message"], part.get("delta") or {})
            if part.get("finish_reason"):
                choice["finish_reason"] = part["finish_reason"]
            new_logprobs: Fields = part.get("logprobs") or {}
            if new_logprobs.get("content") is not None:
                logprobs = choice.setdefault("logprobs", {"content": [], "refusal": None})
                logprobs["content"] += new_logprobs["content"]
    return list(choices.values())


def _extend(message: Fields, delta: Fields) -> None:
    """Adds one delta of a streamed answer to the answer's message."""
    for name, value in delta.items():
        if name == "tool_calls":
            calls = message.setdefault("tool_calls", [])
            for part in value or ():
                while len(calls) <= part["index"]:
                    calls.append({"type": "function", "function": {"name": "", "arguments": ""}})
                call: Fields = calls[part["index"]]
                function: Fields = part.get("function") or {}
                # OpenAI sends a call's id and name once, and its arguments in pieces.
                call["id"] = part.get("id") or call.get("id")
                call["function"]["name"] = function.get("name") or call["function"]["name"]
                call["function"]["arguments"] += function.get("arguments") or ""
        elif name != "role" and value:
            known: Any = message.get(name)
            is_continued = type(value) in (str, list) and type(known) is type(value)
            message[name] = known + value if is_continued else value
