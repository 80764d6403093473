"""Sends inference requests to the engine: waits at the pause gate, resolves the adapter, informs the ledger."""

import asyncio
import contextlib
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass
from typing import Any

import aiohttp
import msgspec

from art_server.base_loader import BaseLoader
from art_server.engine.engine import Engine
from art_server.engine.pause_gate import PauseGate
from art_server.errors import Conflict, Unavailable
from art_server.ledger.ledger import Ledger, OpenRequest
from art_server.ledger.records import Request, choice_id
from art_server.store.registry import Model, Registry

LOST_SECONDS = 1.0
"""Time for the supervisor to notice that the engine has ended, before a request waits for the next engine."""


@dataclass(slots=True)
class InferenceRequest:
    """One inference request, before and after it is resolved to an adapter."""

    api: str
    """chat, completions, responses or messages."""
    path: str
    requested_model: str
    body: dict[str, Any]
    headers: dict[str, str]
    owner: str
    projects: frozenset[str] | None
    """The projects that the caller may use; None: all."""
    only_model: str | None
    """The only model ("PROJECT/NAME") that the caller may use; None: any."""
    session: str | None
    messages: list[dict[str, Any]]
    """The conversation, as chat messages for every API."""
    before: bytes
    """The digest of this conversation."""
    is_first_turn: bool
    """The request cannot continue an earlier answer: its conversation contains none, or its prompt consists of token
    ids, which are used unchanged."""
    named: Sequence[str] = ()
    """The ids of tool calls, choices and responses that the conversation contains."""
    is_before_user: bool = True
    """A user message follows the last answer."""
    model: Model | None = None
    step: int | None = None
    adapter: str = ""

    @property
    def is_stream(self) -> bool:
        return bool(self.body.get("stream"))

    @property
    def has_choices(self) -> bool:
        """Whether several choices are requested, so that each event of a stream belongs to one of them."""
        return self.body.get("n") not in (None, 1)

    def art_field(self, opened: OpenRequest, index: int) -> dict[str, Any]:
        """The `art` field of a choice, with the id of its record; without a record, `unrecorded` is the reason."""
        mark = {
            "id": choice_id(opened.request.request_id, index),
            "step": self.step,
            "model": self.model.id if self.model is not None else None,
        }
        return mark | ({"unrecorded": opened.lost[index]} if index in opened.lost else {})


class EngineLost(Unavailable):
    """The engine ended during a request."""

    def __init__(self) -> None:
        super().__init__(
            "the engine ended during this request and is being restarted: repeat the request",
            code="engine_restarted",
        )


@dataclass(eq=False)
class Relay:
    """Sends requests to the engine and returns its answers; any number at a time."""

    _registry: Registry
    _ledger: Ledger
    _engine: Engine
    _gate: PauseGate
    _base: BaseLoader
    _wait_limit_seconds: float

    def resolve(self, inference: InferenceRequest) -> None:
        """Sets the model, step and adapter that answer a request at this moment.

        Raises:
            NotFound: no such model or step.
            Conflict: several projects have a model of this name, or another base model is loaded.
        """
        base = self._engine.base
        base_name = base.name if base is not None else None
        found = self._registry.resolve(
            inference.requested_model, base_name, inference.projects, inference.only_model
        )
        inference.model, inference.step = found.model, found.step
        self._base.is_wanted = True
        if found.model is None:
            assert base_name is not None, "only a loaded base resolves to no model"
            inference.adapter = base_name
            return
        if base_name is not None and base_name != found.model.record.base_model:
            raise Conflict(
                f"model '{found.model.id}' adapts base model '{found.model.record.base_model}'; this server has "
                f"'{base_name}' loaded: send the request to a server of that base model",
                code="base_model_differs",
                param="model",
            )
        assert found.step is not None, "a model resolves to a step"
        inference.adapter = found.model.adapter_name(found.step)

    @contextlib.asynccontextmanager
    async def answer(
        self, inference: InferenceRequest, request_id: str
    ) -> AsyncIterator[tuple[aiohttp.ClientResponse, OpenRequest]]:
        """Waits at the pause gate, sends the request to the engine, and yields its answer while the connection is open.

        Raises:
            Unavailable: the wait is above the limit.
            EngineLost: the engine died during the request.
        """
        limit = self._wait_limit_seconds
        await self._gate.wait_open(limit)
        self.resolve(inference)
        with contextlib.ExitStack() as stack:
            stack.enter_context(self._gate.inside(inference.adapter))
            if inference.model is not None and inference.step is not None:
                folder = inference.model.folder.checkpoint_dir(inference.step)
                await self._engine.load_adapter(inference.adapter, folder, limit)
            await self._engine.wait_ready(limit)
            opened = stack.enter_context(
                self._ledger.open_request(self._to_record(inference, request_id))
            )
            sent = inference.headers | {
                "x-request-id": request_id,
                "content-type": "application/json",
            }
            content = msgspec.json.encode(self._body(inference, request_id))
            try:
                async with self._engine.http.post(
                    inference.path, data=content, headers=sent
                ) as response:
                    yield response, opened
            except aiohttp.ClientError as error:
                raise EngineLost from error

    def _to_record(self, inference: InferenceRequest, request_id: str) -> Request:
        """A request as the ledger stores it."""
        record = inference.model.record if inference.model is not None else None
        return Request(
            request_id=request_id,
            api=inference.api,
            project=record.project if record else None,
            name=record.name if record else None,
            step=inference.step,
            owner=record.project if record else inference.owner,
            session=inference.session,
            before=inference.before,
            named=self._ledger.callers(inference.named) if inference.named else frozenset(),
            is_before_user=inference.is_before_user,
        )

    @staticmethod
    def _body(inference: InferenceRequest, request_id: str) -> dict[str, Any]:
        body = inference.body | {"model": inference.adapter}
        is_bare = inference.api == "chat" and body.get("logprobs") is None
        if is_bare and inference.model is not None and inference.model.record.always_logprobs:
            body["logprobs"] = True
        if inference.api == "responses":
            body["request_id"] = f"resp_{request_id}"
        return body

    async def was_engine_killed(self) -> bool:
        """Whether somebody killed the engine, so that the request is not the cause. Call it after `EngineLost`; it
        first waits until the supervisor has noticed the engine's end."""
        await asyncio.sleep(LOST_SECONDS)
        return self._engine.was_killed
