"""Authentication middleware: every request is rejected or gets a `Caller`.

A key is sent as `Authorization: Bearer KEY` or `x-api-key: KEY`. Inference (`/v1`) needs the scope `infer`, a machine that
joins the scope `host`, scores the scope `feedback` or `train`, any other route the scope `train`. `/health` and `/ready` need no key; without a valid key they show
only the engine's state. A browser's score has a token in its path, in place of a key. The files of the page need no key, its data the caller's key. OPTIONS of `/v1` needs none, because
browsers send none. A key that the ART wire issued permits inference on one model. With `--legacy-without-key`, callers without
a key may use the routes of the ART wire only. The URL (`/s/SESSION/v1`), the header `x-art-session`, the key (`KEY::SESSION`)
or the header `x-session-id` may name a session, which becomes part of the `Caller`. Without configured keys the server listens
on loopback and trusts the programs of its machine, but not web pages in a browser there: requests with a foreign origin or host
name are refused, unless `--cors-origin` names the origin. A proxy adds TLS and limits of requests (docs/howto/proxy.md).
"""

import contextlib
import hashlib
import re
from dataclasses import dataclass, replace
from typing import Annotated, Protocol
from urllib.parse import urlsplit

from fastapi import Depends, Request
from starlette.datastructures import Headers
from starlette.types import ASGIApp, Receive, Scope, Send

from art_protocol import sampling
from art_protocol.sampling import AGENTS_OWN, Sampling
from art_protocol.wire import SESSION_HEADER, Health
from art_server.api.error_responses import SESSION_PATH, answer
from art_server.api.keys import Keys
from art_server.api.model_keys import ModelKeys
from art_server.api.refused_keys import RefusedKeys
from art_server.errors import Forbidden, InvalidInput, NotFound, ServerError, Unauthorized
from art_server.settings import ApiKey, KeyScope, ServerConfig
from art_server.store.registry import check_name

OPEN_PATHS = frozenset({"/health", "/ready"})
HOSTS = "/api/hosts/"
"""The routes by which other machines offer their devices (`art_server/machines`)."""
FEEDBACK = re.compile(r"/api/models/[^/]+/[^/]+/feedback(/[^/]*)?")
"""The routes of scores."""
TOKENS = "/feedback/"
"""The route of a browser's score, whose path has a token (`feedback_tokens.py`)."""
PAGE = "/page/"
"""Files of the page, which contain no data."""
ART_PATHS = frozenset(
    {
        *("/register", "/_get_step", "/_prepare_backend_for_training", "/_train_model", "/_log"),
        *("/_delete_checkpoint_files", "/_delete_checkpoints", "/close", "/healthcheck"),
    }
)
"""The routes of `art_wire`."""
WITHOUT_V1 = frozenset({"/chat/completions", "/completions", "/responses", "/messages", "/models"})
"""What clients of inference send to a base URL that lacks /v1."""
LOOPBACK_HOSTS = frozenset({"localhost", "127.0.0.1", "::1", "0.0.0.0"})
"""0.0.0.0 is here because guides for ART's clients use it as the address of this machine."""


@dataclass(frozen=True, slots=True)
class Caller:
    """Who sent a request, and what the sender may use."""

    owner: str
    """Identifies the key without revealing it."""
    projects: frozenset[str] | None
    """None: every project."""
    session: str | None = None
    """The session that the request names."""
    sampling: Sampling = AGENTS_OWN
    """The sampling parameters behind the session's name."""
    model_id: str | None = None
    """The only model ("PROJECT/NAME") that the key may use; None: any."""
    gives_feedback_only: bool = False
    """The key may give scores, and read and retract its own."""

    def check_project(self, project: str) -> None:
        """Checks that the caller may use a project.

        Raises:
            Forbidden: the key does not cover the project.
        """
        if self.projects is not None and project not in self.projects:
            raise Forbidden(
                f"this key does not cover project '{project[:128]}': use one of its own projects, or ask the server's owner for "
                "another key",
                code="forbidden",
                param="project",
            )


async def _caller(request: Request) -> Caller:
    return request.state.caller


