"""Keys: names, expiry, limits, and what strangers see."""

import asyncio
from collections.abc import Awaitable, Callable
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pytest
from fastapi import FastAPI
from hypothesis import given
from hypothesis import strategies as st
from starlette.types import Receive, Scope, Send

from art_protocol.wire import Health
from art_server.api.auth import Authentication
from art_server.api.inference import check_choices, num_choices
from art_server.api.keys import Keys, Usage
from art_server.api.model_keys import ModelKeys
from art_server.errors import BadRequest, TooMany
from art_server.settings import ApiKey, ServerConfig
from tests.quick.api.test_art_wire import MODEL, client, make

pytestmark = pytest.mark.anyio

PAST, FUTURE = (datetime.now(UTC) + timedelta(days=days) for days in (-1, 1))


def bearer(key: str) -> dict[str, str]:
    return {"authorization": f"Bearer {key}"}


async def test_an_expired_key_is_told_so(tmp_path: Path) -> None:
    keys = (ApiKey(key="old", expires=PAST), ApiKey(key="new", expires=FUTURE))
    app, _ = make(tmp_path, api_keys=keys)
    async with client(app) as http:
        for path in ("/api/models", "/v1/models"):
            refused = await http.get(path, headers=bearer("old"))
            assert refused.status_code == 401
            assert refused.json()["error"]["code"] == "expired_key"
            assert f"expired at {PAST:%Y-%m-%dT%H:%M}" in refused.text
            assert (await http.get(path, headers=bearer("new"))).status_code == 200


def test_a_name_outlives_its_key_and_a_hash_reveals_none() -> None:
    assert ApiKey(key="one", name="alice").owner == ApiKey(key="two", name="alice").owner == "alice"
    nameless = ApiKey(key="secret").owner
    assert nameless == ApiKey(key="secret").owner != ApiKey(key="other").owner
    assert len(nameless) == 16 and "secret" not in nameless


async def test_a_model_s_key_lives_while_its_owner_has_a_key(tmp_path: Path) -> None:
    app, _ = make(tmp_path, api_keys=(ApiKey(key="one", name="alice"),))
    keys: Keys = app.state.keys
    async with client(app) as http:
        body = {"model": MODEL, "config": None}
        path = "/_prepare_backend_for_training"
        made = (await http.post(path, json=body, headers=bearer("one"))).json()[1]
        for accepted, status in (
            (ApiKey(key="two", name="alice"), 200),
            (ApiKey(key="two", name="alice", expires=PAST), 401),
            (ApiKey(key="one", name="bob"), 401),
            (ApiKey(key="two", name="alice", projects=frozenset({"q"})), 200),
        ):
            keys.replace([accepted])
            answer = await http.get("/v1/models", headers=bearer(made))
            assert answer.status_code == status
        assert answer.json()["data"] == [], "its project is another key's now"


# --- limits ---


@given(st.lists(st.integers(0, 40), max_size=60), st.integers(1, 5))
def test_no_sixty_seconds_hold_more_requests_than_the_limit(waits: list[int], limit: int) -> None:
    key, usage, now = ApiKey(key="k", requests_per_minute=limit), Usage(), 0
    taken: list[int] = []
    for wait in waits:
        now += wait
        recent = [each for each in taken if each > now - 60]
        try:
            usage.enter(key, now)
        except TooMany as error:
            assert len(recent) == limit and error.retry_after_seconds is not None
            usage.enter(key, now + error.retry_after_seconds)
            taken.append(now + error.retry_after_seconds)
            now = taken[-1]
        else:
            assert len(recent) < limit
            taken.append(now)


async def call(app: Any, key: str, path: str = "/api/models") -> tuple[int, dict[str, str], bytes]:
    """Status, headers and body, as ASGI sends them."""
    scope = {
        "type": "http",
        "method": "GET",
        "path": path,
        "headers": [(b"authorization", f"Bearer {key}".encode())],
        "server": None,
    }
    sent: list[Any] = []

    async def send(message: Any) -> None:
        sent.append(message)

    async def receive() -> Any:
        return {"type": "http.request", "body": b"", "more_body": False}

    await app(scope, receive, send)
    headers = {name.decode(): value.decode() for name, value in sent[0]["headers"]}
    body = b"".join(message.get("body", b"") for message in sent[1:])
    return sent[0]["status"], headers, body


