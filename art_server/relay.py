"""One inference request on its way to the engine: resolved to an adapter, held while a step runs, sent, recorded."""

import asyncio
import contextlib
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass
from typing import Any

import aiohttp
import msgspec

from art_server.base_loader import BaseLoader
from art_server.engine.engine import Engine
from art_server.engine.gate import Gate
from art_server.errors import Conflict, Unavailable
from art_server.ledger.ledger import Ledger, OpenRequest
from art_server.ledger.records import Request, choice_id
from art_server.store.registry import Model, Registry

LOST_SECONDS = 1.0
"""Time for the supervisor to see that the engine is gone, before a request waits for the next one."""


@dataclass(slots=True)
class InferenceRequest:
    """One request, as it goes to the engine."""

    api: str
    """chat, completions, responses or messages."""
    path: str
    asked_model: str
    body: dict[str, Any]
    headers: dict[str, str]
    owner: str
    projects: frozenset[str] | None
    """Those that the caller may use; None: all."""
    only_model: str | None
    """The one model that the caller may use."""
    session: str | None
    messages: list[dict[str, Any]]
    """The conversation, as chat messages whatever the API."""
    before: bytes
    """Names that conversation."""
    is_first_turn: bool
    """No answer was given yet that this could go on from, or the prompt came as token ids, which are sampled from as they
    are."""
    named: Sequence[str] = ()
    """Ids of tool calls and choices that the conversation names."""
    is_before_user: bool = True
    """A user's turn follows the last answer."""
    model: Model | None = None
    step: int | None = None
    adapter: str = ""

    @property
    def is_stream(self) -> bool:
        return bool(self.body.get("stream"))

    @property
    def has_choices(self) -> bool:
        """Several choices are asked for, so that a stream's events are of one or the other."""
        return self.body.get("n") not in (None, 1)

    def art_mark(self, opened: OpenRequest, index: int) -> dict[str, Any]:
        """What a choice carries to be found again; or why it cannot be found."""
        mark = {
            "id": choice_id(opened.request.request_id, index),
            "step": self.step,
            "model": self.model.id if self.model is not None else None,
        }
        return mark | ({"unrecorded": opened.lost[index]} if index in opened.lost else {})


class EngineLost(Unavailable):
    """The engine ended under a request."""

    def __init__(self) -> None:
        super().__init__(
            "the engine ended while it answered and is being restarted; repeat the request",
            code="engine_restarted",
        )


class Relay:
    """Sends requests to the engine and hands out its answers; any number at a time."""

    def __init__(
        self,
        registry: Registry,
        ledger: Ledger,
        engine: Engine,
        gate: Gate,
        base: BaseLoader,
        wait_limit_seconds: float,
    ):
        self._registry = registry
        self._ledger = ledger
        self._engine = engine
        self._gate = gate
        self._base = base
        self._wait_limit_seconds = wait_limit_seconds

    def resolve(self, asked: InferenceRequest) -> None:
        """Set which model and step answer, as things stand now.

        Raises:
            NotFound: no such model or step.
            Conflict: the name stands in several projects, or another base model is loaded.
        """
        base = self._engine.base
        base_name = base.name if base is not None else None
        found = self._registry.resolve(
            asked.asked_model, base_name, asked.projects, asked.only_model
        )
        asked.model, asked.step = found.model, found.step
        self._base.is_wanted = True
        if found.model is None:
            assert base_name is not None, "only a loaded base resolves to no model"
            asked.adapter = base_name
            return
        if base_name is not None and base_name != found.model.record.base_model:
            raise Conflict(
                f"model '{found.model.id}' adapts base model '{found.model.record.base_model}'; this server has "
                f"'{base_name}' loaded",
                code="base_model_differs",
                param="model",
            )
        assert found.step is not None, "a model resolves to a step"
        asked.adapter = found.model.adapter_name(found.step)

    @contextlib.asynccontextmanager
    async def answer(
        self, asked: InferenceRequest, request_id: str
    ) -> AsyncIterator[tuple[aiohttp.ClientResponse, OpenRequest]]:
        """Wait for the gate, give the request to the engine, hand out its answer while it is open.

        Raises:
            Unavailable: the wait is above the limit.
            EngineLost: the engine died under the request.
        """
        limit = self._wait_limit_seconds
        await self._gate.wait_open(limit)
        self.resolve(asked)
        with contextlib.ExitStack() as stack:
            stack.enter_context(self._gate.inside(asked.adapter))
            if asked.model is not None and asked.step is not None:
                folder = asked.model.folder.checkpoint_dir(asked.step)
                await self._engine.load_adapter(asked.adapter, folder, limit)
            await self._engine.wait_ready(limit)
            opened = stack.enter_context(
                self._ledger.open_request(self._to_record(asked, request_id))
            )
            sent = asked.headers | {"x-request-id": request_id, "content-type": "application/json"}
            content = msgspec.json.encode(self._body(asked, request_id))
            try:
                async with self._engine.http.post(
                    asked.path, data=content, headers=sent
                ) as response:
                    yield response, opened
            except aiohttp.ClientError as error:
                raise EngineLost from error

    def _to_record(self, asked: InferenceRequest, request_id: str) -> Request:
        """What the ledger is told of a request."""
        record = asked.model.record if asked.model is not None else None
        return Request(
            request_id=request_id,
            api=asked.api,
            project=record.project if record else None,
            name=record.name if record else None,
            step=asked.step,
            owner=record.project if record else asked.owner,
            session=asked.session,
            before=asked.before,
            named=self._ledger.callers(asked.named) if asked.named else frozenset(),
            is_before_user=asked.is_before_user,
        )

    @staticmethod
    def _body(asked: InferenceRequest, request_id: str) -> dict[str, Any]:
        body = asked.body | {"model": asked.adapter}
        is_bare = asked.api == "chat" and body.get("logprobs") is None
        if is_bare and asked.model is not None and asked.model.record.always_logprobs:
            body["logprobs"] = True
        if asked.api == "responses":
            body["request_id"] = f"resp_{request_id}"
        return body

    async def was_engine_killed(self) -> bool:
        """After `EngineLost`: wait until the supervisor has seen it; whether somebody killed the engine, rather than the
        request."""
        await asyncio.sleep(LOST_SECONDS)
        return self._engine.was_killed
