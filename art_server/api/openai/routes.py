"""The OpenAI-compatible proxy: requests go to vLLM, and its answers go back to the client.

A request's `model` is resolved to an adapter, whose name replaces it; the answer contains the requested name again. A
request that waits at the pause gate while a step runs is resolved again afterwards, so that the new step answers it.

The way of a request: `forward` reads and checks it. `answers.py` (one JSON body) or `streaming.py` answers it. Both call
`Proxy.answer` (`inference_proxy.py`), which announces the request to the ledger and sends it to the engine, and both wait for
the ledger's records before they end the answer.
"""

import functools
import math
from collections.abc import Awaitable, Callable, Mapping
from typing import Any

from fastapi import APIRouter, Request
from fastapi.responses import Response

from art_protocol.learning import LEARN_HEADER
from art_protocol.wire import SEED_HEADER, STEP_HEADER
from art_server.api.auth import Caller
from art_server.api.bodies import SHORTER, beside, decode, is_large, read_body, v1_limit_mb
from art_server.api.openai.answers import answer_json
from art_server.api.openai.grammar_limits import check_grammars
from art_server.api.openai.responses import add_stored, check_response_fields, names_stored
from art_server.api.openai.streaming import answer_stream
from art_server.api.openai.vendor_tools import leave_out_offers
from art_server.api.parameters import TheCaller, TheFleet, TheRegistration, TheRegistry, TheServer
from art_server.engine.fleet import Fleet
from art_server.errors import BadRequest, InvalidInput
from art_server.inference_proxy import InferenceRequest, resolve_or_alias
from art_server.ledger.conversation import conversation_of
from art_server.ledger.ledger import Ledger
from art_server.server import Server
from art_server.shared import clock

PATHS: Mapping[str, str] = {
    "/v1/chat/completions": "chat",
    "/v1/completions": "completions",
    "/v1/responses": "responses",
    "/v1/messages": "messages",
    "/v1/messages/count_tokens": "messages",
}
"""The routes that are forwarded, and the names of their APIs. vLLM's other routes cannot be reached."""
COUNT_TOKENS = "/v1/messages/count_tokens"
"""The number of tokens that the prompt of the same body to /v1/messages has, in the tokens from which the engine would sample."""

MAX_CHOICES = 1024
"""Choices of one request: `n` times the number of prompts. An engine samples no more at a time."""

MAX_SEED = 2**63 - 1
"""The largest seed of torch's generators."""

router = APIRouter()


async def forward(request: Request) -> Response:
    """Answers a request for inference."""
    arrived_at = clock.tick()
    server: Server = request.app.state.server
    await server.base.wait_found()  # the limit and the names depend on the base model
    body = await read_body(request, v1_limit_mb(server.fleet.max_seq_length), SHORTER)
    inference = await beside(is_large(body), make_request, request, arrived_at, body)
    server.proxy.resolve(inference)  # refuses an unknown name before the wait at the pause gate
    is_slow = is_large(body) or names_stored(inference)
    await beside(is_slow, read_conversation, server.ledger, inference)
    if inference.is_stream:
        return await answer_stream(server.proxy, inference)
    return await answer_json(server.proxy, inference, request)


for path in PATHS:
    # Not a FastAPI route: that takes a sixth of the server's time per request, and there is nothing to validate.
    router.add_route(path, forward, methods=["POST"], name=path)


@router.head("/v1/models", include_in_schema=False)
@router.get("/v1/models")
async def models(
    fleet: TheFleet, registry: TheRegistry, registration: TheRegistration, caller: TheCaller
) -> dict[str, Any]:
    """The models that a caller may use, under every name that works."""
    base = fleet.base
    if base is None:
        return {"object": "list", "data": []}
    visible = registry.all(caller.projects, caller.model_id)
    models = [model for model in visible if registration.is_on_base(model)]
    names = [model.record.name for model in models]
    ids = [base.name] if caller.model_id is None else []
    ids += [model.id for model in models]
    ids += [name for name in names if names.count(name) == 1]
    return {"object": "list", "data": [card(name, fleet) for name in ids]}


