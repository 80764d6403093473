"""A proxy between an agent and the server that keeps each request and chooses each answer.

The proxy changes nothing in a request but adds a grammar that permits one text. So the policy really samples the answer, and the
server records its exact tokens. `/v1/chat/completions` and `/v1/responses` take `structured_outputs.choice`. `/v1/messages` takes
JSON schemas only, so the text there is JSON: a schema with one constant.
"""

import http.client
import json
import threading
from collections.abc import Callable
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any
from urllib.parse import urlsplit

from tests.waiting import PATIENCE_SECONDS

Policy = Callable[[dict[str, Any]], str]
"""The text of the answer to a request's body."""
APIS = {"/v1/chat/completions": "chat", "/v1/responses": "responses", "/v1/messages": "messages"}
NOT_FORWARDED = {"host", "connection", "content-length", "accept-encoding", "transfer-encoding", "keep-alive"}


@dataclass
class Exchange:
    """A request as the agent sent it, and its answer."""

    method: str
    path: str
    body: dict[str, Any] | None
    status: int = 0
    answer: bytes = b""

    @property
    def api(self) -> str | None:
        """The API of a request for an answer; None for any other request."""
        return next((api for path, api in APIS.items() if urlsplit(self.path).path.endswith(path)), None)

    @property
    def tools(self) -> list[dict[str, Any]]:
        return (self.body or {}).get("tools") or []

    @property
    def kind(self) -> str:
        """`main` is a request with tools, `side` one without. Others have their method and the end of their path."""
        if self.api is None or self.method != "POST":
            return f"{self.method} {urlsplit(self.path).path.partition('/v1')[2] or '/'}"
        return "main" if self.tools else "side"


def messages_of(body: dict[str, Any]) -> list[dict[str, Any]]:
    messages = body.get("messages") or body.get("input") or []
    return [{"role": "user", "content": messages}] if isinstance(messages, str) else messages


def num_tool_results(body: dict[str, Any]) -> int:
    """The number of results of tools in a request of any of the three APIs."""
    count = 0
    for message in messages_of(body):
        content = message.get("content")
        parts = content if isinstance(content, list) else []
        count += sum(part.get("type") == "tool_result" for part in parts if isinstance(part, dict))
        count += message.get("role") == "tool" or message.get("type") in (
            "function_call_output",
            "custom_tool_call_output",
        )
    return count


def with_one_text(api: str, body: dict[str, Any], text: str) -> dict[str, Any]:
    """A request whose answer is this text. In `/v1/messages` a text that is not JSON becomes a JSON string."""
    if api != "messages":
        return {**body, "structured_outputs": {"choice": [text]}}
    constant = json.loads(text) if text.startswith("[") else text
    format = {"type": "json_schema", "schema": {"const": constant}}
    return {**body, "output_config": {**body.get("output_config", {}), "format": format}}


@dataclass
class ScriptedProxy:
    """Forwards to a server. `policy` chooses the answers until it is replaced."""

    server_url: str
    policy: Policy
    exchanges: list[Exchange] = field(default_factory=list)

    def __post_init__(self) -> None:
        proxy = self

        class Handler(BaseHTTPRequestHandler):
            def forward(self) -> None:
                proxy.forward(self)

            do_GET = do_POST = do_HEAD = do_OPTIONS = do_DELETE = forward

            def log_message(self, format: str, *args: object) -> None: ...

        self._http = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self._http.daemon_threads = True
        threading.Thread(target=self._http.serve_forever, daemon=True).start()

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self._http.server_port}"

    def close(self) -> None:
        self._http.shutdown()
        self._http.server_close()

    def forward(self, request: BaseHTTPRequestHandler) -> None:
        content = request.rfile.read(int(request.headers.get("content-length") or 0))
        exchange = Exchange(request.command, request.path, json.loads(content) if content.startswith(b"{") else None)
        self.exchanges.append(exchange)
        if exchange.api is not None and exchange.body is not None:
            text = self.policy(exchange.body)
            content = json.dumps(with_one_text(exchange.api, exchange.body, text)).encode()
        address = urlsplit(self.server_url)
        assert address.hostname is not None
        connection = http.client.HTTPConnection(address.hostname, address.port, timeout=PATIENCE_SECONDS)
        try:
            headers = {name: value for name, value in request.headers.items() if name.lower() not in NOT_FORWARDED}
            connection.request(request.command, request.path, content or None, headers)
            answer = connection.getresponse()
            exchange.status = answer.status
            request.send_response(answer.status)
            for name, value in answer.getheaders():
                if name.lower() not in NOT_FORWARDED:
                    request.send_header(name, value)
            request.send_header("connection", "close")
            request.end_headers()
            while part := answer.read1(65536):
                exchange.answer += part
                request.wfile.write(part)
                request.wfile.flush()
        except ConnectionError:
            pass  # the agent went away
        finally:
            connection.close()
