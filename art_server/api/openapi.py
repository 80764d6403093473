"""What each route takes, for `/openapi.json` and docs/routes.md. Routes read their bodies themselves, beside the event loop
and with limits, so FastAPI does not know them."""

from collections.abc import Mapping
from typing import Any

from fastapi import FastAPI
from fastapi.openapi.utils import get_openapi
from pydantic import BaseModel
from pydantic.json_schema import models_json_schema

from art.wire import (
    DeleteCheckpointsRequest,
    ErrorBody,
    ForkRequest,
    LogRequest,
    MoveJobRequest,
    RegisterRequest,
    RollbackRequest,
    TrainRequest,
)
from art_server.api.art_wire import CallBody, DeleteFilesBody, ModelBody
from art_server.api.door import ART_PATHS, OPEN_PATHS
from art_server.api.inference import PATHS

MODEL = "/api/models/{project}/{name}"
BODIES: Mapping[tuple[str, str], type[BaseModel]] = {
    ("post", "/api/models"): RegisterRequest,
    ("post", f"{MODEL}/train"): TrainRequest,
    ("post", f"{MODEL}/log"): LogRequest,
    ("post", f"{MODEL}/fork"): ForkRequest,
    ("post", f"{MODEL}/rollback"): RollbackRequest,
    ("post", f"{MODEL}/checkpoints/delete"): DeleteCheckpointsRequest,
    ("post", "/api/jobs/{job_id}/move"): MoveJobRequest,
    ("post", "/register"): ModelBody,
    ("post", "/_get_step"): ModelBody,
    ("post", "/_delete_checkpoints"): ModelBody,
    ("post", "/_prepare_backend_for_training"): CallBody,
    ("post", "/_train_model"): CallBody,
    ("post", "/_log"): CallBody,
    ("post", "/_delete_checkpoint_files"): DeleteFilesBody,
}
LARGE = (f"{MODEL}/train", f"{MODEL}/log", "/_train_model", "/_log")
UPLOAD = f"{MODEL}/checkpoints/{{step}}.tar"
REFS = "#/components/schemas/{model}"
INFERENCE = {
    "type": "object",
    "required": ["model"],
    "properties": {"model": {"type": "string"}, "stream": {"type": "boolean"}},
    "description": "As in the API of the same name by OpenAI or Anthropic; vLLM reads the rest.",
}


def describe(app: FastAPI) -> None:
    """Have the application's `/openapi.json` show bodies and errors."""
    found: dict[str, Any] = {}

    def openapi() -> dict[str, Any]:
        if not found:
            found.update(make_openapi(app))
        return found

    app.openapi = openapi


def make_openapi(app: FastAPI) -> dict[str, Any]:
    """The description; FastAPI's, with what it does not see."""
    made = get_openapi(title=app.title, version=app.version, routes=app.routes)
    kinds = sorted({*BODIES.values(), ErrorBody}, key=lambda kind: kind.__name__)
    references, schemas = models_json_schema(
        [(kind, "validation") for kind in kinds], ref_template=REFS
    )
    made.setdefault("components", {}).setdefault("schemas", {}).update(schemas["$defs"])
    paths = made["paths"]
    for path in PATHS:
        answer = {"200": {"description": "As the API answers, with `art` marks and token ids"}}
        paths[path] = {"post": {"requestBody": body_of(INFERENCE), "responses": answer}}
    for (method, path), kind in BODIES.items():
        paths[path][method]["requestBody"] = body_of(references[kind, "validation"])
    paths[UPLOAD]["put"]["requestBody"] = {
        "content": {"application/x-tar": {"schema": {"type": "string", "format": "binary"}}}
    }
    failed = {
        "description": "What is wrong, and what to do",
        "content": {"application/json": {"schema": references[ErrorBody, "validation"]}},
    }
    for operation in (each for path in paths.values() for each in path.values()):
        operation["responses"] = {
            **{k: v for k, v in operation["responses"].items() if k != "422"},
            "default": failed,
        }
    return made


def body_of(schema: Any) -> dict[str, Any]:
    return {"required": True, "content": {"application/json": {"schema": schema}}}


def route_table(app: FastAPI) -> str:
    """Every route, the scope that a key needs for it, and the largest body that it takes, as a Markdown table."""
    rows = [
        f"| {method.upper()} | `{path}` | {scope_of(path)} | {limit_of(method, path)} |"
        for path, operations in make_openapi(app)["paths"].items()
        for method in operations
    ]
    head = "| | route | scope | largest body |\n|---|---|---|---|\n"
    return head + "\n".join(sorted(rows, key=lambda row: row.split("|")[2])) + "\n"


def scope_of(path: str) -> str:
    if path in OPEN_PATHS:
        return "none; with a key more is told"
    if path.startswith("/v1/"):
        return "infer"
    return "train, or `--legacy-without-key`" if path in ART_PATHS else "train"


def limit_of(method: str, path: str) -> str:
    if path in PATHS:
        return "4 MB and 64 bytes a token of the context"
    if path in LARGE:
        return "`--max-body-mb` (512)"
    if path == UPLOAD and method == "put":
        return "8 GiB"
    return "4 MB" if (method, path) in BODIES else "none"
