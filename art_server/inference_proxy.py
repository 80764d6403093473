"""Sends inference requests to the engine: waits at the pause gate, resolves the adapter (`Registry.resolve`), informs the
ledger."""

import asyncio
import contextlib
import functools
import json
import logging
from collections import OrderedDict
from collections.abc import AsyncIterator, Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import aiohttp
import msgspec

from art_protocol.learning import ROLLOUT_SESSION
from art_protocol.sampling import AGENTS_OWN, BASE, Sampling, seeds_from
from art_protocol.tracking import Span, Tracer, link_of
from art_protocol.wire import NOT_DELIVERED
from art_server.engine.engine import Engine
from art_server.engine.fleet import Fleet
from art_server.engine.pause_gate import PauseGate
from art_server.errors import Conflict, NotFound, Unavailable
from art_server.ledger import conversation
from art_server.ledger.conversation import RESPONSE_PREFIX, RequestConversation
from art_server.ledger.ledger import Ledger, OpenRequest
from art_server.ledger.records import TEMPLATE_KWARGS, Request, choice_id
from art_server.models.base_loader import BaseLoader
from art_server.shared.engine_messages import new_request_id
from art_server.shared.refusals import MAX_CAUSE, MAX_SESSIONS, Refusals
from art_server.store.registry import UNKNOWN_MODEL, RegisteredModel, Registry, ResolvedModel, split_step

OPERATIONS: Mapping[str, str] = {"completions": "text_completion"}
"""OpenTelemetry's name of the operation, by API. The other APIs have the operation "chat"."""


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
    sampling: Sampling = AGENTS_OWN
    """The sampling parameters of the session, which win over the body's, and the session's aliases."""
    meaning: str | None = None
    """What an alias says of the requested name. None: a model here has the name."""
    pinned_step: str | None = None
    """What the name of a trainable model without a step means: a step, or "base". None: the newest."""
    requested_at: int | None = None
    """When the server received the request (`clock.tick`)."""
    model: RegisteredModel | None = None
    step: int | None = None
    adapter: str = ""
    conversation: RequestConversation = field(default_factory=RequestConversation)
    """Empty until the name is resolved: a request with an unknown name needs no conversation."""
    continued_response: str | None = None
    """The stored response whose items the body contains, because the caller named it."""
    traceparent: str | None = None
    """The header `traceparent` of the request."""
    never_learns: bool = False
    """The caller permits no score of the answer to be trained."""
    num_choices: int = 1
    """Choices that the request asks for. 0: only the number of its prompt's tokens is asked for."""
    left_out_tools: tuple[str, ...] = ()
    """Offers of the agent's vendor that the body had and nothing here runs, such as "web_search"."""
    num_ended: int = 0
    """Choices that the ledger keeps for the session, or of which the ledger knows that they have no record."""
    request_id: str = ""
    """The id under which the engine samples (`new_request_id`). If an engine is lost, the next one gets another id."""
    engine: Engine | None = None
    """The engine that answers the request, or that was lost during the answer."""

    @property
    def names_step(self) -> bool:
        """Whether the request names the step that answers it."""
        return self.pinned_step is not None or bool(split_step(self.meaning or self.requested_model)[1])

    @property
    def enters_splits(self) -> bool:
        """Whether a canary may answer the request: it comes from an agent in use, not from a rollout or an evaluation."""
        is_rollout = self.session is not None and self.session.startswith(ROLLOUT_SESSION)
        return not (self.names_step or is_rollout or link_of(self.session))

    @property
    def keeps_messages(self) -> bool:
        """Whether the ledger keeps the request's messages: for its session, or because a score's text may teach the model."""
        if self.session is not None:
            return True
        is_teachable = self.api != "completions" and not self.never_learns  # a bare prompt has no messages
        return is_teachable and self.model is not None and self.model.keeps_messages

    @property
    def is_stream(self) -> bool:
        return bool(self.body.get("stream")) and self.num_choices > 0

    @property
    def has_choices(self) -> bool:
        """Whether several choices are requested, so that each event of a stream belongs to one of them."""
        return self.body.get("n") not in (None, 1)

    @property
    def has_token_ids(self) -> bool:
        """Whether the answer contains token ids: the request asks for token ids or log-probabilities, or the model belongs to
        a program that reads both without a request for them."""
        logprobs = self.body.get("logprobs")
        is_asked = bool(self.body.get("return_token_ids")) or (logprobs is not None and logprobs is not False)
        return is_asked or (self.model is not None and self.model.record.always_logprobs)

    @property
    def scope(self) -> tuple[str, int | None]:
        """Owner and the model's number, by which the ledger tells models and their callers apart."""
        if self.model is None:
            return self.owner, None
        return self.model.record.project, self.model.number

    def art_field(self, opened: OpenRequest, index: int) -> dict[str, Any]:
        """The `art` field of a choice, with the id of its record, the number of its tokens, and what the request demanded of the
        answer; without a record, `unrecorded` is the reason."""
        mark: dict[str, Any] = {
            "id": choice_id(opened.request.request_id, index),
            "step": self.step,
            "model": self.model.id if self.model is not None else None,
        }
        mark |= demands_of(self.body)
        if index in opened.records:
            mark["num_tokens"] = len(opened.records[index].token_ids)
        return mark | ({"unrecorded": opened.lost[index]} if index in opened.lost else {})


