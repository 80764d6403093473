"""Refusals of inference requests: a client does not repeat what cannot succeed."""

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx2
import openai
import pytest

from art_server import errors
from art_server.api.openai.routes import PATHS
from art_server.api.openai.streaming import refused_by
from tests.asgi_client import client
from tests.makers.new_models import add_model
from tests.quick.api.idle_server import make

pytestmark = pytest.mark.anyio
IsRepeated = Callable[[int, Any], bool]


def kinds(kind: type[errors.ServerError] = errors.ServerError) -> Iterator[type[errors.ServerError]]:
    for subclass in kind.__subclasses__():
        yield subclass
        yield from kinds(subclass)


def error_of(kind: type[errors.ServerError]) -> errors.ServerError:
    error = kind.__new__(kind)
    errors.ServerError.__init__(error, "refused", code="c")
    if isinstance(error, errors.RecordsMissing):
        error.ids = []
    return error


@pytest.fixture
def is_repeated() -> Iterator[IsRepeated]:
    """Whether OpenAI's client repeats a request after an answer with this status and these headers."""
    with openai.OpenAI(api_key="x") as repeats:
        yield lambda status, headers: repeats._should_retry(httpx2.Response(status, headers=dict(headers)))


async def test_openai_s_client_repeats_what_may_succeed_and_nothing_else(
    tmp_path: Path, is_repeated: IsRepeated
) -> None:
    app, server = make(tmp_path)

    def refuse(_: object) -> None:
        raise error

    server.proxy.resolve = refuse  # type: ignore[method-assign]
    async with client(app) as http:
        for error in map(error_of, set(kinds())):
            for path in (*PATHS, "/s/a/v1/chat/completions"):
                answer = await http.post(path, json={"model": "a", "messages": [], "prompt": "x"})
                assert answer.json()["error"]["message"] == error.message
                assert is_repeated(answer.status_code, answer.headers) == error.retryable, (path, error)
            refused = refused_by(error, "/v1/chat/completions")
            assert is_repeated(refused.status, refused.headers) == error.retryable, error


async def test_a_name_in_two_projects_is_asked_once(tmp_path: Path) -> None:
    app, server = make(tmp_path)
    add_model(server.registry, "run", "art/tiny", project="q")
    asked: list[str] = []
    async with client(app) as http:

        async def send(request: httpx2.Request) -> httpx2.Response:
            asked.append(request.url.path)
            answer = await http.post(request.url.path, content=request.content)
            return httpx2.Response(answer.status_code, headers=dict(answer.headers), content=answer.content)

        transport = httpx2.MockTransport(send)
        connections = openai.DefaultAsyncHttpxClient(transport=transport)
        address = "http://127.0.0.1/v1"
        async with openai.AsyncOpenAI(base_url=address, api_key="x", max_retries=2, http_client=connections) as program:
            with pytest.raises(openai.BadRequestError, match="several projects"):
                await program.chat.completions.create(model="run", messages=[{"role": "user", "content": "hi"}])
    assert len(asked) == 1


@pytest.mark.parametrize(
    ("path", "said"),
    [
        ("/chat/completions", "lacks /v1, http://127.0.0.1:7623/v1"),
        ("/s/abc/chat/completions", "lacks /v1, http://127.0.0.1:7623/s/abc/v1"),
        ("/v1/v1/messages", "too often"),
        ("/s/abc/v1/responses/compact", "Codex does if its model provider has another `name`"),
        ("/v1/embeddings", "this server has no embeddings"),
        ("/v1/nonsense", "openapi.json"),
    ],
)
async def test_a_base_url_without_v1_is_named(path: str, said: str, tmp_path: Path) -> None:
    app, _ = make(tmp_path)
    async with client(app) as http:
        answer = await http.post(path, json={})
    assert answer.status_code == 404 and said in answer.json()["error"]["message"]


async def test_another_method_is_answered_with_the_method_that_is_meant(tmp_path: Path) -> None:
    app, _ = make(tmp_path)
    async with client(app) as http:
        answer = await http.get("/v1/chat/completions")
    assert answer.status_code == 405
    assert answer.json()["error"]["message"] == "this route does not answer GET: use POST"
