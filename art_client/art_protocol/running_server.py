"""The address of the server that works in a folder, for programs and commands that share the server."""

import contextlib
import json
import os
import sys
from pathlib import Path


def running_address(path: Path) -> str | None:
    """The address of the server that works in a folder; None if no server does. The lock of the folder proves that a server
    of this machine works there, so that an address in a copied folder never gets the key."""
    if sys.platform != "linux":  # a server runs on Linux only
        return None
    import fcntl  # which other systems lack

    with contextlib.suppress(OSError, ValueError, KeyError, TypeError):
        descriptor = os.open(path / ".server" / "lock", os.O_RDONLY | os.O_CLOEXEC)
        try:
            # Shared: two commands that look at the same time do not take each other for a server, which locks exclusively.
            fcntl.flock(descriptor, fcntl.LOCK_SH | fcntl.LOCK_NB)
        except BlockingIOError:
            return str(json.loads((path / ".server" / "address.json").read_bytes())["url"])
        finally:
            os.close(descriptor)
    return None
