"""The OpenAI-compatible side: requests go to vLLM and its answers come back as it made them.

A request's `model` is resolved to an adapter and replaced; the answer names the model as it was asked for. Chat and
completion choices gain `token_ids` and `art = {id, step, model}`, the completion `prompt_token_ids`; other clients
ignore these. A request that comes while a step runs waits and is answered by the new step; a stream is kept alive with
comment lines meanwhile. If vLLM dies under a request, the request is sent again, unless part of a stream is out already.
"""

import asyncio
import contextlib
import functools
import json
import logging
import re
from collections.abc import AsyncGenerator, AsyncIterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import aiohttp
import anyio
import msgspec
from fastapi import APIRouter, FastAPI, Request
from fastapi.responses import Response
from starlette.background import BackgroundTask
from starlette.types import Receive, Scope, Send

from art.wire import STEP_HEADER, ErrorBody
from art_server.api.bodies import SHORTER, beside, decode, read_body, v1_limit_mb
from art_server.api.door import Caller
from art_server.api.errors import answer, detail_of
from art_server.api.grammars import check_grammars
from art_server.engine.records import new_request_id
from art_server.errors import Conflict, InvalidInput, ServerError, Unavailable
from art_server.ledger import conversation, ledger
from art_server.ledger.ledger import OpenRequest
from art_server.service import Service
from art_server.store.registry import Model

logger = logging.getLogger(__name__)

PATHS: Mapping[str, str] = {
    "/v1/chat/completions": "chat",
    "/v1/completions": "completions",
    "/v1/responses": "responses",
    "/v1/messages": "messages",
}
"""What the gate forwards; everything else that vLLM serves stays behind it."""

OPENING_ROLES = frozenset({"system", "developer", "user"})
"""A conversation of these only has no answer in it."""

CLIENT_CLOSED_REQUEST = 499
"""The status that nginx gives a request whose client is gone; nobody reads it."""

MAX_FAILED, MAX_KILLED = 2, 10
"""How many engines may die under a request, by themselves (it may be the cause) or killed by somebody, until it is given up."""
LOST_SECONDS = 1.0
"""Time for the supervisor to see that the engine is gone, before a request waits for the next one."""
PATIENCE_SECONDS = 3.0
"""A stream that has not begun by then is begun with a comment line, so that its client sees a living connection."""
COMMENT_SECONDS = 5.0
"""Between two comment lines of a stream that waits."""
COMMENT = b": waiting for the policy\n\n"


@dataclass(slots=True)
class Ask:
    """One request, as it goes to the engine."""

    api: str
    path: str
    asked_model: str
    body: dict[str, Any]
    caller: Caller
    headers: dict[str, str]
    messages: list[dict[str, Any]]
    """The conversation, as chat messages whatever the API."""
    before: bytes
    """Names that conversation."""
    is_first_turn: bool
    """No answer was given yet that this could go on from, or the prompt came as token ids, which are sampled from as they
    are."""
    named: Sequence[str] = ()
    """Ids of tool calls and choices that the conversation names."""
    is_before_user: bool = True
    """A user's turn follows the last answer."""
    model: Model | None = None
    step: int | None = None
    adapter: str = ""

    @property
    def is_stream(self) -> bool:
        return bool(self.body.get("stream"))

    @property
    def has_choices(self) -> bool:
        """Several choices are asked for, so that a stream's events are of one or the other."""
        return self.body.get("n") not in (None, 1)

    def art_mark(self, opened: OpenRequest, index: int) -> dict[str, Any]:
        """What a choice carries to be found again; or why it cannot be found."""
        mark = {
            "id": ledger.choice_id(opened.request.request_id, index),
            "step": self.step,
            "model": self.model.id if self.model is not None else None,
        }
        return mark | ({"unrecorded": opened.lost[index]} if index in opened.lost else {})


def install(app: FastAPI, service: Service) -> None:
    """Add the routes under /v1."""
    router = APIRouter()

    async def forward(request: Request) -> Response:
        body = await read_body(request, v1_limit_mb(service.engine.max_seq_length), SHORTER)
        ask = await beside(functools.partial(make_ask, request), body)
        resolve_policy(service, ask)  # a wrong name is told at once, not after a wait
        if ask.is_stream:
            return await answer_stream(service, ask)
        return await answer_whole(service, ask, request)

    for path in PATHS:
        # A plain route: FastAPI's own takes a sixth of the server's time for a request, and there is nothing to validate.
        app.add_route(path, forward, methods=["POST"], name=PATHS[path])

    @router.get("/v1/models")
    async def models(request: Request) -> dict[str, Any]:
        return {"object": "list", "data": model_cards(service, request.state.caller)}

    app.include_router(router)


