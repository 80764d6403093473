"""The socket over which the engine's process asks about prompts and reports what it sampled."""

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
    text: str
    """As vLLM decoded it, without special tokens, cut where a stop string cut it."""
    token_ids: list[int]
    logprobs: list[float]
    """One for each of token_ids: raw log-probabilities, at temperature 1."""
    finish_reason: str
    stop_reason: int | str | None
    sampling: dict[str, Any]


PromptHandler = Callable[[str, list[int]], list[int] | None]
"""From vLLM's request id and a rendered prompt to the tokens to sample from instead, if any."""


class RecordReceiver:
    """Listens on a Unix socket; answers prompts and hands samples on, in the order in which they come."""

    def __init__(self, on_prompt: PromptHandler, on_sample: Callable[[Sample], None]):
        self._on_prompt = on_prompt
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
                message = json.loads(line)
                if message.pop("kind") == "sample":
                    self._on_sample(Sample(**message))
                    continue
                token_ids = self._on_prompt(message["request_id"], message["token_ids"])
                answer = {"request_id": message["request_id"], "token_ids": token_ids}
                writer.write(json.dumps(answer, separators=(",", ":")).encode() + b"\n")