def demands_of(body: Mapping[str, Any]) -> dict[str, Any]:
    """What a request demands of its answer, for people who read the answer: `tool_choice` unless that is "auto", and the format's
    type, name and strictness. Schemas are left out."""
    demands: dict[str, Any] = {}
    if (choice := body.get("tool_choice")) not in (None, "auto", {"type": "auto"}):
        demands["tool_choice"] = choice
    formats = [body.get("response_format"), *(part.get("format") for part in _dicts(body, "text", "output_config"))]
    for form in formats:
        if isinstance(form, dict) and form.get("type") not in (None, "text"):
            named = form["json_schema"] if isinstance(form.get("json_schema"), dict) else form
            known = {"type": form["type"], "name": named.get("name"), "strict": named.get("strict")}
            demands["format"] = {name: value for name, value in known.items() if value is not None}
    return demands


def _dicts(body: Mapping[str, Any], *names: str) -> list[dict[str, Any]]:
    return [value for name in names if isinstance(value := body.get(name), dict)]


logger = logging.getLogger(__name__)

MAX_TOKENS_FIELDS: Mapping[str, str] = {"responses": "max_output_tokens"}
"""The field with the largest number of tokens, by API. The other APIs have `max_tokens`."""


class SessionSeeds:
    """The seeds of the requests of sessions that have a seed (`sampling.seeds_from`). Only the latest sessions are remembered."""

    def __init__(self) -> None:
        self._seeds: OrderedDict[tuple[str, str | None, int], Iterator[int]] = OrderedDict()

    def next(self, owner: str, session: str | None, seed: int) -> int:
        """The seed of the session's next request."""
        key = owner, session, seed
        seeds = self._seeds.setdefault(key, seeds_from(seed))
        self._seeds.move_to_end(key)
        while len(self._seeds) > MAX_SESSIONS:
            self._seeds.popitem(last=False)
        return next(seeds)


def resolve_or_alias(
    resolve: Callable[[str], ResolvedModel], name: str, sampling: Sampling, base_name: str | None
) -> tuple[ResolvedModel, str | None]:
    """What a name means; where no model has the name, what a session's aliases say of it, and the meaning.

    Raises:
        NotFound: neither a model nor an alias has the name, or the alias's model does not exist.
    """
    try:
        return resolve(name), None
    except NotFound as error:
        meaning = sampling.meaning_of(name)
        if error.code != UNKNOWN_MODEL or meaning is None:
            raise
    meaning = base_name if meaning == BASE and base_name is not None else meaning
    return resolve(meaning), meaning


def set_sampling(inference: InferenceRequest, seeds: SessionSeeds) -> None:
    """Sets the sampling parameters of the session in the body of a request. A seed that the request has stays."""
    parameters = inference.sampling.parameters
    seed = parameters.pop("seed", None)
    if seed is not None and inference.body.get("seed") is None and inference.api != "messages":  # which has no seed
        inference.body["seed"] = seeds.next(inference.owner, inference.session, int(seed))
    for name, value in parameters.items():
        field_name = MAX_TOKENS_FIELDS.get(inference.api, name) if name == "max_tokens" else name
        inference.body[field_name] = value
        if name == "max_tokens":
            inference.body.pop("max_completion_tokens", None)  # chat's other name of the same limit, which would win


class EngineLost(Unavailable):
    """The engine ended during a request."""

    def __init__(self) -> None:
        super().__init__(
            "the engine ended during this request and is being restarted: repeat the request",
            code="engine_restarted",
        )


