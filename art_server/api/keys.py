"""The API keys that a server accepts, and the current usage of their limits."""

import hmac
import math
import time
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field

from art_server.errors import BadRequest, TooMany
from art_server.settings import ApiKey

WINDOW_SECONDS = 60.0
BUSY_SECONDS = 1
"""The `retry-after` while all of a key's concurrent requests run; when one will end is unknown."""


@dataclass(slots=True)
class Usage:
    """The requests of one owner of a limited key. A request for several choices counts as so many."""

    num_running: int = 0
    starts: deque[float] = field(default_factory=deque)
    """Start times of the requests in the last window, oldest first."""

    def enter(self, key: ApiKey, now: float, num: int = 1) -> None:
        """Counts `num` requests that begin. The caller subtracts them from `num_running` when they have ended.

        Raises:
            TooMany: a limit is reached; nothing is counted.
        """
        if key.concurrent is not None and self.num_running + num > key.concurrent:
            raise TooMany(
                f"this API key may have {key.concurrent} requests at a time (`concurrent`), and "
                f"{self.num_running} of them are running: wait until {'one ends' if num == 1 else f'{num} more fit'}",
                code="too_many_concurrent",
                retry_after_seconds=BUSY_SECONDS,
            )
        if key.requests_per_minute is not None:
            while self.starts and self.starts[0] + WINDOW_SECONDS <= now:
                self.starts.popleft()
            room = key.requests_per_minute - num
            if len(self.starts) > room:
                last = self.starts[
                    len(self.starts) - room - 1
                ]  # of those that must leave the window
                wait = math.ceil(last + WINDOW_SECONDS - now)
                raise TooMany(
                    f"this API key may make {key.requests_per_minute} requests a minute (`requests_per_minute`), and "
                    f"{len(self.starts)} are used: try again in {wait} s",
                    code="rate_limited",
                    retry_after_seconds=wait,
                )
            self.starts.extend([now] * num)
        self.num_running += num


@dataclass(slots=True)
class Counted:
    """A running request of a limited key."""

    _key: ApiKey
    _usage: Usage
    _num: int = 1

    def grow(self, num: int) -> None:
        """Counts the request as `num` requests, because it asks for so many choices.

        Raises:
            BadRequest: the key never allows so many.
            TooMany: a limit is reached.
        """
        for name in ("concurrent", "requests_per_minute"):
            limit: int | None = getattr(self._key, name)
            if limit is not None and num > limit:
                raise BadRequest(
                    f"n: the request asks for {num} choices (n times the number of prompts), which count as so many "
                    f"requests, and this API key allows {limit} (`{name}`): ask for fewer in one request",
                    code="too_many_choices",
                    param="n",
                )
        self._usage.enter(self._key, time.monotonic(), num - self._num)
        self._num = num

    def leave(self) -> None:
        """Ends the request."""
        self._usage.num_running -= self._num


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

    def enter(self, key: ApiKey) -> Counted:
        """Counts a request of a limited key; see `Usage.enter`."""
        usage = self._usages.setdefault(key.owner, Usage())
        usage.enter(key, time.monotonic())
        return Counted(key, usage)
