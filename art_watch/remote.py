"""The commands' connection to a running server."""

import os

import httpx

from art_protocol.proxies import DIRECT
from art_server.errors import UsageError
from art_server.settings import KEY_VARIABLE


def open_client(url: str, timeout: httpx.Timeout | float) -> httpx.Client:
    """A client for the server at an address. The client sends the key of ART_API_KEY.

    Raises:
        UsageError: `url` is no address, or the key cannot be sent.
    """
    address = url.rstrip("/").removesuffix("/v1")
    if not address.startswith(("http://", "https://")):
        raise UsageError(f"--url '{url}' must begin with http:// or https://")
    key = os.environ.get(KEY_VARIABLE, "").strip()
    # httpx encodes headers as ASCII, and its error about a control character would contain the key.
    if not (key.isascii() and key.isprintable()):
        raise UsageError(f"{KEY_VARIABLE} has characters that no key has: set it again")
    headers = {"authorization": f"Bearer {key}"} if key else {}
    try:
        return httpx.Client(base_url=address, headers=headers, timeout=timeout, mounts=DIRECT)
    except httpx.InvalidURL as error:
        raise UsageError(f"--url '{url}' is no address: {error}") from error