@router.head("/v1/models/{name:path}", include_in_schema=False)
@router.get("/v1/models/{name:path}")
async def model_card(
    name: str,
    server: TheServer,
    fleet: TheFleet,
    registry: TheRegistry,
    registration: TheRegistration,
    caller: TheCaller,
) -> dict[str, Any]:
    """One model, by any name that an inference request may have: with its project, with a step, the base model's, or an alias."""
    if not name:
        return await models(fleet, registry, registration, caller)
    await server.base.wait_found()
    base = fleet.base.name if fleet.base is not None else None
    resolve = functools.partial(registry.resolve, base_name=base, projects=caller.projects, only=caller.model_id)
    resolved, _ = resolve_or_alias(resolve, name, caller.sampling, base)
    if resolved.model is not None:
        registration.check_trainable(resolved.model)  # its base model is loaded
    return card(name, fleet)


def card(name: str, fleet: Fleet) -> dict[str, Any]:
    """A model as OpenAI's clients read it."""
    return {
        "id": name,
        "object": "model",
        "created": 0,
        "owned_by": "art",
        "max_model_len": fleet.max_seq_length,
    }


def answer_options(methods: str) -> Callable[[Request], Awaitable[Response]]:
    """The answer to OPTIONS, which needs no key: a route's methods. A browser's page gets no further, unless `--cors-origin` answers its
    question (`app.py`)."""

    async def options(_: Request) -> Response:
        return Response(status_code=204, headers={"allow": methods})

    return options


METHODS: Mapping[str, str] = {
    **dict.fromkeys(PATHS, "POST, OPTIONS"),
    "/v1/models": "GET, HEAD, OPTIONS",
    "/v1/models/{name:path}": "GET, HEAD, OPTIONS",
}
for path, methods in METHODS.items():
    router.add_route(path, answer_options(methods), methods=["OPTIONS"], include_in_schema=False)


def make_request(request: Request, arrived_at: int, body: bytes) -> InferenceRequest:
    """The inference request that a body contains. `arrived_at` is the `clock.tick` of its arrival.

    Raises:
        InvalidInput: the body is not a JSON object with a model, asks for beam search or too many choices, or a grammar is
            above its limits.
    """
    data = decode(body)
    if not isinstance(data, dict) or not isinstance(data.get("model"), str):
        raise InvalidInput(
            "the body needs `model`: 'PROJECT/NAME', 'NAME' or the base model's name",
            code="missing_model",
            param="model",
        )
    caller: Caller = request.state.caller
    path = request.scope["path"]
    api = PATHS[path]
    check_conversation(api, data)
    check_response_fields(api, data)
    left_out = leave_out_offers(api, data)
    check_no_beam_search(data)
    check_choices(api, data)
    check_grammars(api, data)
    if SEED_HEADER in request.headers and data.get("seed") is None and api != "messages":  # /v1/messages has no seed
        data["seed"] = seed_of(request.headers[SEED_HEADER])
    passed_on = ("anthropic-version", "anthropic-beta")
    headers = {name: request.headers[name] for name in passed_on if name in request.headers}
    return InferenceRequest(
        api,
        path,
        data["model"],
        data,
        headers,
        owner=caller.owner,
        projects=caller.projects,
        only_model=caller.model_id,
        session=caller.session,
        sampling=caller.sampling,
        pinned_step=request.headers.get(STEP_HEADER),
        requested_at=arrived_at,
        traceparent=request.headers.get("traceparent"),
        never_learns=data.get("store") is False or request.headers.get(LEARN_HEADER) == "never",
        num_choices=0 if path == COUNT_TOKENS else num_choices(api, data),
        left_out_tools=tuple(left_out),
    )


def read_conversation(ledger: Ledger, inference: InferenceRequest) -> None:
    """Reads the conversation of a resolved request, with the stored items that the request names.

    Raises:
        NotFound: from `add_stored`.
    """
    if names_stored(inference):
        add_stored(ledger, inference)
    inference.conversation = conversation_of(inference.api, inference.body)


def seed_of(header: str) -> int:
    if not header.isdecimal() or len(header) > len(str(MAX_SEED)) or int(header) > MAX_SEED:
        raise BadRequest(
            f"{SEED_HEADER}: it must be a whole number up to {MAX_SEED}", code="invalid_body", param="seed"
        )
    return int(header)


