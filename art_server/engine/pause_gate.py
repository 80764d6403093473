"""The pause gate: holds inference requests while a step runs on the same device.

The gate counts the engine's requests by adapter, so that no adapter is unloaded while requests frozen by a step use it.
"""

import asyncio
import contextlib
from collections import Counter
from collections.abc import Iterator

from art_server.errors import Unavailable
from art_server.shared.clock import REAL, Clock

FIRST, HEAD_START_SECONDS = 2, 0.06
"""When the gate opens, this many requests go first. With 64 requests at once vLLM's API reads prompts for 150 ms (two cores)
before its first answer; the new adapter then needs 196 ms from the optimizer's end to its first token, otherwise 90 ms
(`scripts/bench/step`)."""


class PauseGate:
    """Is open or closed, and counts the requests inside."""

    def __init__(self, *, clock: Clock = REAL) -> None:
        self._clock = clock
        self._open = asyncio.Event()
        self._open.set()
        self._num_waiting = 0
        self._model: str | None = None
        self._inside: Counter[str] = Counter()

    @property
    def num_waiting(self) -> int:
        """Requests that wait for the gate to open."""
        return self._num_waiting

    @property
    def num_inside(self) -> int:
        """Requests that the engine has."""
        return self._inside.total()

    @property
    def model(self) -> str | None:
        """The model whose step closed the gate ("PROJECT/NAME"); None while the gate is open."""
        return self._model

    def close(self, model: str) -> None:
        """Closes the gate for a step of a model."""
        self._model = model
        self._open.clear()

    def open(self) -> None:
        """Opens the gate: after a step's adapter is loaded (`Attempt._serve`), or after an error (`JobRunner`)."""
        self._model = None
        self._open.set()

    async def wait_open(self, timeout_seconds: float) -> None:
        """Returns when the gate is open.

        Raises:
            Unavailable: the gate is still closed after the limit.
        """
        if self._open.is_set():
            return
        is_first = self._num_waiting < FIRST
        self._num_waiting += 1
        try:
            async with self._clock.timeout(timeout_seconds):
                while not self._open.is_set():
                    await self._open.wait()
                    await self._clock.sleep(0.0 if is_first else HEAD_START_SECONDS)
                    is_first = True  # where jobs follow one another, the gate is open for less than a head start
        except TimeoutError as error:
            if self._open.is_set():  # the limit ended during the head start
                return
            raise Unavailable(
                f"inference waited for {timeout_seconds:.0f} s for a step, which trains; repeat the request, or start the "
                "server with a larger --wait-limit",
                code="training_in_progress",
            ) from error
        finally:
            self._num_waiting -= 1

    @contextlib.contextmanager
    def inside(self, adapter: str) -> Iterator[None]:
        """Counts a request as inside during the block, under the adapter that answers it."""
        self._inside[adapter] += 1
        try:
            yield
        finally:
            self._inside[adapter] -= 1
            if not self._inside[adapter]:
                del self._inside[adapter]

    def uses(self, adapter: str) -> bool:
        return self._inside[adapter] > 0
