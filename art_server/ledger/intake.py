"""Receives prompts and samples from the engine's process over a socket, and passes them to the ledger.

They belong to the request whose id vLLM got in the header `x-request-id`: `Proxy.answer` has announced the id to the ledger."""

import asyncio
import logging
import sqlite3
from collections.abc import Callable, Sequence
from typing import Any

import msgspec

from art_server.ledger.ledger import Ledger
from art_server.process.background import Background
from art_server.process.receiver import READ_BYTES, Receiver
from art_server.shared.engine_messages import REQUEST_ID, EngineMessage, FinishedChoice, MessageName

logger = logging.getLogger(__name__)

RECORDS = "records"
"""The name under which `/health` reports lost records."""

PromptHandler = Callable[[str, list[int]], list[int] | None]
"""From vLLM's request id and a rendered prompt to the tokens to sample from instead, or None."""

SamplesHandler = Callable[[Sequence[FinishedChoice]], None]

LostHandler = Callable[[str, int, int, Exception], None]
"""Called for a choice that could not be recorded: vLLM's request id, the choice's index, the number of choices per
prompt, and the error."""


class RecordReceiver(Receiver):
    """Answers prompts, and passes on samples; samples that arrive together form one batch.

    A sample that cannot be recorded affects no other sample: its request is answered without a record.
    """

    def __init__(self, on_prompt: PromptHandler, on_samples: SamplesHandler, on_lost: LostHandler):
        super().__init__()
        self._on_prompt = on_prompt
        self._on_samples = on_samples
        self._on_lost = on_lost

    async def read(self, reader: asyncio.StreamReader, write: Callable[[bytes], None]) -> None:
        rest = bytearray()
        while chunk := await reader.read(READ_BYTES):
            rest += chunk
            # A prompt of megabytes comes in many chunks: all of them are split once, at its end.
            if b"\n" not in chunk:
                continue
            *lines, rest = rest.split(b"\n")
            samples: list[FinishedChoice] = []
            for line in lines:
                try:
                    message = msgspec.json.decode(line, type=EngineMessage)
                    if message.prompt is None:
                        samples.append(msgspec.json.decode(line, type=FinishedChoice))
                        continue
                except (msgspec.MsgspecError, RecursionError) as error:
                    self._lose(line, error)  # such as a log-probability that is not a number
                    continue
                write(msgspec.json.encode(self._answer(message)) + b"\n")
            if samples:
                self._take(samples)
        if rest:
            logger.warning("the engine ended in the middle of a message")

    def _answer(self, message: EngineMessage) -> dict[str, Any]:
        assert message.prompt is not None
        answer = {"request_id": message.request_id, "token_ids": None, "is_stored": True}
        try:
            return answer | {"token_ids": self._on_prompt(message.request_id, message.prompt)}
        except Exception as error:
            # The engine samples from its own rendering, and sends it with the samples.
            logger.error("no exact tokens for request %s: %r", message.request_id, error)
            return answer | {"is_stored": False}

    def _take(self, samples: Sequence[FinishedChoice]) -> None:
        try:
            self._on_samples(samples)
        except Exception as error:
            is_of_disk = isinstance(error, sqlite3.OperationalError)  # full, locked...
            if len(samples) > 1 and not is_of_disk:  # one of them is at fault: record each alone
                for sample in samples:
                    self._take([sample])
                return
            for lost in samples:
                self._on_lost(lost.request_id, lost.index, lost.sampling.get("n", 1), error)

    def _lose(self, line: bytes | bytearray, error: Exception) -> None:
        try:
            name = msgspec.json.decode(line, type=MessageName)
        except (msgspec.MsgspecError, RecursionError):
            logger.error("the engine sent a line that cannot be read: %s", error)
            return
        self._on_lost(name.request_id, name.index, name.sampling.get("n", 1), error)


class Intake:
    """Passes the engine's prompts and samples to the ledger, with request and choice from vLLM's request id."""

    def __init__(self, ledger: Ledger, background: Background):
        self._ledger = ledger
        self._background = background

    def receiver(self) -> RecordReceiver:
        return RecordReceiver(self._take_prompt, self._take_samples, self._lose)

    def _take_prompt(self, engine_request_id: str, rendered: list[int]) -> list[int] | None:
        match = REQUEST_ID.search(engine_request_id)
        if match is None:
            return None
        return self._ledger.take_prompt(match[1], int(match[2] or 0), rendered)

    def _take_samples(self, samples: Sequence[FinishedChoice]) -> None:
        taken: list[tuple[str, int, int, FinishedChoice]] = []
        for sample in samples:
            match = REQUEST_ID.search(sample.request_id)
            if match is not None:
                position = int(match[2] or 0)
                # As vLLM numbers the choices of a completion with several prompts (0.32, completion/serving.py).
                index = position * sample.sampling["n"] + sample.index
                taken.append((match[1], index, position, sample))
        self._ledger.take_samples(taken)
        self._background.clear_fault(RECORDS)

    def _lose(self, engine_request_id: str, index: int, num: int, error: Exception) -> None:
        self._background.record_fault(RECORDS, error)
        if match := REQUEST_ID.search(engine_request_id):
            self._ledger.lose(match[1], int(match[2] or 0) * num + index, str(error))
