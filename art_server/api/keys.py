"""The API keys that a server accepts, and how much of their limits is used."""

import hmac
import math
import time
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field

from art_server.errors import TooMany
from art_server.settings import ApiKey

WINDOW_SECONDS = 60.0
BUSY_SECONDS = 1
"""When to try again while all of a key's concurrent requests run: none of them says when it ends."""


@dataclass(slots=True)
class Usage:
    """What the owner of a limited key does."""

    num_running: int = 0
    starts: deque[float] = field(default_factory=deque)
    """Of the requests in the last window, oldest first."""

    def enter(self, key: ApiKey, now: float) -> None:
        """Count a request that begins; the caller takes it off `num_running` when it has ended.

        Raises:
            TooMany: a limit is reached; the request does not count.
        """
        if key.concurrent is not None and self.num_running >= key.concurrent:
            raise TooMany(
                f"this API key may have {key.concurrent} requests at a time (`concurrent`), and has them: wait for one",
                code="too_many_concurrent",
                retry_after_seconds=BUSY_SECONDS,
            )
        if key.requests_per_minute is not None:
            while self.starts and self.starts[0] + WINDOW_SECONDS <= now:
                self.starts.popleft()
            if len(self.starts) >= key.requests_per_minute:
                wait = math.ceil(self.starts[-key.requests_per_minute] + WINDOW_SECONDS - now)
                raise TooMany(
                    f"this API key may make {key.requests_per_minute} requests a minute (`requests_per_minute`), and has "
                    f"made them: try again in {wait} s",
                    code="rate_limited",
                    retry_after_seconds=wait,
                )
            self.starts.append(now)
        self.num_running += 1


class Keys:
    """The accepted keys. None of them: the server is open to its own machine."""

    def __init__(self, keys: Sequence[ApiKey]):
        self._usages: dict[str, Usage] = {}
        self.replace(keys)

    def replace(self, keys: Sequence[ApiKey]) -> None:
        """Accept these keys from here on, and no others. What their owners have used of their limits stays."""
        self._keys = [(key.key.encode(), key) for key in keys]

    def __bool__(self) -> bool:
        return bool(self._keys)

    def find(self, presented: str) -> ApiKey | None:
        """The key that a request carries; it may have expired."""
        found: ApiKey | None = None
        given = presented.encode()
        for secret, key in self._keys:  # all are compared, so that the time taken tells nothing
            if hmac.compare_digest(secret, given):
                found = key
        return found

    def find_owner(self, owner: str) -> ApiKey | None:
        """A key of `owner` that has not expired."""
        return next((k for _, k in self._keys if k.owner == owner and not k.is_expired), None)

    def enter(self, key: ApiKey) -> Usage:
        """Count a request under a limited key; see `Usage.enter`."""
        usage = self._usages.setdefault(key.owner, Usage())
        usage.enter(key, time.monotonic())
        return usage
