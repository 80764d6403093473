"""The socket over which the engine's process asks about prompts and reports what it sampled."""

import asyncio
import contextlib
import logging
import re
import uuid
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import msgspec

logger = logging.getLogger(__name__)

REQUEST_ID = re.compile(r"([0-9a-f]{32})(?:[-_](\d+))?$")
"""vLLM's request id holds the gate's and, for completions of several prompts, the prompt's number."""

FIRST_TURN = "f"
"""The first digit of a request's id when it cannot continue an answer: its prompt comes with its samples, and the engine does
not wait for other tokens."""

READ_BYTES = 1 << 20


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
    sampled_logprobs: list[float] | None = None
    kept: list[int] = field(default_factory=list)
    sets: list[bytes] = field(default_factory=list)
    """As in the ledger's `Record`."""
    rendered: list[int] | None = None
    """The prompt of a first turn; another's was asked about before."""


def new_request_id(is_first_turn: bool) -> str:
    """32 hexadecimal digits."""
    return (FIRST_TURN if is_first_turn else "0") + uuid.uuid4().hex[1:]


def is_first_turn(engine_request_id: str) -> bool:
    found = REQUEST_ID.search(engine_request_id)
    return found is not None and found[1].startswith(FIRST_TURN)


@dataclass(frozen=True, slots=True)
class Line:
    """What each line has; one with a prompt asks about it, any other is a sample."""

    request_id: str
    prompt: list[int] | None = None


class Name(msgspec.Struct):
    """What a line that cannot be taken still tells."""

    request_id: str = ""
    index: int = 0
    sampling: dict[str, Any] = {}


PromptHandler = Callable[[str, list[int]], list[int] | None]
"""From vLLM's request id and a rendered prompt to the tokens to sample from instead, if any."""

SamplesHandler = Callable[[Sequence[Sample]], None]

LostHandler = Callable[[str, int, int, Exception], None]
"""Told of a choice of which no record could be taken: vLLM's request id, the choice's index in it, the choices of a prompt,
and why."""


class RecordReceiver:
    """Listens on a Unix socket; answers prompts and hands samples on, those that came together as one batch.

    What cannot be taken is lost alone: its request is answered without a record, and the engine goes on.
    """

    def __init__(self, on_prompt: PromptHandler, on_samples: SamplesHandler, on_lost: LostHandler):
        self._on_prompt = on_prompt
        self._on_samples = on_samples
        self._on_lost = on_lost
        self._server: asyncio.Server | None = None

    async def listen(self, socket_path: Path) -> None:
        self._server = await asyncio.start_unix_server(
            self._read, path=socket_path, limit=READ_BYTES
        )

    async def close(self) -> None:
        if self._server is not None:
            self._server.close()
            self._server = None

    async def _read(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        rest = bytearray()
        with contextlib.closing(writer):
            while chunk := await reader.read(READ_BYTES):
                rest += chunk
                if b"\n" not in chunk:
                    continue
                *lines, rest = rest.split(b"\n")
                samples: list[Sample] = []
                for line in lines:
                    try:
                        asked = msgspec.json.decode(line, type=Line)
                        if asked.prompt is None:
                            samples.append(msgspec.json.decode(line, type=Sample))
                            continue
                    except (msgspec.MsgspecError, RecursionError) as error:
                        self._lose(line, error)  # a log-probability that is no number
                        continue
                    answer = {"request_id": asked.request_id, "token_ids": self._answer(asked)}
                    writer.write(msgspec.json.encode(answer) + b"\n")
                if samples:
                    self._take(samples)
            if rest:
                logger.warning("the engine ended in the middle of a record")

    def _answer(self, asked: Line) -> list[int] | None:
        assert asked.prompt is not None
        try:
            return self._on_prompt(asked.request_id, asked.prompt)
        except Exception as error:  # whatever it is, the engine samples from what it rendered
            logger.error("no exact tokens for a prompt of %s: %r", asked.request_id, error)
            return None

    def _take(self, samples: Sequence[Sample]) -> None:
        try:
            self._on_samples(samples)
        except Exception as error:
            if len(samples) > 1:  # it is the fault of one of them
                for sample in samples:
                    self._take([sample])
            else:
                (lost,) = samples
                self._on_lost(lost.request_id, lost.index, lost.sampling.get("n", 1), error)

    def _lose(self, line: bytes | bytearray, error: Exception) -> None:
        try:
            name = msgspec.json.decode(line, type=Name)
        except (msgspec.MsgspecError, RecursionError):
            logger.error("the engine wrote a line that cannot be read: %s", error)
            return
        self._on_lost(name.request_id, name.index, name.sampling.get("n", 1), error)
