"""The door, over a table of all routes that is made from the application itself."""

from collections.abc import Iterator
from pathlib import Path

import pytest
from fastapi import FastAPI
from fastapi.routing import APIRoute

from art_server.api.auth import TOKENS
from art_server.app import make_app
from art_server.server import build
from art_server.settings import ApiKey, ServerConfig
from tests.asgi_client import client

OPEN = {"/health", "/ready"}
KEYS = (
    ApiKey(key="all"),
    ApiKey(key="infer-only", scopes=frozenset({"infer"})),
    ApiKey(key="train-only", scopes=frozenset({"train"})),
    ApiKey(key="one-project", projects=frozenset({"p"})),
)


def make(path: Path, keys: tuple[ApiKey, ...]) -> FastAPI:
    config = ServerConfig(path=path, api_keys=keys)
    return make_app(build(config), inference_port=None)


@pytest.fixture
def guarded(tmp_path: Path) -> FastAPI:
    return make(tmp_path / "guarded", KEYS)


@pytest.fixture
def keyless(tmp_path: Path) -> FastAPI:
    return make(tmp_path / "keyless", ())


def all_routes(app: FastAPI) -> Iterator[tuple[str, str]]:
    """Every method and path of the application; FastAPI's own documentation pages included."""
    for path, item in app.openapi()["paths"].items():
        for method in item:
            yield (method.upper(), path.replace("{project}", "p").replace("{name}", "a").replace("{job_id}", "x"))
    for path in ("/docs", "/redoc", "/openapi.json", "/nothing"):
        yield "GET", path


@pytest.mark.anyio
async def test_every_route_but_health_refuses_missing_and_wrong_keys(guarded: FastAPI) -> None:
    routes = list(all_routes(guarded))
    assert len(routes) >= 14
    async with client(guarded) as http:
        for method, path in routes:
            for headers in ({}, {"authorization": "Bearer wrong"}, {"x-api-key": "wrong"}, {"authorization": "all"}):
                status = (await http.request(method, path, headers=headers)).status_code
                assert (status == 401) == (path not in OPEN), (method, path, headers, status)


@pytest.mark.anyio
async def test_scopes_open_their_own_routes_only(guarded: FastAPI) -> None:
    async with client(guarded) as http:
        for method, path in all_routes(guarded):
            if path in OPEN or path.startswith(TOKENS):
                continue
            shut = "train-only" if path.startswith("/v1/") else "infer-only"
            for key, is_refused in ((shut, True), ("all", False)):
                response = await http.request(method, path, headers={"x-api-key": key})
                assert (response.status_code == 403) == is_refused, (method, path, key)


@pytest.mark.anyio
async def test_a_key_for_one_project_opens_no_other(guarded: FastAPI) -> None:
    headers = {"authorization": "Bearer one-project"}
    body = {"name": "a", "project": "q", "base_model": "art/tiny"}
    async with client(guarded) as http:
        assert (await http.get("/api/models/q/a", headers=headers)).status_code == 403
        assert (await http.get("/api/models/p/a", headers=headers)).status_code == 404
        assert (await http.post("/api/models", json=body, headers=headers)).status_code == 403


@pytest.mark.anyio
async def test_a_keyless_server_refuses_web_pages_and_foreign_hosts(keyless: FastAPI) -> None:
    async with client(keyless) as http:
        assert (await http.get("/api/models")).status_code == 200
        page = {"origin": "https://evil.example"}
        assert (await http.get("/api/models", headers=page)).status_code == 403
        own = {"origin": "http://localhost:3000"}
        assert (await http.get("/api/models", headers=own)).status_code == 200
        for unreadable in ({"origin": "http://["}, {"host": "["}):
            assert (await http.get("/api/models", headers=unreadable)).status_code == 403
    async with client(keyless, host="evil.example") as http:
        assert (await http.get("/api/models")).status_code == 403


def test_keys_do_not_show_in_the_settings() -> None:
    assert "all" not in repr(ServerConfig(api_keys=KEYS[:1]).api_keys[0].model_dump(exclude={"key"}))
    assert "secret" not in repr(ServerConfig(api_keys=(ApiKey(key="secret"),)))


def test_routes_are_api_routes(guarded: FastAPI) -> None:
    assert sum(isinstance(route, APIRoute) for route in guarded.routes) >= 10
