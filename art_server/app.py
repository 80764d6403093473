"""The ASGI application: the server's routes behind authentication."""

import contextlib
from collections.abc import AsyncIterator

from fastapi import FastAPI

from art_server import __version__
from art_server.api import art_wire, checkpoints, control, error_responses, feedback_tokens, learning
from art_server.api.auth import Authentication
from art_server.api.cors import CrossOrigin
from art_server.api.feedback_tokens import FeedbackTokens
from art_server.api.keys import Keys
from art_server.api.model_keys import ModelKeys
from art_server.api.openai import routes as openai_routes
from art_server.api.refused_keys import RefusedKeys
from art_server.api.score_rates import ScoreRates
from art_server.server import Server
from art_server.store import files
from art_watch import metrics, routes
from art_watch.runs import Runs


def make_app(server: Server, inference_port: int | None) -> FastAPI:
    """The ASGI application; its lifespan starts and stops the server. `state.keys` holds the API keys."""

    @contextlib.asynccontextmanager
    async def lifespan(_: FastAPI) -> AsyncIterator[None]:
        await server.start()
        try:
            yield
        finally:
            await server.stop()

    # A body without a content-type is read as JSON.
    app = FastAPI(title="art-server", version=__version__, lifespan=lifespan, strict_content_type=False)
    config = server.config
    keys = Keys(config.api_keys, server.hosts.keys if server.hosts is not None else ())
    app.state.server = server
    app.state.keys, app.state.inference_port = keys, inference_port
    app.state.runs = Runs(config.path, server.registry.history_of)
    app.state.is_stopping = False
    app.state.model_keys = ModelKeys(files.read_secret(config.server_dir / "model_keys_secret"))
    app.state.feedback_tokens = FeedbackTokens(files.read_secret(config.server_dir / "feedback_tokens_secret"))
    app.state.score_rates = ScoreRates()
    app.state.refused_keys = RefusedKeys()
    error_responses.add_error_handlers(app)
    # Routes are tried in order, so the routes of most requests come first.
    for module in (openai_routes, control, feedback_tokens, learning, checkpoints, art_wire, routes, metrics):
        app.include_router(module.router, responses=error_responses.RESPONSES)
    if server.hosts is not None:
        app.include_router(server.hosts.router)
    app.add_middleware(
        Authentication,
        config=config,
        inference_port=inference_port,
        keys=keys,
        model_keys=app.state.model_keys,
        refused_keys=app.state.refused_keys,
    )
    # Added last, so that it comes before authentication: a browser sends no key with its first question.
    app.add_middleware(CrossOrigin, origins=config.cors_origins)
    return app