def make_ask(request: Request, body: bytes) -> Ask:
    """
    Raises:
        InvalidInput: not a JSON object with a model, or a grammar above its limits.
    """
    data = decode(body)
    if not isinstance(data, dict) or not isinstance(data.get("model"), str):
        raise InvalidInput(
            "the body needs `model`: 'PROJECT/NAME', 'NAME' or the base model's name",
            code="missing_model",
            param="model",
        )
    check_grammars(data)
    path = request.scope["path"]
    api = PATHS[path]
    passed_on = ("anthropic-version", "anthropic-beta")
    headers = {name: request.headers[name] for name in passed_on if name in request.headers}
    messages = conversation.messages_of(api, data)
    if api == "completions":
        is_first_turn = is_token_ids(data.get("prompt"))
    else:
        is_first_turn = "previous_response_id" not in data and all(
            message.get("role") in OPENING_ROLES for message in messages
        )
    return Ask(
        api,
        path,
        data["model"],
        data,
        request.state.caller,
        headers,
        messages,
        before=conversation.prefix_digests(messages)[-1],
        is_first_turn=is_first_turn,
        named=() if is_first_turn else conversation.names_in(messages, data),
        is_before_user=conversation.is_before_user(messages),
    )


def is_token_ids(prompt: Any) -> bool:
    """Whether a prompt, or each of several, is a list of token ids."""
    if not isinstance(prompt, list) or not prompt:
        return False
    return all(isinstance(each, int) or is_token_ids(each) for each in prompt)


def model_cards(service: Service, caller: Caller) -> list[dict[str, Any]]:
    """The models that a caller may ask, by every name that works."""
    base = service.engine.base
    if base is None:
        return []
    visible = service.registry.all(caller.projects, caller.model_id)
    models = [m for m in visible if service.is_on_base(m)]
    names = [model.record.name for model in models]
    ids = [base.name] if caller.model_id is None else []
    ids += [model.id for model in models]
    ids += [name for name in names if names.count(name) == 1]
    length = service.engine.max_seq_length
    return [
        {"id": name, "object": "model", "created": 0, "owned_by": "art", "max_model_len": length}
        for name in ids
    ]


def resolve_policy(service: Service, ask: Ask) -> None:
    """Set which model and step answer, as things stand now."""
    base = service.engine.base
    base_name = base.name if base is not None else None
    caller = ask.caller
    policy = service.registry.resolve(ask.asked_model, base_name, caller.projects, caller.model_id)
    ask.model, ask.step = policy.model, policy.step
    service.is_base_wanted = True
    if policy.model is None:
        assert base_name is not None, "only a loaded base resolves to no model"
        ask.adapter = base_name
        return
    if base is not None and not service.is_on_base(policy.model):
        raise Conflict(
            f"model '{policy.model.id}' adapts base model '{policy.model.record.base_model}'; this server has "
            f"'{base.name}' loaded",
            code="base_model_differs",
            param="model",
        )
    assert policy.step is not None, "a model resolves to a step"
    ask.adapter = policy.model.adapter_name(policy.step)


@contextlib.asynccontextmanager
async def engine_answer(
    service: Service, ask: Ask, request_id: str
) -> AsyncIterator[tuple[aiohttp.ClientResponse, OpenRequest]]:
    """Wait for the gate, give the request to the engine, hand out its answer while it is open.

    Raises:
        Unavailable: the wait is above the limit, or the engine died under the request.
    """
    limit = service.config.wait_limit_seconds
    await service.gate.wait_open(limit)
    resolve_policy(service, ask)
    with contextlib.ExitStack() as stack:
        stack.enter_context(service.gate.inside(ask.adapter))
        if ask.model is not None and ask.step is not None:
            folder = ask.model.folder.checkpoint_dir(ask.step)
            await service.engine.load_adapter(ask.adapter, folder, limit)
        await service.engine.wait_ready(limit)
        record = ask.model.record if ask.model is not None else None
        opened = stack.enter_context(
            service.ledger.open_request(
                ledger.Request(
                    request_id=request_id,
                    api=ask.api,
                    project=record.project if record else None,
                    name=record.name if record else None,
                    step=ask.step,
                    owner=record.project if record else ask.caller.owner,
                    session=ask.caller.session,
                    before=ask.before,
                    named=service.ledger.callers(ask.named) if ask.named else frozenset(),
                    is_before_user=ask.is_before_user,
                )
            )
        )
        body = ask.body | {"model": ask.adapter}
        is_bare = ask.api == "chat" and body.get("logprobs") is None
        if is_bare and record is not None and record.always_logprobs:
            body["logprobs"] = True
        if ask.api == "responses":
            body["request_id"] = f"resp_{request_id}"
        try:
            async with service.engine.http.post(
                ask.path,
                data=msgspec.json.encode(body),
                headers=ask.headers
                | {"x-request-id": request_id, "content-type": "application/json"},
            ) as response:
                yield response, opened
        except aiohttp.ClientError as error:
            raise EngineLost from error