CONVERSATIONS = {"chat": "messages", "messages": "messages", "responses": "input"}
"""The field with the conversation, by API."""


def check_conversation(api: str, body: dict[str, Any]) -> None:
    """Checks the shape of a conversation, and removes names that are null: clients send messages back with all fields.

    Raises:
        BadRequest: the conversation is no list of objects; the error names the field.
    """
    field = CONVERSATIONS.get(api)
    if field is None or field not in body or (api == "responses" and isinstance(body[field], str)):
        return
    messages = body[field]
    if not isinstance(messages, list):
        raise not_messages(field, f"it must be a list of messages, not {json_kind(messages)}")
    for index, message in enumerate(messages):
        if not isinstance(message, dict):
            path = f"{field}[{index}]"
            raise not_messages(path, f"it must be an object, not {json_kind(message)}")
        check_parts(f"{field}[{index}].content", message.get("content"))
        if api == "chat" and not isinstance(role := message.get("role"), str):
            reason = f"it must be a text, such as 'user' or 'assistant', not {json_kind(role)}"
            raise not_messages(f"{field}[{index}].role", reason)
        if api == "chat" and message.get("name", "") is None:
            del message["name"]
        calls = message.get("tool_calls")
        if calls is not None and not isinstance(calls, list):
            path = f"{field}[{index}].tool_calls"
            raise not_messages(path, f"it must be a list, not {json_kind(calls)}")


NO_TEXT = frozenset(
    {*("image", "image_url", "input_image"), *("audio_url", "input_audio"), *("video", "video_url", "input_video")}
)
"""Types of the parts of a message that are no text."""


def check_parts(path: str, content: Any) -> None:  # Any: JSON
    """Checks that a message's content has no image, sound or film.

    Raises:
        BadRequest: it has one; the error names the part.
    """
    for index, part in enumerate(content if isinstance(content, list) else ()):
        kind = part.get("type") if isinstance(part, dict) else None
        if isinstance(kind, str) and kind in NO_TEXT:
            reason = (
                f"it is of the type '{kind}', and this server takes text only: leave it out, or describe it in words"
            )
            raise not_messages(f"{path}[{index}]", reason)


def not_messages(path: str, reason: str) -> BadRequest:
    return BadRequest(f"{path}: {reason}", code="invalid_body", param=path)


def json_kind(value: Any) -> str:
    """JSON's name for a value's type."""
    kinds = {bool: "a boolean", str: "a string", list: "an array", dict: "an object"}
    return "null" if value is None else kinds.get(type(value), "a number")


def check_no_beam_search(body: dict[str, Any]) -> None:
    if body.get("use_beam_search"):
        raise InvalidInput(
            "beam search samples no tokens that can be trained: leave out use_beam_search, or ask for several choices "
            "with n",
            code="beam_search",
            param="use_beam_search",
        )


def num_choices(api: str, body: Mapping[str, Any]) -> int:
    """The number of choices that a request asks for: `n` times the number of prompts."""
    n, prompt = body.get("n"), body.get("prompt")
    if api not in ("chat", "completions"):
        return 1
    num = int(n) if isinstance(n, int | float) and 1 < n < math.inf else 1
    if api == "completions" and isinstance(prompt, list):
        # Numbers in the list are the token ids of a single prompt.
        num *= sum(1 for entry in prompt if not isinstance(entry, int)) or 1
    return num


def check_choices(api: str, body: Mapping[str, Any]) -> None:
    """Checks the number of choices.

    Raises:
        BadRequest: the number is above the limit, or `n` is a text, which vLLM would read as a number.
    """
    if isinstance(body.get("n"), str):
        raise BadRequest("n: it must be a number, not a text", code="invalid_body", param="n")
    if (num := num_choices(api, body)) > MAX_CHOICES:
        raise BadRequest(
            f"n: the request asks for {num} choices (n times the number of prompts), above the limit of {MAX_CHOICES}: ask "
            "for fewer in one request",
            code="too_many_choices",
            param="n",
        )
