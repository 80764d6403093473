"""The page over a folder of runs without a running server: `art view DIR`."""

import contextlib
import webbrowser
from pathlib import Path
from types import FrameType

import uvicorn
from fastapi import FastAPI

from art_server import __version__
from art_server.api import error_responses
from art_server.api.auth import Authentication
from art_server.api.keys import Keys
from art_server.api.model_keys import ModelKeys
from art_server.api.refused_keys import RefusedKeys
from art_server.errors import UsageError
from art_server.settings import ServerConfig
from art_watch import routes
from art_watch.runs import Runs


def make_view(path: Path) -> FastAPI:
    """The ASGI application with the page's routes alone. The application writes nothing."""
    app = FastAPI(title="art view", version=__version__)
    app.state.server, app.state.runs, app.state.is_stopping = None, Runs(path), False
    error_responses.add_error_handlers(app)
    app.include_router(routes.router)
    app.add_middleware(
        Authentication,
        config=ServerConfig(path=path),
        inference_port=None,
        keys=Keys(()),
        model_keys=ModelKeys(b""),
        refused_keys=RefusedKeys(),
    )
    return app


def view(path: Path, port: int, *, opens_browser: bool) -> None:
    """Serves the page on this machine until Ctrl-C.

    Raises:
        UsageError: the folder has no models.
    """
    if not Runs(path).folders():
        raise UsageError(
            f"{path} has no models: name the folder that art-server writes (its --path, '.art' by default)"
        )
    url = f"http://127.0.0.1:{port}"
    print(f"{path.absolute()} at {url} (Ctrl-C ends)", flush=True)
    if opens_browser:
        webbrowser.open(url)
    # uvicorn raises Ctrl-C again when all connections are closed.
    with contextlib.suppress(KeyboardInterrupt):
        _Server(make_view(path), port).run()


class _Server(uvicorn.Server):
    """Serves an application on this machine. A signal first ends the streams of open pages."""

    def __init__(self, app: FastAPI, port: int):
        self._app = app
        config = uvicorn.Config(app, host="127.0.0.1", port=port, log_level="warning", timeout_graceful_shutdown=2)
        super().__init__(config)

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        self._app.state.is_stopping = True
        super().handle_exit(sig, frame)
