"""Scopes: which session the requests of this context belong to."""

from collections.abc import Container
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import Any, Protocol
from urllib.parse import urlsplit
from weakref import WeakSet

from art.trajectories import Trajectory
from art.wire import SESSION_HEADER, SessionReply


class Server(Protocol):
    """A server whose requests belong to sessions, as a backend knows it."""

    @property
    def base_url(self) -> str: ...

    @property
    def is_open(self) -> bool: ...

    async def fetch_captured(self, session: str, known: Container[str]) -> dict[str, SessionReply]:
        """What each of its trainable models said in a session, by the model's id, but the known ones."""
        ...


@dataclass(eq=False, slots=True)
class Scope:
    """A session that requests belong to while the context variable holds it."""

    session: str
    trajectory: Trajectory | None = None
    """What in-process capture fills; with it, the requests of every HTTP client belong to the session."""
    servers: "dict[Server, None]" = field(default_factory=dict[Any, None])
    """Those that were asked, in the order in which they were."""


current_scope: ContextVar[Scope | None] = ContextVar("current_scope", default=None)

_servers: WeakSet[Server] = WeakSet()
"""Those with a trainable model: whose requests belong to sessions."""


def add_server(server: Server) -> None:
    """Makes requests to the server belong to the session of their scope."""
    _servers.add(server)


def headers_for(url: str) -> dict[str, str]:
    """The header that a request to the URL needs under the current scope; nothing for other servers.

    A URL that names a session itself is none of the scope's.
    """
    scope = current_scope.get()
    if scope is None:
        return {}
    asked = _servers_at(_to_address(url))
    scope.servers.update(dict.fromkeys(asked))
    return {SESSION_HEADER: scope.session} if asked else {}


def _servers_at(address: str) -> list[Server]:
    """Those at the address; closed ones only where no other speaks for the server."""
    servers = [
        server
        for server in list(_servers)
        if address.startswith(_to_address(server.base_url) + "/v1/")
    ]
    return [server for server in servers if server.is_open] or servers


def _to_address(url: str) -> str:
    """A URL to compare: without query, port written out, one name for this machine."""
    parts = urlsplit(url)
    host = parts.hostname or ""
    if host in ("127.0.0.1", "::1"):
        host = "localhost"
    port = parts.port or {"http": 80, "https": 443}.get(parts.scheme)
    return f"{parts.scheme}://{host}:{port}{parts.path}"
