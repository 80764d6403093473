"""`LocalBackend`: an art-server that runs as a child process of this program.

The server writes its address to `{path}/.server/address.json`. Its output goes to `{path}/logs/server.log`.
"""

import asyncio
import atexit
import contextlib
import json
import logging
import os
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Self

from art.bars import StatusLine
from art.core.backend import Backend
from art.core.model import Model
from art.errors import ArtConnectionError, ArtError
from art.reporting import OnStep
from art_protocol.log_file import LogFile

logger = logging.getLogger(__name__)

STOP_SECONDS = 30
"""Time for the server to finish a checkpoint and stop its engine before the server is killed."""


class LocalBackend(Backend):
    """An art-server on this machine, for this program only.

    The server starts with the first `register` or with `async with`, and stops with `close`, at the latest when the
    program ends. Models and checkpoints stay under `path` (".art"), and the next run continues with them. `server_args`
    are further flags of `art-server`. `trackers` and `on_step` work as in `Backend`.
    """

    def __init__(
        self,
        *,
        path: str | os.PathLike[str] | None = None,
        server_args: Sequence[str] = (),
        start_timeout_seconds: float = 600,
        trackers: Sequence[str] = (),
        on_step: OnStep | None = None,
    ) -> None:
        self._path = Path(path or ".art").absolute()
        self._log_dir = self._path / "logs"
        # The server chooses a free port. Its address replaces this one in `_wait_until_ready`.
        super().__init__("http://127.0.0.1:0", trackers=trackers, on_step=on_step)
        self._server_args = list(server_args)
        self._start_timeout_seconds = start_timeout_seconds
        self._server: subprocess.Popen[bytes] | None = None
        self._start_lock = asyncio.Lock()
        self._server_log = LogFile(self._log_dir / "server.log")

    async def __aenter__(self) -> Self:
        await self.start()
        return self

    async def register(self, model: Model) -> None:
        """Starts the server, unless it runs already, and registers the model; see `Backend.register`."""
        await self.start()
        await super().register(model)

    async def start(self) -> None:
        """Starts the server, unless it runs already, and returns when it answers.

        Raises:
            ArtError: the server ends or does not answer in time; the message contains the end of the server's log.
        """
        async with self._start_lock:
            if self._server is not None and self._server.poll() is None:
                return
            # Not in a thread, where a cancellation could lose the process. The launch takes milliseconds.
            self._server = self._launch()
            atexit.register(self._stop)
            async with contextlib.AsyncExitStack() as on_failure:
                on_failure.push_async_callback(asyncio.to_thread, self._stop)
                await self._wait_until_ready()
                on_failure.pop_all()
            logger.info("art-server runs at %s", self._connection.base_url)

    async def close(self) -> None:
        """Closes the connections and stops the server."""
        await super().close()
        await asyncio.to_thread(self._stop)

    @property
    def _location(self) -> str:
        return str(self._path)

    def _command(self) -> list[str]:
        # "-u": Python keeps output to a file in a buffer, and a killed server's last lines would not be in the log.
        return [sys.executable, "-u", "-m", "art_server"]

    def _launch(self) -> subprocess.Popen[bytes]:
        flags = ["--host", "127.0.0.1", "--port", "0", "--inference-port", "0"]
        flags += ["--path", str(self._path), "--exit-with-parent", *self._server_args]
        try:
            opened = self._server_log.open()
        except OSError as error:
            raise ArtError(
                f"path {self._path} cannot be made or used ({error.strerror}): pass a folder in which this user may write"
            ) from None
        with opened as log:
            return subprocess.Popen(
                [*self._command(), *flags],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                # The server compares this id with its parent's: a program that ended during the server's start is noticed, too.
                env={**os.environ, "ART_PARENT_PID": str(os.getpid())},
                start_new_session=True,  # Ctrl-C reaches only the program, which then stops the server
            )

    async def _wait_until_ready(self) -> None:
        line = StatusLine()
        try:
            await self._wait_until_it_answers(line)
        finally:
            line.end()

    async def _wait_until_it_answers(self, line: StatusLine) -> None:
        started_at = time.monotonic()
        deadline = started_at + self._start_timeout_seconds
        while time.monotonic() < deadline:
            self._check_server()
            seconds = time.monotonic() - started_at
            line.show(f"art: {seconds:.0f} s  art-server starts, log {self._server_log.path}", "start")
            address = await asyncio.to_thread(self._read_address)
            if address is not None:
                self._connection.base_url = address
                try:
                    await self._connection.request("GET", "/health", timeout_seconds=10, reconnect_seconds=0)
                    return
                except ArtConnectionError:
                    pass  # the server is too busy to answer, or has died
            await asyncio.sleep(0.1)
        raise ArtError(f"art-server was not ready after {self._start_timeout_seconds:.0f} s.\n{self._log_tail()}")

    def _read_address(self) -> str | None:
        """The address that the server has written; None before. The address of an earlier server is ignored."""
        try:
            address: dict[str, Any] = json.loads((self._path / ".server" / "address.json").read_text())
        except FileNotFoundError:
            return None
        is_ours = self._server is not None and address["pid"] == self._server.pid
        return address["url"] if is_ours else None

    def _check_server(self) -> None:
        if self._server is None:
            raise ArtError("the server of this LocalBackend is not running: register a model, which starts it")
        if self._server.poll() is None:
            return
        tail = self._log_tail()
        remedy = ""
        if "No module named" in tail:
            remedy = "\nInstall what the server needs: README.md of the repository, section Install"
        raise ArtError(f"art-server ended with exit code {self._server.returncode}.\n{tail}{remedy}")

    def _log_tail(self) -> str:
        return f"Last lines of {self._server_log.path}:\n{self._server_log.tail()}"

    def _stop(self) -> None:
        if self._server is None:
            return
        self._server.terminate()
        try:
            self._server.wait(STOP_SECONDS)
        except subprocess.TimeoutExpired:
            logger.warning("art-server did not stop within %d s: killing it", STOP_SECONDS)
            self._server.kill()
            self._server.wait()
        self._server = None
        atexit.unregister(self._stop)
