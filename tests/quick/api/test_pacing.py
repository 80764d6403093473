"""A burst of requests starts in several turns of the event loop, in order."""

import asyncio
from typing import Any

import pytest

from art_server import clock
from art_server.api import pacing
from art_server.api.pacing import Pacing

pytestmark = pytest.mark.anyio


class Starts:
    """An application that records the turn of the event loop in which each request starts."""

    def __init__(self) -> None:
        self.turn = 0
        self.turns: list[int] = []
        self.order: list[int] = []
        self.arrived_at: list[int] = []
        self.started_at: list[int] = []

    async def count_turns(self) -> None:
        while True:
            self.turn += 1
            await asyncio.sleep(0)

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        self.turns.append(self.turn)
        self.order.append(scope["number"])
        self.arrived_at.append(scope.get("state", {}).get("arrived_at", 0))
        self.started_at.append(clock.tick())


async def burst(num_requests: int, cancelled: range = range(0)) -> Starts:
    starts = Starts()
    paced = Pacing(starts)
    counting = asyncio.create_task(starts.count_turns())
    requests = [
        asyncio.create_task(paced({"type": "http", "number": number}, None, None))  # type: ignore[arg-type]
        for number in range(num_requests)
    ]
    await asyncio.sleep(0)
    for number in cancelled:
        requests[number].cancel()
    async with asyncio.timeout(10):
        await asyncio.gather(*requests, return_exceptions=True)
    counting.cancel()
    return starts


async def test_a_burst_that_takes_long_starts_in_turns_and_in_order(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(pacing, "TURN_SECONDS", 0.0)
    starts = await burst(50)
    assert starts.order == list(range(50))
    assert len(set(starts.turns)) == 50


async def test_requests_of_a_burst_have_arrived_before_the_second_of_them_starts(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Else an answer to the first could count as delivered before the last was requested."""
    monkeypatch.setattr(pacing, "TURN_SECONDS", 0.0)
    starts = await burst(50)
    assert sorted(starts.arrived_at) == starts.arrived_at
    assert starts.arrived_at[-1] < starts.started_at[1]


async def test_cancelled_requests_do_not_start(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pacing, "TURN_SECONDS", 0.0)
    starts = await burst(9, cancelled=range(2, 8))
    assert starts.order == [0, 1, 8]


async def test_a_short_burst_starts_in_one_turn(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pacing, "TURN_SECONDS", 60.0)
    starts = await burst(64)
    assert starts.order == list(range(64)) and len(set(starts.turns)) == 1


async def test_requests_without_a_burst_start_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pacing, "TURN_SECONDS", 0.0)
    starts = Starts()
    paced = Pacing(starts)
    for number in range(3):
        await paced({"type": "http", "number": number}, None, None)  # type: ignore[arg-type]
        assert starts.order[-1] == number
        await asyncio.sleep(0)
    await paced({"type": "lifespan", "number": -1}, None, None)  # type: ignore[arg-type]
    assert starts.order[-1] == -1
