"""The bodies, errors and scopes of all routes, for `/openapi.json` and docs/routes.md. Routes read their bodies
themselves, with limits, and large ones in threads, so FastAPI does not know them."""

from collections.abc import Iterable, Mapping
from typing import Any

from fastapi import FastAPI
from fastapi.dependencies.models import Dependant
from fastapi.openapi.utils import get_openapi
from fastapi.routing import APIRoute
from pydantic.json_schema import models_json_schema
from starlette.routing import BaseRoute

from art_protocol.wire import ErrorBody
from art_server.api.auth import ART_PATHS, OPEN_PATHS
from art_server.api.inference import PATHS
from art_server.api.parameters import JsonBody, LargeBody

MODEL = "/api/models/{project}/{name}"
UPLOAD = f"{MODEL}/checkpoints/{{step}}.tar"
SPECIAL_LIMITS: Mapping[tuple[str, str], str] = {
    **{("post", path): "4 MB plus 64 bytes for each token of the context" for path in PATHS},
    ("put", UPLOAD): "8 GiB",
}
REFS = "#/components/schemas/{model}"
INFERENCE = {
    "type": "object",
    "required": ["model"],
    "properties": {"model": {"type": "string"}, "stream": {"type": "boolean"}},
    "description": "As in the API of the same name by OpenAI or Anthropic. vLLM reads all other fields.",
}


def make_openapi(app: FastAPI) -> dict[str, Any]:
    """FastAPI's description of the application, with the bodies and errors that it does not know."""
    made = get_openapi(title=app.title, version=app.version, routes=app.routes)
    bodies = bodies_of(app.routes)
    kinds = sorted(
        {*(each.kind for each in bodies.values()), ErrorBody}, key=lambda kind: kind.__name__
    )
    references, schemas = models_json_schema(
        [(kind, "validation") for kind in kinds], ref_template=REFS
    )
    made.setdefault("components", {}).setdefault("schemas", {}).update(schemas["$defs"])
    paths = made["paths"]
    for path in PATHS:
        answer = {"200": {"description": "The answer of that API; choices have an `art` field"}}
        paths[path] = {"post": {"requestBody": body_of(INFERENCE), "responses": answer}}
    for (method, path), body in bodies.items():
        paths[path][method]["requestBody"] = body_of(references[body.kind, "validation"])
    paths[UPLOAD]["put"]["requestBody"] = {
        "content": {"application/x-tar": {"schema": {"type": "string", "format": "binary"}}}
    }
    failed = {
        "description": "The error, and how to fix it",
        "content": {"application/json": {"schema": references[ErrorBody, "validation"]}},
    }
    for operation in (each for path in paths.values() for each in path.values()):
        operation["responses"] = {
            **{k: v for k, v in operation["responses"].items() if k != "422"},
            "default": failed,
        }
    return made


def bodies_of(routes: Iterable[BaseRoute]) -> dict[tuple[str, str], JsonBody | LargeBody]:
    """The body that each route reads, by method and path."""
    return {
        (method.lower(), route.path): body
        for route in routes
        if isinstance(route, APIRoute)
        for body in find_bodies(route.dependant)
        for method in route.methods
    }


def find_bodies(dependant: Dependant) -> list[JsonBody | LargeBody]:
    """The bodies among the parameters of a route, and of what these depend on."""
    own = [dependant.call] if isinstance(dependant.call, JsonBody | LargeBody) else []
    return own + [body for each in dependant.dependencies for body in find_bodies(each)]


def body_of(schema: Any) -> dict[str, Any]:
    return {"required": True, "content": {"application/json": {"schema": schema}}}


def route_table(app: FastAPI) -> str:
    """Every route, the scope that a key needs for it, and the largest body that it takes, as a Markdown table."""
    bodies = bodies_of(app.routes)
    limits = {**{key: body.limit for key, body in bodies.items()}, **SPECIAL_LIMITS}
    rows = [
        f"| {method.upper()} | `{path}` | {scope_of(path)} | {limits.get((method, path), 'none')} |"
        for path, operations in make_openapi(app)["paths"].items()
        for method in operations
    ]
    head = "| | route | scope | largest body |\n|---|---|---|---|\n"
    return head + "\n".join(sorted(rows, key=lambda row: row.split("|")[2])) + "\n"


def scope_of(path: str) -> str:
    if path in OPEN_PATHS:
        return "none; with a key the answer has more fields"
    if path.startswith("/v1/"):
        return "infer"
    return "train, or `--legacy-without-key`" if path in ART_PATHS else "train"