def guarded(answer: Callable[[], Awaitable[None]], *keys: ApiKey) -> tuple[Authentication, Keys]:
    """A guarded before an application that streams: it begins, waits for `answer`, and ends."""

    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        await send({"type": "http.response.start", "status": 200, "headers": []})
        await send({"type": "http.response.body", "body": b"begun ", "more_body": True})
        await answer()
        await send({"type": "http.response.body", "body": b"ended"})

    accepted = Keys(keys)
    return Authentication(app, ServerConfig(), None, accepted, ModelKeys(b"x" * 32)), accepted


async def test_a_stream_counts_until_it_has_ended() -> None:
    end = asyncio.Event()
    app, keys = guarded(end.wait, ApiKey(key="k", name="a", concurrent=2), ApiKey(key="free"))  # type: ignore[arg-type]
    running = [asyncio.create_task(call(app, "k")) for _ in range(2)]
    await asyncio.sleep(0)
    status, headers, body = await call(app, "k")
    assert (status, headers["retry-after"]) == (429, "1") and b"2 requests at a time" in body
    keys.replace([ApiKey(key="rotated", name="a", concurrent=2), ApiKey(key="free")])
    assert (await call(app, "rotated"))[0] == 429, "the name's requests still run"
    end.set()
    assert [result[2] for result in await asyncio.gather(*running)] == [b"begun ended"] * 2
    assert (await call(app, "rotated"))[0] == 200
    assert (await call(app, "free"))[0] == 200


async def test_a_request_that_fails_is_no_longer_counted() -> None:
    async def fail() -> None:
        raise RuntimeError("the client has gone")

    app, keys = guarded(fail, ApiKey(key="k", concurrent=1))
    for _ in range(3):
        with pytest.raises(RuntimeError):
            await call(app, "k")
    (usage,) = keys._usages.values()
    assert usage.num_running == 0


async def test_the_rate_is_refused_with_the_time_to_wait(tmp_path: Path) -> None:
    keys = (ApiKey(key="k", requests_per_minute=3, scopes=frozenset({"infer"})), ApiKey(key="f"))
    app, _ = make(tmp_path, api_keys=keys)
    async with client(app, headers=bearer("k")) as http:
        for _ in range(3):
            assert (await http.get("/v1/models")).status_code == 200
            assert (await http.get("/health")).status_code == 200, "which does not count"
            assert (await http.get("/api/models")).status_code == 403, "nor does this"
        refused = await http.get("/v1/models")
        error = refused.json()["error"]
        assert refused.status_code == 429 and 58 <= int(refused.headers["retry-after"]) <= 60
        assert (error["code"], error["retryable"]) == ("rate_limited", True)
        assert "3 requests a minute" in error["message"]
        assert (await http.get("/v1/models", headers=bearer("f"))).status_code == 200


async def test_a_model_s_key_uses_its_owner_s_limits(tmp_path: Path) -> None:
    app, _ = make(tmp_path, api_keys=(ApiKey(key="k", requests_per_minute=2),))
    async with client(app) as http:
        body = {"model": MODEL, "config": None}
        path = "/_prepare_backend_for_training"
        made = (await http.post(path, json=body, headers=bearer("k"))).json()[1]
        assert (await http.get("/v1/models", headers=bearer(made))).status_code == 200
        assert (await http.get("/v1/models", headers=bearer(made))).status_code == 429


# --- health ---


async def health(app: FastAPI, path: str, host: str, key: str | None) -> dict[str, Any]:
    async with client(app, host) as http:
        answer = await http.get(path, headers=bearer(key) if key else {})
    return answer.json()


