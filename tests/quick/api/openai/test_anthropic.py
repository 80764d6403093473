"""What is Anthropic's own in /v1/messages: the effort, and the shape of errors, read by Anthropic's client."""

import asyncio
import contextlib
import json
from collections.abc import AsyncIterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import anthropic
import httpx2
import pytest

from art_server import errors
from art_server.api.openai.refusals import refusal_of
from art_server.api.openai.streaming import error_event, stream_events
from art_server.inference_proxy import EngineLost, InferenceRequest, engine_body
from art_server.settings import ApiKey
from tests.asgi_client import client
from tests.quick.api.idle_server import make

pytestmark = pytest.mark.anyio
ASKED: dict[str, Any] = {"model": "run", "max_tokens": 8, "messages": [{"role": "user", "content": "hi"}]}


def messages_request(**fields: Any) -> InferenceRequest:
    return InferenceRequest("messages", "/v1/messages", "run", ASKED | fields, {}, "me", None, None, None)


@pytest.mark.parametrize(
    ("fields", "config"),
    [
        ({"output_config": {"effort": "high"}}, {}),
        ({"output_config": {"effort": "high"}, "thinking": None}, {}),
        ({"output_config": {"effort": "low", "format": {"type": "json_schema"}}}, {"format": {"type": "json_schema"}}),
        ({"output_config": {"effort": "high"}, "thinking": {"type": "adaptive"}}, {"effort": "high"}),
        ({"output_config": {"effort": "high"}, "thinking": {"type": "disabled"}}, {"effort": "high"}),
    ],
)
def test_an_effort_reaches_the_engine_only_beside_thinking(fields: dict[str, Any], config: dict[str, Any]) -> None:
    asked = messages_request(**fields)
    assert engine_body(asked)["output_config"] == config
    assert asked.body == ASKED | fields, "the request itself is unchanged"


KINDS = {
    errors.BadRequest: (anthropic.BadRequestError, "invalid_request_error"),
    errors.InvalidInput: (anthropic.UnprocessableEntityError, "invalid_request_error"),
    errors.Unauthorized: (anthropic.AuthenticationError, "authentication_error"),
    errors.Forbidden: (anthropic.PermissionDeniedError, "permission_error"),
    errors.NotFound: (anthropic.NotFoundError, "not_found_error"),
    errors.TooLarge: (anthropic.APIStatusError, "request_too_large"),
    errors.TooMany: (anthropic.RateLimitError, "rate_limit_error"),
    errors.Unavailable: (anthropic.InternalServerError, "overloaded_error"),
    errors.StorageFull: (anthropic.InternalServerError, "api_error"),
}


@pytest.mark.parametrize("kind", KINDS)
async def test_anthropic_s_client_reads_the_type_and_our_fields(kind: type[errors.ServerError], tmp_path: Path) -> None:
    app, server = make(tmp_path)

    def refuse(_: object) -> None:
        raise kind("refused", code="its_code", param="its.field")

    server.proxy.resolve = refuse  # type: ignore[method-assign]
    async with client(app) as http:

        async def send(request: httpx2.Request) -> httpx2.Response:
            answer = await http.post(request.url.path, content=request.content, headers={"x-api-key": "x"})
            return httpx2.Response(answer.status_code, headers=dict(answer.headers), content=answer.content)

        connections = anthropic.DefaultAsyncHttpxClient(transport=httpx2.MockTransport(send))
        agent = anthropic.AsyncAnthropic(base_url="http://a", api_key="x", http_client=connections, max_retries=0)
        class_, type_ = KINDS[kind]
        async with agent:
            with pytest.raises(class_) as caught:
                await agent.messages.create(**ASKED)
    assert (caught.value.type, caught.value.api_message) == (type_, "refused")
    body: Any = caught.value.body
    assert body["type"] == "error" and body["error"]["retryable"] == kind.retryable
    assert (body["error"]["code"], body["error"]["param"]) == ("its_code", "its.field")


