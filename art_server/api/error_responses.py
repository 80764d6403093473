"""Maps errors to HTTP answers: one table of statuses, and one shape of body, which OpenAI clients already read. On the routes of
Anthropic's API the body is one that Anthropic's clients read, too."""

from collections.abc import Mapping, Sequence
from typing import Any

from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse
from pydantic import ValidationError
from starlette.exceptions import HTTPException
from starlette.routing import Route

from art_protocol.wire import NAME_RULE, ErrorBody, ErrorDetail
from art_server import errors

STATUS: Mapping[type[errors.ServerError], int] = {
    errors.BadRequest: 400,
    errors.InvalidInput: 422,
    errors.Unauthorized: 401,
    errors.Forbidden: 403,
    errors.NotFound: 404,
    errors.Conflict: 409,
    errors.TooLarge: 413,
    errors.TooMany: 429,
    errors.Unavailable: 503,
    errors.StorageFull: 507,
}

MESSAGES = "/v1/messages"
"""The beginning of the paths of Anthropic's API."""
ANTHROPIC_TYPES: Mapping[int, str] = {
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    413: "request_too_large",
    429: "rate_limit_error",
    503: "overloaded_error",
}
"""The types of errors in Anthropic's API that are not `invalid_request_error` or, from 500 on, `api_error`."""

SESSION_PATH = "art.session_path"
"""The key of a request's scope with the session in its URL: "s/SESSION/"."""
MAX_FIELDS_SHOWN = 3
RESPONSES: dict[int | str, dict[str, Any]] = {
    "default": {"model": ErrorBody, "description": "The error, and how to fix it"}
}
"""The answer of all routes to an error, for `/openapi.json`."""
NO_JSON = "the header content-type is not application/json; "
OTHER_SERVICES: Mapping[str, str] = {
    "embeddings": "embeddings",
    "rerank": "reranking",
    "moderations": "moderations",
    "images": "images",
    "audio": "speech",
    "realtime": "realtime sessions",
    "files": "files",
    "vector_stores": "vector stores",
    "batches": "batches",
    "assistants": "assistants",
    "threads": "threads",
    "fine_tuning": "fine-tuning jobs of OpenAI's API (`model.train` trains)",
}
"""What paths of OpenAI's API stand for that this server does not have, by the first part behind /v1/."""
COMPACT = "/v1/responses/compact"
NO_COMPACT = (
    "no such route: this server compacts no conversations, so let the agent compact with a request of its own; Codex does if its "
    "model provider has another `name` than OpenAI or Azure"
)
HTTP_CODES: Mapping[int, str] = {400: "invalid_body", 413: "body_too_large"}
"""The codes of FastAPI's own errors, by status."""


def status_of(error: errors.ServerError, *, is_inference: bool = False) -> int:
    """The status of an answer. Clients of OpenAI and Anthropic repeat a request after 408, 409, 429 and 5xx. Where the
    repetition of an inference request would be refused again, the status is 400 instead."""
    status = next((STATUS[kind] for kind in type(error).__mro__ if kind in STATUS), 500)
    is_repeated = status in (408, 409, 429) or status >= 500
    return 400 if is_inference and is_repeated and not error.retryable else status


def detail_of(error: errors.ServerError) -> ErrorDetail:
    status = status_of(error)
    kind = "invalid_request_error" if status < 500 else "server_error"
    return ErrorDetail(
        message=error.message,
        type=kind,
        code=error.code,
        param=error.param,
        retryable=error.retryable,
        ids=error.ids if isinstance(error, errors.RecordsMissing) else [],
    )


def body_of(detail: ErrorDetail, status: int, path: str) -> dict[str, Any]:
    """The body of the answer to a request for `path`."""
    body = ErrorBody(error=detail).model_dump(mode="json")
    return as_anthropic(body, status) if path.startswith(MESSAGES) else body


def as_anthropic(body: Mapping[str, Any], status: int) -> dict[str, Any]:
    """An error's body in the shape of Anthropic's API, with all fields of the error."""
    kind = ANTHROPIC_TYPES.get(status, "invalid_request_error" if status < 500 else "api_error")
    return {"type": "error", "error": {**body["error"], "type": kind}}


def answer(error: errors.ServerError, path: str = "") -> JSONResponse:
    """The HTTP answer to a request for `path`."""
    status = status_of(error, is_inference=path.startswith("/v1/"))
    headers = {"retry-after": str(error.wait_seconds)} if status in (429, 503) else {}
    if status == 401:
        headers["www-authenticate"] = "Bearer"
    return JSONResponse(body_of(detail_of(error), status, path), status_code=status, headers=headers)


def too_deep() -> errors.InvalidInput:
    return errors.InvalidInput("the body, or a JSON text inside it, is nested too deeply: flatten it", code="too_deep")


def field_path(location: tuple[int | str, ...]) -> str:
    """The path of a field: ("groups", 0, "reward") -> "groups[0].reward". Pydantic's names for the members of a union are left
    out."""
    path = ""
    for part in location:
        if isinstance(part, str) and not part.isidentifier():
            continue
        if isinstance(part, int):
            path += f"[{part}]"
        else:
            path += f".{part}" if path else part
    return path


