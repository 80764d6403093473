"""Request bodies: read up to a size limit, parsed in a thread if they are large, refused if they nest too deeply."""

import asyncio
import contextlib
import gc
from collections.abc import Awaitable, Callable
from typing import Any, Protocol, TypeAlias, TypeVar, cast

import msgspec
from fastapi import Request
from pydantic import BaseModel, ValidationError

from art_protocol.wire import TrajectoryBody, TrajectoryGroupBody
from art_server.api.errors import invalid_body, invalid_fields, problems_of, too_deep
from art_server.errors import InvalidInput, TooLarge


class HasGroups(Protocol):
    @property
    def groups(self) -> list[TrajectoryGroupBody]: ...


T = TypeVar("T", bound=BaseModel)
G = TypeVar("G", bound=HasGroups)
R = TypeVar("R")

SMALL_BYTES = 64 * 1024
"""Larger bodies are parsed in a thread."""
MAX_DEPTH = 100
"""Levels of objects and arrays. All JSON readers and writers here and in vLLM handle 200; tools need about 30."""
V1_MB = 4
"""Room beyond the context, for tools, schemas, and several prompts in one request."""
V1_BYTES_PER_TOKEN = 64
"""A token is about four characters of text (six bytes each if JSON escapes them) or a number of up to eight bytes."""
DROP_SECONDS = 0.01
"""Time for a finished thread to drop its arguments, so that `release` frees the objects, not the thread."""
FEWER_GROUPS = "send fewer groups at once, or start the server with a larger --max-body-mb"
SHORTER = "shorten the conversation, or start the server with a larger --max-seq-length"


def v1_limit_mb(max_seq_length: int | None) -> float:
    """The largest body of an inference request. A larger one cannot fit the context."""
    return V1_MB + V1_BYTES_PER_TOKEN * (max_seq_length or 0) / 2**20


async def read_body(request: Request, max_mb: float, remedy: str = FEWER_GROUPS) -> bytes:
    """The body of a request.

    Raises:
        TooLarge: the body is above the limit. Nothing is read if `content-length` shows this; otherwise reading stops.
    """
    limit = max_mb * 2**20
    declared = request.headers.get("content-length", "")
    size = int(declared) if declared.isdecimal() else 0
    parts: list[bytes] = []
    if size <= limit:
        size = 0
        async for part in request.stream():
            size += len(part)
            if size > limit:
                break
            parts.append(part)
    if size > limit:
        raise TooLarge(f"the body is above {max_mb:.4g} MB: {remedy}", code="body_too_large")
    if size <= SMALL_BYTES:
        return b"".join(parts)
    return await asyncio.to_thread(b"".join, parts)  # without the GIL if the parts are large


async def parse_body(body: bytes, kind: type[T]) -> T:
    """The request that a body contains.

    Raises:
        InvalidInput: invalid fields, which the message names.
    """
    try:
        return await beside(kind.model_validate_json, body)
    except ValidationError as error:
        raise invalid_body(error) from error


async def beside(parse: Callable[[bytes], R], body: bytes) -> R:
    """`parse(body)`, in a thread if the body is large."""
    return parse(body) if len(body) <= SMALL_BYTES else await asyncio.to_thread(parse, body)


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
        level = [each for each in level if isinstance(each, dict | list)]
        if not level:
            return False
        level = [
            inner for each in level for inner in (each.values() if isinstance(each, dict) else each)
        ]
    return True


# --- bodies of trajectories ------------------------------------------------------------------------------------------


class GroupBodies:
    """Reads bodies of many trajectories without blocking the event loop.

    A large body is read in a thread, one trajectory at a time, because a call to the parser holds the GIL until it
    returns. It becomes millions of objects, none of them garbage, and one garbage collection over them would take a
    second. Therefore they are frozen until they are released.
    """

    def __init__(self) -> None:
        self._turn = asyncio.Lock()
        """Bodies are read one at a time, because each takes a core and many times its size in memory."""
        self._num_open = 0

    async def read(
        self, body: bytes, parse: Callable[[bytes], G], use: Callable[[G], Awaitable[R]]
    ) -> R:
        """The result of `use` for the request that `parse` makes of a body.

        Raises:
            InvalidInput: from `parse`.
        """
        if len(body) <= SMALL_BYTES:
            return await use(parse(body))
        self._num_open += 1
        try:
            async with self._turn:
                request = await asyncio.to_thread(read_frozen, body, parse)
            trajectories = [each for group in request.groups for each in group.trajectories]
            try:
                return await use(request)
            finally:
                del request
                await asyncio.sleep(DROP_SECONDS)
                await asyncio.to_thread(release, trajectories)
        finally:
            self._num_open -= 1
            if self._num_open == 0:
                gc.unfreeze()


