"""Reading bodies: with a limit, beside the event loop when they are large, and no deeper than anything here can handle."""

import asyncio
import gc
from collections.abc import Awaitable, Callable
from typing import Any, TypeVar

import msgspec
from fastapi import Request
from pydantic import BaseModel, ValidationError

from art.wire import LogRequest, TrainRequest, TrajectoryBody, TrajectoryGroupBody
from art_server.api.errors import invalid_body, invalid_fields, problems_of, too_deep
from art_server.errors import InvalidInput, TooLarge

T = TypeVar("T", bound=BaseModel)
G = TypeVar("G", TrainRequest, LogRequest)
R = TypeVar("R")

SMALL_BYTES = 64 * 1024
"""Parsed at once; above it, in a thread."""
MAX_DEPTH = 100
"""Of objects and arrays. Whatever reads or writes JSON here and in vLLM handles 200; tools nest to 30 or so."""
V1_MB = 4
"""For tools, schemas, and prompts in a batch."""
V1_BYTES_PER_TOKEN = 64
"""A token is about four characters of text, each six bytes where JSON escapes it, or one number of at most eight."""
DROP_SECONDS = 0.01
"""For threads that have just returned to drop their arguments, so that `release` is the one that frees them."""
FEWER_GROUPS = "send fewer groups at once, or start the server with a larger --max-body-mb"
SHORTER = "shorten the conversation, or start the server with a larger --max-seq-length"


def v1_limit_mb(max_seq_length: int | None) -> float:
    """How large a request for inference may be. What is longer does not fit the context."""
    return V1_MB + V1_BYTES_PER_TOKEN * (max_seq_length or 0) / 2**20


async def read_body(request: Request, max_mb: float, remedy: str = FEWER_GROUPS) -> bytes:
    """
    Raises:
        TooLarge: more than the server takes; nothing is read where the length is told, else the rest is not.
    """
    limit = max_mb * 2**20
    told = request.headers.get("content-length", "")
    size = int(told) if told.isdecimal() else 0
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
    return b"".join(parts)


async def parse_body(body: bytes, kind: type[T]) -> T:
    """
    Raises:
        InvalidInput: naming the fields at fault.
    """
    try:
        return await beside(kind.model_validate_json, body)
    except ValidationError as error:
        raise invalid_body(error) from error


async def beside(parse: Callable[[bytes], R], body: bytes) -> R:
    """What `parse` makes of a body: at once where it is small, else in a thread."""
    return parse(body) if len(body) <= SMALL_BYTES else await asyncio.to_thread(parse, body)


def decode(body: bytes) -> Any:
    """The value of a JSON body.

    Raises:
        InvalidInput: it is none, or nested too deeply.
    """
    try:
        value = msgspec.json.decode(body)
    except RecursionError as error:
        raise too_deep() from error
    except ValueError as error:
        raise InvalidInput(f"the body is not JSON: {error}", code="invalid_body") from error
    # No body is deeper than it has brackets: most are not walked through.
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
    """Reads bodies of many trajectories without holding up the event loop.

    A large one is read in a thread, one trajectory at a time, because a call to the parser holds the interpreter until it
    returns. It becomes millions of objects without any garbage among them, and one search for garbage would take a second:
    they are frozen until they are released.
    """

    def __init__(self) -> None:
        self._turn = asyncio.Lock()
        """One is read at a time: it takes a core, and many times its bytes."""
        self._num_open = 0

    async def read(self, body: bytes, kind: type[G], use: Callable[[G], Awaitable[R]]) -> R:
        """What `use` returns for the request that a body holds.

        Raises:
            InvalidInput: naming the fields at fault.
        """
        if len(body) <= SMALL_BYTES:
            return await use(await parse_body(body, kind))
        self._num_open += 1
        try:
            async with self._turn:
                request = await asyncio.to_thread(read_frozen, body, kind)
            trajectories = [each for group in request.groups for each in group.trajectories]
            used = await use(request)
            del request
            await asyncio.sleep(DROP_SECONDS)
            await asyncio.to_thread(release, trajectories)
            return used
        finally:
            self._num_open -= 1
            if self._num_open == 0:
                gc.unfreeze()


def read_frozen(body: bytes, kind: type[G]) -> G:
    """`read_groups` without any search for garbage, then or later."""
    gc.disable()
    try:
        return read_groups(body, kind)
    finally:
        gc.freeze()
        gc.enable()


def release(values: list[Any]) -> None:
    """Drop values one by one: all at once would hold the interpreter."""
    while values:
        values.pop()


Place = tuple[int | str, ...]
Problems = list[dict[str, Any]]
"""As pydantic lists them."""


def read_groups(body: bytes, kind: type[G]) -> G:
    """What `kind.model_validate_json` returns, and the problems that it finds, but from strict JSON, without NaN.

    Raises:
        InvalidInput: naming the fields at fault.
    """
    problems: Problems = []
    try:
        rest, texts = take_list(body, "groups", one=b'{"trajectories":[]}')
        groups = [read_group(text, ("groups", index), problems) for index, text in enumerate(texts)]
    except RecursionError as error:
        raise too_deep() from error
    except msgspec.DecodeError as error:
        raise InvalidInput(
            f"the body is not JSON, which has no NaN and no Infinity: {error}", code="invalid_body"
        ) from error
    request = validate(rest, kind, (), problems)
    if request is None or problems:
        raise invalid_fields(problems)
    return request.model_copy(update={"groups": groups} if groups else {})


def read_group(text: msgspec.Raw, path: Place, problems: Problems) -> TrajectoryGroupBody | None:
    rest, texts = take_list(text, "trajectories")
    trajectories = [
        validate(bytes(text), TrajectoryBody, (*path, "trajectories", index), problems)
        for index, text in enumerate(texts)
    ]
    group = validate(rest, TrajectoryGroupBody, path, problems)
    return group and group.model_copy(update={"trajectories": trajectories})


def take_list(
    text: bytes | msgspec.Raw, name: str, one: bytes = b""
) -> tuple[bytes, list[msgspec.Raw]]:
    """An object with its list `name` emptied, or holding `one` where it was not empty, and the list's items, unread. What
    has another type becomes null, which is as wrong."""
    try:
        fields = msgspec.json.decode(text, type=dict[str, msgspec.Raw])
    except msgspec.ValidationError:
        return b"null", []
    items: list[msgspec.Raw] = []
    if name in fields:
        try:
            items = msgspec.json.decode(fields[name], type=list[msgspec.Raw])
            fields[name] = msgspec.Raw(b"[" + (one if items else b"") + b"]")
        except msgspec.ValidationError:
            fields[name] = msgspec.Raw(b"null")
    return msgspec.json.encode(fields), items


def validate(text: bytes, kind: type[T], path: Place, problems: Problems) -> T | None:
    """The record that a text holds; None where it does not fit, with the reasons added to `problems`."""
    try:
        return kind.model_validate_json(text)
    except ValidationError as error:
        problems += [{**problem, "loc": (*path, *problem["loc"])} for problem in problems_of(error)]
        return None
