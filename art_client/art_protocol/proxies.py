"""Requests to this machine go to it directly, even where the environment names a proxy for all addresses."""

from typing import Any

DIRECT: dict[str, Any] = {f"all://{host}": None for host in ("127.0.0.1", "localhost", "[::1]")}
"""The `mounts` of an httpx client; None is no proxy."""
