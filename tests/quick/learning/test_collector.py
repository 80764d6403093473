"""Scores become jobs: what a batch takes, what it leaves out, and what is trained once."""

import asyncio
from pathlib import Path
from typing import Any

import pytest

from art_protocol.learning import Policy
from art_server.jobs.trainer_process import TrainerError
from art_server.learning.collector import REST, choose
from art_server.learning.scores import Scores, WaitingScore
from art_server.shared.clock import Clock
from art_server.shared.trainer_messages import Batch
from tests.fakes.vllm import ANSWER, PROMPT
from tests.quick.learning.crowd import ROUTES, Crowd, crowd

pytestmark = pytest.mark.anyio

FOUR = {"batch": 4, "least": 2, "user_share": 1}


async def give(shop: Crowd, values: list[Any], first: int = 0) -> list[dict[str, Any]]:
    return [
        await shop.score(await shop.answer(first + number), value, user=f"u{number}")
        for number, value in enumerate(values)
    ]


async def test_a_full_batch_trains_a_step_and_each_score_once(tmp_path: Path) -> None:
    async with crowd(tmp_path) as shop:
        assert (await shop.learn(**FOUR))["reason"].startswith("0 of 4 scored answers wait")
        scores = await give(shop, [1, 0, 1])
        assert (await shop.info())["counts"] == {"scored": 3}
        scores += await give(shop, [0], first=3)
        info = await shop.trained(1)
        assert (info["serving_step"], info["counts"]) == (1, {"trained": 4})
        (batch,) = shop.served.trainer.batches
        rewards = [trajectory["reward"] for group in batch["groups"] for trajectory in group["trajectories"]]
        assert rewards == [1, 0, 1, 0]
        for score in await shop.scores():
            assert (score["state"], score["trained_step"]) == ("trained", 1)
        again = await shop.score(scores[0]["answer"], 0, user="u0")
        assert (again["state"], again["reason"]) == ("dropped", "already_trained")


class SlowClock(Clock):
    """By this clock a look at the scores takes at least five seconds. A pause takes no time."""

    def __init__(self) -> None:
        self.seconds = 0.0
        self.pauses: list[float] = []

    def monotonic(self) -> float:
        self.seconds += 5.0
        return self.seconds

    async def sleep(self, seconds: float) -> None:
        self.pauses.append(seconds)
        await asyncio.sleep(0.01)


async def test_the_collector_rests_longer_than_it_looks(tmp_path: Path) -> None:
    clock = SlowClock()
    async with crowd(tmp_path, clock) as shop:
        await shop.learn(**FOUR)
        await give(shop, [1, 1, 0, 0])
        await shop.trained(1)
    assert max(clock.pauses) >= 5.0 * REST


async def test_scores_that_are_all_equal_wait(tmp_path: Path) -> None:
    async with crowd(tmp_path) as shop:
        await shop.learn(**FOUR)
        await give(shop, [1, 1, 1, 1, 1])
        assert "all have the same reward" in (await shop.info())["reason"]
        await give(shop, [0], first=9)
        assert (await shop.trained(1))["counts"] == {"trained": 4, "scored": 2}


