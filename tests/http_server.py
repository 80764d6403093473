"""An application over real HTTP, in a thread of this process."""

import contextlib
import threading
import time
from collections.abc import Iterator
from typing import Any

import uvicorn

from tests.waiting import PATIENCE_SECONDS


class Served:
    """An application on this machine, until `stop`. Port 0 is a free one."""

    def __init__(self, app: Any, port: int = 0, lifespan: Any = "on"):
        self.app = app
        config = uvicorn.Config(
            app, port=port, lifespan=lifespan, log_level="critical", ws="none", timeout_graceful_shutdown=1
        )
        self._server = uvicorn.Server(config)
        self._thread = threading.Thread(target=self._server.run, daemon=True)
        self._thread.start()
        deadline = time.monotonic() + PATIENCE_SECONDS
        while not self._server.started:
            assert self._thread.is_alive() and time.monotonic() < deadline
            time.sleep(0.01)
        self.port: int = self._server.servers[0].sockets[0].getsockname()[1]
        self.url = f"http://127.0.0.1:{self.port}"

    def stop(self) -> None:
        self.app.state.is_stopping = True  # ends the streams of open pages
        self._server.should_exit = True
        self._thread.join()


@contextlib.contextmanager
def served(app: Any, port: int = 0, lifespan: Any = "on") -> Iterator[str]:
    """The address of an application."""
    running = Served(app, port, lifespan)
    try:
        yield running.url
    finally:
        running.stop()
