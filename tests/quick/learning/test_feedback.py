"""Scores over HTTP: which answer an id names, what is refused, what replaces what, and what is on disk before the reply."""

import asyncio
import json
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.quick.learning.crowd import NAME, ROUTES, crowd

pytestmark = pytest.mark.anyio


async def test_the_id_of_an_answer_of_any_api_names_its_record(tmp_path: Path) -> None:
    async with crowd(tmp_path) as shop:
        chat = await shop.answer()
        response = await shop.http.post("/v1/responses", json={"model": NAME, "input": "hello"})
        ids = [chat, response.json()["id"], f"{chat.removeprefix('chatcmpl-')}-0"]
        for answer in ids:
            score = await shop.score(answer)
            record = answer.removeprefix("chatcmpl-").removeprefix("resp_").removesuffix("-0")
            assert (score["answer"], score["state"], score["step"]) == (f"{record}-0", "scored", 0)
        events = await shop.http.post(
            "/v1/chat/completions",
            json={"model": NAME, "messages": [{"role": "user", "content": "hello"}], "stream": True},
        )
        first = json.loads(events.text.partition("data: ")[2].partition("\n")[0])
        assert (await shop.score(first["id"]))["state"] == "scored"


REFUSED: dict[str, tuple[dict[str, Any], int, str]] = {
    "an answer that is not there": ({"answer": "chatcmpl-" + "0" * 32}, 404, "unknown_answer"),
    "no id": ({"answer": "the second one"}, 404, "unknown_answer"),
    "a session that is not there": ({"answer": None, "session": "s"}, 404, "unknown_answer"),
    "neither": ({"answer": None}, 422, "invalid_body"),
    "both": ({"session": "s"}, 422, "invalid_body"),
    "another name": ({"name": "stars"}, 422, "unknown_name"),
    "above the range": ({"value": 1.5}, 422, "out_of_range"),
    "not finite": ({"value": 1e999}, 422, "invalid_body"),
    "no number": ({"value": "good"}, 422, "invalid_body"),
    "an unknown field": ({"score": 1}, 422, "invalid_body"),
}


@pytest.mark.parametrize("fault", REFUSED)
async def test_a_wrong_score_is_refused_and_changes_nothing(fault: str, tmp_path: Path) -> None:
    change, status, code = REFUSED[fault]
    async with crowd(tmp_path) as shop:
        body = {"answer": await shop.answer(), "value": 1, **change}
        text = json.dumps(body).replace("Infinity", "1e999")
        reply = await shop.http.post(f"{ROUTES}/feedback", content=text)
        assert (reply.status_code, reply.json()["error"]["code"]) == (status, code), reply.text
        assert await shop.scores() == []


async def test_an_answer_of_another_model_is_unknown(tmp_path: Path) -> None:
    async with crowd(tmp_path) as shop:
        await shop.http.post("/api/models", json={"project": "shop", "name": "other", "base_model": "base"})
        answer = await shop.answer()
        reply = await shop.http.post("/api/models/shop/other/feedback", json={"answer": answer, "value": 1})
        assert (reply.status_code, reply.json()["error"]["code"]) == (404, "unknown_answer")


async def test_the_same_id_and_content_is_the_same_score(tmp_path: Path) -> None:
    async with crowd(tmp_path) as shop:
        answer = await shop.answer()
        first = await shop.score(answer, 1, id="mine")
        assert await shop.score(answer, 1, id="mine") == first
        reply = await shop.http.post(f"{ROUTES}/feedback", json={"answer": answer, "value": 0, "id": "mine"})
        assert (reply.status_code, reply.json()["error"]["code"]) == (409, "id_reused")
        assert len(await shop.scores()) == 1


async def test_a_changed_mind_replaces_and_another_user_adds(tmp_path: Path) -> None:
    async with crowd(tmp_path) as shop:
        answer = await shop.answer()
        first = await shop.score(answer, 1, user="ada")
        await shop.score(answer, 1, user="bob")
        second = await shop.score(answer, 0, user="ada")
        assert second["replaces"] == first["id"]
        assert [(score["state"], score["value"]) for score in await shop.scores()] == [
            ("replaced", 1),
            ("scored", 1),
            ("scored", 0),
        ]
        assert "ada" not in (tmp_path / ".server" / "server.sqlite").read_bytes().decode(errors="replace")


async def test_a_score_is_read_and_taken_back(tmp_path: Path) -> None:
    async with crowd(tmp_path) as shop:
        score = await shop.score(await shop.answer(), True, comment="nice")
        assert (await shop.http.get(f"{ROUTES}/feedback/{score['id']}")).json()["comment"] == "nice"
        taken = await shop.http.delete(f"{ROUTES}/feedback/{score['id']}")
        assert taken.json()["state"] == "retracted"
        assert (await shop.http.get(f"{ROUTES}/feedback/F0")).status_code == 404
        assert await shop.scores(state="scored") == []
        assert (await shop.http.get(f"{ROUTES}/feedback", params={"state": "x"})).status_code == 422


async def test_a_bad_line_does_not_lose_the_others(tmp_path: Path) -> None:
    async with crowd(tmp_path) as shop:
        answers = [await shop.answer(number) for number in range(3)]
        lines = [json.dumps({"answer": answer, "value": 1}) for answer in answers]
        lines[1:1] = ["{", json.dumps({"answer": "x", "value": 1})]
        reply = await shop.http.post(
            f"{ROUTES}/feedback", content="\n".join(lines), headers={"content-type": "application/x-ndjson"}
        )
        results = [json.loads(line) for line in reply.text.splitlines()]
        assert [result.get("state") or result["error"]["code"] for result in results] == [
            *("scored", "invalid_body", "unknown_answer", "scored", "scored")
        ]
        assert [result["line"] for result in results if "error" in result] == [2, 3]
        too_many = await shop.http.post(f"{ROUTES}/feedback", content="{}\n" * 1001)
        assert (too_many.status_code, len(await shop.scores())) == (413, 3)


