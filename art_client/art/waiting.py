"""Reports on stderr what calls to a server wait for: the server's start, or why a call waits.

In a terminal this is one line that changes each second. In a file the reason is printed after ten seconds, then every minute.
"""

import asyncio
import operator
import time
from collections.abc import Generator
from contextlib import contextmanager, suppress

import httpx
from pydantic import ValidationError

from art.bars import StatusLine, is_terminal
from art_protocol.proxies import DIRECT
from art_protocol.wire import Health, ProgressLine

FIRST_SECONDS = 10.0
"""The wait after which a reason is printed."""
START = "start"
"""The beginning of the reasons of reports about the server's start."""
AWAY = "the server, which does not answer"
"""The reason of reports about a server that is away."""
LOOK_SECONDS = 1.0
"""The time between two checks of how long the calls have waited."""


class Waiting:
    """The running calls to one server, and the reports of what they wait for."""

    def __init__(self, base_url: str, api_key: str | None) -> None:
        self._base_url = base_url
        self._headers = {} if api_key is None else {"authorization": f"Bearer {api_key}"}
        self._since: dict[object, tuple[float, str | None]] = {}
        """When each running call began, and its name; None: only the server's start is reported for the call."""
        self._line = StatusLine()
        self._last: ProgressLine | None = None
        """The newest line of the server's start."""
        self._started_at = 0.0
        self._is_ready = False
        """Whether the engine was ready or failed at the last check, so that nothing of a start is left to report."""
        self._away_since: float | None = None
        """When the server did not answer for the first time; None: the server answered the last check."""
        self._task: asyncio.Task[None] | None = None

    @contextmanager
    def call(self, what: str | None) -> Generator[None]:
        """Counts as a running call while the `with` block runs. Reports name the call `what`; for a call without a name only the
        server's start is reported."""
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
        self.end_line()
        if self._task is not None and self._task.get_loop() is loop:
            self._task.cancel()
            self._task = None  # a cancelled task is not yet done when the next call begins

    def report(self, what: str, since: float, reason: str) -> None:
        """Shows the reason after ten seconds. `since` is monotonic time."""
        seconds = time.monotonic() - since
        if seconds >= FIRST_SECONDS:
            self._line.show(f"art: {what} has waited {seconds:.0f} s for {reason}", reason)

    def end_line(self) -> None:
        """Removes the report from a terminal, because nothing waits any longer."""
        self._line.end()

    async def _watch(self) -> None:
        checked_at = 0.0
        while True:
            await asyncio.sleep(LOOK_SECONDS)
            if not self._since:  # the last call ended on another thread's event loop
                return
            named = [call for call in self._since.values() if call[1] is not None]
            since, what = min(named or self._since.values(), key=operator.itemgetter(0))
            now = time.monotonic()
            if self._is_ready and (now - since < FIRST_SECONDS or now - checked_at < FIRST_SECONDS):
                continue
            checked_at = now
            health = await self._health()
            if health is None:
                self._show_away(now, since, what)
                continue
            self._end_away(health)
            self._show_start(health, since)
            if health.waits_for is not None and self._is_ready and what is not None:
                self.report(what, since, health.waits_for)

    def _show_away(self, now: float, since: float, what: str | None) -> None:
        """Shows that the server does not answer: at once where a call has waited, else when the server has been away for long."""
        self._is_ready = False
        self._away_since = self._away_since or now
        server = f"the server at {self._base_url}"
        if what is not None and now - since >= FIRST_SECONDS:
            self._line.show(f"art: {what} has waited {now - since:.0f} s for {server}, which does not answer", AWAY)
        elif now - self._away_since >= FIRST_SECONDS:
            self._line.show(f"art: {server} does not answer; requests wait", AWAY)

    def _end_away(self, health: Health) -> None:
        self._away_since = None
        if self._line.reason == AWAY:
            is_ready = health.engine in ("ready", "failed")
            text = "the server answers again" if is_ready else "the server was restarted; its engine starts"
            self._line.end(f"art: {text}")

    def _show_start(self, health: Health, since: float) -> None:
        """Shows what the server's start does, or that the start has ended."""
        self._is_ready = health.engine in ("ready", "failed")
        lines = [
            line for line in health.progress if not line.text.startswith("trainer")
        ]  # no request waits for the trainer
        newest = lines[-1] if lines else None
        if newest != self._last:  # also after a restart of the server, whose lines begin again
            self._last = newest
            self._started_at = time.monotonic() - (newest.seconds if newest is not None else 0.0)
        if self._is_ready:
            if self._line.reason is not None and self._line.reason.startswith(START):
                text = "the engine could not be started" if health.engine == "failed" else "the engine is ready"
                self._line.end(f"art: {self._start_seconds():.0f} s  {text}")
            return
        text = self._last.text if self._last is not None else (health.waits_for or "the engine starts").rstrip(".")
        if is_terminal() or time.monotonic() - since >= FIRST_SECONDS:
            # In a file a line for each part of the start: the base model, the engine.
            self._line.show(f"art: {self._start_seconds():.0f} s  {text}", f"{START}: {text.partition(':')[0]}")

    def _start_seconds(self) -> float:
        return time.monotonic() - self._started_at if self._last is not None else 0.0

    async def _health(self) -> Health | None:
        with suppress(httpx.HTTPError, ValidationError):
            async with httpx.AsyncClient(headers=self._headers, mounts=DIRECT) as client:
                answer = await client.get(f"{self._base_url}/health", timeout=5.0)
                return Health.model_validate_json(answer.content)
        return None


_known: dict[tuple[str, str | None], Waiting] = {}


def waiting_for(base_url: str, api_key: str | None) -> Waiting:
    """The `Waiting` of a server and key. All calls share it, so that a common reason is printed once. "default" is no
    key: OpenAI clients need one."""
    api_key = None if api_key == "default" else api_key
    if (base_url, api_key) not in _known:
        _known[base_url, api_key] = Waiting(base_url, api_key)
    return _known[base_url, api_key]
