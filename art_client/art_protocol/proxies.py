"""Requests to this machine go to it directly, even where the environment names a proxy for all addresses. What an address
lacks that cannot be reached."""

import socket
import ssl
from typing import Any

DIRECT: dict[str, Any] = {f"all://{host}": None for host in ("127.0.0.1", "localhost", "[::1]")}
"""The `mounts` of an httpx client; None is no proxy."""


def fault_of_address(url: str, error: BaseException) -> str | None:
    """What is wrong with an address, as an error of the connection shows, and the remedy; None if the address may be right."""
    if "CERTIFICATE_VERIFY_FAILED" in str(error):
        return "its certificate is not trusted here: name the file of its authority in SSL_CERT_FILE"
    causes: list[BaseException] = [error]
    while (cause := causes[-1].__cause__ or causes[-1].__context__) is not None:
        causes.append(cause)
    if any(isinstance(cause, socket.gaierror) for cause in causes):
        return "no machine has this name: check the address"
    is_unreachable = any(isinstance(cause, OSError) and not isinstance(cause, ssl.SSLError) for cause in causes)
    if url.startswith("https://") and not is_unreachable:  # connected, but not by TLS
        return f"it does not speak TLS: write http:{url.removeprefix('https:')}"
    return None
