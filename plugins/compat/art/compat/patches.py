"""The client's only patch of other libraries: it adds the session header to requests to an art-server, and notes answers of
other servers (`other_providers`).

The first capture scope calls `patch_http_clients` (`capturing`); `import art` and `art.rollout` never do. httpx, httpx2, aiohttp
and requests each have a method through which all requests pass. `patch_http_clients` wraps it on the class, so existing clients
are covered too. The wrapper adds the header `x-art-session`, unless a request has it already, to requests to `/v1/...`
of servers with a registered trainable model of this program. It does so only while a capture scope is active.

Not covered: other HTTP clients (urllib, urllib3, pycurl), other processes, and threads that do not inherit the context
of their caller (`threading.Thread`, `loop.run_in_executor`; `asyncio.to_thread` inherits it). They need `art.rollout`,
whose base URL and API key contain the session's name.
"""

import functools
import importlib
import importlib.util
import inspect
from collections.abc import Callable, MutableMapping
from typing import Any

from art.compat import other_providers
from art.scopes import current_scope, headers_for

_PATCHED_METHODS = [
    ("httpx", "Client", "send"),
    ("httpx", "AsyncClient", "send"),
    ("httpx2", "Client", "send"),
    ("httpx2", "AsyncClient", "send"),
    ("aiohttp", "ClientRequest", "send"),
    ("requests", "Session", "send"),
]
"""Module, class, method. The request is `self` for aiohttp, and the method's first argument for the others."""


@functools.cache
def patch_http_clients() -> None:
    """Imports and patches the installed HTTP libraries, once. A coroutine may import them only later."""
    for module_name, class_name, method_name in _PATCHED_METHODS:
        if importlib.util.find_spec(module_name) is not None:
            owner = getattr(importlib.import_module(module_name), class_name)
            wrap = _with_header_of_self if module_name == "aiohttp" else _with_header_of_request
            setattr(owner, method_name, wrap(getattr(owner, method_name)))


# Any: requests of four libraries, which have `url` and `headers` in common, but no type.
def _with_header_of_request(send: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(send)
    def send_with_header(self: Any, request: Any, *args: Any, **kwargs: Any) -> Any:
        _add_header(request)
        response = send(self, request, *args, **kwargs)
        if hasattr(response, "iter_raw"):  # httpx; requests has no such method
            other_providers.watch(request, response)
        return response

    @functools.wraps(send)
    async def send_async(self: Any, request: Any, *args: Any, **kwargs: Any) -> Any:
        _add_header(request)
        response = await send(self, request, *args, **kwargs)
        other_providers.watch(request, response)
        return response

    return send_async if inspect.iscoroutinefunction(send) else send_with_header


def _with_header_of_self(send: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(send)
    def send_with_header(self: Any, *args: Any, **kwargs: Any) -> Any:
        _add_header(self)
        return send(self, *args, **kwargs)

    return send_with_header


def _add_header(request: Any) -> None:
    if not isinstance(current_scope.get(), other_providers.Capture):
        return
    headers: MutableMapping[str, str] = request.headers
    for name, value in headers_for(str(request.url)).items():
        headers.setdefault(name, value)