class Losses:
    """The engines that died under one request."""

    def __init__(self, service: Service):
        self._service = service
        self._num_failed = self._num_killed = 0

    async def is_again(self, request_id: str) -> bool:
        """Count one, and wait until the supervisor has seen it; whether the request is to be sampled again."""
        await asyncio.sleep(LOST_SECONDS)
        if self._service.engine.was_killed:
            self._num_killed += 1
        else:
            self._num_failed += 1
        logger.warning("the engine died under request %s", request_id)
        return self._num_failed < MAX_FAILED and self._num_killed < MAX_KILLED


class EngineLost(Unavailable):
    """The engine ended under a request."""

    def __init__(self) -> None:
        super().__init__(
            "the engine ended while it answered and is being restarted; repeat the request",
            code="engine_restarted",
        )


# --- whole answers ------------------------------------------------------------------------------------------------


async def answer_whole(service: Service, ask: Ask, request: Request) -> Response:
    """Forward a request whose answer is one body; sampled again when the engine dies under it. When the client hangs up,
    the engine is told so and stops."""
    with anyio.CancelScope() as sampling:
        hanging_up = asyncio.create_task(cancel_at_disconnect(request.receive, sampling))
        try:
            return await sample_whole(service, ask)
        finally:
            hanging_up.cancel()
    return Response(status_code=CLIENT_CLOSED_REQUEST)


async def cancel_at_disconnect(receive: Receive, answering: anyio.CancelScope) -> None:
    """Wait until the client has gone; its body must have been read."""
    while (await receive())["type"] != "http.disconnect":
        pass
    answering.cancel()


async def sample_whole(service: Service, ask: Ask) -> Response:
    losses = Losses(service)
    while True:
        request_id = new_request_id(ask.is_first_turn)
        try:
            async with engine_answer(service, ask, request_id) as (response, opened):
                content = await response.read()
                if response.status == 200:
                    content = await finish_body(content, ask, opened)
                return Response(
                    name_as_asked(content, ask),
                    status_code=response.status,
                    media_type=response.headers.get("content-type"),
                    headers=step_header(ask),
                    background=BackgroundTask(delivered, service, opened),
                )
        except EngineLost:
            if not await losses.is_again(request_id):
                raise


async def delivered(service: Service, opened: OpenRequest) -> None:
    """The answer went out in full: only now may a session hold it."""
    service.ledger.mark_delivered(opened.request.request_id)


async def finish_body(content: bytes, ask: Ask, opened: OpenRequest) -> bytes:
    """Wait until every choice is in the ledger; chat and completion choices get their tokens and their mark."""
    if ask.api not in ("chat", "completions"):
        await opened.wait(0)
        name_calls(content, opened, 0)
        keep_turn(ask, opened, {})
        return content
    body = msgspec.json.decode(content)
    for choice in body["choices"]:
        record = await opened.wait(choice["index"])
        choice["art"] = ask.art_mark(opened, choice["index"])
        calls = choice.get("message", {}).get("tool_calls") or ()
        opened.ledger.name_calls(
            ledger.choice_id(opened.request.request_id, choice["index"]),
            [call["id"] for call in calls],
        )
        if record is not None:
            choice["token_ids"] = record.token_ids
            if ask.api == "chat":
                body["prompt_token_ids"] = record.prompt_token_ids
    if ask.api == "chat":
        keep_turn(ask, opened, {choice["index"]: choice for choice in body["choices"]})
    else:
        keep_turn(ask, opened, {})
    return msgspec.json.encode(body)


CALL_ID = re.compile(rb'"(?:call_id|id)": ?"([^"]*(?:call|tool)[^"]*)"')
"""The id of a tool call as the APIs write it; the quotes of a text are escaped."""


