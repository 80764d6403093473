"""Capture of answers that do not come from an art-server: chat completions of any other address, read from the HTTP traffic.

They are what a capture returns where no registered model answered, for example to compare a prompted model with the trained
one, or to collect demonstrations. A capture with answers of registered models leaves them out: they are often a judge's.
Only httpx is read, which OpenAI's client and LiteLLM use.
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
    """A request to another server and the bytes of its answer, which a streamed one adds to as the program reads it."""

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
        """The request's body, and the choices of the answer. Raises anything if they are no chat completion."""
        response = self._response
        if self._parts:  # a streamed answer as it was sent, perhaps compressed
            response = type(response)(
                200, headers=response.headers, content=b"".join(self._parts), request=self._request
            )
        text = response.text
        request = json.loads(self._request.content)
        if request.get("stream"):
            return request, _join(_chunks(text))
        return request, [dict(each) for each in json.loads(text)["choices"]]


@dataclass(eq=False, slots=True)
class Capture(Scope):
    """A session whose conversations become a trajectory. Requests of patched HTTP clients belong to it."""

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
    if not response.is_stream_consumed:
        response.aiter_raw = answer.tee(response.aiter_raw)
        response.iter_raw = answer.tee_sync(response.iter_raw)
    scope.answers.append(answer)


def histories(answers: Iterable[ProviderResponse]) -> list[History]:
    """The conversations of these answers, in the order in which they began. A request whose messages are a conversation so
    far continues it. What is no chat completion is left out with a warning."""
    conversations: list[tuple[list[Any], Any]] = []
    for answer in answers:
        with _left_out_if_unreadable():
            request, choices = answer.parse()
            for choice in choices:
                roles = [each["role"] for each in (*request["messages"], choice["message"])]
                if roles[-1] != "assistant":
                    raise ValueError(f"a choice of role {roles[-1]!r}")
                complete = {"index": 0, "finish_reason": "stop", "logprobs": None} | choice
                _add(conversations, request["messages"], request.get("tools"), complete)
    found: list[History] = []
    for entries, tools in conversations:
        with _left_out_if_unreadable():
            found.append(History.model_validate({"messages_and_choices": entries, "tools": tools}))
    return found


@contextmanager
def _left_out_if_unreadable() -> Generator[None]:
    try:
        yield
    except Exception as error:  # other servers may answer anything; the rollout continues
        logger.warning("an answer of another server is not captured: %r", error)


def _add(found: list[tuple[list[Any], Any]], messages: list[Any], tools: Any, choice: Fields) -> None:
    for entries, of_history in found:
        shown = [_shown(entry) for entry in entries]
        if of_history == tools and shown == [_shown(each) for each in messages[: len(shown)]]:
            entries += [*messages[len(shown) :], choice]
            return
    found.append(([*messages, choice], tools))


def _shown(entry: Fields) -> tuple[Any, ...]:
    """What two entries have in common if one is an answer and the other is how a program sends it back."""
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
    for part in (each for chunk in chunks for each in chunk.get("choices") or ()):
        message: Fields = {"role": "assistant", "content": None}
        index = part.get("index", 0)
        choice = choices.setdefault(index, {"index": index, "message": message})
        _extend(choice["message"], part.get("delta") or {})
        if part.get("finish_reason"):
            choice["finish_reason"] = part["finish_reason"]
        given: Fields = part.get("logprobs") or {}
        if given.get("content") is not None:
            logprobs = choice.setdefault("logprobs", {"content": [], "refusal": None})
            logprobs["content"] += given["content"]
    return list(choices.values())


def _extend(message: Fields, delta: Fields) -> None:
    for name, value in delta.items():
        if name == "tool_calls":
            calls = message.setdefault("tool_calls", [])
            for part in value or ():
                while len(calls) <= part["index"]:
                    calls.append({"type": "function", "function": {"name": "", "arguments": ""}})
                call: Fields = calls[part["index"]]
                function: Fields = part.get("function") or {}
                call["id"] = part.get("id") or call.get("id")
                call["function"]["name"] = function.get("name") or call["function"]["name"]
                call["function"]["arguments"] += function.get("arguments") or ""
        elif name != "role" and value:
            known: Any = message.get(name)
            is_continued = type(value) in (str, list) and type(known) is type(value)
            message[name] = known + value if is_continued else value
