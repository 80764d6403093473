"""Sessions: the requests of one rollout, stored under one name on the server.

    async with art.rollout(model) as r:
        await run_agent(base_url=r.base_url, api_key=r.api_key)
        trajectory = await r.trajectory(reward=1.0)

A request names its session in its URL, in its API key or in a header. The server assembles the conversations, so the
client does not parse any requests.
"""

# pyright: reportPrivateUsage=false

import logging
import re
import uuid
from collections import Counter
from collections.abc import Collection, Iterable, Mapping
from contextvars import Token
from types import TracebackType
from typing import TYPE_CHECKING, Any, Never, Self

from art import tracing
from art.core.model import TrainableModel
from art.scopes import Scope, current_scope
from art.trajectories import History, Trajectory
from art_protocol import sampling as session_sampling
from art_protocol.learning import ROLLOUT_SESSION
from art_protocol.wire import (
    NAME_PATTERN,
    NAME_RULE,
    NOT_DELIVERED,
    NOT_ENDED,
    SESSION_HEADER,
    UNNAMED_SECONDS,
    HistoryBody,
    HistoryKind,
    SessionReply,
)

logger = logging.getLogger(__name__)

PLURALS: Mapping[HistoryKind, str] = {
    "branch": "branches",
    "context_reset": "context_resets",
    "sub_agent": "sub_agents",
    "side_call": "side_calls",
}
"""The metrics that count the conversations beside the main one."""

NO_REQUEST = "the agent sent no request that names the session"

if TYPE_CHECKING:
    from openai import AsyncOpenAI


def rollout(
    model: TrainableModel,
    session: str | None = None,
    *,
    sampling: Mapping[str, float] | None = None,
    aliases: Mapping[str, str] | None = None,
) -> "Rollout":
    """A scope for `async with` in which an agent's requests are captured; see `Rollout`.

    `session` is the rollout's name on the server: letters, digits, '.', '_' and '-'. A name that was used before continues
    the earlier rollout. None: a new name. `sampling` has temperature, top_p and max_tokens of the agent's requests to trainable
    models. They win over the agent's own. `seed` there begins the seeds of requests that have none; in `art.evaluate(seed=)` each
    rollout has such a seed. `aliases` says what names mean that no model here has, such as the agent's small model:
    `{"claude-haiku-*": "base"}` is the base model, which is not trained, `{"claude-*": model.get_inference_name()}` the model itself.
    """
    return Rollout(model, session, sampling, aliases)


def session_with_sampling(
    model: TrainableModel,
    session: str,
    sampling: Mapping[str, float] | None,
    aliases: Mapping[str, str] | None = None,
) -> str:
    """The name under which requests of a session reach the server, with sampling parameters and aliases.

    Raises:
        ValueError: a parameter is unknown, its value is out of range, or an alias is no name.
    """
    if not sampling and not aliases:
        return session
    is_base = model.get_inference_name() == model.base_model
    named = {**(sampling or {}), "base": is_base, "aliases": aliases or {}}
    return session_sampling.write(session, session_sampling.checked(named))


