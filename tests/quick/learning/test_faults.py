"""What becomes of scores when the disk is full, the clock goes back, or the model changes."""

import asyncio
from pathlib import Path
from typing import Any

import pytest

from art_server.shared.clock import Clock
from tests.quick.learning.crowd import ROUTES, Crowd, crowd

pytestmark = pytest.mark.anyio

FOUR = {"batch": 4, "least": 2, "user_share": 1}


class ShiftedClock(Clock):
    """The real clock, which somebody sets."""

    shift = 0.0

    def now(self) -> float:
        return super().now() + self.shift


async def give(shop: Crowd, values: list[int], first: int = 0) -> None:
    for number, value in enumerate(values, first):
        await shop.score(await shop.answer(number), value, user=f"u{number}")


async def test_a_full_disk_refuses_a_score_before_it_is_acknowledged(tmp_path: Path) -> None:
    async with crowd(tmp_path) as shop:
        answers = [await shop.answer(number) for number in range(40)]
        database = shop.served.server.registry.database
        ((pages,),) = database.select("PRAGMA page_count")
        database.connection.execute(f"PRAGMA max_page_count = {pages}")
        statuses: list[int] = []
        for answer in answers:
            body = {"answer": answer, "value": 1, "comment": "x" * 4000}
            statuses.append((await shop.http.post(f"{ROUTES}/feedback", json=body)).status_code)
        assert 507 in statuses and {*statuses} <= {202, 507}
        database.connection.execute("PRAGMA max_page_count = 1000000")
        assert len(await shop.scores(limit=1000)) == statuses.count(202)
        for answer, status in zip(answers, statuses, strict=True):
            if status == 507:
                assert (await shop.score(answer))["state"] == "scored"


async def test_a_clock_that_goes_back_loses_no_score_and_keeps_their_order(tmp_path: Path) -> None:
    clock = ShiftedClock()
    async with crowd(tmp_path, clock) as shop:
        await give(shop, [1, 0])
        clock.shift = -7200.0
        await give(shop, [1, 0, 1], first=2)
        info = await shop.learn(**FOUR)
        assert "-" not in info["reason"]
        await shop.trained(1)
        assert [score["state"] for score in await shop.scores()] == ["trained"] * 4 + ["scored"]


async def test_scores_follow_a_renamed_model_and_stay_behind_a_fork(tmp_path: Path) -> None:
    async with crowd(tmp_path) as shop:
        await shop.learn(**FOUR)
        await give(shop, [1, 0, 1])
        fork = await shop.http.post(f"{ROUTES}/fork", json={"project": "shop", "name": "fork"})
        assert fork.status_code == 200
        info = (await shop.http.get("/api/models/shop/fork/learning")).json()
        assert (info["state"], info["counts"]) == ("off", {})
        answer = await shop.answer(9)
        assert (await shop.http.post(f"{ROUTES}/rename", json={"name": "renamed"})).status_code == 200
        routes = "/api/models/shop/renamed"
        reply = await shop.http.post(f"{routes}/feedback", json={"answer": answer, "value": 0})
        assert reply.status_code == 202
        while (info := (await shop.http.get(f"{routes}/learning")).json())["counts"] != {"trained": 4}:  # noqa: ASYNC110
            await asyncio.sleep(0.02)
        assert (await shop.http.get(f"{ROUTES}/learning")).status_code == 404


async def test_a_policy_that_changes_meanwhile_holds_for_the_scores_that_wait(tmp_path: Path) -> None:
    async with crowd(tmp_path) as shop:
        await shop.learn(**FOUR, names={"thumb": {}, "paid": {}})
        await give(shop, [1, 0])
        await shop.score(await shop.answer(7), 1, name="paid", user="u7")
        await shop.score(await shop.answer(8), 0, name="paid", user="u8")
        await shop.trained(1)
        await shop.score(await shop.answer(9), 1, name="paid", user="u9")
        await shop.learn(**FOUR)
        await give(shop, [1, 0, 1, 0], first=10)
        counts = (await shop.trained(2))["counts"]
        assert counts == {"trained": 8, "scored": 1}, "the name that is gone waits"


async def test_a_body_with_ten_thousand_lines_is_refused_as_a_whole(tmp_path: Path) -> None:
    async with crowd(tmp_path) as shop:
        line = '{"answer": "%s", "value": 1}\n' % await shop.answer()
        headers = {"content-type": "application/x-ndjson"}
        reply = await shop.http.post(f"{ROUTES}/feedback", content=line * 10_000, headers=headers)
        error: dict[str, Any] = reply.json()["error"]
        assert (reply.status_code, error["code"]) == (413, "too_many_lines")
        assert "nothing of it was taken" in error["message"] and await shop.scores() == []


async def test_a_base_that_is_not_loaded_lets_scores_wait(tmp_path: Path) -> None:
    async with crowd(tmp_path) as shop:
        await give(shop, [1, 0, 1, 0])
        shop.served.engine.base = None
        info = await shop.learn(**FOUR)
        assert info["reason"] == "the server has not loaded the base model 'base'"
        assert info["counts"] == {"scored": 4}
