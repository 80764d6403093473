"""`ServerlessBackend`: ART's name for a managed service. Here a program with this backend trains on its own art-server."""

import logging
import os
from typing import Any

from art_compat.aliases import alias
from art_compat.backends import Backend
from art_compat.local import LocalBackend

logger = logging.getLogger(__name__)


class ServerlessBackend:
    """`Backend()` if ART_SERVER_URL names a server, else `LocalBackend()`. Keys and addresses of the service are ignored,
    and never sent."""

    def __new__(cls, *_: Any, **__: Any) -> Backend:  # type: ignore[misc]  # a name for another class
        url = os.environ.get("ART_SERVER_URL")
        logger.warning(
            "ServerlessBackend: the models train on %s. Use art.Backend(url) or art.LocalBackend() to choose",
            f"the art-server at {url}" if url else "an art-server that this program starts",
        )
        return Backend() if url else LocalBackend()


alias(__name__, f"{__name__}.backend")
