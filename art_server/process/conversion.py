"""Finds a base model whose files may have to be converted first. A child process converts them, once: the work needs torch and
computes for a minute, in which a server has to answer its clients and a host its server."""

import asyncio
import os
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from art_protocol.log_file import LogFile
from art_server.errors import InvalidInput
from art_server.process.children import Children
from art_server.process.place import Command, Here
from art_server.store.base_models import BaseModel, NotConverted

PROGRAM = "art_server.engine.inspection_process.convert_smollm2"
MAX_LINE_BYTES = 2**16


@dataclass(frozen=True, slots=True)
class ConversionProgram:
    """The conversion into a folder, as a place starts it (`process/place.py`)."""

    folder: Path

    async def prepare(self) -> Command:
        environment = {name: value for name, value in os.environ.items() if name != "ART_API_KEY"}
        return Command(
            arguments=[sys.executable, "-m", PROGRAM, str(self.folder)],
            # No GPU: a context on it would take memory that the engine's start measures.
            environment=environment | {"CUDA_VISIBLE_DEVICES": ""},
            max_line_bytes=MAX_LINE_BYTES,
        )


async def find_converted(
    find: Callable[[], BaseModel], *, children: Children, log_dir: Path, report: Callable[[str], None]
) -> BaseModel:
    """The base model that `find` returns (blocking: called in a thread), after a conversion if `find` asks for one. `report` gets
    a sentence at the beginning of each part of the conversion. A conversion that is cancelled is killed.

    Raises:
        InvalidInput: from `find`, or the files cannot be converted.
    """
    try:
        return await asyncio.to_thread(find)
    except NotConverted as error:
        missing = error
    log = LogFile(log_dir / "conversion.log")
    process = await Here(device="cpu", children=children).start(ConversionProgram(missing.folder), log)
    try:
        while line := await process.read_line():
            report(f"converting, once: {line.decode().strip()}")
        status = await process.wait()
    finally:
        await process.end()
    if status != 0:
        reason = log.tail(1) or f"the process ended with status {status}"
        raise InvalidInput(
            f"base_model '{missing.name}' cannot be converted: {reason[:500]}; the whole log is {log.path}",
            code="unknown_base_model",
            param="base_model",
        )
    return await asyncio.to_thread(find)