class Proxy:
    """Sends requests to the engine and returns its answers; any number at a time."""

    def __init__(
        self,
        *,
        registry: Registry,
        ledger: Ledger,
        fleet: Fleet,
        gate: PauseGate,
        base: BaseLoader,
        wait_limit_seconds: float,
        tracing: Tracer | None = None,
    ):
        self._registry = registry
        self._ledger = ledger
        self._fleet = fleet
        self._gate = gate
        self._base = base
        self._wait_limit_seconds = wait_limit_seconds
        self._tracing = tracing
        self._seeds = SessionSeeds()
        self.refused_names = Refusals()
        self._told: dict[int, int] = {}
        """The length of the agent's first prompt that was told, by the number of its model."""
        self._told_tools: dict[int, set[str]] = {}
        """The left-out tools that were told, by the number of the model."""

    def resolve(self, inference: InferenceRequest) -> None:
        """Sets the model, step and adapter that answer a request at this moment. `refused_names` remembers a name that no model
        has.

        Raises:
            NotFound: no such model or step.
            Conflict: several projects have a model of this name, or another base model is loaded.
        """
        base = self._fleet.base
        base_name = base.name if base is not None else None
        try:
            resolved = self._resolve_name(inference, base_name)
        except NotFound as error:
            if inference.session is not None:
                self.refused_names.add(inference.owner, inference.session, inference.requested_model)
                if error.code == UNKNOWN_MODEL:
                    name = inference.requested_model[:MAX_CAUSE]
                    remedy = (
                        f"inside a rollout, art.rollout(..., aliases={{{name!r}: 'base'}}) says what such a name means"
                    )
                    raise NotFound(f"{error.message}; {remedy}", code=error.code, param=error.param) from error
            raise
        inference.model, inference.step = resolved.model, resolved.step
        if inference.sampling is not AGENTS_OWN and (resolved.model is not None or inference.sampling.base):
            set_sampling(inference, self._seeds)
        self._base.is_wanted = True
        if resolved.model is None:
            assert base_name is not None, "only a loaded base resolves to no model"
            inference.adapter = base_name
            return
        if base_name is not None and base_name != resolved.model.record.base_model:
            raise Conflict(
                f"model '{resolved.model.id}' adapts base model '{resolved.model.record.base_model}'; this server has "
                f"'{base_name}' loaded: send the request to a server of that base model",
                code="base_model_differs",
                param="model",
            )
        assert resolved.step is not None, "a model resolves to a step"
        inference.adapter = resolved.model.adapter_name(resolved.step)

    def _resolve_name(self, inference: InferenceRequest, base_name: str | None) -> ResolvedModel:
        """What the requested name means, with the pinned step if the name has no step."""
        resolve = functools.partial(
            self._registry.resolve, base_name=base_name, projects=inference.projects, only=inference.only_model
        )
        resolved, meaning = resolve_or_alias(resolve, inference.requested_model, inference.sampling, base_name)
        inference.meaning = meaning
        name = meaning or inference.requested_model
        if inference.pinned_step is None or resolved.model is None or split_step(name)[1]:
            split = resolved.model.split if resolved.model is not None else None
            if split is not None and inference.enters_splits and split.takes(split_key(inference)):
                return ResolvedModel(resolved.model, split.step)
            return resolved
        if inference.pinned_step == "base":
            return resolve(resolved.model.record.base_model)
        return resolve(f"{resolved.model.id}@{inference.pinned_step}")

    @contextlib.asynccontextmanager
    async def answer(self, inference: InferenceRequest) -> AsyncIterator[tuple[aiohttp.ClientResponse, OpenRequest]]:
        """Waits at the pause gate, announces the request to the ledger, sends it to the engine, and yields the answer while the
        connection is open. Beside the answer, the engine's process sends prompts and samples to the ledger under the request's
        id (`ledger/intake.py`); the `OpenRequest` gets the records that the ledger makes of them.

        Thinking that the agent left out is added to the request; the chat template decides which thinking is rendered. If the
        client hangs up, the session counts the choices that did not end.

        Raises:
            Unavailable: the wait is above the limit.
            EngineLost: the engine died during the request.
        """
        limit = self._wait_limit_seconds
        with contextlib.ExitStack() as stack:
            stack.enter_context(self._counting_hang_up(inference))
            span = None
            if self._tracing is not None:
                span = stack.enter_context(inference_span(self._tracing, inference))
            if inference.model is not None:
                await self._registry.verify(inference.model)
            await self._gate.wait_open(limit)
            # Behind the gate, because the step that closed it may be the newest now.
            self.resolve(inference)
            # Nothing is awaited since `resolve`: in between the step could be deleted (`Checkpoints._delete_steps`).
            stack.enter_context(self._gate.inside(inference.adapter))
            folder = None
            if inference.model is not None and inference.step is not None:
                folder = inference.model.folder.checkpoint_dir(inference.step)
            key = functools.partial(routing_key, inference)
            inference.engine = await self._fleet.reach(inference.adapter, folder, key, limit, stack)
            inference.request_id = new_request_id(inference.conversation.is_first_turn)
            opened = stack.enter_context(
                self._ledger.open_request(ledger_request(inference), inference.engine.silence_seconds)
            )
            stack.callback(self._tell_context, inference, opened)
            self._tell_left_out(inference)
            if span is not None:
                stack.callback(set_span_attributes, span, inference, opened)
            headers = inference.headers | {"x-request-id": inference.request_id, "content-type": "application/json"}
            post = functools.partial(inference.engine.http.post, inference.path, headers=headers)
            body = engine_body(inference)
            thoughts = self._ledger.recall_thinking(opened) if inference.conversation.answers else []
            try:
                if any(thoughts):
                    restored = conversation.with_thinking(inference.api, body, thoughts)
                    async with post(data=msgspec.json.encode(restored)) as response:
                        # 400: the context may have no room for the thinking; then the request goes as the agent sent it.
                        if response.status != 400:
                            yield await self._checked(response, inference), opened
                            return
                async with post(data=msgspec.json.encode(body)) as response:
                    yield await self._checked(response, inference), opened
            except aiohttp.ClientError as error:
                raise EngineLost from error

    def _tell_context(self, inference: InferenceRequest, opened: OpenRequest) -> None:
        """Tells how much of the context the first prompt of a model's agent takes. A side call may come before the agent's own
        conversation, so a prompt of twice that length is told as well."""
        model, whole, prompt = inference.model, self._fleet.max_seq_length, opened.prompts.get(0)
        if model is None or inference.session is None or prompt is None or whole is None:
            return
        length = len(prompt.token_ids)
        if not inference.conversation.is_first_turn or length < 2 * self._told.get(model.number, 0):
            return
        self._told[model.number] = length
        level = logging.WARNING if length > whole / 2 else logging.INFO
        logger.log(
            level,
            "%s: the first prompt of its agent has %d tokens, and the context has %d (--max-seq-length): %d are left for the whole "
            "conversation; docs/howto/coding-agents.md has what coding agents need",
            model.id,
            length,
            whole,
            whole - length,
        )

    def _tell_left_out(self, inference: InferenceRequest) -> None:
        """Tells once for each model which tools the agent offers in vain."""
        if inference.model is None:
            return
        told = self._told_tools.setdefault(inference.model.number, set())
        for offer in sorted(set(inference.left_out_tools) - told):
            told.add(offer)
            logger.info(
                "%s: its agent offers %s, which nothing here runs: the model does not see this tool. docs/agents.md has the "
                "agents' settings that turn it off",
                inference.model.id,
                offer,
            )

    @contextlib.contextmanager
    def _counting_hang_up(self, inference: InferenceRequest) -> Iterator[None]:
        request = ledger_request(inference)
        try:
            with self._ledger.expecting(request, inference.num_choices):
                yield
        except (asyncio.CancelledError, GeneratorExit):  # an answer as one body is cancelled, a stream is closed
            if num_lost := inference.num_choices - inference.num_ended:
                self._ledger.count_lost(request, NOT_DELIVERED, num_lost)
            raise

    async def _checked(self, response: aiohttp.ClientResponse, inference: InferenceRequest) -> aiohttp.ClientResponse:
        if response.status == 500:
            await self.check_engine(inference)
        return response

    @staticmethod
    async def check_engine(inference: InferenceRequest) -> None:
        """Checks that an error is the answer of a living engine.

        Raises:
            EngineLost: the engine is dead or dying.
        """
        assert inference.engine is not None, "it has answered"
        if not await inference.engine.is_alive():
            raise EngineLost

    @staticmethod
    async def was_engine_killed(inference: InferenceRequest) -> bool:
        """Whether somebody killed the engine, so that the request is not the cause. To be called after `EngineLost`; first
        waits until the supervisor has noticed the engine's end."""
        assert inference.engine is not None, "it was lost"
        await inference.engine.notice_end()
        return inference.engine.was_killed


