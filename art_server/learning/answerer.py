"""Steps that answer and read for the server itself: for the guard and the teacher. Users' requests go on meanwhile, and the ledger records
nothing."""

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable, Coroutine, Iterator
from typing import Any

from art_server.engine.engine import LOST, AdapterRefused, Engine, EngineDied
from art_server.engine.fleet import Fleet
from art_server.engine.pause_gate import PauseGate
from art_server.store.registry import RegisteredModel

WAIT_SECONDS = 3600.0
AT_ONCE = 8
"""Requests that the server has at the engine at the same time, beside those of the users."""


async def at_once(work: Callable[[], Coroutine[Any, Any, None]]) -> None:
    """Runs AT_ONCE workers, which share what is to be done. If one fails, the others end too, and its error is raised."""
    try:
        async with asyncio.TaskGroup() as group:
            for _ in range(AT_ONCE):
                group.create_task(work())
    except ExceptionGroup as errors:
        raise errors.exceptions[0] from errors


class EngineEnded(EngineDied):
    """The engine ended while it answered."""

    def __init__(self, name: str):
        super().__init__(f"the engine ended while it computed with '{name}' for the server")


class Answerer:
    """Asks steps of models. Each call waits until an engine is ready.

    Raises in all calls:
        EngineEnded: the engine ended meanwhile.
        AdapterRefused: the engine refuses the step, or cannot compute with it.
        Unavailable: the engine is not ready.
    """

    def __init__(self, *, fleet: Fleet, gate: PauseGate):
        self._fleet = fleet
        self._gate = gate

    @contextlib.contextmanager
    def kept(self, model: RegisteredModel, step: int) -> Iterator[None]:
        """A step that is not deleted inside the block."""
        with self._gate.inside(model.adapter_name(step)):
            yield

    async def complete(self, model: RegisteredModel, step: int, body: dict[str, Any]) -> dict[str, Any]:
        """The choice of a completion."""
        async with self._reached(model, step) as engine:
            return await engine.complete(model.adapter_name(step), body)

    async def logprobs(self, model: RegisteredModel, step: int, prompt: list[int], sampled: list[int]) -> list[float]:
        """The log-probabilities of an answer's tokens behind a prompt, at temperature 1."""
        async with self._reached(model, step) as engine:
            logprobs = await engine.score(model.adapter_name(step), [*prompt, *sampled])
        return logprobs[len(logprobs) - len(sampled) :]

    @contextlib.asynccontextmanager
    async def _reached(self, model: RegisteredModel, step: int) -> AsyncIterator[Engine]:
        """An engine that has a step's adapter. The step is in use inside the block."""
        name = model.adapter_name(step)
        await self._gate.wait_open(WAIT_SECONDS)
        with contextlib.ExitStack() as stack:
            stack.enter_context(self._gate.inside(name))
            folder = model.folder.checkpoint_dir(step)
            engine = await self._fleet.reach(name, folder, lambda: name.encode(), WAIT_SECONDS, stack)
            try:
                yield engine
            except LOST as error:
                raise EngineEnded(name) from error
            except AdapterRefused as error:
                if await engine.is_alive():
                    raise
                raise EngineEnded(name) from error
