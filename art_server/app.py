"""The application: the service behind the door, with its routes."""

import contextlib
from collections.abc import AsyncIterator

from fastapi import FastAPI

from art_server import __version__
from art_server.api import art_wire, checkpoints, control, errors, inference, openapi
from art_server.api.door import Door
from art_server.api.keys import Keys
from art_server.api.model_keys import ModelKeys, read_secret
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

    app = FastAPI(title="art-server", version=__version__, lifespan=lifespan)
    errors.install(app)
    keys = app.state.keys = Keys(config.api_keys)
    model_keys = ModelKeys(read_secret(config.server_dir / "model_keys_secret"))
    inference.install(app, service)  # first, for routes are tried in order
    control.install(app, service, config.max_body_mb)
    checkpoints.install(app, service)
    art_wire.install(app, service, keys, model_keys, inference_port, config.max_body_mb)
    openapi.describe(app)
    app.add_middleware(
        Door,
        config=config,
        inference_port=inference_port,
        keys=keys,
        model_keys=model_keys,
    )
    return app
