"""Streamed answers: vLLM's server-sent events, with the requested model name and `art` fields added.

Comment lines keep a waiting stream alive. If vLLM dies before a stream's first event, the request is sampled again.
If it dies later, the stream ends with an error event.
"""

import asyncio
import contextlib
import json
from collections.abc import AsyncGenerator, AsyncIterator, Mapping
from typing import Any

import anyio
import msgspec
from fastapi.responses import Response
from starlette.types import Receive, Scope, Send

from art_server.api.error_responses import answer, body_of, detail_of, status_of
from art_server.api.openai.answers import Losses, cancel_at_disconnect, known_headers, with_requested_name
from art_server.api.openai.kept_turns import keep_turn, name_calls
from art_server.api.openai.refusals import ANTHROPICS_TYPE, VLLMS_TYPE, refusal_of
from art_server.api.openai.responses import keep_streamed
from art_server.errors import ServerError
from art_server.inference_proxy import EngineLost, InferenceRequest, Proxy
from art_server.ledger.ledger import OpenRequest

PATIENCE_SECONDS = 3.0
"""A stream without an event after this time begins with a comment line, so that the client sees a live connection."""
COMMENT_SECONDS = 5.0
"""A stream that sends nothing for this long gets a comment line."""
COMMENT = b": waiting for the policy\n\n"


async def answer_stream(proxy: Proxy, inference: InferenceRequest) -> Response:
    """Forwards a streaming request. A stream that can begin at once keeps vLLM's status. A stream that must wait begins
    with comment lines and then sends errors as events."""
    events = stream_events(proxy, inference)
    first = asyncio.ensure_future(anext(events))
    # Unlike `wait_for`, `wait` leaves the task running when the time is over.
    done, _ = await asyncio.wait({first}, timeout=PATIENCE_SECONDS)
    if done:
        try:
            head = first.result()
        except StreamRefused as refused:
            return refused.response(inference)
        return EventStream(chain_events(events, head), headers=known_headers(inference))
    # Without headers: a request gets its step and its id only when the pause gate opens (`Proxy.answer`).
    return EventStream(errors_as_events(chain_events(events, first), inference))


class StreamRefused(Exception):
    """vLLM or the server refused a streaming request before its first event."""

    def __init__(self, status: int, content: bytes, headers: dict[str, str]):
        self.status = status
        self.content = content
        self.headers = headers

    def response(self, inference: InferenceRequest) -> Response:
        return Response(
            with_requested_name(self.content, inference),
            self.status,
            headers=self.headers,
            media_type="application/json",
        )


async def stream_events(proxy: Proxy, inference: InferenceRequest) -> AsyncGenerator[bytes, None]:
    """The events of an answer as they arrive, in chunks of whole events, with the requested model name and `art`
    fields. If the engine dies before the first event, the request is sampled again.

    Raises:
        StreamRefused: the request was refused before its first event.
    """
    losses = Losses(proxy, inference)
    while True:
        is_begun = False
        try:
            async with proxy.answer(inference) as (response, opened):
                if response.status != 200:
                    content = refusal_of(await response.read(), response.status, inference)
                    raise StreamRefused(response.status, content, {})
                rest = b""
                received: dict[int, dict[str, Any]] = {}
                keeps = inference.api == "chat" and inference.session is not None
                while chunk := await response.content.readany():
                    events, rest = take_events(rest + chunk)
                    if not events:
                        continue
                    # vLLM's API process also ends a stream with such an event if the engine behind it has died.
                    if ERROR_EVENTS[inference.api] in events:
                        await proxy.check_engine(inference)
                        events = events.replace(VLLMS_TYPE, ANTHROPICS_TYPE)
                    is_begun = True
                    if not inference.has_choices:
                        name_calls(events, opened, 0)
                    if keeps:
                        add_deltas(received, events)
                    if CHOICE_END not in events and LAST_EVENTS[inference.api] not in events:
                        yield with_requested_name(events, inference)
                        continue
                    # Without the last part: the text behind the end of the last event, which is empty (`take_events`).
                    for event in events.split(EVENT_END)[:-1]:
                        yield await finish_event(event + EVENT_END, inference, opened, received)
                if rest:
                    yield rest
                return
        except EngineLost as error:
            if is_begun:
                yield error_event(error, inference)
                return
            if not await losses.count_loss():
                raise refused_by(error, inference.path) from error
        except ServerError as error:
            raise refused_by(error, inference.path) from error


def refused_by(error: ServerError, path: str) -> StreamRefused:
    response = answer(error, path)
    headers = {key: value for key, value in response.headers.items() if key == "retry-after"}
    return StreamRefused(response.status_code, bytes(response.body), headers)


class EventStream(Response):
    """Server-sent events, with a comment line in each long pause. Ends when the client disconnects."""

    media_type = "text/event-stream"

    def __init__(self, events: AsyncIterator[bytes], headers: Mapping[str, str] | None = None):
        super().__init__(headers=headers)
        # `Response` has set it to 0.
        del self.headers["content-length"]
        self._events = events

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        clock = asyncio.get_running_loop().time
        last = clock()

        async def send_body(body: bytes, more: bool = True) -> None:
            await send({"type": "http.response.body", "body": body, "more_body": more})

        async def attend(sending: anyio.CancelScope) -> None:
            nonlocal last
            while True:
                with contextlib.suppress(TimeoutError):
                    async with asyncio.timeout_at(last + COMMENT_SECONDS):
                        await cancel_at_disconnect(receive, sending)
                        return
                if clock() >= last + COMMENT_SECONDS:
                    last = clock()
                    await send_body(COMMENT)

        start = {"type": "http.response.start", "status": 200, "headers": self.raw_headers}
        await send(start)
        with anyio.CancelScope() as sending:
            attending = asyncio.create_task(attend(sending))
            try:
                async for events in self._events:
                    last = clock()
                    if events:
                        await send_body(events)
                await send_body(b"", more=False)
            finally:
                attending.cancel()


