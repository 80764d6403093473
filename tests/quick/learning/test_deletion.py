"""Deletions: what an answer, a session or a user leaves on the disk, and which steps have learned from it."""

import asyncio
import gzip
from pathlib import Path
from typing import Any

import httpx
import pytest

from art_server.errors import StorageFull
from art_server.settings import ApiKey
from tests.quick.learning.crowd import NAME, ROUTES, Crowd, crowd
from tests.quick.server.served import serving

pytestmark = pytest.mark.anyio

FOUR = {"batch": 4, "least": 2, "user_share": 1}
SECRET = b"xylophone 52"


def files_with(folder: Path, text: bytes) -> list[str]:
    """The files under a folder that have a text, also compressed ones."""
    files = [file for file in folder.rglob("*") if file.is_file()]
    contents = {file: file.read_bytes() for file in files}
    contents |= {file: gzip.decompress(contents[file]) for file in files if file.suffix == ".gz"}
    return [str(file.relative_to(folder)) for file, content in contents.items() if text in content]


async def talk(shop: Crowd, session: str, text: str) -> str:
    """The id of an answer in a session."""
    body = {"model": NAME, "messages": [{"role": "user", "content": text}]}
    reply = await shop.http.post(f"/s/{session}/v1/chat/completions", json=body)
    assert reply.status_code == 200, reply.text
    return reply.json()["id"]


async def delete(shop: Crowd, path: str) -> dict[str, Any]:
    reply = await shop.http.delete(f"{ROUTES}/{path}")
    assert reply.status_code == 200, reply.text
    return reply.json()


@pytest.mark.parametrize("is_rolled_back", [False, True])
async def test_a_session_is_deleted_from_the_disk_and_its_steps_are_named(is_rolled_back: bool, tmp_path: Path) -> None:
    async with crowd(tmp_path) as shop:
        await shop.learn(**FOUR)
        for number in range(4):
            text = SECRET.decode() if number == 0 else f"question {number}"
            await talk(shop, f"s{number}", text)
            score = {"session": f"s{number}", "value": number % 2, "comment": f"{text}!"}
            assert (await shop.http.post(f"{ROUTES}/feedback", json=score)).status_code == 202
        await shop.trained(1)
        if is_rolled_back:
            assert (await shop.http.post(f"{ROUTES}/rollback", json={"step": 0})).status_code == 200
        assert len(files_with(tmp_path, SECRET)) >= 3, "ledger, scores, rollouts"
        reply = await delete(shop, "sessions/s0")
        steps = [] if is_rolled_back else [1]
        assert reply == {"answers": 1, "scores": 1, "rollouts": 1, "steps": steps, "continued_by": []}
        assert len(await shop.scores()) == 3
        assert (await shop.http.delete(f"{ROUTES}/sessions/s0")).status_code == 404
        assert (await shop.http.get(f"{ROUTES}/sessions/s0")).json()["num_choices"] == 0
        assert (await shop.http.get(f"{ROUTES}/sessions/s1")).json()["num_choices"] == 1
        for number in (1, 2, 3):
            assert any("train/0001." in file for file in files_with(tmp_path, b"question %d" % number))
    assert files_with(tmp_path, SECRET) == []


async def test_an_answer_is_deleted_with_the_scores_of_its_session(tmp_path: Path) -> None:
    async with crowd(tmp_path) as shop:
        answer = await talk(shop, "one", "a")
        other = await talk(shop, "two", "a")
        await shop.score(answer, user="ada")
        await shop.score(other)
        assert (await shop.http.post(f"{ROUTES}/feedback", json={"session": "one", "value": 1})).status_code == 202
        reply = await delete(shop, f"answers/{answer}")
        assert reply == {"answers": 1, "scores": 2, "rollouts": 0, "steps": [], "continued_by": []}
        again = await shop.http.post(f"{ROUTES}/feedback", json={"answer": answer, "value": 1})
        assert again.json()["error"]["code"] == "unknown_answer"
        assert len(await shop.scores()) == 1