def name_calls(content: bytes, opened: OpenRequest, index: int) -> None:
    """Remember which choice made the tool calls in an answer, or in a stream's events."""
    if found := CALL_ID.findall(content):
        choice = ledger.choice_id(opened.request.request_id, index)
        opened.ledger.name_calls(choice, [each.decode() for each in found])


def keep_turn(ask: Ask, opened: OpenRequest, choices: dict[int, dict[str, Any]]) -> None:
    """In a session, keep the request's messages and its choices as the agent sees them. `choices` holds those that the
    API made already; the others are made from the sampled text."""
    if ask.caller.session is None:
        return
    kept: dict[str, dict[str, Any]] = {}
    for index, record in opened.records.items():
        made = choices.get(index)
        message = made["message"] if made is not None else conversation.message_from(record.text)
        kept[str(index)] = {
            "index": index,
            "finish_reason": made["finish_reason"] if made else record.finish_reason,
            "message": {key: value for key, value in message.items() if value is not None},
            "art": ask.art_mark(opened, index),
        }
    tools = ask.body.get("tools")
    turn = {
        "messages": ask.messages,
        "tools": tools if isinstance(tools, list) else None,
        "choices": kept,
    }
    opened.ledger.keep_turn(opened.request.request_id, turn)


def name_as_asked(content: bytes, ask: Ask) -> bytes:
    """The adapter's name as the client asked for it. Inside a JSON string quotes are escaped, so no text can match."""
    if ask.adapter == ask.asked_model:
        return content
    return content.replace(json_name(ask.adapter), json_name(ask.asked_model))


@functools.lru_cache
def json_name(model: str) -> bytes:
    return b'"model":' + json.dumps(model).encode()


def step_header(ask: Ask) -> dict[str, str]:
    return {STEP_HEADER: str(ask.step)} if ask.step is not None else {}


# --- streams ------------------------------------------------------------------------------------------------------


async def answer_stream(service: Service, ask: Ask) -> Response:
    """Forward a streaming request. One that can begin at once keeps vLLM's status; one that must wait begins with
    comment lines, and then tells errors as events."""
    events = stream_events(service, ask)
    first = asyncio.ensure_future(anext(events))
    done, _ = await asyncio.wait({first}, timeout=PATIENCE_SECONDS)
    if done:
        try:
            head = first.result()
        except StreamRefused as refused:
            return refused.response(ask)
        return EventStream(begun(events, head), headers=step_header(ask))
    return EventStream(errors_as_events(begun(events, first), ask))


class StreamRefused(Exception):
    """vLLM, or the gate, refused a streaming request before its first event."""

    def __init__(self, status: int, content: bytes, headers: dict[str, str]):
        self.status = status
        self.content = content
        self.headers = headers

    def response(self, ask: Ask) -> Response:
        return Response(
            name_as_asked(self.content, ask),
            self.status,
            headers=self.headers,
            media_type="application/json",
        )


async def stream_events(service: Service, ask: Ask) -> AsyncGenerator[bytes, None]:
    """The events of an answer as they come, whole ones only, with names and marks put in; sampled again while nothing is out.

    Raises:
        StreamRefused: no stream came to be.
    """
    losses = Losses(service)
    while True:
        request_id = new_request_id(ask.is_first_turn)
        is_begun = False
        try:
            async with engine_answer(service, ask, request_id) as (response, opened):
                if response.status != 200:
                    raise StreamRefused(response.status, await response.read(), {})
                rest = b""
                received: dict[int, dict[str, Any]] = {}
                keeps = ask.api == "chat" and ask.caller.session is not None
                while chunk := await response.content.readany():
                    events, rest = take_events(rest + chunk)
                    is_begun = is_begun or bool(events)
                    if not ask.has_choices:
                        name_calls(events, opened, 0)
                    if keeps:
                        add_deltas(received, events)
                    if CHOICE_END not in events and LAST_EVENTS[ask.api] not in events:
                        yield name_as_asked(events, ask)
                        continue
                    for event in events.split(EVENT_END)[:-1]:
                        is_last = event.lstrip().startswith(LAST_EVENTS[ask.api])
                        finished = await finish_event(
                            event + EVENT_END, is_last, ask, opened, received
                        )
                        if is_last:
                            # Everything but this event is out; a client may hang up as soon as it has read it.
                            service.ledger.mark_delivered(request_id)
                        yield finished
                if rest:
                    yield rest
                return
        except EngineLost as error:
            if is_begun:
                yield error_event(error, ask)
                return
            if not await losses.is_again(request_id):
                raise refused_by(error) from error
        except ServerError as error:
            raise refused_by(error) from error


