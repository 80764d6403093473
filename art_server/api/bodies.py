"""Request bodies. FastAPI reads JSON of a few megabytes; trajectories come as NDJSON and are read a line at a time; the
routes of inference and of ART's wire read a whole body, and parse a large body in a thread."""

import asyncio
import hashlib
from collections.abc import AsyncIterator, Callable, Coroutine
from typing import Any, ParamSpec, TypeVar

import msgspec
from fastapi import HTTPException, Request, Response
from fastapi.routing import APIRoute
from pydantic import BaseModel, ValidationError
from starlette.requests import ClientDisconnect
from starlette.types import Message

from art_protocol.wire import LogRequest, TrainRequest, TrajectoryGroupBody
from art_server.api.error_responses import invalid_body, too_deep
from art_server.errors import InvalidInput, TooLarge

T = TypeVar("T", bound=BaseModel)
G = TypeVar("G", TrainRequest, LogRequest)
P = ParamSpec("P")
R = TypeVar("R")

SMALL_BYTES = 64 * 1024
"""Larger bodies and lines are parsed in a thread (`is_large`, `beside`)."""
MAX_DEPTH = 100
"""Levels of objects and arrays. All JSON readers and writers here and in vLLM handle 200; tools need about 30."""
SMALL_MB = 4
"""The largest JSON body that FastAPI reads."""
V1_MB = 4
"""Room beyond the context, for tools, schemas, and several prompts in one request."""
V1_BYTES_PER_TOKEN = 64
"""A token is about four characters of text (six bytes each if JSON escapes them) or a number of up to eight bytes."""
FEWER_GROUPS = "send fewer groups at once, or start the server with a larger --max-body-mb"
SHORTER = "shorten the conversation, or start the server with a larger --max-seq-length"


def v1_limit_mb(max_seq_length: int | None) -> float:
    """The largest body of an inference request. A larger body cannot fit the context."""
    return V1_MB + V1_BYTES_PER_TOKEN * (max_seq_length or 0) / 2**20


def declared_size(request: Request) -> int:
    """The size of a body by the header `content-length`; 0 without this header."""
    declared = request.headers.get("content-length", "")
    return int(declared) if declared.isdecimal() else 0


async def read_parts(request: Request, max_mb: float, remedy: str = FEWER_GROUPS) -> AsyncIterator[bytes]:
    """The parts of a body, as they arrive.

    Raises:
        TooLarge: the body is above the limit. Nothing is read if `content-length` shows this; otherwise reading stops.
    """
    too_large = TooLarge(f"the body is above {max_mb:.4g} MB: {remedy}", code="body_too_large")
    if declared_size(request) > max_mb * 2**20:
        raise too_large
    size = 0
    async for part in request.stream():
        size += len(part)
        if size > max_mb * 2**20:
            raise too_large
        yield part


async def read_body(request: Request, max_mb: float, remedy: str = FEWER_GROUPS) -> bytes:
    """The body of a request.

    Raises:
        TooLarge: the body is above the limit.
    """
    parts = [part async for part in read_parts(request, max_mb, remedy)]
    return await asyncio.to_thread(b"".join, parts) if len(parts) > 1 else b"".join(parts)


def is_large(body: bytes) -> bool:
    return len(body) > SMALL_BYTES


async def beside(is_slow: bool, function: Callable[P, R], *args: P.args, **kwargs: P.kwargs) -> R:
    """`function(...)`, in a thread if the call is slow."""
    return await asyncio.to_thread(function, *args, **kwargs) if is_slow else function(*args, **kwargs)


def decode(body: bytes) -> Any:
    """The value of a JSON body.

    Raises:
        InvalidInput: the body is not JSON, or nested too deeply.
    """
    try:
        value = msgspec.json.decode(body)
    except RecursionError as error:
        raise too_deep() from error
    except ValueError as error:
        raise InvalidInput(f"the body is not JSON: {error}", code="invalid_body") from error
    # A body nests at most as deeply as it has brackets, so most bodies need no check of their values.
    if body.count(b"{") + body.count(b"[") > MAX_DEPTH and is_deeper(value, MAX_DEPTH):
        raise too_deep()
    return value