def invalid_body(error: ValidationError, location: tuple[int | str, ...] = (), line: str = "") -> errors.InvalidInput:
    """An error that lists the invalid fields of a body without echoing the body's content. `location` is the position of the
    invalid record in the body, and `line` begins the list."""
    problems = error.errors(include_url=False, include_input=False)
    return invalid_fields([{**problem, "loc": (*location, *problem["loc"])} for problem in problems], line)


def invalid_fields(problems: Sequence[Mapping[str, Any]], line: str = "") -> errors.InvalidInput:
    shown = [f"{field_path(p['loc']) or 'body'}: {p['msg']}" for p in problems[:MAX_FIELDS_SHOWN]]
    more = len(problems) - len(shown)
    text = line + "; ".join(shown) + (f"; and {more} more" if more else "")
    names = any("name" in p["loc"] or "project" in p["loc"] for p in problems)
    hint = f" (names: {NAME_RULE})" if names else ""
    return errors.InvalidInput(
        f"the request is invalid: {text}{hint}",
        code="bad_name" if names else "invalid_body",
        param=field_path(problems[0]["loc"]) or None,
    )


def invalid_parameters(problems: Sequence[Mapping[str, Any]]) -> errors.InvalidInput:
    """An error that lists the invalid parameters of a path or query without echoing their values."""
    shown = [f"{_parameter(p['loc'])}: {p['msg']}" for p in problems[:MAX_FIELDS_SHOWN]]
    return errors.InvalidInput(
        f"the request is invalid: {'; '.join(shown)}",
        code="bad_parameter",
        param=str(problems[0]["loc"][1]),
    )


def _parameter(location: Sequence[int | str]) -> str:
    """("query", "limit") -> "limit in the query"."""
    return f"{location[1]} in the {location[0]}"


def _no_route(request: Request) -> str:
    """The sentence for a path that no route has. OpenAI's clients append the route to a base URL that ends with /v1,
    Anthropic's to one that does not."""
    path, base = request.scope["path"], f"{request.base_url}{request.scope.get(SESSION_PATH, '')}"
    known_paths = {route.path for route in request.app.routes if isinstance(route, Route)}
    if f"/v1{path}" in known_paths:
        return f"no such route: the base_url lacks /v1, {base}v1"
    if path.startswith("/v1/v1/"):
        return f"no such route: the base_url has /v1 too often, {base}v1, for Anthropic's client {base}"
    if path == COMPACT:
        return NO_COMPACT
    kind = path.removeprefix("/v1/").partition("/")[0]
    if path.startswith("/v1/") and kind in OTHER_SERVICES:
        return (
            f"no such route: this server has no {OTHER_SERVICES[kind]}, because it serves a language model only; give the "
            "agent's client for them another base_url"
        )
    return "no such route: `/openapi.json` lists the routes of this server"


def add_error_handlers(app: FastAPI) -> None:
    """Adds handlers that give every error the same shape."""

    @app.exception_handler(errors.ServerError)
    async def _server_error(request: Request, error: errors.ServerError) -> JSONResponse:
        return answer(error, request.scope["path"])

    @app.exception_handler(RequestValidationError)
    async def _invalid_request(request: Request, error: RequestValidationError) -> JSONResponse:
        problems = error.errors()
        if problems[0]["loc"][0] != "body":
            return answer(invalid_parameters(problems))
        # "body" is followed by the path of a field or, where the JSON is broken, by a position in the text, which is no field.
        fields = [
            {**problem, "loc": () if problem["type"] == "json_invalid" else problem["loc"][1:]} for problem in problems
        ]
        is_json = "json" in request.headers.get("content-type", "json")
        return answer(invalid_fields(fields, "" if is_json else NO_JSON))

    @app.exception_handler(RecursionError)
    async def _too_deep(request: Request, error: RecursionError) -> JSONResponse:
        """Only JSON readers and writers recurse here, so the body is nested too deeply."""
        return answer(too_deep(), request.scope["path"])

    @app.exception_handler(HTTPException)
    async def _http_error(request: Request, error: HTTPException) -> JSONResponse:
        code = HTTP_CODES.get(error.status_code, "http_error")
        detail = ErrorDetail(message=str(error.detail), code=code)
        if error.status_code == 405 and (methods := (error.headers or {}).get("Allow")):
            detail = detail.model_copy(
                update={"message": f"this route does not answer {request.method}: use {methods}"}
            )
        if error.status_code == 404:
            detail = ErrorDetail(message=_no_route(request), code="unknown_route")
        body = body_of(detail, error.status_code, request.scope["path"])
        return JSONResponse(body, status_code=error.status_code, headers=error.headers)

    @app.exception_handler(Exception)
    async def _unforeseen(request: Request, error: Exception) -> JSONResponse:
        detail = ErrorDetail(
            message=f"{type(error).__name__} in the server: see the server's log",
            type="server_error",
            code="internal_error",
        )
        return JSONResponse(body_of(detail, 500, request.scope["path"]), status_code=500)
