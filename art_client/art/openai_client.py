"""The OpenAI client of a model. Only this module imports `openai` at the top; the first call of `Model.openai_client`
imports this module."""

import asyncio
import weakref
from collections.abc import Iterator
from typing import Any, Self

from openai import AsyncOpenAI, DefaultAsyncHttpxClient, Timeout
from openai.types.chat import ChatCompletion

from art.loops import running_loop
from art.scopes import headers_for
from art.waiting import waiting_for
from art_protocol.proxies import DIRECT

READ_TIMEOUT_SECONDS = 1200
"""A request waits on the server while a step trains, and a long completion on a CPU takes minutes."""

MAX_RETRIES = 10
"""With openai's waits of 0.5 to 8 seconds between attempts, about 50 seconds: long enough for a server to restart."""


SAMPLING_PATHS = ("/chat/completions", "/completions", "/responses")
"""The routes whose requests have a `seed`."""


class InferenceClient(AsyncOpenAI):
    """An AsyncOpenAI for a trainable model, whose choices contain the data that training needs.

    Each choice has an `art.id`, by which the server finds the choice's tokens again. If the caller requests `logprobs` or
    `return_token_ids`, the server returns the tokens too. Each choice then gets the prompt's token ids, which the server
    sends once in a completion. Requests contain the header of the current scope's session.
    """

    seeds: Iterator[int] | None = None
    """The seeds of requests for which the caller sets none."""

    @property
    def default_headers(self) -> dict[str, Any]:  # pyright: ignore[reportIncompatibleMethodOverride]
        # `openai` reads this property for each request, in the context of the caller.
        return {**headers_for(str(self.base_url)), **super().default_headers}

    async def post(self, path: str, **kwargs: Any) -> Any:  # pyright: ignore[reportIncompatibleMethodOverride]
        if self.seeds is not None and path in SAMPLING_PATHS:
            # `openai` leaves arguments that the caller has not set out of the body.
            kwargs["body"] = {"seed": next(self.seeds), **kwargs["body"]}
        server = str(self.base_url).rstrip("/").removesuffix("/v1")
        with waiting_for(server, self.api_key).call("a request"):
            answer: Any = await super().post(path, **kwargs)
        if isinstance(answer, ChatCompletion) and answer.model_extra:
            prompt_token_ids = answer.model_extra.get("prompt_token_ids")
            if prompt_token_ids is not None:
                for choice in answer.choices:
                    choice.prompt_token_ids = prompt_token_ids  # pyright: ignore[reportAttributeAccessIssue]
        return answer

    def copy(self, **options: Any) -> Self:  # pyright: ignore[reportIncompatibleMethodOverride]
        copied = super().copy(**options)
        copied.seeds = self.seeds
        return copied

    # In `openai` this name is bound to the base class's `copy`.
    with_options = copy  # pyright: ignore[reportAssignmentType]


def seeded(client: AsyncOpenAI, seeds: Iterator[int]) -> AsyncOpenAI:
    """A copy of a trainable model's client, on the same connections. Each request has the next of `seeds`, unless the caller
    sets a seed."""
    assert isinstance(client, InferenceClient), "trainable models have an InferenceClient"
    copied = client.copy()
    copied.seeds = seeds
    return copied


class Connections(DefaultAsyncHttpxClient):
    """HTTP connections that are closed when nothing uses them any more, if their event loop is still running. The openai
    package's own connections close in any loop that runs then, which prints "Event loop is closed".

    The finalizer holds the transports, so that they are never collected before they are closed: a socket that is collected is
    closed at once, and the later `aclose` would stop the reading of the new socket that has its number.
    """

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        transports = [transport for transport in (self._transport, *self._mounts.values()) if transport is not None]
        weakref.finalize(self, _close_soon, running_loop(), transports).atexit = False


_CLOSING: set[asyncio.Task[None]] = set()
"""Tasks that close connections: a loop alone does not keep a task alive."""


def _close_soon(loop: asyncio.AbstractEventLoop | None, transports: list[Any]) -> None:
    """Closes transports, if the running loop is theirs. Any: transports are of the HTTP package that openai uses."""

    async def close() -> None:
        for transport in transports:
            await transport.aclose()

    if loop is not None and loop is running_loop():
        task = loop.create_task(close())
        _CLOSING.add(task)
        task.add_done_callback(_CLOSING.discard)


def make_client(base_url: str, api_key: str, *, is_trainable: bool) -> AsyncOpenAI:
    """A client for one inference address, with our timeouts and number of retries."""
    kind = InferenceClient if is_trainable else AsyncOpenAI
    timeout = Timeout(READ_TIMEOUT_SECONDS, connect=10.0)
    return kind(
        base_url=base_url,
        api_key=api_key,
        timeout=timeout,
        max_retries=MAX_RETRIES,
        http_client=Connections(timeout=timeout, mounts=DIRECT),
    )
