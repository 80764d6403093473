"""Tokens for browsers: a token gives the one score that it is for, and opens nothing else."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import httpx
import pytest

import art
from art_server.api.feedback_tokens import FeedbackTokens, TokenClaim
from art_server.errors import Unauthorized
from art_server.settings import ApiKey
from tests.quick.learning.crowd import NAME, ROUTES, Crowd, crowd
from tests.quick.server.served import serving

pytestmark = pytest.mark.anyio

CLAIM = TokenClaim(model=7, answer="a-0", name="thumb", user=None, owner="anyone", expires=4e9)


def altered(token: str) -> list[str]:
    """A token with one changed character at each position, and other texts."""
    swapped = [token[:at] + ("A" if token[at] != "A" else "B") + token[at + 1 :] for at in range(len(token))]
    return [*swapped, "", ".", "x.y", token[:-1], token + "A", token + "=", token.replace(".", ""), "é.ü"]


def test_only_the_servers_own_tokens_are_read() -> None:
    tokens = FeedbackTokens(b"secret")
    token = tokens.make(CLAIM)
    assert tokens.read(token) == CLAIM
    for forged in [*altered(token), FeedbackTokens(b"other").make(CLAIM)]:
        with pytest.raises(Unauthorized):
            tokens.read(forged)
    with pytest.raises(Unauthorized, match="expired"):
        tokens.read(tokens.make(replace(CLAIM, expires=1.0)))


async def token_for(shop: Crowd, answer: str, **more: Any) -> str:
    reply = await shop.http.post(f"{ROUTES}/feedback/tokens", json={"answer": answer, **more})
    assert reply.status_code == 200, reply.text
    assert reply.json()["path"] == f"/feedback/{reply.json()['token']}"
    return reply.json()["path"]


async def test_a_token_gives_one_score_of_its_user(tmp_path: Path) -> None:
    async with crowd(tmp_path) as shop:
        answer = await shop.answer()
        path = await token_for(shop, answer, user="ada")
        claim = shop.served.app.state.feedback_tokens.read(path.rpartition("/")[2])
        assert len(claim.user) == 32, "a hash"
        first = await shop.http.post(path, json={"value": True, "comment": "nice"})
        assert (first.status_code, first.json()) == (202, {"name": "thumb", "value": 1, "state": "scored"})
        assert (await shop.http.post(path, json={"value": 0})).json()["value"] == 0
        await shop.score(answer, 1, user="bob")
        own = await shop.score(answer, 1, user="ada")
        assert [(score["state"], score["value"]) for score in await shop.scores()] == [
            *(("replaced", 1), ("replaced", 0), ("scored", 1), ("scored", 1))
        ]
        assert own["replaces"] is not None
        for body, code in (
            ({"value": 2}, "out_of_range"),
            ({"value": 1, "name": "stars"}, "bad_name"),
            ({"value": 1, "answer": answer}, "invalid_body"),
            ({}, "invalid_body"),
        ):
            assert (await shop.http.post(path, json=body)).json()["error"]["code"] == code
        assert len(await shop.scores()) == 4


async def test_a_token_is_for_an_answer_and_a_name_that_are_there(tmp_path: Path) -> None:
    async with crowd(tmp_path) as shop:
        answer = await shop.answer()
        for body, code in (
            ({"answer": "chatcmpl-" + "0" * 32}, "unknown_answer"),
            ({"answer": answer, "name": "stars"}, "unknown_name"),
            ({"answer": answer, "seconds": 0}, "invalid_body"),
            ({"answer": answer, "seconds": 1e9}, "invalid_body"),
        ):
            reply = await shop.http.post(f"{ROUTES}/feedback/tokens", json=body)
            assert reply.json()["error"]["code"] == code


async def test_a_token_of_a_deleted_model_is_refused(tmp_path: Path) -> None:
    async with crowd(tmp_path) as shop:
        path = await token_for(shop, await shop.answer())
        assert (await shop.http.delete(ROUTES)).status_code == 200
        await shop.http.post("/api/models", json={"project": "shop", "name": "helper", "base_model": "base"})
        reply = await shop.http.post(path, json={"value": 1})
        assert (reply.status_code, reply.json()["error"]["code"]) == (401, "wrong_token")


async def test_a_token_needs_no_key_and_ends_with_the_key_that_issued_it(tmp_path: Path) -> None:
    keys = (ApiKey(key="all", name="boss"), ApiKey(key="thumbs", scopes=frozenset({"feedback"}), name="shop"))
    bearer = {key.name: {"authorization": f"Bearer {key.key}"} for key in keys}
    async with serving(tmp_path, api_keys=keys) as served, httpx.AsyncClient(base_url=served.url) as http:
        model = {"project": "shop", "name": "helper", "base_model": "base"}
        await http.post("/api/models", json=model, headers=bearer["boss"])
        chat = {"model": NAME, "messages": [{"role": "user", "content": "a"}]}
        answer = (await http.post("/v1/chat/completions", json=chat, headers=bearer["boss"])).json()["id"]
        body = {"answer": answer}
        assert (await http.post(f"{ROUTES}/feedback/tokens", json=body)).status_code == 401
        issued = (await http.post(f"{ROUTES}/feedback/tokens", json=body, headers=bearer["shop"])).json()
        page = {"origin": "https://shop.example"}
        assert (await http.post(issued["path"], json={"value": 1}, headers=page)).status_code == 202
        assert (await http.get(issued["path"], headers=page)).status_code == 405
        for method, path in (("GET", "/api/models"), ("POST", f"{ROUTES}/feedback"), ("POST", "/v1/chat/completions")):
            headers = {"authorization": f"Bearer {issued['token']}"}
            assert (await http.request(method, path, headers=headers)).status_code == 401, path
        scores = await http.get(f"{ROUTES}/feedback", headers=bearer["shop"])
        assert [score["value"] for score in scores.json()["scores"]] == [1]
    async with serving(tmp_path, api_keys=keys[:1]) as served, httpx.AsyncClient(base_url=served.url) as http:
        reply = await http.post(issued["path"], json={"value": 0})
        assert (reply.status_code, reply.json()["error"]["code"]) == (403, "revoked_token")


async def test_a_program_asks_for_a_token(tmp_path: Path) -> None:
    async with crowd(tmp_path) as shop, art.Backend(shop.served.url) as backend:
        model = art.TrainableModel(project="shop", name="helper", base_model="base")
        await model.register(backend)
        token = await model.feedback_token(await shop.answer(), seconds=60)
        assert (await shop.http.post(token.path, json={"value": 1})).status_code == 202
