"""The way out of a box: HTTP requests to one session of a server, and nothing else.

The program listens inside the box's network (`holder.py`) and reads each request there. A request whose path is not in the session
is refused. The others go to the server with the program's key: the box never has the key. Headers that could name another session
or step, or another address, are removed. Answers are passed on as bytes, so streams and connections that are kept work.
"""

import asyncio
import contextlib
import json
import re
import socket
import ssl
from collections.abc import AsyncGenerator, Coroutine
from dataclasses import dataclass
from typing import Any
from urllib.parse import unquote, urlsplit

PORT = 7623
"""The port of the box's loopback on which the session answers."""
KEY = "sandbox"
"""The API key inside of the box. The gateway replaces the placeholder by the real key."""
MAX_HEAD_BYTES = 1 << 16
BLOCK_BYTES = 1 << 16
MAX_CONNECTIONS = 64
"""Connections of a box at one time. More wait until one ends."""
REMOVED = re.compile(
    r"host|authorization|x-api-key|api-key|x-art-.*|x-session-.*|forwarded|x-forwarded-.*|proxy-.*|upgrade|te|trailer",
    re.I,
)
"""Headers that the gateway removes: addresses, keys, and what names a session, a step or another protocol."""
HEADER = re.compile(r"[!#$%&'*+.^_`|~0-9A-Za-z-]+:[^\r\n\0]*")
REQUEST = re.compile(r"([A-Z]+) (\S+) HTTP/1\.1")


class RefusedRequest(Exception):
    """A request of the box is not passed on. The message says why."""


@dataclass(frozen=True, slots=True)
class Head:
    """The head of a request, as it goes to the server."""

    lines: list[str]
    num_bytes: int
    """Of the body. -1: the body is in chunks."""


