"""Floods of scores are refused by key and by token, and the answer says when to come again."""

from pathlib import Path

import pytest

from art_server.api.score_rates import PER_TOKEN, ScoreRates
from art_server.errors import TooMany
from tests.fakes.clock import FakeClock
from tests.quick.learning.crowd import ROUTES, crowd


def test_each_sender_has_a_number_of_scores_in_a_minute() -> None:
    clock = FakeClock()
    rates = ScoreRates(clock)
    rates.count("a", 3, 5)
    rates.count("b", 5, 5)
    with pytest.raises(TooMany) as refused:
        rates.count("a", 3, 5)
    rates.count("a", 2, 5)
    clock.advance(refused.value.wait_seconds - 1)
    with pytest.raises(TooMany):
        rates.count("a", 1, 5)
    clock.advance(1)
    rates.count("a", 5, 5)


@pytest.mark.anyio
async def test_a_tokens_flood_is_refused_and_the_others_go_on(tmp_path: Path) -> None:
    clock = FakeClock(stands=True)
    async with crowd(tmp_path) as shop:
        shop.served.app.state.score_rates = ScoreRates(clock)
        tokens = [{"answer": await shop.answer(number)} for number in range(2)]
        replies = [await shop.http.post(f"{ROUTES}/feedback/tokens", json=body) for body in tokens]
        flooding, other = [reply.json()["path"] for reply in replies]
        statuses = [
            (await shop.http.post(flooding, json={"value": number % 2})).status_code for number in range(PER_TOKEN + 1)
        ]
        assert statuses == [202] * PER_TOKEN + [429]
        refused = await shop.http.post(flooding, json={"value": 1})
        assert refused.json()["error"]["code"] == "too_many_scores" and refused.json()["error"]["retryable"]
        assert (await shop.http.post(other, json={"value": 1})).status_code == 202
        clock.advance(int(refused.headers["retry-after"]))
        assert (await shop.http.post(flooding, json={"value": 1})).status_code == 202


@pytest.mark.anyio
async def test_a_keys_flood_is_refused_whole(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("art_server.api.learning.PER_KEY", 3)
    async with crowd(tmp_path) as shop:
        shop.served.app.state.score_rates = ScoreRates(FakeClock(stands=True))
        line = f'{{"answer": "{await shop.answer()}", "value": 1}}\n'
        statuses = [
            (await shop.http.post(f"{ROUTES}/feedback", content=line * number)).status_code for number in (2, 2, 1, 1)
        ]
        assert statuses == [202, 429, 202, 429]