def is_deeper(value: Any, limit: int) -> bool:
    """Whether objects and arrays nest more than `limit` times."""
    level = [value]
    for _ in range(limit + 1):
        containers = [entry for entry in level if isinstance(entry, dict | list)]
        if not containers:
            return False
        level = []
        for container in containers:
            level += container.values() if isinstance(container, dict) else container
    return True


class SmallBodies(APIRoute):
    """A route whose body FastAPI reads, up to `SMALL_MB`."""

    def get_route_handler(self) -> Callable[[Request], Coroutine[Any, Any, Response]]:
        handle = super().get_route_handler()

        async def limited(request: Request) -> Response:
            # An HTTPException, because FastAPI turns any other error during the reading of a body into a 400.
            too_large = HTTPException(413, f"the body is above {SMALL_MB} MB: send less at once")
            if declared_size(request) > SMALL_MB * 2**20:
                raise too_large
            size = 0

            async def receive() -> Message:
                nonlocal size
                message = await request.receive()
                size += len(message.get("body", b""))
                if size > SMALL_MB * 2**20:
                    raise too_large
                return message

            return await handle(Request(request.scope, receive))

        return limited if self.body_field is not None else handle


class GroupLines:
    """A train or log request in NDJSON: a line with its fields, then a line for each trajectory group.

    Reads one line at a time. The first line may also have groups, so that a JSON body on one line is such a request, too.
    """

    def __init__(self, request: Request, max_mb: float):
        self._digest = hashlib.sha256()
        self._parts = read_parts(request, max_mb)
        self._lines = self._read_lines()
        self._number = 0
        self._first: list[TrajectoryGroupBody] = []

    async def fields(self, kind: type[G]) -> G:
        """The fields in the first line.

        Raises:
            InvalidInput: there is no line, or its fields are invalid.
            TooLarge: from `read_parts`, as in the methods below.
        """
        line = await anext(self._lines, b"")
        request = await beside(is_large(line), self._parse, kind, (), line)
        self._first = request.groups
        return request

    async def groups(self) -> AsyncIterator[TrajectoryGroupBody]:
        """The groups, each as it arrives.

        Raises:
            InvalidInput: a line is no group, or the body ends within a line.
        """
        for group in self._first:
            yield group
        index = len(self._first)
        async for line in self._lines:
            yield await beside(is_large(line), self._parse, TrajectoryGroupBody, ("groups", index), line)
            index += 1

    async def digest(self) -> str:
        """The SHA-256 of the whole body. The lines that are left are read, but not parsed."""
        async for _ in self._lines:
            pass
        return self._digest.hexdigest()

    async def _read_lines(self) -> AsyncIterator[bytes]:
        """The lines that are not empty."""
        rest = bytearray()
        try:
            async for part in self._parts:
                self._digest.update(part)
                *ended, last = part.split(b"\n")
                for piece in ended:
                    rest += piece
                    self._number += 1
                    if rest.strip():
                        yield bytes(rest)
                    rest.clear()
                rest += last
        except ClientDisconnect as error:
            raise InvalidInput(
                f"the body ends within line {self._number + 1}: nothing of it is kept; send it again",
                code="body_cut",
            ) from error
        self._number += 1
        if rest.strip():
            yield bytes(rest)

    def _parse(self, kind: type[T], location: tuple[str | int, ...], line: bytes) -> T:
        try:
            return kind.model_validate_json(line)
        except ValidationError as error:
            raise invalid_body(error, location, f"line {self._number}: ") from error


def described_body(media_type: str, kind: type[BaseModel]) -> dict[str, Any]:
    """The `openapi_extra` of a route that reads its body itself, up to `--max-body-mb`."""
    schema = kind.model_json_schema()
    named = schema.pop("$defs", {})
    content = {media_type: {"schema": whole_schema(schema, named)}}
    return {"requestBody": {"required": True, "content": content}}


def whole_schema(part: Any, named: dict[str, Any]) -> Any:
    """A part of a JSON schema with each `$ref` replaced by the schema that it names. FastAPI lists named schemas only for bodies
    that it reads."""
    if isinstance(part, list):
        return [whole_schema(entry, named) for entry in part]
    if not isinstance(part, dict):
        return part
    if "$ref" in part:
        return whole_schema(named[part["$ref"].rpartition("/")[2]], named)
    return {key: whole_schema(value, named) for key, value in part.items()}
