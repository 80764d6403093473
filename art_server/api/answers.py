"""Whole answers, and what every answer gains: chat and completion choices `token_ids` and `art = {id, step, model}`, the chat
completion `prompt_token_ids`; other clients ignore these. If vLLM dies under a request, the request is sent again.
"""

import asyncio
import functools
import json
import logging
import re
from typing import Any

import anyio
import msgspec
from fastapi import Request
from fastapi.responses import Response
from starlette.background import BackgroundTask
from starlette.types import Receive

from art.wire import STEP_HEADER
from art_server.ledger import conversation
from art_server.ledger.ledger import OpenRequest
from art_server.ledger.records import choice_id
from art_server.relay import EngineLost, InferenceRequest
from art_server.service import Service
from art_server.shared.samples import new_request_id

logger = logging.getLogger(__name__)

CLIENT_CLOSED_REQUEST = 499
"""The status that nginx gives a request whose client is gone; nobody reads it."""

MAX_FAILED, MAX_KILLED = 2, 10
"""How many engines may die under a request, by themselves (it may be the cause) or killed by somebody, until it is given up."""


class Losses:
    """The engines that died under one request."""

    def __init__(self, service: Service):
        self._service = service
        self._num_failed = self._num_killed = 0

    async def is_again(self, request_id: str) -> bool:
        """Count one; whether the request is to be sampled again."""
        if await self._service.was_engine_killed():
            self._num_killed += 1
        else:
            self._num_failed += 1
        logger.warning("the engine died under request %s", request_id)
        return self._num_failed < MAX_FAILED and self._num_killed < MAX_KILLED


async def answer_whole(service: Service, asked: InferenceRequest, request: Request) -> Response:
    """Forward a request whose answer is one body; sampled again when the engine dies under it. When the client hangs up,
    the engine is told so and stops."""
    with anyio.CancelScope() as sampling:
        hanging_up = asyncio.create_task(cancel_at_disconnect(request.receive, sampling))
        try:
            return await sample_whole(service, asked)
        finally:
            hanging_up.cancel()
    return Response(status_code=CLIENT_CLOSED_REQUEST)


async def cancel_at_disconnect(receive: Receive, answering: anyio.CancelScope) -> None:
    """Wait until the client has gone; its body must have been read."""
    while (await receive())["type"] != "http.disconnect":
        pass
    answering.cancel()


async def sample_whole(service: Service, asked: InferenceRequest) -> Response:
    losses = Losses(service)
    while True:
        request_id = new_request_id(asked.is_first_turn)
        try:
            async with service.relay(asked, request_id) as (response, opened):
                content = await response.read()
                if response.status == 200:
                    content = await finish_body(content, asked, opened)
                return Response(
                    name_as_asked(content, asked),
                    status_code=response.status,
                    media_type=response.headers.get("content-type"),
                    headers=step_header(asked),
                    background=BackgroundTask(opened.mark_delivered),
                )
        except EngineLost:
            if not await losses.is_again(request_id):
                raise


async def finish_body(content: bytes, asked: InferenceRequest, opened: OpenRequest) -> bytes:
    """Wait until every choice is in the ledger; chat and completion choices get their tokens and their mark."""
    if asked.api not in ("chat", "completions"):
        await opened.wait(0)
        name_calls(content, opened, 0)
        keep_turn(asked, opened, {})
        return content
    body = msgspec.json.decode(content)
    for choice in body["choices"]:
        record = await opened.wait(choice["index"])
        choice["art"] = asked.art_mark(opened, choice["index"])
        calls = choice.get("message", {}).get("tool_calls") or ()
        opened.ledger.name_calls(
            choice_id(opened.request.request_id, choice["index"]),
            [call["id"] for call in calls],
        )
        if record is not None:
            choice["token_ids"] = record.token_ids
            if asked.api == "chat":
                body["prompt_token_ids"] = record.prompt_token_ids
    if asked.api == "chat":
        keep_turn(asked, opened, {choice["index"]: choice for choice in body["choices"]})
    else:
        keep_turn(asked, opened, {})
    return msgspec.json.encode(body)


CALL_ID = re.compile(rb'"(?:call_id|id)": ?"([^"]*(?:call|tool)[^"]*)"')
"""The id of a tool call as the APIs write it; the quotes of a text are escaped."""


def name_calls(content: bytes, opened: OpenRequest, index: int) -> None:
    """Remember which choice made the tool calls in an answer, or in a stream's events."""
    if found := CALL_ID.findall(content):
        choice = choice_id(opened.request.request_id, index)
        opened.ledger.name_calls(choice, [each.decode() for each in found])


def keep_turn(
    asked: InferenceRequest, opened: OpenRequest, choices: dict[int, dict[str, Any]]
) -> None:
    """In a session, keep the request's messages and its choices as the agent sees them. `choices` holds those that the
    API made already; the others are made from the sampled text."""
    if asked.session is None:
        return
    kept: dict[str, dict[str, Any]] = {}
    for index, record in opened.records.items():
        made = choices.get(index)
        message = made["message"] if made is not None else conversation.message_from(record.text)
        kept[str(index)] = {
            "index": index,
            "finish_reason": made["finish_reason"] if made else record.finish_reason,
            "message": {key: value for key, value in message.items() if value is not None},
            "art": asked.art_mark(opened, index),
        }
    tools = asked.body.get("tools")
    turn = {
        "messages": asked.messages,
        "tools": tools if isinstance(tools, list) else None,
        "choices": kept,
    }
    opened.ledger.keep_turn(opened.request.request_id, turn)


def name_as_asked(content: bytes, asked: InferenceRequest) -> bytes:
    """The adapter's name as the client asked for it. Inside a JSON string quotes are escaped, so no text can match."""
    if asked.adapter == asked.asked_model:
        return content
    return content.replace(json_name(asked.adapter), json_name(asked.asked_model))


@functools.lru_cache
def json_name(model: str) -> bytes:
    return b'"model":' + json.dumps(model).encode()


def step_header(asked: InferenceRequest) -> dict[str, str]:
    return {STEP_HEADER: str(asked.step)} if asked.step is not None else {}