async def test_a_session_is_scored_with_its_turns_so_far(tmp_path: Path) -> None:
    async with crowd(tmp_path) as shop:
        session = f"{shop.served.url}/s/one/v1/chat/completions"
        body = {"model": NAME, "messages": [{"role": "user", "content": "a"}]}
        await shop.http.post(session, json=body)
        reply = await shop.http.post(f"{ROUTES}/feedback", json={"session": "one", "value": 0.5})
        assert (reply.status_code, reply.json()["session"]) == (202, "one"), reply.text


async def test_a_key_for_feedback_does_nothing_else_and_sees_its_own_scores(tmp_path: Path) -> None:
    from art_server.settings import ApiKey

    keys = (
        ApiKey(key="all"),
        ApiKey(key="thumbs", scopes=frozenset({"feedback"}), name="page"),
        ApiKey(key="asks", scopes=frozenset({"infer"})),
    )
    from tests.quick.server.served import serving

    async with serving(tmp_path, api_keys=keys) as served:
        clients = {
            key.key: httpx.AsyncClient(base_url=served.url, headers={"authorization": f"Bearer {key.key}"})
            for key in keys
        }
        await clients["all"].post("/api/models", json={"project": "shop", "name": "helper", "base_model": "base"})
        chat = {"model": NAME, "messages": [{"role": "user", "content": "a"}]}
        answer = (await clients["asks"].post("/v1/chat/completions", json=chat)).json()["id"]
        body = {"answer": answer, "value": 1}
        assert (await clients["asks"].post(f"{ROUTES}/feedback", json=body)).status_code == 403
        own = await clients["thumbs"].post(f"{ROUTES}/feedback", json=body)
        others = await clients["all"].post(f"{ROUTES}/feedback", json=body)
        assert (own.status_code, others.status_code) == (202, 202)
        for method, path in (
            *(("GET", "/api/models"), ("GET", f"{ROUTES}/learning"), ("PUT", f"{ROUTES}/learning")),
            *(("POST", "/v1/chat/completions"), ("POST", f"{ROUTES}/train"), ("DELETE", ROUTES)),
        ):
            assert (await clients["thumbs"].request(method, path)).status_code == 403, path
        assert len((await clients["thumbs"].get(f"{ROUTES}/feedback")).json()["scores"]) == 1
        assert len((await clients["all"].get(f"{ROUTES}/feedback")).json()["scores"]) == 2
        other = f"{ROUTES}/feedback/{others.json()['id']}"
        assert (await clients["thumbs"].delete(other)).status_code == 404
        for client in clients.values():
            await client.aclose()


@pytest.mark.parametrize("refusal", [{"headers": {"x-art-learn": "never"}}, {"store": False}])
async def test_an_answer_that_may_not_teach_is_refused(refusal: dict[str, Any], tmp_path: Path) -> None:
    async with crowd(tmp_path) as shop:
        body = {"model": NAME, "messages": [{"role": "user", "content": "a"}]}
        headers = refusal.pop("headers", {})
        answer = await shop.http.post("/v1/chat/completions", json=body | refusal, headers=headers)
        assert answer.json()["id"] == f"chatcmpl-{answer.headers['x-art-answer']}"
        reply = await shop.http.post(f"{ROUTES}/feedback", json={"answer": answer.json()["id"], "value": 1})
        assert (reply.status_code, reply.json()["error"]["code"]) == (409, "not_for_learning")


async def test_the_commands_teach_a_running_server(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    from art_watch.terminal.cli import main as art

    async def run(*arguments: object) -> tuple[Any, str, str]:
        def call() -> Any:
            try:
                art([str(argument) for argument in arguments])
            except SystemExit as end:
                return end.code
            return 0

        code = await asyncio.to_thread(call)
        captured = capsys.readouterr()
        return code, captured.out, captured.err

    async with crowd(tmp_path / "art") as shop:
        url = ("--url", shop.served.url)
        code, out, err = await run("learn", NAME, "--batch", "2", "--learning-rate", "1e-4", "--user-share", "1", *url)
        assert (code, err) == (0, "") and "0 of 2 scored answers wait" in out and "learning is on" in out
        assert (await shop.info())["policy"]["config"]["learning_rate"] == 1e-4
        scores = [{"answer": await shop.answer(number), "value": number} for number in range(2)]
        file = tmp_path / "scores.jsonl"
        file.write_text("\n".join(map(json.dumps, [scores[0], {"answer": "x", "value": 1}, scores[1]])))
        code, out, err = await run("feedback", file, "--model", NAME, *url)
        assert code == 2 and "2 of 3 scores taken" in out and f"{file}, line 2: answer 'x' is no answer" in err
        await shop.trained(1)
        assert "scores: 2 trained" in (await run("learn", NAME, *url))[1]
        paused = f"learning is paused: somebody paused it. It goes on with `art learn {NAME} --resume`"
        assert paused in " ".join((await run("learn", NAME, "--pause", *url))[1].split())
        assert '"state": "off"' in (await run("learn", NAME, "--off", "--json", *url))[1]
