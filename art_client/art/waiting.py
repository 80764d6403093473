"""Reports on stderr what calls to a server wait for: what the server's start has done, and why a call waits.

A line of the server's start is printed within a second; while an engine starts, no ten seconds pass without a line. Other
reasons are printed after ten seconds, and then every minute.
"""

import asyncio
import sys
import time
from collections.abc import Generator
from contextlib import contextmanager, suppress

import httpx
from pydantic import ValidationError
from tqdm.auto import tqdm

from art_protocol.proxies import DIRECT
from art_protocol.wire import Health, ProgressLine

FIRST_SECONDS, AGAIN_SECONDS = 10.0, 60.0
"""The wait after which a reason is printed, and the time until the same reason is printed again."""
START_SECONDS = 8.0
"""Longest time without a line while an engine starts."""
LOOK_SECONDS = 1.0
"""The time between two checks of how long the calls have waited."""


class Waiting:
    """The running calls to one server, and the reports of what they wait for."""

    def __init__(self, base_url: str, api_key: str | None) -> None:
        self._base_url = base_url
        self._headers = {} if api_key is None else {"authorization": f"Bearer {api_key}"}
        self._since: dict[object, tuple[float, str]] = {}
        self._last_reason, self._printed_at = "", 0.0
        self._last_line = 0
        self._started_at = 0.0
        self._is_ready = False
        """Whether the engine was ready or failed at the last check, so that nothing of a start is left to report."""
        self._task: asyncio.Task[None] | None = None

    @contextmanager
    def call(self, what: str) -> Generator[None]:
        """Counts as a running call while the `with` block runs. Reports name the call `what`."""
        key = object()
        self._since[key] = time.monotonic(), what
        loop = asyncio.get_running_loop()
        if self._task is None or self._task.done() or self._task.get_loop() is not loop:
            self._task = asyncio.create_task(self._watch())
        try:
            yield
        finally:
            del self._since[key]
            if not self._since:
                self._stop_watching(loop)

    def _stop_watching(self, loop: asyncio.AbstractEventLoop) -> None:
        if self._task is not None and self._task.get_loop() is loop:
            self._task.cancel()
            self._task = None  # a cancelled task is not yet done when the next call begins

    def report(self, what: str, since: float, reason: str) -> None:
        """Prints the reason after ten seconds, and the same reason at most once a minute. `since` is monotonic time."""
        now = time.monotonic()
        is_again = reason == self._last_reason and now - self._printed_at < AGAIN_SECONDS
        if now - since >= FIRST_SECONDS and not is_again:
            self._print(f"{what} has waited {now - since:.0f} s for {reason}", reason)

    async def _watch(self) -> None:
        checked_at = 0.0
        while True:
            await asyncio.sleep(LOOK_SECONDS)
            if not self._since:  # the last call ended on another thread's event loop
                return
            since, what = min(self._since.values())
            now = time.monotonic()
            if self._is_ready and (now - since < FIRST_SECONDS or now - checked_at < FIRST_SECONDS):
                continue
            checked_at = now
            health = await self._health()
            if health is None:
                reason = f"the server at {self._base_url}, which does not answer"
                self.report(what, since, reason)
                continue
            self._show_start(health)
            if health.waits_for is not None and self._is_ready:
                self.report(what, since, health.waits_for)

    def _show_start(self, health: Health) -> None:
        """Prints what the server's start has done since the last report, or that the start still runs."""
        was_ready, self._is_ready = self._is_ready, health.engine in ("ready", "failed")
        new = [line for line in health.progress if line.number > self._last_line]
        if new:
            self._last_line = new[-1].number
            self._started_at = time.monotonic() - new[-1].seconds
        if self._is_ready and (was_ready or not self._last_reason):
            return  # the engine was ready before this program's first call
        for line in new:
            self._print(_as_text(line))
        if not self._is_ready and time.monotonic() - self._printed_at >= START_SECONDS:
            seconds = time.monotonic() - self._started_at if self._last_line else 0.0
            self._print(f"{seconds:4.0f} s  waiting for {(health.waits_for or 'the engine').rstrip('.')}")

    def _print(self, text: str, reason: str = "start") -> None:
        self._last_reason, self._printed_at = reason, time.monotonic()
        tqdm.write(f"art: {text}", file=sys.stderr)

    async def _health(self) -> Health | None:
        with suppress(httpx.HTTPError, ValidationError):
            async with httpx.AsyncClient(headers=self._headers, mounts=DIRECT) as client:
                answer = await client.get(f"{self._base_url}/health", timeout=5.0)
                return Health.model_validate_json(answer.content)
        return None


def _as_text(line: ProgressLine) -> str:
    return f"{line.seconds:4.0f} s  {line.text}"


_known: dict[tuple[str, str | None], Waiting] = {}


def waiting_for(base_url: str, api_key: str | None) -> Waiting:
    """The `Waiting` of a server and key. All calls share it, so that a common reason is printed once. "default" is no
    key: OpenAI clients need one."""
    api_key = None if api_key == "default" else api_key
    if (base_url, api_key) not in _known:
        _known[base_url, api_key] = Waiting(base_url, api_key)
    return _known[base_url, api_key]
