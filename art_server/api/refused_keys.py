"""Requests that are refused for their key: counted by session, and named in the log. The key itself is neither kept nor logged."""

import hashlib
import logging

from art_server.errors import ServerError
from art_server.shared.clock import REAL, Clock
from art_server.shared.refusals import Refusals

logger = logging.getLogger(__name__)

SECONDS = 60.0
"""The time until a key gets another line."""
MAX_KEYS = 20
"""Lines in that time: a program that tries many keys does not fill the log."""
NOBODY = ""
"""The owner of the counts, because a refused key has no owner."""


class RefusedKeys:
    """For the event loop only."""

    def __init__(self, clock: Clock = REAL):
        self._clock = clock
        self._sessions = Refusals()
        self._lines: dict[bytes, float] = {}
        """When a key got a line, by the key's hash."""

    def add(self, error: ServerError, presented: str, session: str | None, path: str, address: str) -> None:
        """Counts a request that was refused with `error`."""
        reason = error.message.partition(": ")[0]
        if session is not None:
            self._sessions.add(NOBODY, session, reason)
        now = self._clock.monotonic()
        self._lines = {key: at for key, at in self._lines.items() if now - at < SECONDS}
        key = hashlib.sha256(presented.encode()).digest()
        if not presented or key in self._lines or len(self._lines) >= MAX_KEYS:
            return
        self._lines[key] = now
        logger.warning(
            "a request of %s to %r was refused: %s. Further requests with this key get no line for a minute",
            address,
            path[:100],
            reason,
        )

    def of_session(self, session: str) -> dict[str, int]:
        """The number of refused requests that named the session, by the reason."""
        return self._sessions.of_session(NOBODY, session)
