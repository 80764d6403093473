"""A fleet: several engines, its replicas, that look like one engine from outside.

Each replica is supervised, watched and restarted by itself. A request goes to one of those that are ready (`routing.py`);
if that one is lost, the proxy asks again, and another one answers. A step's adapter is loaded by all ready replicas or
serves from none. A replica that starts loads it before it is ready, and one that does not answer is killed. On a device that
the trainer uses, too, all replicas pause, and all wake. Only `--engines` above 1 makes a fleet.
"""

import asyncio
import contextlib
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from art_server.engine.device.plan import MemoryPlan
from art_server.engine.engine import START_TIMEOUT_SECONDS, AdapterRefused, Engine, EngineDied, State
from art_server.engine.routing import Router
from art_server.process.progress import StartProgress
from art_server.process.shared.trainer_messages import MismatchLimits
from art_server.store.base_models import BaseModel


class Fleet:
    """Several engines with the same base model; the methods of `Engine` act on all of them."""

    def __init__(self, replicas: Sequence[Engine], progress: StartProgress, changed: asyncio.Condition):
        """`progress` and `changed` are those of the replicas."""
        self.replicas = tuple(replicas)
        self.progress = progress
        self._changed = changed
        self._router = Router()

    # --- life ---

    def start(self, base: BaseModel, requested: Mapping[str, str], plan: MemoryPlan | None = None) -> None:
        """As `Engine.start`."""
        for replica in self.replicas:
            replica.start(base, requested, plan)

    async def stop(self) -> None:
        """As `Engine.stop`."""
        await asyncio.gather(*(replica.stop() for replica in self.replicas))

    @property
    def state(self) -> State:
        """That of the replica that is closest to serving."""
        states = {replica.state for replica in self.replicas}
        return next(state for state in ("ready", "starting", "failed", "none") if state in states)

    @property
    def detail(self) -> str | None:
        """Why no replica is ready."""
        if self.state == "ready":
            return None
        found = [f"{replica.name}: {replica.detail}" for replica in self.replicas if replica.detail]
        return " ".join(found) or None

    @property
    def base(self) -> BaseModel | None:
        return self.replicas[0].base

    @property
    def num_starts(self) -> int:
        """Of all processes of vLLM."""
        return sum(replica.num_starts for replica in self.replicas)

    @property
    def max_seq_length(self) -> int | None:
        """That which every replica takes."""
        lengths = [replica.max_seq_length for replica in self.replicas]
        return min((length for length in lengths if length is not None), default=None)

    @property
    def mismatch_limits(self) -> MismatchLimits | None:
        return self.replicas[0].mismatch_limits

    @property
    def start_waited_for(self) -> str | None:
        """What requests wait for while no replica is ready."""
        if self.state != "starting":
            return None
        return f"the engines, which are starting. {self.detail or ''}".rstrip()

    @property
    def log_path(self) -> Path:
        """The first replica's; the logs of the others are beside it."""
        return self.replicas[0].log_path

    def ignored_args(self, requested: Mapping[str, str]) -> list[str]:
        return self.replicas[0].ignored_args(requested)

    async def wait_ready(self, timeout_seconds: float) -> None:
        """Returns when a replica is ready.

        Raises:
            Unavailable: there is no base model yet, or none is ready in time.
        """
        if self.state == "ready":
            return
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(timeout_seconds), self._changed:
                await self._changed.wait_for(lambda: self.state in ("ready", "failed"))
        if (state := self.state) != "ready":
            # It has the sentence that says why.
            await next(replica for replica in self.replicas if replica.state == state).wait_ready(0.0)

    # --- requests ---

    async def reach(
        self,
        name: str,
        path: Path | None,
        key: Callable[[], bytes],
        timeout_seconds: float,
        stack: contextlib.ExitStack,
    ) -> Engine:
        """A ready replica that serves the adapter `name`, which is in `path`, or the base model (None). Requests with an
        equal `key` get the same one, unless it is busier than others. It counts as busy until `stack` ends.

        Raises:
            AdapterRefused: every ready replica refuses the adapter.
            Unavailable: no replica is ready in time.
        """
        refusals: dict[int, AdapterRefused] = {}
        wanted = key()
        while True:
            await self.wait_ready(timeout_seconds)
            loads = {n: r.num_requests for n, r in enumerate(self.replicas) if r.state == "ready" and n not in refusals}
            if not loads:
                raise next(iter(refusals.values()))
            number = self._router.choose(wanted, loads)
            replica = self.replicas[number]
            with contextlib.ExitStack() as trying:
                replica.num_requests += 1
                trying.callback(_end_request, replica)
                refusal = None
                if path is not None and not replica.holds(name):
                    refusal = await self._load_on(replica, name, path)
                if refusal is not None:
                    refusals[number] = refusal
                elif replica.state == "ready" and (path is None or replica.holds(name)):
                    stack.enter_context(trying.pop_all())
                    return replica

    async def tokenize(self, body: dict[str, Any]) -> list[int]:
        """As `Engine.tokenize`, by the replica with the fewest requests; if it ends meanwhile, by another one."""
        for _ in self.replicas[1:]:
            await self.wait_ready(START_TIMEOUT_SECONDS)
            replica = self._least_busy()
            try:
                return await replica.tokenize(body)
            except EngineDied:
                await replica.notice_end()
        await self.wait_ready(START_TIMEOUT_SECONDS)
        return await self._least_busy().tokenize(body)

    def _least_busy(self) -> Engine:
        return min(self._ready(), key=lambda replica: replica.num_requests)

    def _ready(self) -> list[Engine]:
        return [replica for replica in self.replicas if replica.state == "ready"]

    # --- pausing ---

    async def pause(self) -> None:
        """As `Engine.pause`."""
        await asyncio.gather(*(replica.pause() for replica in self.replicas))

    async def wake_weights(self) -> None:
        """As `Engine.wake_weights`."""
        await asyncio.gather(*(replica.wake_weights() for replica in self.replicas))

    async def resume(self) -> None:
        """As `Engine.resume`."""
        await asyncio.gather(*(replica.resume() for replica in self.replicas))

    # --- adapters ---

    async def load_adapter(self, name: str, path: Path, timeout_seconds: float, *, holds_device: bool = False) -> None:
        """As `Engine.load_adapter`, by all replicas: returns when every ready one serves the adapter. Those that are
        starting load it before they are ready. If one refuses it, all that did not serve it before unload it.

        Raises:
            PolicyDiffers, AdapterRefused: a replica refuses the adapter.
            Unavailable: no replica is ready in time.
        """
        if holds_device:
            await asyncio.gather(
                *(each.load_adapter(name, path, timeout_seconds, holds_device=True) for each in self.replicas)
            )
            return
        others = [replica for replica in self.replicas if not replica.holds(name)]
        while True:
            await self.wait_ready(timeout_seconds)
            missing = [replica for replica in self._ready() if not replica.holds(name)]
            if not missing:
                break
            refusals = await asyncio.gather(*(self._load_on(replica, name, path) for replica in missing))
            if refusal := next((each for each in refusals if each is not None), None):
                for replica in others:
                    replica.unload_adapter(name)
                await asyncio.gather(*(replica.tidy() for replica in self._ready()))
                raise refusal
        for replica in self.replicas:
            if replica.state != "ready":
                replica.keep(name, path)

    async def _load_on(self, replica: Engine, name: str, path: Path) -> AdapterRefused | None:
        """Has a replica load an adapter; returns its refusal. One that dies meanwhile refuses nothing, and one that does
        not answer is killed."""
        try:
            has_answered = await replica.try_load(name, path)
        except AdapterRefused as error:
            # Its API process answers with errors while its core is dying.
            if await replica.is_alive():
                return error
            has_answered = True
        if not has_answered and replica.state == "ready":
            await replica.end("it did not load an adapter in time")
        elif not replica.holds(name):
            await replica.notice_end()
        return None

    def unload_adapter(self, name: str) -> None:
        """As `Engine.unload_adapter`."""
        for replica in self.replicas:
            replica.unload_adapter(name)

    def forget_prompts(self) -> None:
        """As `Engine.forget_prompts`."""
        for replica in self.replicas:
            replica.forget_prompts()

    def loaded_adapters(self) -> list[str]:
        """Those that a replica has loaded."""
        return list(dict.fromkeys(name for replica in self.replicas for name in replica.loaded_adapters()))


def _end_request(replica: Engine) -> None:
    replica.num_requests -= 1


AnyEngine = Engine | Fleet
"""What the rest of the server uses."""
