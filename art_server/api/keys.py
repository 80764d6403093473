"""The API keys that a server accepts."""

import hmac
from collections.abc import Sequence

from art_server.settings import ApiKey


class Keys:
    """The accepted keys. Without any, the server is open to every program of its own machine."""

    def __init__(self, keys: Sequence[ApiKey]):
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
