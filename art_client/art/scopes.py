"""Scopes: the session to which the requests of the current context (`contextvars`) belong."""

from collections.abc import Callable, Container, Generator, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import Any, Protocol
from urllib.parse import urlsplit
from weakref import WeakSet

from art_protocol.wire import SEED_HEADER, SESSION_HEADER, STEP_HEADER, SessionReply


class CapturingServer(Protocol):
    """The part of a backend that scopes use."""

    @property
    def base_url(self) -> str: ...

    @property
    def is_open(self) -> bool: ...

    @property
    def trainable_names(self) -> list[str]:
        """The names by which agents use the registered models."""
        ...

    async def fetch_captured(self, session: str, known: Container[str]) -> dict[str, SessionReply]:
        """The answers of each trainable model in a session, by the model's path; without the `known` paths."""
        ...


@dataclass(eq=False, slots=True)
class Scope:
    """A session. Requests belong to the session while the scope is the value of `current_scope`."""

    session: str | Callable[[], str]
    """The session's name, or a function that returns the name for each request."""
    step: int | str | None = None
    """The step that the name of a trainable model means, or "base"; None: the newest."""
    seeds: Iterator[int] | None = None
    """The seeds of requests for which the caller sets none."""
    servers: "dict[CapturingServer, None]" = field(default_factory=dict[Any, None])
    """The servers that got requests in this scope, in the order of their first request."""
    is_ended: bool = False
    """Whether the scope has ended. Later requests belong to no session: a thread that began in the scope may still send some."""


current_scope: ContextVar[Scope | None] = ContextVar("current_scope", default=None)


@contextmanager
def entered(scope: Scope | None) -> Generator[None]:
    """Makes the scope the current one inside the `with` block."""
    token = current_scope.set(scope)
    try:
        yield
    finally:
        current_scope.reset(token)


@contextmanager
def no_capture() -> Generator[None]:
    """A scope whose requests belong to no session, for example a judge's requests. A rollout's own client, `r.openai_client()`, names
    the session here too: use `model.openai_client()`."""
    with entered(None):
        yield


_servers: WeakSet[CapturingServer] = WeakSet()
"""Servers with a trainable model. Only requests to these belong to sessions."""


def add_server(server: CapturingServer) -> None:
    """Registers a server, so that requests to it belong to the session of their scope."""
    _servers.add(server)


def headers_for(url: str) -> dict[str, str]:
    """The current scope's headers for a request to the URL; empty outside a scope and for other servers.

    A URL that contains a session's name gets no header.
    """
    scope = current_scope.get()
    if scope is None or scope.is_ended:
        return {}
    servers = _servers_at(_to_address(url))
    scope.servers.update(dict.fromkeys(servers))
    if not servers:
        return {}
    headers = {SESSION_HEADER: scope.session if isinstance(scope.session, str) else scope.session()}
    if scope.step is not None:
        headers[STEP_HEADER] = str(scope.step)
    if scope.seeds is not None:
        headers[SEED_HEADER] = str(next(scope.seeds))
    return headers


def is_registered(url: str) -> bool:
    """Whether the URL is at a registered server, with or without a session's name."""
    address = _to_address(url)
    return any(address.startswith(_to_address(server.base_url) + "/") for server in list(_servers))


def _servers_at(address: str) -> list[CapturingServer]:
    """The registered servers at the address; closed ones only if none is open."""
    servers = [server for server in list(_servers) if address.startswith(_to_address(server.base_url) + "/v1/")]
    return [server for server in servers if server.is_open] or servers


def _to_address(url: str) -> str:
    """A URL in a form to compare: without query, with the port, and with one name for this machine. For example
    `'http://127.0.0.1/v1?a=b' -> 'http://localhost:80/v1'`."""
    parts = urlsplit(url)
    host = parts.hostname or ""
    if host in ("127.0.0.1", "::1"):
        host = "localhost"
    port = parts.port or {"http": 80, "https": 443}.get(parts.scheme)
    return f"{parts.scheme}://{host}:{port}{parts.path}"
