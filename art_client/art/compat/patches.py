"""The one patch that the client makes to other libraries: the session header on requests to an art-server.

`install` is called when a capture scope is first entered (`capturing`), never by `import art` or `art.rollout`. It wraps
the one method of httpx, httpx2, aiohttp and requests through which all their requests pass, on the class, so clients
that exist already are covered. The wrapper adds `x-art-session` to requests to `/v1/...` of a server that a trainable
model of this program is registered with, while a capture scope is active and when the request has no such header, and
does nothing else.

Not covered: other HTTP clients (urllib, urllib3, pycurl), other processes, and threads that do not carry their
starter's context (`threading.Thread`, `loop.run_in_executor`; `asyncio.to_thread` carries it). They need `art.rollout`,
whose base URL and key name the session.
"""

import functools
import importlib
import importlib.util
from collections.abc import Callable, MutableMapping
from typing import Any

from art.scopes import current_scope, headers_for

_PATCHED_METHODS = [
    ("httpx", "Client", "send"),
    ("httpx", "AsyncClient", "send"),
    ("httpx2", "Client", "send"),
    ("httpx2", "AsyncClient", "send"),
    ("aiohttp", "ClientRequest", "send"),
    ("requests", "Session", "send"),
]
"""Module, class, method. The first two arguments of a method lead to the request's URL and headers."""


@functools.cache
def install() -> None:
    """Patches the HTTP libraries that are installed, once; they are imported, for a coroutine may do so later."""
    for module_name, class_name, method_name in _PATCHED_METHODS:
        if importlib.util.find_spec(module_name) is not None:
            owner = getattr(importlib.import_module(module_name), class_name)
            wrap = _with_header_of_self if module_name == "aiohttp" else _with_header_of_request
            setattr(owner, method_name, wrap(getattr(owner, method_name)))


# Any: requests of four libraries, which share `url` and `headers` and no type.
def _with_header_of_request(send: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(send)
    def send_with_header(self: Any, request: Any, *args: Any, **kwargs: Any) -> Any:
        _add_header(request)
        return send(self, request, *args, **kwargs)

    return send_with_header


def _with_header_of_self(send: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(send)
    def send_with_header(self: Any, *args: Any, **kwargs: Any) -> Any:
        _add_header(self)
        return send(self, *args, **kwargs)

    return send_with_header


def _add_header(request: Any) -> None:
    scope = current_scope.get()
    if scope is None or scope.trajectory is None:
        return
    headers: MutableMapping[str, str] = request.headers
    for name, value in headers_for(str(request.url)).items():
        headers.setdefault(name, value)
