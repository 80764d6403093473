"""Bursts of requests: new ones start for a bounded time in each turn of the event loop. Each gets its time of arrival."""

import asyncio
import time

from starlette.types import ASGIApp, Receive, Scope, Send

from art_server import clock

TURN_SECONDS = 0.06
"""Time in which requests start in one turn. Until its first wait a request takes about a millisecond of the event loop, so
the burst of an engine that samples 64 sequences is not split."""


class Pacing:
    """ASGI middleware. Hundreds of requests that arrive together would block the event loop until each has started;
    here the others wait for the next turn, and timers and answers have theirs in between. `state.arrived_at` of a request
    is its `clock.tick`, before it waits."""

    def __init__(self, app: ASGIApp):
        self._app = app
        self._deadline: float | None = None
        """Of the present turn (time.monotonic); None until a request starts in it."""
        self._waiting: list[asyncio.Future[None]] = []

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http":
            scope.setdefault("state", {})["arrived_at"] = clock.tick()
            await self._start()
        await self._app(scope, receive, send)

    async def _start(self) -> None:
        while self._deadline is not None and time.monotonic() >= self._deadline:
            next_turn: asyncio.Future[None] = asyncio.get_running_loop().create_future()
            self._waiting.append(next_turn)
            await next_turn
        if self._deadline is None:
            self._deadline = time.monotonic() + TURN_SECONDS
            asyncio.get_running_loop().call_soon(self._end_turn)

    def _end_turn(self) -> None:
        self._deadline = None
        waiting, self._waiting = self._waiting, []
        for next_turn in waiting:
            if not next_turn.done():  # else it was cancelled
                next_turn.set_result(None)