@pytest.mark.parametrize(
    ("method", "path", "kind"),
    [
        ("GET", "/v1/messages", "invalid_request_error"),
        ("POST", "/v1/messages/batches", "not_found_error"),
        ("POST", "/s/a/v1/messages", "authentication_error"),
    ],
)
async def test_errors_that_no_route_makes_have_the_shape_too(method: str, path: str, kind: str, tmp_path: Path) -> None:
    app, _ = make(tmp_path, api_keys=(ApiKey(key="all"),) if kind == "authentication_error" else ())
    async with client(app) as http:
        error = (await http.request(method, path, json=ASKED)).json()
    assert (error["type"], error["error"]["type"]) == ("error", kind)


async def test_other_apis_keep_the_shape_of_openai(tmp_path: Path) -> None:
    app, _ = make(tmp_path)
    async with client(app) as http:
        for path in ("/v1/chat/completions", "/v1/responses"):
            refused = (await http.post(path, json={**ASKED, "model": "p/none", "input": "hi"})).json()
            assert refused.keys() == {"error"} and refused["error"]["type"] == "invalid_request_error"


@pytest.mark.parametrize(
    "said",
    [
        {"type": "error", "error": {"type": "BadRequestError", "message": "no"}},
        {"error": {"message": "no", "type": "Bad Request", "param": "body.x", "code": 400}},
    ],
)
def test_what_the_engine_refuses_has_anthropic_s_type(said: dict[str, Any]) -> None:
    body = json.loads(refusal_of(json.dumps(said).encode(), 400, messages_request()))
    assert body == {"type": "error", "error": said["error"] | {"type": "invalid_request_error"}}
    chat = InferenceRequest("chat", "/v1/chat/completions", "run", ASKED, {}, "me", None, None, None)
    assert json.loads(refusal_of(json.dumps(said).encode(), 400, chat)) == said


async def read_stream(*parts: bytes) -> anthropic.APIStatusError:
    """The error with which Anthropic's client ends a stream of these bytes."""

    async def content() -> AsyncIterator[bytes]:
        for part in parts:
            yield part

    def send(_: httpx2.Request) -> httpx2.Response:
        return httpx2.Response(200, headers={"content-type": "text/event-stream"}, content=content())

    connections = anthropic.DefaultAsyncHttpxClient(transport=httpx2.MockTransport(send))
    async with anthropic.AsyncAnthropic(base_url="http://a", api_key="x", http_client=connections) as agent:
        with pytest.raises(anthropic.APIStatusError) as caught:
            async for _ in await agent.messages.create(**ASKED, stream=True):
                pass
    return caught.value


async def test_an_error_in_a_stream_is_read_by_anthropic_s_client() -> None:
    lost = await read_stream(error_event(EngineLost(), messages_request(stream=True)))
    assert lost.type == "overloaded_error" and "repeat the request" in str(lost.api_message)
    body: Any = lost.body
    assert body["error"]["retryable"] and body["error"]["code"] == "engine_restarted"


async def test_an_error_of_the_engine_in_a_stream_has_anthropic_s_type() -> None:
    said = b'event: error\ndata: {"type":"error","error":{"type":"internal_error","message":"it \\"broke\\""}}\n\n'

    class FailingProxy:
        """Its engine lives, and answers each request with this event."""

        @contextlib.asynccontextmanager
        async def answer(self, _: Any) -> AsyncIterator[Any]:
            stream = asyncio.StreamReader()
            stream.feed_data(said)
            stream.feed_eof()
            yield SimpleNamespace(status=200, content=SimpleNamespace(readany=lambda: stream.read(2**16))), None

        async def check_engine(self, _: Any) -> None: ...

    failing: Any = FailingProxy()
    events = stream_events(failing, messages_request(stream=True))
    error = await read_stream(await anext(events))
    assert (error.type, error.api_message) == ("api_error", 'it "broke"')
    await events.aclose()
