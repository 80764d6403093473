"""Reports on stderr what calls to a server wait for: after ten seconds, and then every minute."""

import asyncio
import sys
import time
from collections.abc import Generator
from contextlib import contextmanager, suppress

import httpx
from pydantic import ValidationError
from tqdm.auto import tqdm

from art.wire import Health

FIRST_SECONDS, AGAIN_SECONDS = 10.0, 60.0
LOOK_SECONDS = 1.0
"""Between two checks of how long the calls have waited."""


class Waiting:
    """The running calls to one server, and the reports of what they wait for."""

    def __init__(self, base_url: str, api_key: str | None) -> None:
        self._base_url = base_url
        self._headers = {} if api_key is None else {"authorization": f"Bearer {api_key}"}
        self._since: dict[object, tuple[float, str]] = {}
        self._told, self._told_at = "", 0.0
        self._task: asyncio.Task[None] | None = None

    @contextmanager
    def call(self, what: str) -> Generator[None]:
        """Counts as a running call while the `with` block runs. Reports name it `what`."""
        key = object()
        self._since[key] = time.monotonic(), what
        loop = asyncio.get_running_loop()
        if self._task is None or self._task.done() or self._task.get_loop() is not loop:
            self._task = asyncio.create_task(self._watch())
        try:
            yield
        finally:
            del self._since[key]
            if not self._since and self._task.get_loop() is loop:
                self._task.cancel()

    def report(self, what: str, since: float, reason: str) -> None:
        """Prints the reason after ten seconds, and the same reason at most once a minute. `since` is monotonic time."""
        now = time.monotonic()
        is_again = reason == self._told and now - self._told_at < AGAIN_SECONDS
        if now - since >= FIRST_SECONDS and not is_again:
            self._told, self._told_at = reason, now
            tqdm.write(f"art: {what} has waited {now - since:.0f} s for {reason}", file=sys.stderr)

    async def _watch(self) -> None:
        while True:
            await asyncio.sleep(LOOK_SECONDS)
            if not self._since:  # the last call ended on another thread's event loop
                return
            since, what = min(self._since.values())
            if time.monotonic() - since < FIRST_SECONDS:
                continue
            reason = await self._reason()
            if reason is not None:
                self.report(what, since, reason)
            await asyncio.sleep(FIRST_SECONDS)

    async def _reason(self) -> str | None:
        """What calls wait for; None if the server is working on them."""
        with suppress(httpx.HTTPError, ValidationError):
            async with httpx.AsyncClient(headers=self._headers) as client:
                answer = await client.get(f"{self._base_url}/health", timeout=5.0)
                return Health.model_validate_json(answer.content).waits_for
        return f"the server at {self._base_url}, which does not answer"


_known: dict[tuple[str, str | None], Waiting] = {}


def waiting_for(base_url: str, api_key: str | None) -> Waiting:
    """The `Waiting` of a server and key. All calls share it, so that a common reason is printed once."""
    if (base_url, api_key) not in _known:
        _known[base_url, api_key] = Waiting(base_url, api_key)
    return _known[base_url, api_key]
