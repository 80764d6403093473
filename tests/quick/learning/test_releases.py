"""Which step serves while newer steps are guarded and tried, also after a restart."""

import asyncio
from pathlib import Path
from typing import Any

import pytest

from art_protocol.learning import Policy
from art_server.errors import StorageFull
from art_server.jobs.trainer_process import TrainerError
from art_server.learning.releases import Releases
from art_server.learning.releasing import opinions_of
from art_server.learning.scores import WaitingScore
from tests.quick.learning.crowd import NAME, ROUTES, Crowd, crowd

pytestmark = pytest.mark.anyio

FOUR = {"batch": 4, "least": 2, "user_share": 1}
CANARY = FOUR | {"release": "canary", "steps_per_release": 1, "share": 0.5, "looks": [40, 80]}


async def teach(shop: Crowd, first: int = 0) -> None:
    """Scores a batch."""
    for number, value in enumerate((1, 0, 1, 0)):
        await shop.score(await shop.answer(first + number), value, user=f"teacher {first + number}")


async def until(shop: Crowd, **wanted: Any) -> dict[str, Any]:
    """How the model learns, once its newest release has these values."""
    while True:
        info = await shop.info()
        release = info["release"] or {}
        if all(release.get(name) == value for name, value in wanted.items()):
            return info
        await asyncio.sleep(0.02)


async def act(shop: Crowd, action: str) -> None:
    assert (await shop.http.post(f"{ROUTES}/learning", json={"action": action})).status_code == 200


async def begin_canary(shop: Crowd, candidate: int = 1) -> None:
    """A canary whose scores make no further batch."""
    await until(shop, state="canary", candidate=candidate)
    await act(shop, "pause")


async def step_of(shop: Crowd, user: str, **more: Any) -> int:
    """The step that answers a user."""
    messages = [{"role": "user", "content": "hello"}]
    headers = more.pop("headers", {})
    body = {"model": NAME, "messages": messages, "user": user, **more}
    reply = await shop.http.post("/v1/chat/completions", json=body, headers=headers)
    return int(reply.headers["x-art-step"])


async def opinions(shop: Crowd, step: int, value: int, number: int) -> None:
    """Scores of users whom a step answers."""
    user = scored = 0
    while scored < number:
        user += 1
        messages = [{"role": "user", "content": f"{step} {user}"}]
        body = {"model": NAME, "messages": messages, "user": f"{step} {user}"}
        reply = await shop.http.post("/v1/chat/completions", json=body)
        if int(reply.headers["x-art-step"]) == step:
            scored += 1
            await shop.score(reply.json()["id"], value, user=f"{step} {user}")


async def test_a_step_serves_when_it_has_passed_the_guard(tmp_path: Path) -> None:
    async with crowd(tmp_path) as shop:
        await shop.learn(**FOUR)
        await teach(shop)
        info = await until(shop, state="promoted")
        assert (info["serving_step"], info["release"]["reason"]) == (1, "step 1 has passed the guard")


async def test_a_broken_step_never_answers_a_user(tmp_path: Path) -> None:
    async with crowd(tmp_path) as shop:
        shop.served.engine.vllm.endless = {f"{NAME}@1"}
        await shop.learn(**FOUR)
        await teach(shop)
        while (info := await shop.info())["counts"].get("dropped: rolled_back") != 4:
            assert info["serving_step"] == 0
            await asyncio.sleep(0.02)
        assert "the guard has refused step 1: 100% of its answers" in info["release"]["reason"]
        shop.served.engine.vllm.endless = set()
        await teach(shop, first=4)
        assert (await until(shop, state="promoted"))["serving_step"] == 1


async def test_three_broken_steps_pause_the_learning(tmp_path: Path) -> None:
    async with crowd(tmp_path) as shop:
        shop.served.engine.vllm.endless = {f"{NAME}@1"}
        await shop.learn(**FOUR)
        for number in range(3):
            await teach(shop, first=4 * number)
            while (await shop.info())["counts"].get("dropped: rolled_back") != 4 * (number + 1):  # noqa: ASYNC110
                await asyncio.sleep(0.02)
        info = await until(shop, state="rolled_back")
        assert info["state"] == "paused" and "3 steps in a row were refused" in info["reason"]


async def test_a_canary_answers_a_share_of_the_users_and_no_rollout(tmp_path: Path) -> None:
    async with crowd(tmp_path) as shop:
        await shop.learn(**CANARY)
        await teach(shop)
        await until(shop, state="canary")
        steps = {user: await step_of(shop, f"u{user}") for user in range(60)}
        assert 15 < sum(steps.values()) < 45
        assert steps == {user: await step_of(shop, f"u{user}") for user in range(60)}, "the same step for each user"
        taken = next(f"u{user}" for user, step in steps.items() if step == 1)
        assert await step_of(shop, taken, model=f"{NAME}@0") == 0
        assert await step_of(shop, taken, headers={"x-art-step": "0"}) == 0
        rollouts = [await step_of(shop, taken, headers={"x-art-session": f"rollout-{number}"}) for number in range(9)]
        assert rollouts == [0] * 9
        info = await shop.info()
        assert "step 1 answers 50% of the users" in info["reason"] and info["serving_step"] == 0


