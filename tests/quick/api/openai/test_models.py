"""One model by its name, and the methods of the routes of /v1, as clients ask for them."""

from pathlib import Path

import httpx2
import openai
import pytest

from art_server.api.openai.routes import PATHS
from art_server.settings import ApiKey
from tests.asgi_client import client
from tests.makers.new_models import add_model
from tests.quick.api.idle_server import make

pytestmark = pytest.mark.anyio
KEYS = (ApiKey(key="all"), ApiKey(key="only", projects=frozenset({"q"})))
ALL = {"authorization": "Bearer all"}
LISTS = ("/v1/models", "/s/one/v1/models", "/v1/models/")
ONE = ("p/run", "run", "p%2Frun", "p/run@0", "art/tiny")


@pytest.mark.parametrize("name", ONE)
async def test_a_model_answers_to_each_name_that_an_inference_request_may_have(name: str, tmp_path: Path) -> None:
    app, _ = make(tmp_path, api_keys=KEYS)
    async with client(app, headers=ALL) as http:
        listed = (await http.get("/v1/models")).json()["data"][0]
        one = await http.get(f"/v1/models/{name}")
        assert one.status_code == 200
        assert one.json() == {**listed, "id": name.replace("%2F", "/")}


async def test_openai_s_client_retrieves_a_model_with_a_slash(tmp_path: Path) -> None:
    app, _ = make(tmp_path)
    async with client(app) as http:

        async def send(request: httpx2.Request) -> httpx2.Response:
            answer = await http.get(request.url.raw_path.decode())
            return httpx2.Response(answer.status_code, headers=dict(answer.headers), content=answer.content)

        connections = openai.DefaultAsyncHttpxClient(transport=httpx2.MockTransport(send))
        async with openai.AsyncOpenAI(base_url="http://127.0.0.1/v1", api_key="x", http_client=connections) as program:
            assert (await program.models.retrieve("p/run")).id == "p/run"
            with pytest.raises(openai.NotFoundError, match="did you mean 'p/run'"):
                await program.models.retrieve("p/ran")


async def test_a_model_that_a_key_may_not_use_or_that_has_another_base_is_refused(tmp_path: Path) -> None:
    app, server = make(tmp_path, api_keys=KEYS)
    add_model(server.registry, "other", "some/base")
    async with client(app) as http:
        hidden = await http.get("/v1/models/p/run", headers={"authorization": "Bearer only"})
        assert (hidden.status_code, hidden.json()["error"]["code"]) == (404, "unknown_model")
        foreign = await http.get("/v1/models/p/other", headers=ALL)
        assert (foreign.status_code, foreign.json()["error"]["code"]) == (400, "base_model_differs")
        assert (await http.get("/v1/models/p/run")).status_code == 401


@pytest.mark.parametrize("path", [*LISTS, *(f"/v1/models/{name}" for name in ONE)])
async def test_head_is_answered_where_get_is(path: str, tmp_path: Path) -> None:
    app, _ = make(tmp_path, api_keys=KEYS)
    async with client(app) as http:
        head, get = [await http.request(method, path, headers=ALL) for method in ("HEAD", "GET")]
        assert (head.status_code, head.headers) == (get.status_code, get.headers) == (200, get.headers)
        assert (await http.head(path)).status_code == 401


@pytest.mark.parametrize("path", ["/health", "/ready"])
async def test_a_load_balancer_may_ask_with_head(path: str, tmp_path: Path) -> None:
    app, _ = make(tmp_path, api_keys=KEYS)
    async with client(app) as http:
        assert (await http.head(path)).status_code == (await http.get(path)).status_code


@pytest.mark.parametrize("path", [*LISTS, *PATHS, "/s/one/v1/messages", "/v1/models/p/run"])
async def test_options_names_the_methods_and_needs_no_key(path: str, tmp_path: Path) -> None:
    app, _ = make(tmp_path, api_keys=KEYS)
    async with client(app) as http:
        answer = await http.options(path, headers={"origin": "https://page.example"})
        methods = "GET, HEAD, OPTIONS" if "models" in path else "POST, OPTIONS"
        assert (answer.status_code, answer.headers["allow"], answer.content) == (204, methods, b"")
        assert not [name for name in answer.headers if name.startswith("access-control")]


@pytest.mark.parametrize("port", [7623, 8000])
@pytest.mark.parametrize("path", ["/", "/s/one", "/s/one/", "/s/one;temperature=0.5"])
async def test_an_agent_may_ask_with_head_whether_its_base_url_answers(path: str, port: int, tmp_path: Path) -> None:
    """Claude Code does, without a key. The server of the second port shows no page there."""
    app, _ = make(tmp_path, api_keys=KEYS)
    async with client(app, port=port) as http:
        answer = await http.head(path)
        assert (answer.status_code, answer.content) == (200, b"")
        assert (await http.get(path)).status_code == (200 if port == 7623 else 404)


async def test_other_methods_and_paths_are_refused(tmp_path: Path) -> None:
    app, _ = make(tmp_path)
    async with client(app) as http:
        for method in ("GET", "HEAD"):
            wrong = await http.request(method, "/v1/chat/completions")
            assert (wrong.status_code, wrong.headers["allow"]) == (405, "POST")
        for method in ("GET", "HEAD", "OPTIONS"):
            assert (await http.request(method, "/v1/nothing")).status_code == 404
