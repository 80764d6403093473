"""The socket over which the engine's process asks about prompts and reports what it sampled, and the way into the ledger."""

import asyncio
import contextlib
import logging
from collections.abc import Callable, Sequence
from pathlib import Path

import msgspec

from art_server.background import Background
from art_server.ledger.ledger import Ledger
from art_server.shared.samples import REQUEST_ID, Line, Name, Sample

logger = logging.getLogger(__name__)

RECORDS = "records"
"""The name under which `/health` tells of records that are lost."""

READ_BYTES = 1 << 20


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


class Intake:
    """Takes what the engine reports into the ledger: finds the request and the choice by vLLM's request id."""

    def __init__(self, ledger: Ledger, background: Background):
        self._ledger = ledger
        self._background = background

    def receiver(self) -> RecordReceiver:
        return RecordReceiver(self._take_prompt, self._take_samples, self._lose)

    def _take_prompt(self, engine_request_id: str, rendered: list[int]) -> list[int] | None:
        found = REQUEST_ID.search(engine_request_id)
        if found is None:
            return None
        return self._ledger.take_prompt(found[1], int(found[2] or 0), rendered)

    def _take_samples(self, samples: Sequence[Sample]) -> None:
        taken: list[tuple[str, int, int, Sample]] = []
        for sample in samples:
            found = REQUEST_ID.search(sample.request_id)
            if found is not None:
                position = int(found[2] or 0)
                index = position * sample.sampling["n"] + sample.index
                taken.append((found[1], index, position, sample))
        self._ledger.take_samples(taken)
        self._background.is_well(RECORDS)

    def _lose(self, engine_request_id: str, index: int, num: int, error: Exception) -> None:
        self._background.is_faulty(RECORDS, error)
        if found := REQUEST_ID.search(engine_request_id):
            self._ledger.lose(found[1], int(found[2] or 0) * num + index, str(error))
