"""Pages in a browser that call the server from another origin (`--cors-origin`), as browsers ask and read."""

import json
from pathlib import Path
from typing import Any

import httpx
import pytest
from pydantic import ValidationError

import art
from art_server.settings import ApiKey, ServerConfig
from tests.asgi_client import client
from tests.quick.api.idle_server import make
from tests.quick.server.served import serving

pytestmark = pytest.mark.anyio
KEY = ApiKey(key="all")
SHOP, OTHER = "https://shop.example", "https://other.example"
WITH_KEY = {"authorization": "Bearer all"}
PATHS = ("/v1/chat/completions", "/s/one/v1/responses", "/v1/models", "/api/models/p/run/feedback")


def asks(origin: str) -> dict[str, str]:
    """What a browser sends before a request with a key and JSON."""
    return {
        "origin": origin,
        "access-control-request-method": "POST",
        "access-control-request-headers": "authorization,content-type,x-stainless-lang",
    }


@pytest.mark.parametrize("path", PATHS)
async def test_a_browser_may_send_what_the_named_origin_asks(path: str, tmp_path: Path) -> None:
    app, _ = make(tmp_path, api_keys=(KEY,), cors_origins=(SHOP,))
    async with client(app) as http:
        answer = await http.options(path, headers=asks(SHOP))
        assert answer.status_code == 200 and answer.headers["access-control-allow-origin"] == SHOP
        assert answer.headers["access-control-allow-headers"] == asks(SHOP)["access-control-request-headers"]
        assert "POST" in answer.headers["access-control-allow-methods"]
        assert "access-control-allow-credentials" not in answer.headers
        foreign = await http.options(path, headers=asks(OTHER))
        assert "access-control-allow-origin" not in foreign.headers


@pytest.mark.parametrize("origins", [(), (SHOP,)])
async def test_a_page_of_another_origin_hears_the_remedy(
    origins: tuple[str, ...], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    app, _ = make(tmp_path, api_keys=(KEY,), cors_origins=origins)
    async with client(app) as http:
        answers = [await http.options("/v1/models", headers=asks(OTHER)) for _ in range(3)]
    assert [answer.status_code for answer in answers] == [403] * 3
    error = answers[0].json()["error"]
    assert error["code"] == "foreign_origin" and f"--cors-origin {OTHER}" in error["message"]
    assert [record.message for record in caplog.records if OTHER in record.message] == [error["message"]]


async def test_the_page_needs_a_key_and_reads_errors(tmp_path: Path) -> None:
    app, _ = make(tmp_path, api_keys=(KEY,), cors_origins=(SHOP,))
    async with client(app, headers={"origin": SHOP}) as http:
        refused, listed = await http.get("/v1/models"), await http.get("/v1/models", headers=WITH_KEY)
        assert (refused.status_code, listed.status_code) == (401, 200)
        for answer in (refused, listed):
            assert answer.headers["access-control-allow-origin"] == SHOP
        foreign = await http.get("/v1/models", headers=WITH_KEY | {"origin": OTHER})
        assert foreign.status_code == 200 and "access-control-allow-origin" not in foreign.headers


async def test_without_keys_only_the_named_origin_is_answered(tmp_path: Path) -> None:
    app, _ = make(tmp_path, cors_origins=(SHOP,))
    async with client(app) as http:
        assert (await http.get("/v1/models", headers={"origin": SHOP})).status_code == 200
        refused = await http.get("/v1/models", headers={"origin": OTHER})
        assert refused.status_code == 403 and "--cors-origin" in refused.json()["error"]["message"]


async def test_clients_still_ask_for_the_methods_of_a_route(tmp_path: Path) -> None:
    app, _ = make(tmp_path, api_keys=(KEY,), cors_origins=(SHOP,))
    async with client(app) as http:
        answer = await http.options("/v1/messages")
        assert (answer.status_code, answer.headers["allow"]) == (204, "POST, OPTIONS")


async def test_a_page_reads_a_stream_and_which_step_answered(tmp_path: Path) -> None:
    async with serving(tmp_path, api_keys=(KEY,), cors_origins=("*",)) as served:
        async with art.Backend(served.url, api_key="all") as backend:
            await art.TrainableModel(name="run", project="p", base_model="art/tiny").register(backend)
        body: dict[str, Any] = {"model": "p/run", "messages": [{"role": "user", "content": "hi"}], "stream": True}
        async with httpx.AsyncClient(headers=WITH_KEY | {"origin": SHOP}) as http:
            answer = await http.post(f"{served.url}/v1/chat/completions", json=body)
        assert answer.headers["access-control-allow-origin"] == "*"
        exposed = answer.headers["access-control-expose-headers"].split(", ")
        assert {"x-art-step", "x-art-answer"} <= answer.headers.keys() & set(exposed)
        events = [line.removeprefix("data: ") for line in answer.text.splitlines() if line.startswith("data: {")]
        assert events and all(json.loads(event)["choices"] is not None for event in events)


@pytest.mark.parametrize("origin", ["shop.example", f"{SHOP}/", f"{SHOP}/page", "https://", "https://a b", ""])
async def test_what_is_no_origin_is_refused(origin: str) -> None:
    with pytest.raises(ValidationError, match="is no web origin: write one as browsers do"):
        ServerConfig(cors_origins=(origin,))


async def test_all_origins_need_keys() -> None:
    with pytest.raises(ValidationError, match="without API keys lets every web page"):
        ServerConfig(cors_origins=("*",))
    assert ServerConfig(cors_origins=("*",), api_keys=(KEY,)).cors_origins == ("*",)