async def test_a_better_step_is_promoted_and_a_worse_one_set_aside(tmp_path: Path) -> None:
    async with crowd(tmp_path) as shop:
        await shop.learn(**CANARY)
        await teach(shop)
        await begin_canary(shop)
        await opinions(shop, 0, 0, 20)
        await opinions(shop, 1, 1, 20)
        info = await until(shop, state="promoted")
        assert "the canary is better: step 1 earned 1.000" in info["release"]["reason"]
        assert (info["serving_step"], await step_of(shop, "anybody")) == (1, 1)
        await act(shop, "resume")
        await begin_canary(shop, 2)
        await opinions(shop, 1, 1, 20)
        await opinions(shop, 2, 0, 20)
        info = await until(shop, state="rolled_back")
        assert "the canary is not better: step 2 earned 0.000" in info["release"]["reason"]
        while (info := await shop.info())["newest_step"] != 1:  # noqa: ASYNC110
            await asyncio.sleep(0.02)
        assert info["serving_step"] == 1


async def test_a_canary_survives_a_restart(tmp_path: Path) -> None:
    async with crowd(tmp_path) as shop:
        await shop.learn(**CANARY)
        await teach(shop)
        await begin_canary(shop)
        steps = [await step_of(shop, f"u{user}") for user in range(30)]
        await opinions(shop, 0, 0, 20)
    async with crowd(tmp_path) as shop:
        assert steps == [await step_of(shop, f"u{user}") for user in range(30)]
        await opinions(shop, 1, 1, 20)
        assert (await until(shop, state="promoted"))["serving_step"] == 1


async def test_an_engine_that_dies_delays_the_guard_and_does_not_disturb_a_canary(tmp_path: Path) -> None:
    async with crowd(tmp_path) as shop:
        await shop.learn(**CANARY)

        async def die(_: Any) -> None:
            shop.served.engine.state = "failed"

        shop.served.trainer.events = [die]
        await teach(shop)
        while (await shop.info())["newest_step"] != 1:  # noqa: ASYNC110
            await asyncio.sleep(0.02)
        assert (await shop.info())["release"]["state"] == "steps"
        shop.served.engine.state = "ready"
        shop.served.server.releasing.wake()
        await begin_canary(shop)
        steps = [await step_of(shop, f"u{user}") for user in range(30)]
        shop.served.engine.adapters.clear()  # as a new engine has none
        assert steps == [await step_of(shop, f"u{user}") for user in range(30)]
        assert set(steps) == {0, 1}


async def test_people_decide_on_a_release(tmp_path: Path) -> None:
    async with crowd(tmp_path) as shop:
        refused = await shop.http.post(f"{ROUTES}/learning", json={"action": "promote"})
        assert (refused.status_code, refused.json()["error"]["code"]) == (409, "no_release")
        await shop.learn(**CANARY)
        await teach(shop)
        await until(shop, state="canary")
        await act(shop, "pause")
        refused = await shop.http.post(f"{ROUTES}/train", json={"groups": []})
        assert (refused.status_code, refused.json()["error"]["code"]) == (409, "release_is_open")
        assert (await shop.http.delete(f"{ROUTES}/learning")).status_code == 409
        await act(shop, "promote")
        assert (await shop.info())["serving_step"] == 1
        await act(shop, "resume")
        await teach(shop, first=4)
        await until(shop, state="canary", candidate=2)
        await act(shop, "rollback")
        info = await until(shop, state="rolled_back")
        assert (info["serving_step"], info["newest_step"]) == (1, 1)


async def test_a_release_without_a_step_can_be_ended(tmp_path: Path) -> None:
    async with crowd(tmp_path) as shop:
        shop.served.trainer.events = [TrainerError("bad_data", "the numbers are not finite", retryable=False)]
        await shop.learn(**CANARY)
        await teach(shop)
        while (await shop.info())["state"] != "paused":  # noqa: ASYNC110
            await asyncio.sleep(0.02)
        assert (await shop.http.delete(f"{ROUTES}/learning")).status_code == 409
        await act(shop, "rollback")
        assert (await shop.info())["release"]["state"] == "rolled_back"
        assert (await shop.http.delete(f"{ROUTES}/learning")).status_code == 200


async def test_a_rollback_by_hand_ends_the_canary(tmp_path: Path) -> None:
    async with crowd(tmp_path) as shop:
        await shop.learn(**CANARY)
        await teach(shop)
        await until(shop, state="canary")
        assert (await shop.http.post(f"{ROUTES}/rollback", json={"step": 0})).status_code == 200
        info = await until(shop, state="rolled_back")
        assert info["release"]["reason"] == "somebody has rolled the model back to step 0"
        assert {await step_of(shop, f"u{user}") for user in range(20)} == {0}


def test_answers_of_a_session_are_one_users_opinion_in_a_canary() -> None:
    def scored(number: int, user: str | None, session: str | None) -> WaitingScore:
        return WaitingScore(number, f"answer {number}", [str(number)], user, "thumb", 1.0, 3, 0.0, session)

    scores = [
        scored(1, "u", "s"),
        scored(2, None, "s"),
        scored(3, None, "s"),
        scored(4, None, None),
        scored(5, None, None),
    ]
    users = [opinion.user for opinion in opinions_of(scores, Policy())[3]]
    assert users == ["u", "s", "s", "answer 4", "answer 5"]


async def test_a_step_that_passed_before_a_crash_serves(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    promote, writes = Releases.promote, iter([StorageFull("the disk is full", code="storage_full")])

    def promote_late(*arguments: Any) -> None:
        if error := next(writes, None):
            raise error
        promote(*arguments)

    monkeypatch.setattr(Releases, "promote", promote_late)
    async with crowd(tmp_path) as shop:
        await shop.learn(**FOUR)
        await teach(shop)
        await until(shop, state="steps", passed=1)
        await shop.score(await shop.answer(9), 1)  # a score asks for a look
        assert (await until(shop, state="promoted"))["serving_step"] == 1
