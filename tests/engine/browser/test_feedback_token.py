"""A page of another origin gives a thumb with a browser's token, and can do nothing else with the token."""

import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import pytest
from anyio.from_thread import start_blocking_portal
from fastapi import FastAPI
from fastapi.responses import HTMLResponse

from art_server.settings import ApiKey
from tests.pages import blocks
from tests.quick.learning.crowd import NAME, ROUTES
from tests.quick.server.served import serving

THUMB = blocks("../learning-in-use.md", "javascript")[1]
"""What docs/learning-in-use.md has a page do."""
SEND = """async ({url, method, headers, body}) => {
  const response = await fetch(url, {method, headers, body}).catch(() => null);
  return response && response.status;
}"""
"""The status that a page reads; null if the browser keeps the reply from the page."""
KEYS = (ApiKey(key="all", name="boss"), ApiKey(key="thumbs", scopes=frozenset({"feedback"}), name="shop"))
BOSS = {"authorization": "Bearer all"}
CHAT = {"model": NAME, "messages": [{"role": "user", "content": "a"}]}
POLICY = {"batch": 2, "least": 2, "config": {"learning_rate": 1}}


@dataclass
class Shop:
    """A server with keys, a page of another origin, and two answers."""

    url: str
    page_url: str
    http: httpx.Client
    """Of the operator."""
    answers: list[str]

    def issue(self, **more: Any) -> dict[str, Any]:
        """A token of the first answer, for the shop's key."""
        body = {"answer": self.answers[0], "user": "ada", **more}
        reply = self.http.post(f"{ROUTES}/feedback/tokens", json=body, headers={"authorization": "Bearer thumbs"})
        assert reply.status_code == 200, reply.text
        return reply.json()

    def seen(self) -> tuple[Any, ...]:
        """All that an intruder could change: scores, learning, models, records."""
        scores = self.http.get(f"{ROUTES}/feedback").json()["scores"]
        kept = [(score["answer"], score["name"], score["value"], score["state"]) for score in scores]
        learning = self.http.get(f"{ROUTES}/learning").json()
        models = self.http.get("/api/models").json()
        session = self.http.get(f"{ROUTES}/sessions/s").json()
        return kept, learning["state"], learning["policy"], models, session


@pytest.fixture
def shop(serve: Any, tmp_path: Path) -> Iterator[Shop]:
    page_app = FastAPI()
    page_app.get("/", response_class=HTMLResponse)(lambda: "<title>shop</title>")
    page_url = serve(page_app).url
    settings: dict[str, Any] = {"api_keys": KEYS, "cors_origins": (page_url,)}
    model = {"project": "shop", "name": "helper", "base_model": "base"}
    with (
        start_blocking_portal() as portal,
        portal.wrap_async_context_manager(serving(tmp_path, **settings)) as served,
        httpx.Client(base_url=served.url, headers=BOSS, timeout=60) as http,
    ):
        http.post("/api/models", json=model).raise_for_status()
        replies = [http.post("/s/s/v1/chat/completions", json=CHAT) for _ in range(2)]
        yield Shop(served.url, page_url, http, [reply.json()["id"] for reply in replies])


def test_a_page_of_another_origin_gives_a_thumb_with_a_token(page: Any, shop: Shop) -> None:
    page.goto(shop.page_url)
    page.evaluate(f"async ([ART, path]) => {{ {THUMB} }}", [shop.url, shop.issue()["path"]])
    (score,) = shop.http.get(f"{ROUTES}/feedback").json()["scores"]
    assert (score["answer"], score["value"], score["state"]) == (choice(shop.answers[0]), 1, "scored")
    assert score["comment"] == "It found the order."


def test_a_page_that_the_server_does_not_name_reads_no_reply(page: Any, shop: Shop) -> None:
    page.goto(shop.page_url.replace("127.0.0.1", "localhost"))
    request = {"url": shop.url + shop.issue()["path"], "method": "POST", "body": '{"value": true}'}
    assert page.evaluate(SEND, request | {"headers": {"content-type": "application/json"}}) is None
    assert shop.http.get(f"{ROUTES}/feedback").json()["scores"] == []


def test_a_page_can_do_nothing_else_with_the_token(page: Any, shop: Shop) -> None:
    score = shop.http.post(f"{ROUTES}/feedback", json={"answer": shop.answers[1], "value": 0}).json()["id"]
    token = shop.issue()
    other = shop.issue(name="thumb", user="bob")["token"]
    before = shop.seen()
    page.goto(shop.page_url)
    for method, path, body in attempts(shop, token["path"], token["token"], other, score):
        for headers in senders(token["token"]):
            request = {"url": shop.url + path, "method": method, "headers": headers}
            if body is not None:
                request |= {"body": json.dumps(body), "headers": headers | {"content-type": "application/json"}}
            assert page.evaluate(SEND, request) in (401, 405, 422), (method, path, headers)
    assert shop.seen() == before


def senders(token: str) -> list[dict[str, str]]:
    """Without a key, and with the token as a key."""
    return [{}, {"authorization": f"Bearer {token}"}, {"x-api-key": token}]


def attempts(shop: Shop, path: str, token: str, other: str, score: str) -> list[tuple[str, str, Any]]:
    """Method, path and body of what a page with a token may not do."""
    thumb = {"value": True}
    mixed = f"{other.partition('.')[0]}.{token.partition('.')[2]}"
    of_scores = [
        ("GET", f"{ROUTES}/feedback", None),
        ("GET", f"{ROUTES}/feedback/{score}", None),
        ("DELETE", f"{ROUTES}/feedback/{score}", None),
        ("DELETE", f"{ROUTES}/feedback?user=ada", None),
        ("POST", f"{ROUTES}/feedback", {"answer": shop.answers[1], **thumb}),
        ("POST", f"{ROUTES}/feedback", {"answer": shop.answers[0], **thumb}),
        ("POST", f"{ROUTES}/feedback/tokens", {"answer": shop.answers[1]}),
    ]
    with_the_token = [
        ("GET", path, None),
        ("PUT", path, thumb),
        ("DELETE", path, None),
        ("POST", path, {"answer": shop.answers[1], **thumb}),
        ("POST", path, {"name": "stars", **thumb}),
        ("POST", path, {"user": "bob", **thumb}),
        ("POST", f"/feedback/{mixed}", thumb),
        ("POST", f"/feedback/{token}x", thumb),
    ]
    of_the_model = [
        ("GET", f"{ROUTES}/learning", None),
        ("PUT", f"{ROUTES}/learning", POLICY),
        *(("POST", f"{ROUTES}/learning", {"action": action}) for action in ("pause", "train", "promote", "rollback")),
        ("DELETE", f"{ROUTES}/learning", None),
        ("DELETE", f"{ROUTES}/answers/{shop.answers[0]}", None),
        ("GET", f"{ROUTES}/sessions/s", None),
        ("DELETE", f"{ROUTES}/sessions/s", None),
        ("POST", f"{ROUTES}/train", {"groups": []}),
        ("POST", f"{ROUTES}/rollback", {"step": 0}),
        ("GET", "/api/models", None),
        ("DELETE", ROUTES, None),
        ("GET", "/v1/models", None),
        ("POST", "/v1/chat/completions", CHAT),
        ("POST", "/s/s/v1/chat/completions", CHAT),
    ]
    return of_scores + with_the_token + of_the_model


def choice(answer: str) -> str:
    return f"{answer.removeprefix('chatcmpl-')}-0"
