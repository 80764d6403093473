"""The socket over which the engine's process reports what it sampled."""

import asyncio
import contextlib
import json
import logging
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

logger = logging.getLogger(__name__)

MAX_LINE_BYTES = 1 << 28


@dataclass(frozen=True, slots=True)
class Sample:
    """One finished choice, as the engine sampled it."""

    request_id: str
    """vLLM's own id of the request; it contains the id that the gate set."""
    index: int
    adapter: str | None
    """The LoRA that sampled, as the engine knows it; None for the base model."""
    prompt_token_ids: list[int]
    token_ids: list[int]
    logprobs: list[float]
    """One for each of token_ids: raw log-probabilities, at temperature 1."""
    finish_reason: str
    stop_reason: int | str | None
    sampling: dict[str, Any]


class RecordReceiver:
    """Listens on a Unix socket and hands each sample on, in the order in which they come."""

    def __init__(self, on_sample: Callable[[Sample], None]):
        self._on_sample = on_sample
        self._server: asyncio.Server | None = None

    async def listen(self, socket_path: Path) -> None:
        self._server = await asyncio.start_unix_server(
            self._read, path=socket_path, limit=MAX_LINE_BYTES
        )

    async def close(self) -> None:
        if self._server is not None:
            self._server.close()
            self._server = None

    async def _read(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with contextlib.closing(writer):
            while line := await reader.readline():
                if not line.endswith(b"\n"):
                    logger.warning("the engine ended in the middle of a record")
                    return
                self._on_sample(Sample(**json.loads(line)))