def ledger_request(inference: InferenceRequest) -> Request:
    """A request as the ledger stores it."""
    owner, model = inference.scope
    earlier = inference.continued_response
    template_kwargs = inference.body.get(TEMPLATE_KWARGS)
    return Request(
        request_id=inference.request_id,
        api=inference.api,
        model=model,
        step=inference.step,
        owner=owner,
        session=inference.session,
        prefix_digest=inference.conversation.digest,
        answers=inference.conversation.answers,
        cited_choices=() if earlier is None else (choice_id(earlier.removeprefix(RESPONSE_PREFIX), 0),),
        requested_at=inference.requested_at,
        never_learns=inference.never_learns,
        names_step=not inference.enters_splits,
        template_kwargs=template_kwargs if isinstance(template_kwargs, dict) else None,
    )


def engine_body(inference: InferenceRequest) -> dict[str, Any]:
    """The body that the engine gets."""
    body = inference.body | {"model": inference.adapter}
    is_bare = inference.api == "chat" and body.get("logprobs") is None
    if is_bare and inference.model is not None and inference.model.record.always_logprobs:
        body["logprobs"] = True
    if (
        inference.api == "messages"
        and isinstance(config := body.get("output_config"), dict)
        and not body.get("thinking")
    ):
        # In Anthropic's API only `thinking` switches thinking on. vLLM would do so for an effort, too.
        body["output_config"] = {name: value for name, value in config.items() if name != "effort"}
    if inference.api == "responses":
        # vLLM's Responses take their id from the body, not from the header.
        body["request_id"] = f"{RESPONSE_PREFIX}{inference.request_id}"
    return body