async def test_strangers_see_the_state_only(tmp_path: Path) -> None:
    infer = frozenset({"infer"})
    keys = (ApiKey(key="k", scopes=infer), ApiKey(key="old", expires=PAST))  # type: ignore[arg-type]
    app, server = make(tmp_path / "keys", api_keys=keys)
    server.engine.detail = "last log lines: a prompt"
    bare = Health(engine="ready").model_dump()
    for path in ("/health", "/ready"):
        for key in (None, "wrong", "old"):
            assert await health(app, path, "box", key) == bare
        for key in ("k", "k::session"):
            seen = await health(app, path, "box", key)
            assert seen["detail"] == "last log lines: a prompt" and seen["base_model"] == "art/tiny"
    assert seen["waits_for"] is None
    keys = (ApiKey(key="k"), ApiKey(key="q", projects=frozenset({"q"})))
    app, server = make(tmp_path / "projects", api_keys=keys)
    server.gate.close("a step of 'p/a', which trains")
    for key, reason in (("k", "a step of 'p/a', which trains"), ("q", "a step, which trains")):
        assert (await health(app, "/health", "box", key))["waits_for"] == reason
    app, server = make(tmp_path / "keyless")
    server.engine.detail = "last log lines: a prompt"
    assert (await health(app, "/health", "localhost", None))["detail"] is not None
    assert await health(app, "/health", "evil.example", None) == bare


async def test_choices_count_as_so_many_requests(tmp_path: Path) -> None:
    keys = (
        ApiKey(key="k", concurrent=8, requests_per_minute=20),
        ApiKey(key="free"),
    )
    app, _ = make(tmp_path, api_keys=keys)
    async with client(app, headers=bearer("k")) as http:
        path = "/v1/completions"
        body = {"model": "none", "prompt": ["a", "b", [1, 2]], "n": 3}
        refused = await http.post(path, json=body)
        error = refused.json()["error"]
        assert (refused.status_code, error["param"]) == (400, "n")
        assert "9 choices" in error["message"] and "8 (`concurrent`)" in error["message"]
        body["n"] = 2
        assert (await http.post(path, json=body)).status_code == 404, "6 of 8"
        assert app.state.keys._usages[keys[0].owner].num_running == 0
        assert len(app.state.keys._usages[keys[0].owner].starts) == 7, "1, and 6"
        await http.post("/v1/chat/completions", json={"model": "none", "messages": [], "n": 8.0})
        assert len(app.state.keys._usages[keys[0].owner].starts) == 15
        chat = {"model": "none", "messages": [], "n": 8}
        refused = await http.post("/v1/chat/completions", json=chat)
        assert (refused.status_code, refused.json()["error"]["code"]) == (429, "rate_limited")
        many = {"model": "none", "prompt": ["a"] * 1000, "n": 2}
        refused = await http.post(path, json=many, headers=bearer("free"))
        assert refused.status_code == 400 and "2000 choices" in refused.text


@pytest.mark.parametrize("n", ["8", "+3", "1_000", "16.0"])
def test_a_text_is_no_number_of_choices(n: str) -> None:
    """vLLM would read each as a number, and no limit would count it."""
    with pytest.raises(BadRequest, match="n: it must be a number"):
        check_choices("chat", {"n": n})


@pytest.mark.parametrize(
    ("api", "body", "num"),
    [
        ("chat", {}, 1),
        ("chat", {"n": 4, "prompt": ["a", "b"]}, 4),
        ("completions", {"prompt": [1, 2, 3], "n": 2}, 2),
        ("completions", {"prompt": [[1], [2]], "n": 2.0}, 4),
        ("completions", {"prompt": "text", "n": None}, 1),
        ("completions", {"prompt": [], "n": -3}, 1),
        ("chat", {"n": float("inf")}, 1),
        ("responses", {"n": 9}, 1),
    ],
)
def test_choices_are_prompts_times_n(api: str, body: dict[str, Any], num: int) -> None:
    assert num_choices(api, body) == num