class Rollout:
    """One rollout of an agent that was not written for ART: the address for its requests, and the resulting trajectory.

    An agent that sends its requests to `base_url` is captured wherever the agent runs, also in another process. If the
    agent's address cannot be changed, `api_key` alone is enough. Inside the scope, `model.openai_client()` of any model
    needs neither.
    """

    def __init__(
        self,
        model: TrainableModel,
        session: str | None,
        sampling: Mapping[str, float] | None = None,
        aliases: Mapping[str, str] | None = None,
    ) -> None:
        if session is not None and not re.fullmatch(NAME_PATTERN, session):
            raise ValueError(f"session {session!r} becomes a part of URLs: {NAME_RULE}")
        model.backend()  # raises for a model that is not registered
        self.model = model
        self._span = tracing.start_rollout(model.get_inference_name())
        if model._seeds is not None:
            sampling = {"seed": next(model._seeds), **(sampling or {})}
        link = self._span.link if self._span is not None else None
        # With a span's link as its name, the server's spans of the requests are this span's children (`tracking.link_of`).
        self.session = session or link or f"{ROLLOUT_SESSION}{uuid.uuid4().hex}"
        self.session_in_requests = session_with_sampling(model, self.session, sampling, aliases)
        """The session's name with the sampling parameters and aliases, as the agent's requests name the session."""
        self._token: Token[Scope | None] | None = None
        self._waiting = model.backend()._reporting_start()

    @property
    def base_url(self) -> str:
        """The base URL for OpenAI's clients, with the session's name: "http://SERVER/s/SESSION/v1"."""
        return f"{self.root_url}/v1"

    @property
    def root_url(self) -> str:
        """The base URL for Anthropic's clients: `base_url` without "/v1"."""
        return f"{self.model.backend().base_url}/s/{self.session_in_requests}"

    @property
    def api_key(self) -> str:
        """The API key, with the session's name: "KEY::SESSION"."""
        return f"{self.model.inference_api_key or 'default'}::{self.session_in_requests}"

    def openai_client(self) -> "AsyncOpenAI":
        """The model's OpenAI client, bound to this session even outside the scope."""
        headers = {SESSION_HEADER: self.session_in_requests}
        if self._span is not None and self._span.link is not None:
            # 01: sampled (W3C trace context). A span that is not sampled has no link.
            headers["traceparent"] = f"00-{self._span.link}-01"
        return self.model.openai_client().with_options(default_headers=headers)

    async def trajectory(
        self,
        reward: float = 0.0,
        *,
        metrics: dict[str, float | int | bool] | None = None,
        metadata: dict[str, Any] | None = None,
        model: TrainableModel | None = None,
        leave_out: Collection[HistoryKind] = (),
    ) -> Trajectory:
        """The answers of `model` (default: the rollout's model) in this session so far, as a trajectory.

        The conversation with the most answers is the trajectory's own. The others are its additional histories, in the order in which
        they began; metrics have the number of `branches`, `context_resets`, `sub_agents` and `side_calls`. `leave_out` names kinds of
        conversations that are not to be trained, such as {"side_call"}: titles, summaries and probes of a coding agent. Choices that
        were left out are counted in metrics["unused_choices"], with the reasons in `logs`.

        Raises:
            ValueError: `leave_out` has another word.
        """
        for kind in leave_out:
            if kind not in PLURALS:
                raise ValueError(f"leave_out has {kind!r}, which is none of {', '.join(PLURALS)}")
        model = model or self.model
        reply = await model.backend()._fetch_session(model, self.session)
        reason = None if reply.num_choices else self._why_empty(model, reply)
        if reason is not None:
            logger.warning(reason)
        if self._span is not None:
            self._span.set({"art.reward": reward})
        trajectory = Trajectory(reward=reward, metrics=metrics or {}, metadata=metadata or {})
        add_captured(trajectory, [without(reply, leave_out)])
        if reason is not None:
            trajectory.log(reason)
        return trajectory

    def _why_empty(self, model: TrainableModel, reply: SessionReply) -> str | None:
        """Why a session has no answer of a model, and the remedy. None if the base model answered, and `model` is the copy
        with which `art.evaluate` samples from the base model."""
        name, others, unknown = model.get_inference_name(), reply.other_models, reply.unknown_models
        if reply.num_base_answers and name == model.base_model:
            return None
        facts: list[str] = []
        if reply.num_base_answers:
            base = f"the base model {model.base_model}, which is not trained"
            facts.append(f"{reply.num_base_answers} of its answers came from {base}")
        facts += [f"{count} of its answers came from the model {other}" for other, count in others.items()]
        facts += [
            f"{count} of its requests named {other!r}, which is no model here" for other, count in unknown.items()
        ]
        refused = [
            f"{count} requests that name the session were refused: {reason}"
            for reason, count in reply.refused_keys.items()
        ]
        if facts:
            facts += refused
            remedy = f"The agent has to send model={name!r}"
            if unknown:
                remedy += ", or art.rollout(..., aliases={...}) says what its own names mean"
            if others:
                remedy += f"; the answers of {next(iter(others))} are in r.trajectory(model=...) of that model"
        elif reply.unused:
            facts = [f"{were(count)} left out: {reason}" for reason, count in reply.unused.items()]
            remedy = "docs/agents.md has each reason, and what to do"
            if reply.unused.keys() <= {NOT_DELIVERED, NOT_ENDED}:
                facts.insert(0, none_finished(sum(reply.unused.values())))
                remedy = (
                    "Give the agent more time, or its answers a limit: art.rollout(..., sampling={'max_tokens': N})"
                )
        elif refused:
            facts = refused
            remedy = "The agent needs the rollout's api_key, or another key with the scope infer"
        elif reply.num_unnamed_requests:
            minutes = UNNAMED_SECONDS // 60
            facts = [f"{reply.num_unnamed_requests} requests to {name} in the last {minutes} minutes name no session"]
            remedy = "Processes and HTTP clients that are not captured need the rollout's base_url or api_key"
        else:
            facts = [NO_REQUEST]
            remedy = f"Give it base_url={self.base_url}, or the rollout's api_key, and model={name!r}"
        return f"session {self.session} has no answer of {name} that can be trained: {'; '.join(facts)}. {remedy}"

    def __enter__(self) -> Never:
        raise TypeError("a rollout is asynchronous: write `async with` in place of `with`")

    def __exit__(self, *_: object) -> None: ...

    async def __aenter__(self) -> Self:
        self._token = current_scope.set(Scope(self.session_in_requests))
        self._waiting.__enter__()
        if self._span is not None:
            self._span.__enter__()
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        assert self._token is not None, "a scope is left after it was entered"
        if self._span is not None:
            self._span.__exit__(kind, error, traceback)
        current_scope.reset(self._token)
        self._waiting.__exit__(None, None, None)
        if isinstance(error, Exception):
            name, address = self.model.get_inference_name(), self.model.backend().base_url
            error.add_note(
                f"{show_command(name, self.session, address)} shows what it was answered, if it asked the model"
            )