def refused_by(error: ServerError) -> StreamRefused:
    response = answer(error)
    headers = {key: value for key, value in response.headers.items() if key == "retry-after"}
    return StreamRefused(response.status_code, bytes(response.body), headers)


class EventStream(Response):
    """Server-sent events, and a comment line whenever none came for a while. Ends when the client hangs up."""

    media_type = "text/event-stream"

    def __init__(self, events: AsyncIterator[bytes], headers: Mapping[str, str] | None = None):
        super().__init__(headers=headers)
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


async def begun(
    events: AsyncGenerator[bytes, None], head: bytes | asyncio.Future[bytes]
) -> AsyncIterator[bytes]:
    """The events from their first on, which is there or still to come."""
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


async def errors_as_events(events: AsyncIterator[bytes], ask: Ask) -> AsyncIterator[bytes]:
    """For a stream that has begun: a refusal is told in it."""
    try:
        async for event in events:
            yield event
    except StreamRefused as refused:
        yield raw_event(refused.content, ask)


EVENT_END = b"\n\n"
CHOICE_END = b'"finish_reason":"'
"""What the event that ends a choice of chat or completions holds; the quotes of a text are escaped."""
LAST_EVENTS: Mapping[str, bytes] = {
    "chat": b"data: [DONE]",
    "completions": b"data: [DONE]",
    "responses": b"event: response.completed",
    "messages": b"event: message_stop",
}
"""How the event begins after which an answer was sampled in full."""


def take_events(buffer: bytes) -> tuple[bytes, bytes]:
    """The whole events of what came so far, each with the empty line that ends it, and the rest."""
    whole, mark, rest = buffer.rpartition(EVENT_END)
    return whole + mark, rest


def add_deltas(received: dict[int, dict[str, Any]], events: bytes) -> None:
    """Put what a chat stream's events add to the choices that the agent has received so far: its own parser's work, which
    may differ from what a parser makes of the whole text."""
    for event in events.split(EVENT_END)[:-1]:
        data = event.partition(b"data: ")[2]
        if not data.startswith(b"{"):
            continue
        for part in msgspec.json.decode(data).get("choices") or ():
            choice = received.setdefault(
                part["index"], {"message": {"role": "assistant"}, "finish_reason": None}
            )
            message = choice["message"]
            choice["finish_reason"] = part.get("finish_reason") or choice["finish_reason"]
            delta = part.get("delta") or {}
            for name in ("content", "reasoning", "reasoning_content"):
                if delta.get(name):
                    message[name] = message.get(name, "") + delta[name]
            for call in delta.get("tool_calls") or ():
                calls = message.setdefault("tool_calls", [])
                while len(calls) <= call["index"]:
                    calls.append({"type": "function", "function": {"name": "", "arguments": ""}})
                made = calls[call["index"]]
                if call.get("id"):
                    made["id"] = call["id"]
                for name, value in (call.get("function") or {}).items():
                    made["function"][name] = made["function"].get(name, "") + (value or "")


async def finish_event(
    event: bytes,
    is_last: bool,
    ask: Ask,
    opened: OpenRequest,
    received: dict[int, dict[str, Any]],
) -> bytes:
    """Put the asked name into an event, and the mark into the chunk that ends a choice. `received` are the choices of a
    session's chat stream as the agent has them.

    Such a chunk, or the last event, is held until the ledger has the choice, so that the client can train at once.
    """
    event = name_as_asked(event, ask)
    if ask.api in ("chat", "completions"):
        if CHOICE_END in event:
            prefix, _, data = event.partition(b"data: ")
            chunk = msgspec.json.decode(data)
            for choice in chunk["choices"]:
                if choice.get("finish_reason") is not None:
                    await opened.wait(choice["index"])
                    choice["art"] = ask.art_mark(opened, choice["index"])
                    keep_turn(ask, opened, received)
            return prefix + b"data: " + msgspec.json.encode(chunk) + EVENT_END
    elif is_last:
        await opened.wait(0)
        keep_turn(ask, opened, {})
    return event


def error_event(error: ServerError, ask: Ask) -> bytes:
    return raw_event(ErrorBody(error=detail_of(error)).model_dump_json().encode(), ask)


def raw_event(content: bytes, ask: Ask) -> bytes:
    """An error inside a stream, in the form that the API's clients read."""
    if ask.api in ("chat", "completions"):
        return b"data: " + content + b"\n\ndata: [DONE]\n\n"
    body = {"type": "error", **json.loads(content)}
    return b"event: error\ndata: " + json.dumps(body).encode() + b"\n\n"