class Gateway:
    """Passes requests from a box to one session.

    `root_url` is the session's address for the program, "http://SERVER/s/SESSION", and `api_key` the session's key.
    """

    def __init__(self, root_url: str, api_key: str) -> None:
        address = urlsplit(root_url)
        if address.scheme not in ("http", "https") or address.hostname is None:
            raise ValueError(f"{root_url} is no address of a session")
        self._host, self._netloc = address.hostname, address.netloc.rpartition("@")[2]
        self._port = address.port or (443 if address.scheme == "https" else 80)
        self._tls = ssl.create_default_context() if address.scheme == "https" else None
        self._path, self._api_key = address.path.rstrip("/"), api_key
        self._free = asyncio.Semaphore(MAX_CONNECTIONS)
        self._connections: set[asyncio.Task[None]] = set()

    @property
    def root_url(self) -> str:
        """The session's address inside of the box."""
        return f"http://127.0.0.1:{PORT}{self._path}"

    @contextlib.asynccontextmanager
    async def serving(self, listener: socket.socket) -> AsyncGenerator[None]:
        """Serves the connections of a listening socket, and drops all of them at the end of the scope."""
        server = await asyncio.start_server(self._accept, sock=listener, limit=MAX_HEAD_BYTES)
        try:
            yield
        finally:
            server.close()
            for connection in self._connections:
                connection.cancel()
            await asyncio.gather(*self._connections, return_exceptions=True)

    def _accept(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        connection = asyncio.get_running_loop().create_task(self._serve(reader, writer))
        self._connections.add(connection)
        connection.add_done_callback(self._connections.discard)

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """Passes on the requests of one connection, over one connection to the server."""
        answers: asyncio.Task[None] | None = None
        try:
            async with self._free:
                head = await self._read_head(reader)
                if head is None:
                    return
                upstream_reader, upstream = await asyncio.open_connection(self._host, self._port, ssl=self._tls)
                try:
                    answers = asyncio.create_task(copy(upstream_reader, writer))
                    while head is not None and not answers.done():
                        upstream.write("\r\n".join([*head.lines, "", ""]).encode("latin-1"))
                        await pass_body(head, reader, upstream)
                        head = await first_of(self._read_head(reader), answers)
                    await answers
                finally:
                    upstream.transport.abort()
        except RefusedRequest as error:
            await refuse(writer, 403, "outside_session", str(error))
        except (OSError, ssl.SSLError) as error:
            await refuse(writer, 502, "server_unreachable", f"the server cannot be reached: {error}")
        except (
            asyncio.IncompleteReadError,
            asyncio.LimitOverrunError,
        ):  # the box hung up within a request, or sent no chunks
            pass
        finally:
            if answers is not None:
                answers.cancel()
            with contextlib.suppress(OSError):
                writer.close()

    async def _read_head(self, reader: asyncio.StreamReader) -> Head | None:
        """The next request's head. None: the connection has ended.

        Raises:
            RefusedRequest: the request is outside of the session, or no request of HTTP/1.1.
        """
        try:
            text = (await reader.readuntil(b"\r\n\r\n")).decode("latin-1")[:-4]
        except asyncio.IncompleteReadError as error:
            if error.partial:
                raise RefusedRequest("the request is not complete") from error
            return None
        except asyncio.LimitOverrunError as error:
            raise RefusedRequest(f"the headers have more than {MAX_HEAD_BYTES} bytes") from error
        first, *headers = text.split("\r\n")
        request = REQUEST.fullmatch(first)
        if request is None:
            raise RefusedRequest(f"no request of HTTP/1.1: {first[:80]!r}")
        self._check(request[1], request[2])
        return self._rewrite(first, headers)

    def _check(self, method: str, target: str) -> None:
        path = unquote(target.partition("?")[0])
        is_inside = path.rstrip("/") == self._path or path.startswith(f"{self._path}/v1/")
        if method == "CONNECT" or not is_inside or {".", ".."} & set(re.split(r"[/\\]", path)) or "#" in target:
            raise RefusedRequest(f"{method} {path[:80]} is not in this session: its paths begin with {self._path}/v1/")

    def _rewrite(self, first: str, headers: list[str]) -> Head:
        lines, lengths, encodings = list[str](), list[str](), list[str]()
        for header in headers:
            if HEADER.fullmatch(header) is None:
                raise RefusedRequest(f"a header is malformed: {header[:80]!r}")
            name, _, value = header.partition(":")
            if name.lower() == "content-length":
                lengths.append(value.strip())
            elif name.lower() == "transfer-encoding":
                encodings.append(value.strip().lower())
            elif not REMOVED.fullmatch(name):
                lines.append(header)
        lines = [first, f"Host: {self._netloc}", f"Authorization: Bearer {self._api_key}", *lines]
        if encodings == ["chunked"] and not lengths:
            return Head([*lines, "Transfer-Encoding: chunked"], -1)
        if encodings or len(lengths) > 1 or not all(re.fullmatch(r"[0-9]{1,12}", length) for length in lengths):
            raise RefusedRequest("the length of the body is not clear")
        return Head([*lines, *(f"Content-Length: {length}" for length in lengths)], int(lengths[0]) if lengths else 0)


async def first_of(reading_head: Coroutine[Any, Any, Head | None], answers: asyncio.Task[None]) -> Head | None:
    """The next head; None if the server ends the connection before."""
    reading = asyncio.create_task(reading_head)
    try:
        await asyncio.wait({reading, answers}, return_when=asyncio.FIRST_COMPLETED)
        return reading.result() if reading.done() else None
    finally:
        reading.cancel()


async def copy(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    """Passes bytes on until the reader's end. A lost connection is an end, too."""
    with contextlib.suppress(OSError):
        while block := await reader.read(BLOCK_BYTES):
            writer.write(block)
            await writer.drain()


async def pass_body(head: Head, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    if head.num_bytes >= 0:
        return await pass_bytes(head.num_bytes, reader, writer)
    while True:
        line = await reader.readuntil(b"\r\n")
        if not re.fullmatch(rb"[0-9A-Fa-f]{1,8}\r\n", line):
            raise RefusedRequest("the size of a chunk is malformed")
        writer.write(line)
        size = int(line, 16)
        await pass_bytes(size, reader, writer)
        if await reader.readexactly(2) != b"\r\n":
            raise RefusedRequest("a chunk has another end than its size says")
        writer.write(b"\r\n")
        if size == 0:
            return None


async def pass_bytes(num_bytes: int, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    while num_bytes:
        block = await reader.read(min(num_bytes, BLOCK_BYTES))
        if not block:
            raise asyncio.IncompleteReadError(b"", num_bytes)
        writer.write(block)
        await writer.drain()
        num_bytes -= len(block)


async def refuse(writer: asyncio.StreamWriter, status: int, code: str, message: str) -> None:
    error = {"message": message, "type": code, "code": code, "param": None, "retryable": status == 502}
    body = json.dumps({"error": error}).encode()
    head = f"HTTP/1.1 {status} X\r\ncontent-type: application/json\r\ncontent-length: {len(body)}\r\nconnection: close\r\n\r\n"
    with contextlib.suppress(OSError):
        writer.write(head.encode() + body)
        await writer.drain()