async def test_waiting_scores_are_read_again_when_other_scores_wait(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    looks: list[int] = []
    read = Scores.waiting

    def waiting(scores: Scores, model: int) -> list[WaitingScore]:
        looks.append(model)
        return read(scores, model)

    monkeypatch.setattr(Scores, "waiting", waiting)
    async with crowd(tmp_path) as shop:
        await shop.learn(**FOUR)
        scores = await give(shop, [1, 1, 1])
        assert "3 of 4" in (await shop.info())["reason"]
        num_looks = len(looks)
        assert "3 of 4" in (await shop.info())["reason"]
        assert len(looks) == num_looks
        (await shop.http.delete(f"{ROUTES}/feedback/{scores[-1]['id']}")).raise_for_status()
        assert "2 of 4" in (await shop.info())["reason"]
        await give(shop, [1], first=9)
        assert "3 of 4" in (await shop.info())["reason"], "as many as before, but another score"


async def test_programs_do_not_train_a_model_that_learns(tmp_path: Path) -> None:
    async with crowd(tmp_path) as shop:
        await shop.learn(**FOUR)
        body = {"groups": []}
        refused = await shop.http.post(f"{ROUTES}/train", json=body)
        assert (refused.status_code, refused.json()["error"]["code"]) == (409, "learning_is_on")
        await shop.http.post(f"{ROUTES}/learning", json={"action": "pause"})
        assert (await shop.http.post(f"{ROUTES}/train", json=body)).status_code == 422


def scored(number: int, user: str | None = None, value: float = 1.0, **more: Any) -> WaitingScore:
    fields: dict[str, Any] = {"target": f"answer {number}", "choices": [str(number)], "step": 5, "answered_at": 0.0}
    return WaitingScore(number, user=user, name="thumb", value=value, **(fields | more))


def test_a_user_has_at_most_a_share_of_a_batch() -> None:
    waiting = [scored(number, "pushy") for number in range(60)] + [scored(60 + n, f"u{n}", 0.0) for n in range(50)]
    chosen = choose(waiting, Policy(batch=40), newest_step=5, now=0.0)
    users = [score.user for unit in chosen.units for score in unit.scores]
    assert (len(users), users.count("pushy")) == (40, 2), "5% of 40"
    assert len(chosen.capped) == 58


def test_old_and_stale_scores_are_left_out_with_their_reason() -> None:
    waiting = [scored(0, answered_at=-8 * 86400.0), scored(1, step=1), scored(2, step=None), scored(3)]
    chosen = choose(waiting, Policy(), newest_step=10, now=0.0)
    assert chosen.expired == {"too_old": [0], "too_stale": [1]}
    assert len(chosen.units) == 2


def test_the_scores_of_an_answer_are_one_reward_and_a_session_has_its_answers() -> None:
    waiting = [
        scored(0, "a", 1.0, target="answer x-0", choices=["x-0"]),
        scored(1, "b", 0.0, target="answer x-0", choices=["x-0"]),
        scored(2, target="session s", choices=["y-0", "z-0"]),
        scored(3, target="answer y-0", choices=["y-0"]),
    ]
    chosen = choose(waiting, Policy(), newest_step=5, now=0.0)
    first, second = chosen.units
    assert [score.number for score in first.scores] == [0, 1]
    assert [score.number for score in second.scores] == [2] and [*second.turn_scores] == ["y-0"]


async def test_scores_survive_a_restart_and_the_ledger(tmp_path: Path) -> None:
    async with crowd(tmp_path) as shop:
        await shop.learn(**FOUR)
        await give(shop, [1, 0, 1])
    for file in (tmp_path / ".server").glob("ledger.sqlite*"):
        file.unlink()
    async with crowd(tmp_path) as shop:
        assert (await shop.info())["counts"] == {"scored": 3}
        await give(shop, [0], first=3)
        assert (await shop.trained(1))["counts"] == {"trained": 4}
        (batch,) = shop.served.trainer.batches
        trajectories = [group.trajectories[0] for group in Batch.model_validate(batch).groups]
        tokens = [sequence.token_ids for trajectory in trajectories for sequence in trajectory.sequences]
        assert tokens == [[*PROMPT, *ANSWER]] * 4


async def test_a_failed_job_gives_its_scores_back_and_pauses(tmp_path: Path) -> None:
    async with crowd(tmp_path) as shop:
        shop.served.trainer.events = [TrainerError("bad_data", "the numbers are not finite", retryable=False)]
        await shop.learn(**FOUR)
        await give(shop, [1, 0, 1, 0])
        while (info := await shop.info())["state"] != "paused":  # noqa: ASYNC110
            await asyncio.sleep(0.02)
        assert info["counts"] == {"scored": 4} and "failed or was cancelled" in info["reason"]
        await shop.http.post(f"{ROUTES}/learning", json={"action": "resume"})
        assert (await shop.trained(1))["counts"] == {"trained": 4}


async def test_a_rollback_drops_what_the_later_steps_had_learned(tmp_path: Path) -> None:
    async with crowd(tmp_path) as shop:
        await shop.learn(**FOUR)
        first = await give(shop, [1, 0, 1, 0])
        await shop.trained(1)
        await give(shop, [1, 0, 1, 0], first=4)
        await shop.trained(2)
        assert (await shop.http.post(f"{ROUTES}/rollback", json={"step": 1})).status_code == 200
        assert (await shop.info())["counts"] == {"trained": 4, "dropped": 4, "dropped: rolled_back": 4}
        late = await shop.score(first[0]["answer"], 0, user="u9")
        assert (late["state"], late["reason"]) == ("dropped", "already_trained")


async def test_a_score_of_an_undone_step_is_kept_and_not_trained(tmp_path: Path) -> None:
    async with crowd(tmp_path) as shop:
        await shop.learn(**FOUR)
        await give(shop, [1, 0, 1, 0])
        await shop.trained(1)
        answer = await shop.answer(9)
        await shop.http.post(f"{ROUTES}/rollback", json={"step": 0})
        score = await shop.score(answer)
        assert (score["state"], score["reason"]) == ("dropped", "rolled_back")


async def test_what_is_asked_for_trains_a_part_of_a_batch(tmp_path: Path) -> None:
    async with crowd(tmp_path) as shop:
        await shop.learn(**FOUR)
        refused = await shop.http.post(f"{ROUTES}/learning", json={"action": "train"})
        assert (refused.status_code, refused.json()["error"]["code"]) == (409, "nothing_to_learn")
        await give(shop, [1, 0])
        assert (await shop.http.post(f"{ROUTES}/learning", json={"action": "train"})).status_code == 200
        assert (await shop.trained(1))["counts"] == {"trained": 2}


async def test_two_who_ask_at_once_get_one_job(tmp_path: Path) -> None:
    async with crowd(tmp_path) as shop:
        await shop.learn(batch=100)
        await give(shop, [1, 0, 1])
        asked = (shop.http.post(f"{ROUTES}/learning", json={"action": "train"}) for _ in range(6))
        statuses = {reply.status_code for reply in await asyncio.gather(*asked)}
        assert statuses == {200, 409}
        assert (await shop.trained(1))["counts"] == {"trained": 3}


async def test_scores_that_cannot_be_trained_are_dropped_with_the_reason(tmp_path: Path) -> None:
    async with crowd(tmp_path) as shop:
        await give(shop, [1, 0, 1, 0])
        shop.served.engine.max_seq_length = len(PROMPT)
        await shop.learn(**FOUR)
        while (await shop.info())["counts"].get("scored"):  # noqa: ASYNC110
            await asyncio.sleep(0.02)
        assert (await shop.info())["counts"] == {"dropped": 4, "dropped: no_trainable_turn": 4}


async def test_a_policy_that_trains_nothing_pauses_and_keeps_the_scores(tmp_path: Path) -> None:
    async with crowd(tmp_path) as shop:
        await shop.learn(**FOUR, config={"learning_rate": [1e-4, 1e-4, 1e-4], "passes": 4})
        await give(shop, [1, 0, 1, 0])
        while (info := await shop.info())["state"] != "paused":  # noqa: ASYNC110
            await asyncio.sleep(0.02)
        assert "learning_rate" in info["reason"] and info["counts"] == {"scored": 4}


async def test_a_deleted_model_takes_its_scores_along(tmp_path: Path) -> None:
    async with crowd(tmp_path) as shop:
        await shop.learn(**FOUR)
        await give(shop, [1, 0])
        assert (await shop.http.delete(ROUTES)).status_code == 200
        database = shop.served.server.registry.database
        for table in ("scores", "learning"):
            assert database.select(f"SELECT COUNT(*) FROM {table}")[0][0] == 0
