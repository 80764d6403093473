"""Answers in one JSON body. Streams (`streaming.py`) count lost engines and name the model as these answers do.

Choices of chat and completions gain `art = {id, step, model, num_tokens}`. Answers to requests that ask for
log-probabilities or `return_token_ids` gain `token_ids` on their choices, and a chat completion `prompt_token_ids`. Other
clients ignore these fields. If vLLM dies during a request, the request is sent again.
"""

import asyncio
import functools
import json
import logging

import anyio
import msgspec
from fastapi import Request
from fastapi.responses import Response
from starlette.background import BackgroundTask
from starlette.types import Receive

from art_protocol.learning import ANSWER_HEADER
from art_protocol.wire import STEP_HEADER
from art_server.api.openai.kept_turns import keep_turn, name_calls
from art_server.api.openai.refusals import refusal_of
from art_server.api.openai.responses import keep_whole
from art_server.inference_proxy import EngineLost, InferenceRequest, Proxy
from art_server.ledger.ledger import OpenRequest
from art_server.ledger.records import choice_id

logger = logging.getLogger(__name__)

CLIENT_CLOSED_REQUEST = 499
"""The status that nginx logs for a request whose client disconnected. No client receives this status."""

MAX_FAILED, MAX_KILLED = 2, 10
"""Engine deaths after which a request fails: crashes, which the request may have caused, and kills from outside."""


class Losses:
    """Counts the engines that died during one request."""

    def __init__(self, proxy: Proxy, inference: InferenceRequest):
        self._proxy = proxy
        self._inference = inference
        self._num_failed = self._num_killed = 0

    async def count_loss(self) -> bool:
        """Counts one more death. Returns whether to sample the request again."""
        if await self._proxy.was_engine_killed(self._inference):
            self._num_killed += 1
        else:
            self._num_failed += 1
        logger.warning("the engine died during request %s", self._inference.request_id)
        return self._num_failed < MAX_FAILED and self._num_killed < MAX_KILLED


async def answer_json(proxy: Proxy, inference: InferenceRequest, request: Request) -> Response:
    """Forwards a request whose answer is one JSON body. If the engine dies, the request is sampled again. If the client
    disconnects, sampling is cancelled."""
    with anyio.CancelScope() as sampling:
        hanging_up = asyncio.create_task(cancel_at_disconnect(request.receive, sampling))
        try:
            return await sample_json(proxy, inference)
        finally:
            hanging_up.cancel()
    # Reached only if the scope was cancelled.
    return Response(status_code=CLIENT_CLOSED_REQUEST)


async def cancel_at_disconnect(receive: Receive, answering: anyio.CancelScope) -> None:
    """Cancels `answering` when the client disconnects. The request's body must have been read before."""
    while (await receive())["type"] != "http.disconnect":
        pass
    answering.cancel()


async def sample_json(proxy: Proxy, inference: InferenceRequest) -> Response:
    losses = Losses(proxy, inference)
    while True:
        try:
            async with proxy.answer(inference) as (response, opened):
                content = await response.read()
                if response.status != 200:
                    content = refusal_of(content, response.status, inference)
                elif inference.num_choices:
                    content = await finish_body(content, inference, opened)
                return Response(
                    with_requested_name(content, inference),
                    status_code=response.status,
                    media_type=response.headers.get("content-type"),
                    headers=known_headers(inference),
                    # Starlette runs the task when it has sent the whole answer.
                    background=BackgroundTask(opened.mark_delivered),
                )
        except EngineLost:
            if not await losses.count_loss():
                raise


async def finish_body(content: bytes, inference: InferenceRequest, opened: OpenRequest) -> bytes:
    """The answer's body, as soon as the ledger has recorded or given up every choice. Choices of chat and completions get
    their `art` field, and their tokens if the request asks for them."""
    if inference.api not in ("chat", "completions"):
        await opened.wait(0)
        name_calls(content, opened, 0)
        keep_turn(inference, opened, {})
        if inference.api == "responses":
            keep_whole(inference, opened, content)
        return content
    body = msgspec.json.decode(content)
    for choice in body["choices"]:
        record = await opened.wait(choice["index"])
        choice["art"] = inference.art_field(opened, choice["index"])
        if calls := choice.get("message", {}).get("tool_calls"):
            opened.ledger.name_calls(
                choice_id(opened.request.request_id, choice["index"]),
                [call["id"] for call in calls],
            )
        if record is not None and inference.has_token_ids:
            choice["token_ids"] = record.token_ids
            if inference.api == "chat":
                body["prompt_token_ids"] = record.prompt_token_ids
    if inference.api == "chat":
        keep_turn(inference, opened, {choice["index"]: choice for choice in body["choices"]})
    else:
        keep_turn(inference, opened, {})
    return msgspec.json.encode(body)


NO_EARLIER_RESPONSE = b'"previous_response_id":null'
"""What vLLM writes in each response: vLLM gets the items of an earlier response, and not the earlier response's id."""


def with_requested_name(content: bytes, inference: InferenceRequest) -> bytes:
    """The answer with the requested model name instead of the adapter's, and with the id of the response that the request
    continues. Quotes inside a text are escaped, so no text can match."""
    if inference.continued_response is not None:
        earlier = json.dumps(inference.continued_response).encode()
        content = content.replace(NO_EARLIER_RESPONSE, NO_EARLIER_RESPONSE.replace(b"null", earlier))
    if inference.adapter == inference.requested_model:
        return content
    return content.replace(json_name(inference.adapter), json_name(inference.requested_model))


@functools.lru_cache
def json_name(model: str) -> bytes:
    return b'"model":' + json.dumps(model).encode()


def known_headers(inference: InferenceRequest) -> dict[str, str]:
    """What is known of an answer before its body: the step, and the id for feedback."""
    if inference.step is None:
        return {}
    return {STEP_HEADER: str(inference.step), ANSWER_HEADER: inference.request_id}