TheCaller = Annotated[Caller, Depends(_caller)]
"""A route's parameter."""
ANYONE = Caller(owner="anyone", projects=None)
STRANGER = Caller(owner="stranger", projects=frozenset())
"""A caller without a valid key, on a path that needs no key."""
SESSION_MARK = "::"
FOREIGN_SESSION_HEADER = "x-session-id"
"""The header in which verifiers and other programs name their rollouts, with any text."""


class HealthSource(Protocol):
    """A running server's `Status`, without an import: `art view` authenticates without a server's packages."""

    def health(self, *, names_model: bool) -> Health: ...


def visible_health(status: HealthSource, caller: Caller) -> Health:
    """Callers without a valid key see only the engine's state: the rest may contain file names and log lines. Callers
    with a key for some projects see no model's name."""
    state = status.health(names_model=caller.projects is None)
    return Health(engine=state.engine) if caller is STRANGER else state


class Authentication:
    """ASGI middleware that adds the `Caller` to each request's state."""

    def __init__(
        self,
        app: ASGIApp,
        config: ServerConfig,
        inference_port: int | None,
        keys: Keys,
        model_keys: ModelKeys,
        refused_keys: RefusedKeys,
    ):
        self._app = app
        self._is_legacy_open = config.legacy_without_key
        self._keys = keys
        self._model_keys = model_keys
        self._refused_keys = refused_keys
        self._inference_port = inference_port
        self._hosts = LOOPBACK_HOSTS | {config.host}
        self._origins = frozenset(config.cors_origins)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "lifespan":
            await self._app(scope, receive, send)
            return
        try:
            caller = self._admit(scope)
        except ServerError as error:
            await answer(error, scope["path"])(scope, receive, send)
            return
        # Starlette's `request.state`.
        scope.setdefault("state", {})["caller"] = caller
        await self._app(scope, receive, send)

    def _admit(self, scope: Scope) -> Caller:
        session = take_session_path(scope)
        path: str = scope["path"]
        is_inference_port = (
            self._inference_port is not None
            and scope["server"] is not None
            and scope["server"][1] == self._inference_port
        )
        is_probe = path == "/" and scope.get("method") == "HEAD"
        if is_inference_port and not (path.startswith("/v1/") or path in OPEN_PATHS or is_probe):
            raise NotFound("this port serves /v1 only", code="unknown_route")
        headers = Headers(scope=scope)
        presented, _, key_session = (presented_key(headers) or "").partition(SESSION_MARK)
        if is_open(path) or (scope.get("method") == "OPTIONS" and path.startswith("/v1/")):
            with contextlib.suppress(ServerError):
                return self._identify(path, headers, presented)
            return STRANGER
        named = session or headers.get(SESSION_HEADER) or key_session
        identifier = headers.get(FOREIGN_SESSION_HEADER)
        try:
            caller = self._identify(path, headers, presented)
        except (Unauthorized, Forbidden) as error:
            name = named.partition(sampling.MARK)[0] if named else identifier
            client: tuple[str, int] | None = scope.get("client")
            address = client[0] if client is not None else "this machine"
            self._refused_keys.add(error, presented, session_of(name) if name else None, path, address)
            raise
        if named:
            return _in_session(caller, named)
        if identifier:
            return replace(caller, session=session_of(identifier))
        return caller

    def _identify(self, path: str, headers: Headers, presented: str) -> Caller:
        is_inference = path.startswith("/v1/")
        needed: KeyScope = "train"
        if is_inference:
            needed = "infer"
        elif path.startswith(HOSTS):
            needed = "host"
            if not self._keys.can(needed):
                raise NotFound("this server takes no hosts: no key has the scope 'host'", code="unknown_route")
        elif FEEDBACK.fullmatch(path):
            needed = "feedback"
        if not self._keys.are_needed(needed):
            self._refuse_web_pages(headers)
            return ANYONE
        if path in ART_PATHS and not presented and self._is_legacy_open:
            if "origin" in headers:
                raise Forbidden("requests from web pages need an API key", code="foreign_origin")
            return ANYONE
        caller = self._find_model(presented) if is_inference else None
        if caller is not None:
            return caller
        key = self._find(presented)
        is_allowed = needed in key.scopes or (needed == "feedback" and "train" in key.scopes)
        if not is_allowed and not is_open(path):
            if path in WITHOUT_V1:
                raise NotFound(
                    f"no such route: the base_url lacks /v1 at its end; OpenAI's clients send '{path}' behind it",
                    code="unknown_route",
                )
            raise Forbidden(
                f"this key lacks the scope '{needed}': ask the server's owner for one with this scope", code="forbidden"
            )
        return Caller(key.owner, key.projects, gives_feedback_only=needed == "feedback" and "train" not in key.scopes)

    def _find_model(self, presented: str) -> Caller | None:
        """The caller that a key for one model was issued to. None for other keys, or if this caller has lost access."""
        model_id, owner = self._model_keys.read(presented) or (None, None)
        if model_id is None or owner is None:
            return None
        if owner == ANYONE.owner and self._is_legacy_open:
            return replace(ANYONE, model_id=model_id)
        key = self._keys.find_owner(owner)
        if key is None:
            return None
        return Caller(owner, key.projects, model_id=model_id)

    def _find(self, presented: str) -> ApiKey:
        if not presented:
            raise Unauthorized(
                "no API key: send 'Authorization: Bearer KEY' (clients: art.Backend(api_key=...) or ART_API_KEY)",
                code="missing_key",
            )
        key = self._keys.find(presented)
        if key is None:
            raise Unauthorized("unknown API key: ask the server's owner for one", code="wrong_key")
        if key.is_expired:
            raise Unauthorized(
                f"this API key expired at {key.expires:%Y-%m-%dT%H:%M:%SZ}: ask the server's owner for another",
                code="expired_key",
            )
        return key

    def _refuse_web_pages(self, headers: Headers) -> None:
        host = host_name(f"//{headers.get('host', '')}") or ""
        origin = headers.get("origin")
        if host not in self._hosts:
            raise Forbidden(
                f"host name '{host[:200]}' is refused: without API keys the server answers to loopback names only; use "
                "localhost, or configure --api-key",
                code="foreign_host",
            )
        if origin is not None and host_name(origin) not in self._hosts and origin not in self._origins:
            raise Forbidden(
                "requests from other web origins are refused without API keys: name the page's origin with --cors-origin, or "
                "configure --api-key",
                code="foreign_origin",
            )