@pytest.mark.parametrize("path", ["answers/chatcmpl-" + "0" * 32, "answers/x", "sessions/nothing"])
async def test_what_is_not_there_is_not_deleted(path: str, tmp_path: Path) -> None:
    async with crowd(tmp_path) as shop:
        assert (await shop.http.delete(f"{ROUTES}/{path}")).status_code == 404


async def test_another_models_answer_stays(tmp_path: Path) -> None:
    async with crowd(tmp_path) as shop:
        await shop.http.post("/api/models", json={"project": "shop", "name": "other", "base_model": "base"})
        answer = await shop.answer()
        assert (await shop.http.delete(f"/api/models/shop/other/answers/{answer}")).status_code == 404
        assert (await shop.score(answer))["state"] == "scored"


async def test_what_a_job_trains_is_deleted_after_the_job(tmp_path: Path) -> None:
    async with crowd(tmp_path) as shop:
        may_end = asyncio.Event()
        shop.served.trainer.events = [lambda _: may_end.wait()]
        answers = [await shop.answer(number) for number in range(2)]
        for number, answer in enumerate(answers):
            await shop.score(answer, number, user="ada")
        await shop.learn(batch=2, user_share=1)
        while "queued" not in (await shop.info())["counts"]:  # noqa: ASYNC110
            await asyncio.sleep(0.02)
        for path in (f"answers/{answers[0]}", "feedback?user=ada"):
            refused = await shop.http.delete(f"{ROUTES}/{path}")
            assert (refused.status_code, refused.json()["error"]["code"]) == (409, "score_in_job")
        may_end.set()
        await shop.trained(1)
        assert (await delete(shop, f"answers/{answers[0]}"))["steps"] == [1]


async def test_a_deletion_that_was_cut_short_is_completed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async with crowd(tmp_path) as shop:
        answer = await talk(shop, "one", SECRET.decode())
        await shop.score(answer, comment=SECRET.decode())

        def refuse(*_: object) -> None:
            raise StorageFull("the disk is full", code="no_disk_space")

        with monkeypatch.context() as patched:
            patched.setattr(shop.served.server.scores, "delete", refuse)
            assert (await shop.http.delete(f"{ROUTES}/answers/{answer}")).status_code == 507
        assert len(await shop.scores()) == 1
        reply = await delete(shop, f"answers/{answer}")
        assert (reply["answers"], reply["scores"]) == (0, 1)
    assert files_with(tmp_path, SECRET) == []


async def test_the_scores_of_a_user_are_deleted(tmp_path: Path) -> None:
    async with crowd(tmp_path) as shop:
        answers = [await shop.answer(number) for number in range(6)]
        for number, answer in enumerate(answers[:4]):
            await shop.score(answer, number % 2, user="ada", comment=SECRET.decode(), id=f"{SECRET.decode()} {number}")
        await shop.learn(**FOUR)
        await shop.trained(1)
        await shop.score(answers[4], user="ada", comment=SECRET.decode())
        await shop.score(answers[5], user="bob")
        reply = await delete(shop, "feedback?user=ada")
        assert reply == {"answers": 0, "scores": 5, "rollouts": 0, "steps": [1], "continued_by": []}
        assert (await shop.info())["counts"] == {"trained": 4, "scored": 1}
        assert (await delete(shop, "feedback?user=ada"))["scores"] == 0
        late = await shop.score(answers[0], user="ada")
        assert (late["state"], late["reason"]) == ("dropped", "already_trained")
    assert files_with(tmp_path, SECRET) == []


async def test_a_key_for_feedback_deletes_nobody(tmp_path: Path) -> None:
    keys = (ApiKey(key="all"), ApiKey(key="thumbs", scopes=frozenset({"feedback"})))
    async with serving(tmp_path, api_keys=keys) as served, httpx.AsyncClient(base_url=served.url) as http:
        model = {"project": "shop", "name": "helper", "base_model": "base"}
        await http.post("/api/models", json=model, headers={"x-api-key": "all"})
        for path in ("feedback?user=ada", "answers/x", "sessions/s"):
            reply = await http.delete(f"{ROUTES}/{path}", headers={"x-api-key": "thumbs"})
            assert reply.status_code == 403, path