def split_key(inference: InferenceRequest) -> bytes:
    """Decides which of a canary's two steps answers a request: a digest of the user, or without one of the session, or without both
    that of `routing_key`."""
    metadata = inference.body.get("metadata")
    named = metadata.get("user_id") if inference.api == "messages" and isinstance(metadata, dict) else None
    user = named or inference.body.get("safety_identifier") or inference.body.get("user")
    if isinstance(user, str):
        return conversation.digest(inference.owner.encode(), b"user", user.encode(errors="surrogatepass"))
    return routing_key(inference)


def routing_key(inference: InferenceRequest) -> bytes:
    """A digest that requests share if their prompts begin alike: of the session, or without a session of the
    model, the messages up to the user's first, and the tools."""
    if inference.session is not None:
        return conversation.digest(inference.owner.encode(), inference.session.encode(errors="surrogatepass"))
    messages = inference.conversation.messages
    users = (n for n, message in enumerate(messages, start=1) if message.get("role") == "user")
    opening = messages[: next(users, len(messages))]
    content = [inference.requested_model, opening, inference.body.get("tools")]
    return conversation.digest(msgspec.json.encode(content))


@contextlib.contextmanager
def inference_span(tracing: Tracer, inference: InferenceRequest) -> Iterator[Span]:
    """The span of a request, from its arrival at the pause gate to the last byte of vLLM's answer. The header
    `traceparent` names the parent span, or else the session does; if both name a span, the session's span is linked."""
    session, header = link_of(inference.session), link_of(inference.traceparent)
    operation = OPERATIONS.get(inference.api, "chat")
    attributes = {
        "gen_ai.operation.name": operation,
        "gen_ai.request.model": inference.requested_model,
        "art.api": inference.api,
    }
    span = tracing.start(
        f"{operation} {inference.requested_model}",
        header or session,
        attributes,
        kind="SERVER",
        links=[session] if header is not None and session is not None else [],
    )
    try:
        yield span
    except BaseException as error:  # also a client that disconnects
        span.end(type(error).__name__)
        raise
    span.end()


def set_span_attributes(span: Span, inference: InferenceRequest, opened: OpenRequest) -> None:
    """Adds to a request's span what is known at its end."""
    records = opened.records.values()
    span.set(
        {
            "art.adapter": inference.adapter,
            "art.request": opened.request.request_id,
            "gen_ai.usage.input_tokens": max((len(r.prompt_token_ids) for r in records), default=0),
            "gen_ai.usage.output_tokens": sum(len(r.token_ids) for r in records),
        }
    )
    if inference.step is not None:
        span.set({"art.step": inference.step})
    if span.holds_contents:
        answers = [{"role": "assistant", "content": record.text} for record in records]
        span.set({"gen_ai.input.messages": parts_of(inference.conversation.messages)})
        span.set({"gen_ai.output.messages": parts_of(answers)})


def parts_of(messages: Sequence[Mapping[str, Any]]) -> str:
    """Messages in the JSON of OpenTelemetry's conventions."""
    return json.dumps(
        [
            {
                "role": message.get("role", ""),
                "parts": [{"type": "text", "content": message.get("content") or ""}],
            }
            for message in messages
        ]
    )
