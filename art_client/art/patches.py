"""The client's only patch of other libraries: it adds the session header to requests to an art-server, and notes answers of
other servers (`other_providers`).

The first capture scope calls `patch_http_clients` (`capturing`); `import art` and `art.rollout` never do. httpx, httpx2, aiohttp
and Python's own http.client each have methods through which all requests pass; http.client carries the requests of urllib,
urllib3, requests and the libraries above them. `patch_http_clients` wraps these methods on the class, so existing clients are
covered too. The wrapper adds the header `x-art-session`, unless a request has the header already, to requests to `/v1/...` of
servers with a registered trainable model of this program. It does so only while a capture scope is active.

The work that a captured program gives to other threads belongs to the program's scope: the work of a thread that the program
starts, and the work that the program submits to a ThreadPoolExecutor, also to an executor that several rollouts share.

Not covered: clients that are not written in Python (pycurl), other processes, and threads that were started outside of the
scope and get their work in another way (a queue). They need `art.rollout`, whose base URL and API key contain the session's
name.
"""

import functools
import http.client
import importlib
import importlib.util
import inspect
import threading
from collections.abc import Callable, MutableMapping
from concurrent.futures import ThreadPoolExecutor
from contextvars import copy_context
from typing import Any
from weakref import WeakKeyDictionary

from art import other_providers
from art.scopes import current_scope, entered, headers_for

_PATCHED_METHODS = [
    ("httpx", "Client", "send"),
    ("httpx", "AsyncClient", "send"),
    # openai 3 sends its requests with httpx2.
    ("httpx2", "Client", "send"),
    ("httpx2", "AsyncClient", "send"),
    ("aiohttp", "ClientRequest", "send"),
]
"""Module, class, method. The request is `self` for aiohttp, and the method's first argument for the others."""

HTTPS_PORT = 443


@functools.cache
def patch_http_clients() -> None:
    """Imports and patches the installed HTTP libraries, and threads, once. A coroutine may import the libraries only later."""
    for module_name, class_name, method_name in _PATCHED_METHODS:
        if importlib.util.find_spec(module_name) is not None:
            owner = getattr(importlib.import_module(module_name), class_name)
            wrap = _with_header_of_self if module_name == "aiohttp" else _with_header_of_request
            setattr(owner, method_name, wrap(getattr(owner, method_name)))
    _patch_connections()
    threading.Thread.start = _in_context_of_starter(threading.Thread.start)
    ThreadPoolExecutor.submit = _in_context_of_caller(ThreadPoolExecutor.submit)


def _patch_connections() -> None:
    """Python's own connections write a request's headers one after the other. Our headers come last; a header that the caller
    wrote is not written again."""
    connection = http.client.HTTPConnection
    put_request, put_header, end_headers = connection.putrequest, connection.putheader, connection.endheaders
    missing: WeakKeyDictionary[http.client.HTTPConnection, dict[str, str]] = WeakKeyDictionary()

    @functools.wraps(put_request)
    def putrequest(self: http.client.HTTPConnection, method: str, url: str, *args: Any, **kwargs: Any) -> None:
        missing[self] = headers_for(_full_url(self, url)) if _is_captured() else {}
        put_request(self, method, url, *args, **kwargs)

    @functools.wraps(put_header)
    def putheader(self: http.client.HTTPConnection, header: str | bytes, *values: Any) -> None:
        name = header.decode("latin-1") if isinstance(header, bytes) else header
        missing.get(self, {}).pop(name.lower(), None)
        put_header(self, header, *values)

    @functools.wraps(end_headers)
    def endheaders(self: http.client.HTTPConnection, *args: Any, **kwargs: Any) -> None:
        for name, value in missing.pop(self, {}).items():
            put_header(self, name, value)
        end_headers(self, *args, **kwargs)

    connection.putrequest, connection.putheader, connection.endheaders = putrequest, putheader, endheaders


def _full_url(connection: http.client.HTTPConnection, url: str) -> str:
    """The full URL of a request. A request to a proxy may contain the full URL already."""
    if "://" in url:
        return url
    tunnel: Any = connection
    # After `set_tunnel`, `host` and `port` are the proxy's. http.client has no public names for the target.
    host, port = (tunnel._tunnel_host, tunnel._tunnel_port) if tunnel._tunnel_host else (tunnel.host, tunnel.port)
    # A connection does not keep its scheme. The default port is an attribute of its class, also in urllib3.
    scheme = "https" if connection.default_port == HTTPS_PORT else "http"
    if ":" in host:  # an IPv6 address
        host = f"[{host}]"
    return f"{scheme}://{host}:{port}{url}"


def _is_captured() -> bool:
    return isinstance(current_scope.get(), other_providers.Capture)


def _in_context_of_starter(start: Callable[[threading.Thread], None]) -> Callable[..., None]:
    @functools.wraps(start)
    def start_in_context(self: threading.Thread) -> None:
        if _is_captured():
            self.run = functools.partial(copy_context().run, self.run)
        start(self)

    return start_in_context


def _in_context_of_caller(submit: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(submit)
    def submit_in_context(self: ThreadPoolExecutor, fn: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Any:
        if not _is_captured():
            return submit(self, fn, *args, **kwargs)
        context = copy_context()
        with entered(None):  # `submit` may start a thread, which serves other scopes later
            return submit(self, context.run, fn, *args, **kwargs)

    return submit_in_context


# Any: requests of three libraries, which have `url` and `headers` in common, but no type.
def _with_header_of_request(send: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(send)
    def send_with_header(self: Any, request: Any, *args: Any, **kwargs: Any) -> Any:
        _add_header(request)
        response = send(self, request, *args, **kwargs)
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
    if not _is_captured():
        return
    headers: MutableMapping[str, str] = request.headers
    for name, value in headers_for(str(request.url)).items():
        headers.setdefault(name, value)