def read_frozen(body: bytes, parse: Callable[[bytes], G]) -> G:
    """`parse(body)` without garbage collection. Later collections skip the result."""
    gc.disable()
    try:
        return parse(body)
    finally:
        gc.freeze()
        gc.enable()


def release(values: list[Any]) -> None:
    """Drops values one by one, because dropping all at once would hold the GIL."""
    while values:
        values.pop()


Place = tuple[int | str, ...]
Problems = list[dict[str, Any]]
"""Errors as pydantic lists them."""


Reduce: TypeAlias = Callable[[bytes, type[BaseModel]], bytes]
"""Makes the JSON of a group or trajectory valid for its class, before it is validated."""


def read_request(body: bytes, kind: type[T]) -> T:
    """The train or log request that a body contains.

    Raises:
        InvalidInput: invalid fields, which the message names, or from a large body no strict JSON.
    """
    if len(body) > SMALL_BYTES:
        return read_groups(body, kind)
    try:
        return kind.model_validate_json(body)
    except ValidationError as error:
        raise invalid_body(error) from error


def read_groups(
    body: bytes, kind: type[T], name: str = "groups", reduce: Reduce | None = None
) -> T:
    """The result of `kind.model_validate_json`, with the same errors, but only from strict JSON, without NaN. `groups`
    is the field with the trajectory groups, and `name` its name in the body.

    Raises:
        InvalidInput: invalid fields, which the message names, or no strict JSON.
    """
    problems: Problems = []
    try:
        rest, texts = take_list(body, name, each=b'{"trajectories":[]}')
        groups = [
            read_group(text, (name, index), problems, reduce) for index, text in enumerate(texts)
        ]
    except RecursionError as error:
        raise too_deep() from error
    except msgspec.DecodeError as error:
        raise InvalidInput(
            f"the body is not JSON (NaN and Infinity are not allowed): {error}", code="invalid_body"
        ) from error
    request = validate(rest, kind, (), problems)
    if request is None or problems:
        raise invalid_fields(problems)
    return request.model_copy(update={"groups": groups} if groups else {})


def read_group(
    text: msgspec.Raw, path: Place, problems: Problems, reduce: Reduce | None
) -> TrajectoryGroupBody | None:
    rest, texts = take_list(text, "trajectories")
    trajectories = [
        validate(bytes(text), TrajectoryBody, (*path, "trajectories", index), problems, reduce)
        for index, text in enumerate(texts)
    ]
    group = validate(rest, TrajectoryGroupBody, path, problems, reduce)
    return group and group.model_copy(update={"trajectories": trajectories})


Fields: TypeAlias = dict[
    str, list[msgspec.Raw] | dict[str, msgspec.Raw] | str | int | float | bool | None
]
"""An object of which only the upper two levels are parsed."""


def take_list(
    text: bytes | msgspec.Raw, name: str, each: bytes = b""
) -> tuple[bytes, list[msgspec.Raw]]:
    """Splits a JSON object into the object with an empty list `name`, and the list's items, not yet parsed. If `each`
    is given, it replaces each item in the list. A value of another type becomes null, which is just as invalid."""
    fields: dict[str, Any]  # Any: lists and objects of unparsed values, and scalars
    try:  # one pass, because the GIL is held until the whole text is read
        fields = msgspec.json.decode(text, type=Fields)
    except msgspec.ValidationError:  # a number beyond 64 bits, or no object
        try:
            fields = msgspec.json.decode(text, type=dict[str, msgspec.Raw])
        except msgspec.ValidationError:
            return b"null", []
        if name in fields:
            with contextlib.suppress(msgspec.ValidationError):
                fields[name] = msgspec.json.decode(fields[name], type=list[msgspec.Raw])
    items = fields.get(name, [])
    if not isinstance(items, list):
        return msgspec.json.encode(fields | {name: None}), []
    if name in fields:
        fields[name] = msgspec.Raw(b"[" + (b",".join([each] * len(items)) if each else b"") + b"]")
    return msgspec.json.encode(fields), cast("list[msgspec.Raw]", items)


def validate(
    text: bytes, kind: type[T], path: Place, problems: Problems, reduce: Reduce | None = None
) -> T | None:
    """The record that a text contains. If it is invalid, returns None and adds the errors to `problems`."""
    try:
        return kind.model_validate_json(reduce(text, kind) if reduce else text)
    except ValidationError as error:
        problems += [{**problem, "loc": (*path, *problem["loc"])} for problem in problems_of(error)]
        return None