def show_command(name: str, session: str, address: str) -> str:
    """The command that shows what a model answered in a session."""
    return f"`art show {name} --session {session} --url {address}`"


def were(count: int) -> str:
    return "1 of its answers was" if count == 1 else f"{count} of its answers were"


def without(reply: SessionReply, leave_out: Collection[HistoryKind]) -> SessionReply:
    """A session without some kinds of conversations, whose choices are counted."""
    if not leave_out:
        return reply
    kinds = dict(enumerate(reply.kinds))
    kept = [history for number, history in enumerate(reply.histories) if kinds.get(number) not in leave_out]
    unused = dict(reply.unused)
    ids = choice_ids(kept)
    for kind in leave_out:
        left_out = [history for number, history in enumerate(reply.histories) if kinds.get(number) == kind]
        if num_left_out := len(choice_ids(left_out) - ids):
            unused[f"the rollout leaves {PLURALS[kind].replace('_', ' ')} out"] = num_left_out
    return reply.model_copy(update={"histories": kept, "unused": unused})


def choice_ids(histories: Iterable[HistoryBody]) -> set[str]:
    entries = (entry for history in histories for entry in history.messages_and_choices)
    return {entry["art"]["id"] for entry in entries if "art" in entry}


def none_finished(count: int) -> str:
    if count == 1:
        return "the agent asked for 1 answer, which was not finished"
    return f"the agent asked for {count} answers, of which none was finished"


def add_captured(trajectory: Trajectory, replies: Iterable[SessionReply]) -> None:
    """Adds the conversations of a session to a trajectory. Existing entries of the trajectory are unchanged."""
    histories: list[History] = []
    unused: dict[str, int] = {}
    kinds: Counter[str] = Counter()
    for reply in replies:
        kinds.update(PLURALS[kind] for kind in reply.kinds if kind != "main")
        for history in reply.histories:
            histories.append(History.model_validate(history.model_dump()))
        for reason, count in reply.unused.items():
            unused[reason] = unused.get(reason, 0) + count
    add_histories(trajectory, histories)
    trajectory.metrics |= kinds
    if unused:
        trajectory.metrics["unused_choices"] = sum(unused.values())
    for reason, count in unused.items():
        trajectory.log(f"{count} captured choices left out: {reason}")


def add_histories(trajectory: Trajectory, histories: list[History]) -> None:
    """Adds conversations to a trajectory. If the trajectory's own conversation is empty, the first takes its place."""
    if histories and not trajectory.messages_and_choices:
        first, *histories = histories
        trajectory.messages_and_choices, trajectory.tools = first.messages_and_choices, first.tools
    trajectory.additional_histories += histories
