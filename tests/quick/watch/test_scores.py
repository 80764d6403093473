"""What people see of scores: numbers by day, the scores of a rollout, and a canary, over HTTP and from the folder."""

import asyncio
import contextlib
from pathlib import Path
from typing import Any

import pytest

from art_server.store.model_folder import ModelFolder
from art_server.store.server_database import open_server_database
from art_watch import scores
from art_watch.terminal.cli import main as art
from tests.quick.learning.crowd import NAME, Crowd, crowd

pytestmark = pytest.mark.anyio

LOOK = f"/api/look/models/{NAME}"
FOUR = {"batch": 4, "least": 2, "user_share": 1, "names": {"thumb": {}, "tests": {"low": -1}}}


def folder_of(root: Path) -> ModelFolder:
    return ModelFolder(root, *NAME.split("/"))


async def look(shop: Crowd, path: str) -> Any:
    reply = await shop.http.get(f"{LOOK}/{path}")
    assert reply.status_code == 200, reply.text
    return reply.json()


async def teach(shop: Crowd) -> list[str]:
    """Four scored answers, the last with its session, and the answers' ids."""
    answers = [await shop.answer(number) for number in range(3)]
    for number, answer in enumerate(answers):
        await shop.score(answer, number % 2, user=f"u{number}", comment="too long")
    messages = [{"role": "user", "content": "in a session"}]
    reply = await shop.http.post("/s/order-52/v1/chat/completions", json={"model": NAME, "messages": messages})
    feedback = {"session": "order-52", "name": "tests", "value": True, "user": "suite"}
    assert (await shop.http.post(f"/api/models/{NAME}/feedback", json=feedback)).status_code == 202
    return [*answers, reply.json()["id"]]


async def test_scores_are_summed_by_day_name_and_step(tmp_path: Path) -> None:
    async with crowd(tmp_path) as shop:
        assert await look(shop, "learning") == {"info": None, "scores": None}
        await shop.learn(**FOUR)
        await teach(shop)
        await shop.score(await shop.answer(9), 1, user="u9")
        await shop.answer(10)
        await shop.trained(1)
        shown = await look(shop, "learning")
        summed = {(row["name"], row["step"]): (row["number"], row["mean"]) for row in shown["scores"]["days"]}
        assert summed == {("thumb", 0): (4, 0.5), ("tests", 0): (1, 1.0)}
        assert shown["scores"]["answers"] == {"number": 6, "scored": 5}
        assert shown["scores"]["delay"]["number"] == 5 and shown["scores"]["delay"]["p95"] >= 0
        (release,) = shown["scores"]["releases"]
        assert (release["state"], release["step"]) == ("promoted", 1)
        assert shown["info"]["serving_step"] == 1 and shown["info"]["counts"]["trained"] == 4
    assert scores.report(folder_of(tmp_path)) == shown["scores"], "also without the server"


async def test_a_rollout_shows_its_scores_and_who_gave_them(tmp_path: Path) -> None:
    async with crowd(tmp_path) as shop:
        await shop.learn(**FOUR)
        answers = await teach(shop)
        await shop.trained(1)
        groups = (await look(shop, "rollouts/train/1"))["groups"]
        shown = [(await look(shop, f"rollouts/train/1/{group['index']}/0"))["scores"] for group in groups]
        assert [[(score["name"], score["value"], score["state"]) for score in row] for row in shown] == [
            [("thumb", 0, "trained")],
            [("thumb", 1, "trained")],
            [("thumb", 0, "trained")],
            [("tests", 1, "trained")],
        ]
        assert shown[0][0]["comment"] == "too long" and shown[3][0]["target"] == "session order-52"
        assert {len(row[0]["user"]) for row in shown} == {scores.USER_DIGITS}
        listed = await look(shop, f"scores?session=order-52&choice={answers[0].removeprefix('chatcmpl-')}-0")
        assert [score["name"] for score in listed["scores"]] == ["thumb", "tests"]


async def test_a_session_shows_its_scores_in_the_terminal(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    async with crowd(tmp_path) as shop:
        await shop.learn(**FOUR)
        *_, answer = await teach(shop)
        await shop.trained(1)
        await shop.score(answer, 0, user="late")
        arguments = ["show", NAME, "--session", "order-52", "--url", shop.served.url]
        await asyncio.to_thread(art, arguments)
        out = capsys.readouterr().out
        assert "score tests 1.000 by " in out and ", trained step 1" in out
        assert "score thumb 0.000 by " in out and ", dropped: already_trained" in out
        await asyncio.to_thread(art, ["status", "--url", shop.served.url])
        status = capsys.readouterr().out
        assert (
            f"\n{NAME}  serving 1  waiting 0 of 4  dropped 1 (already_trained)\n  0 of 4 scored answers wait" in status
        )


async def test_a_canary_shows_both_rates_with_their_intervals(tmp_path: Path) -> None:
    async with crowd(tmp_path) as shop:
        await shop.learn(**FOUR, release="canary", steps_per_release=1, share=0.5, looks=[40, 80])
        await teach(shop)
        while ((await shop.info())["release"] or {}).get("state") != "canary":  # noqa: ASYNC110
            await asyncio.sleep(0.02)
        for user in range(30):
            messages = [{"role": "user", "content": "hello"}]
            body = {"model": NAME, "messages": messages, "user": f"v{user}"}
            reply = await shop.http.post("/v1/chat/completions", json=body)
            await shop.score(reply.json()["id"], user % 3 > 0, user=f"v{user}")
        release = (await look(shop, "learning"))["info"]["release"]
        assert sum(arm["scored"] for arm in release["arms"]) == 30
        for arm in release["arms"]:
            low, high = arm["interval"]
            assert low < arm["mean"] < high < 1.5


@pytest.mark.parametrize("query", [scores.BY_DAY, scores.DELAYS, scores.MEANS])
def test_sums_over_many_scores_read_one_index_and_no_row(query: str) -> None:
    with contextlib.closing(open_server_database(None)) as database:
        plan = database.select(f"EXPLAIN QUERY PLAN {query}", *[1] * query.count("?"))
    assert plan[0]["detail"].startswith("SEARCH scores USING COVERING INDEX scores_by_day (model=?")


async def test_a_damaged_database_shows_no_scores(tmp_path: Path) -> None:
    async with crowd(tmp_path):
        pass
    (tmp_path / ".server" / "server.sqlite").write_bytes(b"no database")
    assert scores.report(folder_of(tmp_path)) is None
    assert scores.of_choices(folder_of(tmp_path), ["RID-0"]) == []
