"""The one door: every request passes here, and leaves with an error or with a known caller.

Keys come as `Authorization: Bearer KEY` or `x-api-key: KEY`. Inference (`/v1`) needs the scope `infer`, all else the
scope `train`; only health is open. A key that the ART wire handed out opens inference on its one model. With
`--legacy-without-key` the routes of that wire, and no others, are open to callers without any key. A session may be
named by the URL (`/s/SESSION/v1`), the header `x-art-session` or the key (`KEY::SESSION`); the door takes the name off
and passes it on. Without configured keys the server is bound to loopback and trusts its machine, but not web pages that
a browser on it shows: requests of a foreign origin, or for a foreign host name, are refused.
"""

import hashlib
import hmac
from dataclasses import dataclass, replace
from urllib.parse import urlsplit

from starlette.datastructures import Headers
from starlette.types import ASGIApp, Receive, Scope, Send

from art.wire import SESSION_HEADER
from art_server.api.errors import answer
from art_server.api.model_keys import ModelKeys
from art_server.errors import Forbidden, NotFound, ServerError, Unauthorized
from art_server.settings import ApiKey, ServerConfig
from art_server.settings import Scope as KeyScope
from art_server.store.registry import check_name

OPEN_PATHS = frozenset({"/health", "/ready"})
ART_PATHS = frozenset(
    {
        *("/register", "/_get_step", "/_prepare_backend_for_training", "/_train_model", "/_log"),
        *("/_delete_checkpoint_files", "/_delete_checkpoints", "/close", "/healthcheck"),
    }
)
"""The routes of `art_wire`."""
LOOPBACK_HOSTS = frozenset({"localhost", "127.0.0.1", "::1", "0.0.0.0"})
"""0.0.0.0 is what guides of ART's clients write for this machine."""


@dataclass(frozen=True, slots=True)
class Caller:
    """Who asks, and what they may see."""

    owner: str
    """Names the key without telling it."""
    projects: frozenset[str] | None
    """None: every project."""
    session: str | None = None
    """The rollout that the request says it belongs to."""
    model_id: str | None = None
    """The one model ("PROJECT/NAME") that the key is for; None: any."""

    def check_project(self, project: str) -> None:
        """
        Raises:
            Forbidden: the key does not cover the project.
        """
        if self.projects is not None and project not in self.projects:
            raise Forbidden(
                f"this key does not cover project '{project[:128]}'",
                code="forbidden",
                param="project",
            )


ANYONE = Caller(owner="anyone", projects=None)
SESSION_MARK = "::"


class Door:
    """ASGI middleware."""

    def __init__(
        self,
        app: ASGIApp,
        config: ServerConfig,
        inference_port: int | None,
        model_keys: ModelKeys,
    ):
        self._app = app
        self._is_legacy_open = config.legacy_without_key
        self._model_keys = model_keys
        self._inference_port = inference_port
        self._keys = config.api_keys
        self._hosts = LOOPBACK_HOSTS | {config.host}

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        try:
            caller = self._admit(scope)
        except ServerError as error:
            await answer(error)(scope, receive, send)
            return
        scope.setdefault("state", {})["caller"] = caller
        await self._app(scope, receive, send)

    def _admit(self, scope: Scope) -> Caller:
        session = take_session_path(scope)
        path: str = scope["path"]
        is_inference_port = (
            scope["server"] is not None and scope["server"][1] == self._inference_port
        )
        if is_inference_port and not path.startswith("/v1/") and path not in OPEN_PATHS:
            raise NotFound("this port serves /v1 only", code="unknown_route")
        if path in OPEN_PATHS:
            return ANYONE
        headers = Headers(scope=scope)
        presented, _, key_session = (presented_key(headers) or "").partition(SESSION_MARK)
        session = session or headers.get(SESSION_HEADER) or key_session or None
        if session is not None:
            check_name(session, "session")
        if not self._keys:
            self._refuse_web_pages(headers)
            return replace(ANYONE, session=session)
        if path in ART_PATHS and not presented and self._is_legacy_open:
            if "origin" in headers:
                raise Forbidden("web pages need an API key here", code="foreign_origin")
            return replace(ANYONE, session=session)
        needed: KeyScope = "infer" if path.startswith("/v1/") else "train"
        caller = self._find_model(presented) if needed == "infer" else None
        if caller is not None:
            return replace(caller, session=session)
        key = self._find(presented or None)
        if needed not in key.scopes:
            raise Forbidden(f"this key lacks the scope '{needed}'", code="forbidden")
        return Caller(owner_of(key), key.projects, session)

    def _find_model(self, presented: str) -> Caller | None:
        """Whom a key for one model was made for, as long as that caller is still let in."""
        model_id, owner = self._model_keys.read(presented) or (None, None)
        known = {owner_of(key): key.projects for key in self._keys}
        if self._is_legacy_open:
            known[ANYONE.owner] = ANYONE.projects
        if model_id is None or owner not in known:
            return None
        return Caller(owner, known[owner], model_id=model_id)

    def _find(self, presented: str | None) -> ApiKey:
        if presented is None:
            raise Unauthorized(
                "no API key: send 'Authorization: Bearer KEY' (clients: art.Backend(api_key=...) or ART_API_KEY)",
                code="missing_key",
            )
        found: ApiKey | None = None
        for key in self._keys:  # every key is compared, so that the time taken tells nothing
            if hmac.compare_digest(key.key.encode(), presented.encode()):
                found = key
        if found is None:
            raise Unauthorized("this API key is not known here", code="wrong_key")
        return found

    def _refuse_web_pages(self, headers: Headers) -> None:
        host = urlsplit(f"//{headers.get('host', '')}").hostname or ""
        origin = headers.get("origin")
        if host not in self._hosts:
            raise Forbidden(
                f"host '{host[:200]}' is not this server's: without API keys it answers on loopback only",
                code="foreign_host",
            )
        if origin is not None and urlsplit(origin).hostname not in self._hosts:
            raise Forbidden(
                "requests from other web origins are refused: configure --api-key",
                code="foreign_origin",
            )


def owner_of(key: ApiKey) -> str:
    return hashlib.sha256(key.key.encode()).hexdigest()[:16]


def presented_key(headers: Headers) -> str | None:
    """The key that a request carries."""
    kind, _, value = headers.get("authorization", "").partition(" ")
    if kind.lower() == "bearer" and value.strip():
        return value.strip()
    return headers.get("x-api-key")


def take_session_path(scope: Scope) -> str | None:
    """Take `/s/SESSION` off a request's path."""
    path: str = scope["path"]
    if not path.startswith("/s/"):
        return None
    session, slash, rest = path[3:].partition("/")
    scope["path"] = slash + rest
    scope["raw_path"] = scope["path"].encode()
    return session
