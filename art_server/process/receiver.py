"""Receives vLLM's records over a Unix socket: the ledger's intake (`ledger/intake.py`), or on a host the relay to the server
(`machines/obeying.py`)."""

import asyncio
import contextlib
from abc import ABC, abstractmethod
from collections.abc import Callable
from pathlib import Path

READ_BYTES = 1 << 20


class Receiver(ABC):
    """Listens on a socket, to which every process of an engine connects."""

    def __init__(self) -> None:
        self._server: asyncio.Server | None = None

    async def listen(self, socket_path: Path) -> None:
        """Listens until `close`, if it does not listen yet."""
        if self._server is None:
            self._server = await asyncio.start_unix_server(self._serve, path=socket_path, limit=READ_BYTES)

    async def close(self) -> None:
        if self._server is not None:
            self._server.close()
            self._server = None

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with contextlib.closing(writer):
            await self.read(reader, writer.write)

    @abstractmethod
    async def read(self, reader: asyncio.StreamReader, write: Callable[[bytes], None]) -> None:
        """Takes the messages of one connection until vLLM ends; answers with `write`."""
