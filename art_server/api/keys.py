"""The API keys that a server accepts, and the current usage of their limits."""

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
"""The `retry-after` while all of a key's concurrent requests run; when one will end is unknown."""


@dataclass(slots=True)
class Usage:
    """The requests of one owner of a limited key."""

    num_running: int = 0
    starts: deque[float] = field(default_factory=deque)
    """Start times of the requests in the last window, oldest first."""

    def enter(self, key: ApiKey, now: float) -> None:
        """Counts a request that begins. The caller subtracts it from `num_running` when it has ended.

        Raises:
            TooMany: a limit is reached; the request does not count.
        """
        if key.concurrent is not None and self.num_running >= key.concurrent:
            raise TooMany(
                f"this API key may have {key.concurrent} requests at a time (`concurrent`), and "
                "all of them are running: wait until one ends",
                code="too_many_concurrent",
                retry_after_seconds=BUSY_SECONDS,
            )
        if key.requests_per_minute is not None:
            while self.starts and self.starts[0] + WINDOW_SECONDS <= now:
                self.starts.popleft()
            if len(self.starts) >= key.requests_per_minute:
                wait = math.ceil(self.starts[-key.requests_per_minute] + WINDOW_SECONDS - now)
                raise TooMany(
                    f"this API key may make {key.requests_per_minute} requests a minute (`requests_per_minute`), and "
                    f"all are used: try again in {wait} s",
                    code="rate_limited",
                    retry_after_seconds=wait,
                )
            self.starts.append(now)
        self.num_running += 1


class Keys:
    """The accepted keys. Without any, the server is open to every program of its own machine."""

    def __init__(self, keys: Sequence[ApiKey]):
        self._usages: dict[str, Usage] = {}
        self.replace(keys)

    def replace(self, keys: Sequence[ApiKey]) -> None:
        """Accepts only these keys from this call on. The usage of their owners stays."""
        self._keys = [(key.key.encode(), key) for key in keys]

    def __bool__(self) -> bool:
        return bool(self._keys)

    def find(self, presented: str) -> ApiKey | None:
        """The accepted key that equals the presented one, None without one. It may have expired."""
        found: ApiKey | None = None
        given = presented.encode()
        for secret, key in self._keys:  # compares all keys, so that the time taken reveals nothing
            if hmac.compare_digest(secret, given):
                found = key
        return found

    def find_owner(self, owner: str) -> ApiKey | None:
        """A key of `owner` that has not expired."""
        return next((k for _, k in self._keys if k.owner == owner and not k.is_expired), None)

    def enter(self, key: ApiKey) -> Usage:
        """Counts a request of a limited key; see `Usage.enter`."""
        usage = self._usages.setdefault(key.owner, Usage())
        usage.enter(key, time.monotonic())
        return usage
