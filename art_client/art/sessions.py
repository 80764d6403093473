"""Sessions: the server's name for one rollout, under which it keeps what an agent's requests sampled.

    async with art.rollout(model) as r:
        await run_agent(base_url=r.base_url, api_key=r.api_key)
        trajectory = await r.trajectory(reward=1.0)

A request names its session in its URL, in its API key or in a header; the server puts the conversations together, so
nothing here reads what an agent says. ART's in-process capture (`capturing`) is built on the same scopes.
"""

# pyright: reportPrivateUsage=false

import logging
import re
import uuid
from collections.abc import Iterable
from contextvars import ContextVar, Token
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Self
from urllib.parse import urlsplit
from weakref import WeakSet

from art.trajectories import History, Trajectory
from art.wire import NAME_PATTERN, SESSION_HEADER, SessionReply

logger = logging.getLogger(__name__)

if TYPE_CHECKING:
    from openai import AsyncOpenAI

    from art.backend import Backend
    from art.model import TrainableModel


def rollout(model: "TrainableModel", session: str | None = None) -> "Rollout":
    """A scope in which an agent's requests are captured, for `async with`; see `Rollout`.

    `session` names it on the server, in letters, digits, '.', '_' and '-'; a name that was used before goes on with
    that rollout. None makes a fresh one.
    """
    return Rollout(model, session)


class Rollout:
    """One rollout of an agent that was not written for ART: where it should send its requests, and what came of them.

    An agent that is given `base_url` is captured wherever it runs, in another process as well; one whose address is
    fixed, by `api_key` alone. Inside the scope `model.openai_client()`, of this and of every other model, needs neither.
    """

    def __init__(self, model: "TrainableModel", session: str | None) -> None:
        if session is not None and not re.fullmatch(NAME_PATTERN, session):
            raise ValueError(
                f"session {session!r} becomes a part of URLs: use letters, digits, '.', '_' and '-', begin with a "
                "letter or a digit, and keep to 128 characters"
            )
        model.backend()  # raises for a model that is not registered
        self.model = model
        self.session = session or uuid.uuid4().hex
        self._token: Token[Scope | None] | None = None

    @property
    def base_url(self) -> str:
        """The base URL of OpenAI's clients, which names the session: "http://SERVER/s/SESSION/v1"."""
        return f"{self.root_url}/v1"

    @property
    def root_url(self) -> str:
        """The same without "/v1", as Anthropic's clients want it."""
        return f"{self.model.backend()._connection.base_url}/s/{self.session}"

    @property
    def api_key(self) -> str:
        """The API key, which names the session too: "KEY::SESSION"."""
        return f"{self.model.inference_api_key or 'default'}::{self.session}"

    def openai_client(self) -> "AsyncOpenAI":
        """The model's OpenAI client, bound to this session also where the scope does not reach."""
        return self.model.openai_client().with_options(
            default_headers={SESSION_HEADER: self.session}
        )

    async def trajectory(
        self,
        reward: float = 0.0,
        *,
        metrics: dict[str, float | int | bool] | None = None,
        metadata: dict[str, Any] | None = None,
        model: "TrainableModel | None" = None,
    ) -> Trajectory:
        """What the model, or another one that took part, has said in this session so far.

        The first conversation is the trajectory's own, the others are its additional histories: sub-agents, parallel
        branches, what follows a context reset. Choices that the server left out are counted in
        metrics["unused_choices"], with the reasons in `logs`.
        """
        model = model or self.model
        reply = await model.backend()._fetch_session(model, self.session)
        if not reply.num_choices:
            logger.warning(
                "session %s holds no answer of %s: the agent sent its requests elsewhere, or none. Give it base_url=%s, or the "
                "rollout's api_key, and model=%r",
                self.session,
                model.name,
                self.base_url,
                model.get_inference_name(),
            )
        trajectory = Trajectory(reward=reward, metrics=metrics or {}, metadata=metadata or {})
        add_captured(trajectory, [reply])
        return trajectory

    async def __aenter__(self) -> Self:
        self._token = current_scope.set(Scope(self.session))
        return self

    async def __aexit__(self, kind: object, error: object, traceback: object) -> None:
        assert self._token is not None, "a scope is left after it was entered"
        current_scope.reset(self._token)


# --- what the OpenAI client, the patches and the capture share ----------------------------------------------------------


@dataclass(eq=False, slots=True)
class Scope:
    """A session that requests belong to while the context variable holds it."""

    session: str
    trajectory: Trajectory | None = None
    """What in-process capture fills; with it, the requests of every HTTP client belong to the session."""
    backends: "dict[Backend, None]" = field(default_factory=dict[Any, None])
    """The servers that were asked, in the order in which they were."""


current_scope: ContextVar[Scope | None] = ContextVar("current_scope", default=None)

_backends: "WeakSet[Backend]" = WeakSet()
"""Those with a trainable model: whose requests belong to sessions."""


def add_backend(backend: "Backend") -> None:
    """Makes requests to the backend's server belong to the session of their scope."""
    _backends.add(backend)


def headers_for(url: str) -> dict[str, str]:
    """The header that a request to the URL needs under the current scope; nothing for other servers.

    A URL that names a session itself is none of the scope's.
    """
    scope = current_scope.get()
    if scope is None:
        return {}
    asked = _backends_at(_to_address(url))
    scope.backends.update(dict.fromkeys(asked))
    return {SESSION_HEADER: scope.session} if asked else {}


def _backends_at(address: str) -> "list[Backend]":
    """Those whose server has the address; closed ones only where no other speaks for the server."""
    backends = [
        backend
        for backend in list(_backends)
        if address.startswith(_to_address(backend._connection.base_url) + "/v1/")
    ]
    return [backend for backend in backends if backend._connection.is_open] or backends


def _to_address(url: str) -> str:
    """A URL to compare: without query, port written out, one name for this machine."""
    parts = urlsplit(url)
    host = parts.hostname or ""
    if host in ("127.0.0.1", "::1"):
        host = "localhost"
    port = parts.port or {"http": 80, "https": 443}.get(parts.scheme)
    return f"{parts.scheme}://{host}:{port}{parts.path}"


def add_captured(trajectory: Trajectory, replies: Iterable[SessionReply]) -> None:
    """Puts the conversations of a session into a trajectory; entries that it has already stay where they are."""
    histories: list[History] = []
    unused: dict[str, int] = {}
    for reply in replies:
        for history in reply.histories:
            histories.append(History.model_validate(history.model_dump()))
        for reason, count in reply.unused.items():
            unused[reason] = unused.get(reason, 0) + count
    if histories and not trajectory.messages_and_choices:
        first = histories.pop(0)
        trajectory.messages_and_choices, trajectory.tools = first.messages_and_choices, first.tools
    trajectory.additional_histories += histories
    if unused:
        trajectory.metrics["unused_choices"] = sum(unused.values())
    for reason, count in unused.items():
        trajectory.log(f"{count} captured choices left out: {reason}")
