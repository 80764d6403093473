"""Which of several engines gets a request: the engine with the request's conversation in its prefix cache, unless it is busier.

The key of a request is a digest of its session or of its first messages (`inference_proxy.routing_key`). A known key goes
to its engine again. If that engine has more than `MARGIN` requests above the least busy engine, or cannot serve, the key moves
to the least busy engine. Among engines that are equally busy the key's own order decides, so that sessions spread, and a
group's rollouts, which share their prompt, begin on one engine.
"""

import hashlib
from collections import OrderedDict
from collections.abc import Mapping

MARGIN = 4
"""Requests by which a key's engine may be busier than another before the key moves."""
MAX_KEYS = 100_000
"""Number of keys whose engine is remembered: the keys of the latest requests."""


class Router:
    """Remembers the engine of each key."""

    def __init__(self, margin: int = MARGIN, max_keys: int = MAX_KEYS):
        self._margin = margin
        self._max_keys = max_keys
        self._homes: OrderedDict[bytes, int] = OrderedDict()

    def choose(self, key: bytes, loads: Mapping[int, int]) -> int:
        """The engine for a request. `loads` holds the number of requests of each engine that can serve the request."""
        least = min(loads.values())
        home = self._homes.get(key)
        if home is None or home not in loads or loads[home] > least + self._margin:
            free = [engine for engine, load in loads.items() if load == least]
            home = free[0] if len(free) == 1 else max(free, key=lambda engine: weight(key, engine))
            self._homes[key] = home
        self._homes.move_to_end(key)
        if len(self._homes) > self._max_keys:
            self._homes.popitem(last=False)
        return home

    @property
    def num_keys(self) -> int:
        return len(self._homes)


def weight(key: bytes, engine: int) -> bytes:
    """The rank of an engine for a key (rendezvous hashing): the order for a key does not depend on which other engines serve."""
    return hashlib.blake2b(key + engine.to_bytes(4, "little"), digest_size=8).digest()
