"""The API keys that a server accepts."""

import hmac
from collections.abc import Sequence

from art_server.settings import ApiKey, KeyScope


class Keys:
    """The accepted keys. If no key is configured, the server is open to every program of its own machine; hosts still need the key
    that the server issued for them."""

    def __init__(self, configured: Sequence[ApiKey], issued: Sequence[ApiKey] = ()):
        self._keys = [(key.key.encode(), key) for key in (*configured, *issued)]
        self._are_configured = bool(configured)

    def are_needed(self, scope: KeyScope) -> bool:
        """Whether a request that needs this scope needs a key."""
        return self._are_configured or (scope == "host" and bool(self._keys))

    def can(self, scope: KeyScope) -> bool:
        """Whether a key has this scope."""
        return any(scope in key.scopes for _, key in self._keys)

    def find(self, presented: str) -> ApiKey | None:
        """The accepted key that equals the presented key, expired or not; None if no key does."""
        match: ApiKey | None = None
        presented_secret = presented.encode()
        for secret, key in self._keys:  # compares all keys, so that the time taken reveals nothing
            if hmac.compare_digest(secret, presented_secret):
                match = key
        return match

    def find_owner(self, owner: str) -> ApiKey | None:
        """A key of `owner` that has not expired."""
        return next((k for _, k in self._keys if k.owner == owner and not k.is_expired), None)