async def chain_events(
    events: AsyncGenerator[bytes, None], head: bytes | asyncio.Future[bytes]
) -> AsyncIterator[bytes]:
    """All events of a stream. `head` is the first event, or its future. A comment line precedes a future event."""
    try:
        if isinstance(head, bytes):
            yield head
        else:
            yield COMMENT
            yield await head
        async for more in events:
            yield more
    finally:
        if isinstance(head, asyncio.Future) and not head.done():
            head.cancel()
            with contextlib.suppress(asyncio.CancelledError, StopAsyncIteration, StreamRefused):
                await head
        await events.aclose()


async def errors_as_events(events: AsyncIterator[bytes], inference: InferenceRequest) -> AsyncIterator[bytes]:
    """The events of a stream that has begun, with a refusal as its last event."""
    try:
        async for event in events:
            yield event
    except StreamRefused as refused:
        yield raw_event(refused.content, inference)


EVENT_END = b"\n\n"
CHOICE_END = b'"finish_reason":"'
"""Text in the event that ends a choice of chat or completions. Quotes inside a text are escaped, so no text can match."""
ERROR_EVENTS: Mapping[str, bytes] = {
    "chat": b'data: {"error":',
    "completions": b'data: {"error":',
    "responses": b"event: error\n",
    "messages": b"event: error\n",
}
"""vLLM's event of a request that failed, by API. Quotes and line ends inside a text are escaped, so no text can match."""
LAST_EVENTS: Mapping[str, bytes] = {
    "chat": b"data: [DONE]",
    "completions": b"data: [DONE]",
    "responses": b"event: response.completed",
    "messages": b"event: message_stop",
}
"""The beginning of each API's last event, after which an answer is complete."""


def take_events(buffer: bytes) -> tuple[bytes, bytes]:
    """The whole events in a buffer, each with the empty line that ends it, and the rest."""
    whole, mark, rest = buffer.rpartition(EVENT_END)
    return whole + mark, rest


def add_deltas(received: dict[int, dict[str, Any]], events: bytes) -> None:
    """Adds the deltas of a chat stream's events to the choices in `received`."""
    for event in events.split(EVENT_END)[:-1]:
        data = event.partition(b"data: ")[2]
        if not data.startswith(b"{"):
            continue
        for part in msgspec.json.decode(data).get("choices") or ():
            choice = received.setdefault(part["index"], {"message": {"role": "assistant"}, "finish_reason": None})
            choice["finish_reason"] = part.get("finish_reason") or choice["finish_reason"]
            add_delta(choice["message"], part.get("delta") or {})


def add_delta(message: dict[str, Any], delta: dict[str, Any]) -> None:
    """Adds a delta to the message so far."""
    for name in ("content", "reasoning", "reasoning_content"):
        if delta.get(name):
            message[name] = message.get(name, "") + delta[name]
    for part in delta.get("tool_calls") or ():
        calls = message.setdefault("tool_calls", [])
        while len(calls) <= part["index"]:
            calls.append({"type": "function", "function": {"name": "", "arguments": ""}})
        call = calls[part["index"]]
        if part.get("id"):
            call["id"] = part["id"]
        for name, value in (part.get("function") or {}).items():
            call["function"][name] = call["function"].get(name, "") + (value or "")


async def finish_event(
    event: bytes,
    inference: InferenceRequest,
    opened: OpenRequest,
    received: dict[int, dict[str, Any]],
) -> bytes:
    """The event with the requested model name, and with the `art` field in a chunk that ends a choice. `received` holds
    the choices of a session's chat stream as the agent received them.

    Such a chunk, or the last event, waits until the ledger has the choice, so that the client can train at once. The
    choices are marked as delivered before the last event, because a client may disconnect as soon as it has read that event.
    """
    is_last = event.lstrip().startswith(LAST_EVENTS[inference.api])
    event = with_requested_name(event, inference)
    if inference.api in ("chat", "completions"):
        if CHOICE_END in event:
            prefix, _, data = event.partition(b"data: ")
            chunk = msgspec.json.decode(data)
            for choice in chunk["choices"]:
                if choice.get("finish_reason") is not None:
                    await opened.wait(choice["index"])
                    choice["art"] = inference.art_field(opened, choice["index"])
                    keep_turn(inference, opened, received)
            return prefix + b"data: " + msgspec.json.encode(chunk) + EVENT_END
    elif is_last:
        await opened.wait(0)
        keep_turn(inference, opened, {})
        if inference.api == "responses":
            keep_streamed(inference, opened, event)
    if is_last:
        await opened.mark_delivered()
    return event


def error_event(error: ServerError, inference: InferenceRequest) -> bytes:
    return raw_event(json.dumps(body_of(detail_of(error), status_of(error), inference.path)).encode(), inference)


def raw_event(content: bytes, inference: InferenceRequest) -> bytes:
    """An error as an event, in the form that the API's clients read."""
    if inference.api in ("chat", "completions"):
        return b"data: " + content + b"\n\ndata: [DONE]\n\n"
    body = {"type": "error", **json.loads(content)}
    return b"event: error\ndata: " + json.dumps(body).encode() + b"\n\n"
