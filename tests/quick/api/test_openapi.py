"""`/openapi.json` and docs/routes.md say what the application does; and nothing that fits the description, or does not, ends
in a 500 or a hang."""

import asyncio
import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any, cast

import httpx
import pytest
import schemathesis
from fastapi import FastAPI
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from art_server.app import make_app
from art_server.server import build
from art_server.settings import ApiKey, ServerConfig
from scripts.route_table import route_table
from tests.asgi_client import client
from tests.makers.new_models import add_model
from tests.waiting import PATIENCE_SECONDS

KEY = {"authorization": "Bearer all"}
PAGE = (Path(__file__).parents[3] / "docs" / "routes.md").read_text()
ROWS = [row for row in PAGE.splitlines() if row.startswith("| ") and not row.startswith("| |")]
"""For one request that waits for nothing."""
# The iterator of its metaclass has no types.
EVERY_CHECK = cast(list[HealthCheck], list(HealthCheck))


schemathesis.serializer.alias("application/x-ndjson", "application/json")


@pytest.fixture(scope="module")
def app(tmp_path_factory: pytest.TempPathFactory) -> FastAPI:
    """With one model, and no base model, so that no engine starts."""
    keys = (ApiKey(key="all"), ApiKey(key="infer-only", scopes=frozenset({"infer"})))
    config = ServerConfig(path=tmp_path_factory.mktemp("art"), api_keys=keys)
    server = build(config)
    add_model(server.registry)
    return make_app(server, inference_port=None)


@pytest.fixture(autouse=True)
def offline(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")


def send(app: FastAPI, method: str, path: str, **more: Any) -> httpx.Response:
    async def request() -> httpx.Response:
        async with client(app) as http, asyncio.timeout(PATIENCE_SECONDS):
            return await http.request(method, path, **more)

    return asyncio.run(request())


def references(value: Any) -> Iterator[str]:
    if isinstance(value, dict):
        if isinstance(value.get("$ref"), str):
            yield value["$ref"]
        for entry in value.values():
            yield from references(entry)
    elif isinstance(value, list):
        for entry in value:
            yield from references(entry)


def test_every_route_that_takes_a_body_shows_it(app: FastAPI) -> None:
    described = send(app, "GET", "/openapi.json", headers=KEY).json()
    for path, operations in described["paths"].items():
        for method, operation in operations.items():
            takes_one = method in ("post", "put") and path != "/close"
            assert ("requestBody" in operation) == takes_one, (method, path)
    known = described["components"]["schemas"]
    assert {reference.rpartition("/")[2] for reference in references(described)} <= known.keys()
    train = described["paths"]["/api/models/{project}/{name}/train"]["post"]["requestBody"]
    (content,) = train["content"].values()
    assert "expected_step" in content["schema"]["properties"]


def test_the_page_of_routes_is_what_the_application_serves(app: FastAPI) -> None:
    assert PAGE.endswith("\n\n" + route_table(app)), "run scripts/pages"


@pytest.mark.parametrize("row", ROWS)
def test_a_row_of_the_page_is_true(app: FastAPI, row: str) -> None:
    _, method, path, scope, limit, _ = (part.strip().strip("`") for part in row.split("|"))
    path = re.sub(r"{(project)}", "p", re.sub(r"{(name)}", "a", re.sub(r"{(job_id|step|session)}", "0", path)))
    if not scope.startswith("none"):
        assert send(app, method, path).status_code == 401
        status = send(app, method, path, headers={"authorization": "Bearer infer-only"}).status_code
        assert (status != 403) == (scope == "infer")
    if limit == "none" or "jobs" in path:  # there is no job to ask for
        return
    sizes = {"4 MB": 4, "8 GiB": 8 * 2**10, "`--max-body-mb": 512, "--max-body-mb": 512}
    mb = next(size for name, size in sizes.items() if limit.startswith(name))
    too_long = {**KEY, "content-length": str((mb + 1) * 2**20), "content-type": "application/json"}
    assert send(app, method, path, headers=too_long, content=b"{}").status_code in (409, 413, 422)


# --- whatever is sent ---


def told(response: Any) -> None:
    """Success, or an error that says what is wrong."""
    assert response.status_code != 500, response.text
    if response.status_code >= 400 and response.url.path != "/ready":
        assert response.json()["error"]["message"], response.text


OPERATIONS = [
    (row.split("|")[1].strip(), row.split("|")[2].strip().strip("`"))
    for row in ROWS
    if "PUT" not in row and "/v1/" not in row  # tests/quick/models has tars; /openapi.json leaves out /v1
]


@pytest.fixture(scope="module")
def description(app: FastAPI) -> Any:
    return schemathesis.openapi.from_dict(app.openapi())


@pytest.fixture
def cases(description: Any, method: str, path: str) -> st.SearchStrategy[Any]:
    return description[path][method].as_strategy()


@pytest.mark.parametrize(("method", "path"), OPERATIONS)
@settings(max_examples=12, deadline=None, suppress_health_check=EVERY_CHECK)
@given(data=st.data())
def test_what_fits_the_description_is_answered(
    app: FastAPI, cases: st.SearchStrategy[Any], data: st.DataObject
) -> None:
    case = data.draw(cases)
    sent = case.as_transport_kwargs(base_url="http://127.0.0.1")
    more = {name: sent[name] for name in ("params", "json", "data") if sent.get(name) is not None}
    headers = {**(sent.get("headers") or {}), **KEY}
    if isinstance(more.get("data"), bytes):
        more["content"] = more.pop("data")
    told(send(app, sent["method"], sent["url"], headers=headers, **more))


@pytest.mark.parametrize(
    ("path", "param"),
    [
        ("/api/jobs?limit=0", "limit"),
        ("/api/jobs?limit=many", "limit"),
        ("/api/look/models/p/a/trees/x/0", "step"),
        ("/api/look/models/p/a/rollouts/train/0/-1/0", "group"),
    ],
)
def test_a_parameter_that_does_not_fit_is_named(path: str, param: str, app: FastAPI) -> None:
    answer = send(app, "GET", path, headers=KEY)
    error = answer.json()["error"]
    assert (answer.status_code, error["code"], error["param"]) == (422, "bad_parameter", param)
    assert param in error["message"] and "many" not in error["message"]


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=20),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=10), inner, max_size=4),
    max_leaves=20,
)


POSTS = sorted({path for method, path in OPERATIONS if method == "POST"} | {"/v1/chat/completions"})


@pytest.mark.parametrize("path", POSTS)
@settings(max_examples=12, deadline=None, suppress_health_check=EVERY_CHECK)
@given(body=st.binary(max_size=60) | JSON)
def test_a_value_that_does_not_fit_is_reported(path: str, app: FastAPI, body: Any) -> None:
    path = path.format(project="p", name="a", job_id="x", token="t")
    content = body if isinstance(body, bytes) else json.dumps(body)
    told(send(app, "POST", path, headers=KEY, content=content))
