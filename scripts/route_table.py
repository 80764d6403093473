"""docs/routes.md: the server's routes, each with the scope that a key needs and the largest body."""

from collections.abc import Iterator

from fastapi import FastAPI
from fastapi.routing import APIRoute

from art_server.api.auth import ART_PATHS, FEEDBACK, OPEN_PATHS, TOKENS
from art_server.api.bodies import SMALL_MB, V1_BYTES_PER_TOKEN, V1_MB
from art_server.api.openai.routes import PATHS
from art_server.settings import ServerConfig

TRAJECTORIES = f"`--max-body-mb` ({ServerConfig.model_fields['max_body_mb'].default})"
INFERENCE = f"{V1_MB} MB plus {V1_BYTES_PER_TOKEN} bytes for each token of the context"
HEAD = "| | route | scope | largest body |\n|---|---|---|---|\n"


def route_table(app: FastAPI) -> str:
    """A Markdown table."""
    rows = [
        f"| {method} | `{path}` | {scope_of(path)} | {limit} |"
        for method, path, limit in sorted(routes_of(app), key=lambda row: f" `{row[1]}` ")
    ]
    return HEAD + "\n".join(rows) + "\n"


def routes_of(app: FastAPI) -> Iterator[tuple[str, str, str]]:
    """The method, the path and the largest body of each route. "{name:path}", a name with slashes, is written "{name}"."""
    for route in app.routes:
        if isinstance(route, APIRoute) and route.include_in_schema:
            for method in route.methods:
                yield method, route.path.replace(":path}", "}"), limit_of(route, method)
    for path in PATHS:
        yield "POST", path, INFERENCE


def limit_of(route: APIRoute, method: str) -> str:
    if method == "PUT" and route.body_field is None:
        return "8 GiB"
    if route.body_field is not None or (method == "POST" and FEEDBACK.fullmatch(route.path)):
        return f"{SMALL_MB} MB"
    return TRAJECTORIES if route.openapi_extra else "none"


def scope_of(path: str) -> str:
    if path in OPEN_PATHS:
        return "none; with a key the answer has more fields"
    if path.startswith(TOKENS):
        return "none: the path has a token"
    if path.startswith("/v1/"):
        return "infer"
    if FEEDBACK.fullmatch(path):
        return "feedback or train"
    return "train, or `--legacy-without-key`" if path in ART_PATHS else "train"