def _in_session(caller: Caller, named: str) -> Caller:
    """The caller in a session, with the sampling parameters behind the session's name."""
    try:
        session, parameters = sampling.read(named)
    except ValueError as error:
        raise InvalidInput(str(error), code="invalid_sampling", param="session") from error
    return replace(caller, session=check_name(session, "session"), sampling=parameters)


def host_name(address: str) -> str | None:
    """The name of the host in an address: 'http://a:80' -> 'a'. None if the address has no host or cannot be read."""
    try:
        return urlsplit(address).hostname
    except ValueError:
        return None


def is_open(path: str) -> bool:
    """Whether a path needs no key: the engine's state, the page without its data, and a score with a token."""
    return path in OPEN_PATHS or path == "/" or path.startswith((PAGE, TOKENS))


def presented_key(headers: Headers) -> str | None:
    """The key in a request's headers; None without a key."""
    kind, _, value = headers.get("authorization", "").partition(" ")
    if kind.lower() == "bearer" and value.strip():
        return value.strip()
    return headers.get("x-api-key")


def session_of(identifier: str) -> str:
    """A session's name for a foreign identifier: the identifier, or its SHA-256 if it is no name."""
    try:
        return check_name(identifier, "session")
    except InvalidInput:
        return hashlib.sha256(identifier.encode()).hexdigest()


def take_session_path(scope: Scope) -> str | None:
    """Removes `/s/SESSION` from a request's path: '/s/a/v1/models' -> '/v1/models', '/s/a' -> '/'. Returns the session; None without
    a session."""
    path: str = scope["path"]
    if not path.startswith("/s/"):
        return None
    session, slash, rest = path[3:].partition("/")
    scope[SESSION_PATH] = f"s/{session}/"
    scope["path"] = slash + rest or "/"
    scope["raw_path"] = scope["path"].encode()
    return session
