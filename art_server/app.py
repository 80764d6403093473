"""The ASGI application: the service's routes behind authentication."""

import contextlib
from collections.abc import AsyncIterator

from fastapi import FastAPI

from art_server import __version__
from art_server.api import errors, inference
from art_server.api.auth import Authentication
from art_server.api.keys import Keys
from art_server.api.model_keys import ModelKeys, read_secret
from art_server.api.routers import ROUTERS
from art_server.observe.runs import Runs
from art_server.service import Service
from art_server.settings import ServerConfig


def make_app(service: Service, config: ServerConfig, inference_port: int | None) -> FastAPI:
    """The ASGI application; its lifespan starts and stops the service. `state.keys` holds the API keys."""

    @contextlib.asynccontextmanager
    async def lifespan(_: FastAPI) -> AsyncIterator[None]:
        await service.start()
        try:
            yield
        finally:
            await service.stop()

    # A body without a content-type is read as JSON.
    app = FastAPI(
        title="art-server", version=__version__, lifespan=lifespan, strict_content_type=False
    )
    keys = Keys(config.api_keys)
    app.state.service, app.state.config = service, config
    app.state.keys, app.state.inference_port = keys, inference_port
    app.state.runs = Runs(config.path, service.history)
    app.state.is_stopping = False
    app.state.model_keys = ModelKeys(read_secret(config.server_dir / "model_keys_secret"))
    errors.install(app)
    inference.install(app, service)  # first, because routes are tried in order
    for router in ROUTERS:
        app.include_router(router, responses=errors.RESPONSES)
    app.add_middleware(
        Authentication,
        config=config,
        inference_port=inference_port,
        keys=keys,
        model_keys=app.state.model_keys,
    )
    return app
