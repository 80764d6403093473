"""Reading bodies, with a limit, and off the event loop when they are large."""

import asyncio
from typing import TypeVar

from fastapi import Request
from pydantic import BaseModel, ValidationError

from art_server.api.errors import invalid_body
from art_server.errors import TooLarge

T = TypeVar("T", bound=BaseModel)

SMALL_BYTES = 64 * 1024
"""Parsed at once; above it, in a thread."""


async def read_body(request: Request, max_mb: int) -> bytes:
    """
    Raises:
        TooLarge: more than the server takes; the rest is not read.
    """
    limit = max_mb * 1024 * 1024
    parts: list[bytes] = []
    size = 0
    async for part in request.stream():
        size += len(part)
        if size > limit:
            raise TooLarge(
                f"the body is above {max_mb} MB: send fewer groups at once, or start the server with a larger "
                "--max-body-mb",
                code="body_too_large",
            )
        parts.append(part)
    return b"".join(parts)


async def parse_body(body: bytes, kind: type[T]) -> T:
    """
    Raises:
        InvalidInput: naming the fields at fault.
    """
    try:
        if len(body) <= SMALL_BYTES:
            return kind.model_validate_json(body)
        return await asyncio.to_thread(kind.model_validate_json, body)
    except ValidationError as error:
        raise invalid_body(error) from error
