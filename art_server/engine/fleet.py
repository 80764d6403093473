"""The fleet: the server's engines, its replicas, as one engine. Usually there is one; `--engines` and hosts give more or none.

Each replica is supervised, watched and restarted by itself. A request goes to a ready replica (`routing.py`); if that replica
is lost, the proxy asks again, and another replica answers. A step's adapter is loaded by all ready replicas or serves from
none. A replica that starts loads the adapter before it is ready; one of several replicas that does not answer is killed. On a
device that the trainer uses, too, all replicas pause, and all wake. Hosts add and remove replicas while the server runs
(`art_server/machines/hosts.py`). Where a single replica needs less than several, `_is_alone` decides.
"""

import asyncio
import contextlib
import itertools
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from art_server.engine.device.plan import MemoryPlan
from art_server.engine.engine import (
    START_TIMEOUT_SECONDS,
    AdapterRefused,
    Engine,
    EngineDied,
    EngineState,
    NotDelivered,
    ignored_args,
)
from art_server.engine.routing import Router
from art_server.errors import Unavailable
from art_server.process.progress import StartProgress
from art_server.settings import ServerConfig
from art_server.shared.clock import REAL, Clock
from art_server.shared.trainer_messages import MismatchLimits
from art_server.store.base_models import BaseModel

NO_REPLICA = "no machine offers an engine now: start `art-server host` on one, or this server with --engines 1"


class Fleet:
    """Engines with the same base model; what the rest of the server calls the engine."""

    def __init__(
        self,
        *,
        replicas: Sequence[Engine],
        progress: StartProgress,
        changed: asyncio.Condition,
        config: ServerConfig,
        mismatch_limits_of: Callable[[BaseModel], MismatchLimits | None] = lambda _: None,
        clock: Clock = REAL,
    ):
        """The replicas have the same `progress` and `changed`."""
        self.replicas: list[Engine] = []
        self.progress = progress
        self.log_path = replicas[0].log_path if replicas else config.log_dir / "engine-0.log"
        """The log that models name as the engine's."""
        self.base: BaseModel | None = None
        self.requested: Mapping[str, str] = {}
        """Engine arguments of the registration that started the fleet."""
        self._config = config
        self._changed = changed
        self._mismatch_limits_of = mismatch_limits_of
        self._clock = clock
        self._router = Router()
        self._new_number = itertools.count().__next__
        # No number is used twice: the router still knows the keys of a replica that has left.
        self._numbers: dict[Engine, int] = {}
        """The number of each replica, by which the router knows the replica."""
        for replica in replicas:
            self.add(replica)

    # --- life ---

    def start(self, base: BaseModel, requested: Mapping[str, str], plan: MemoryPlan | None = None) -> None:
        """Starts vLLM in all replicas, with `base` (`Engine.start`)."""
        for replica in self.replicas:
            replica.start(base, requested, plan)
        self.base, self.requested = base, requested

    async def stop(self) -> None:
        """Ends vLLM in all replicas. They can be started again, with another base model."""
        # First: a host that joins meanwhile starts no engine (`Hosts._offered_devices`).
        self.base = None
        await asyncio.gather(*(replica.stop() for replica in self.replicas))

    def add(self, replica: Engine) -> None:
        """Adds a replica, which loads the adapters of the other replicas when it starts. In a running fleet the caller starts the
        replica."""
        for other in self.replicas:
            for name, path in other.kept.items():
                replica.keep(name, path)
        self.replicas.append(replica)
        self._numbers[replica] = self._new_number()

    async def remove(self, replica: Engine) -> None:
        """Ends a replica, whose requests the others answer."""
        self.replicas.remove(replica)
        del self._numbers[replica]
        await replica.stop()

    @property
    def state(self) -> EngineState:
        """The state of the replica that is closest to serving. A fleet that was started and has no replica yet is starting."""
        states = {replica.state for replica in self.replicas}
        if not states:
            return "none" if self.base is None else "starting"
        order: tuple[EngineState, ...] = ("ready", "starting", "failed", "none")
        return next(state for state in order if state in states)

    @property
    def detail(self) -> str | None:
        """Why no replica is ready."""
        if self.state == "ready":
            return None
        if not self.replicas:
            return NO_REPLICA
        if self._is_alone:
            return self.replicas[0].detail
        details = [f"{replica.name}: {replica.detail}" for replica in self.replicas if replica.detail]
        return " ".join(details) or None

    @property
    def num_starts(self) -> int:
        """Starts of vLLM in all replicas so far."""
        return sum(replica.num_starts for replica in self.replicas)

    @property
    def max_seq_length(self) -> int | None:
        """The maximum of prompt plus completion, in tokens, that every replica takes (`Engine.max_seq_length`). While there is no
        replica, the configured length, else the model's own. None without a base model."""
        lengths = [length for replica in self.replicas if (length := replica.max_seq_length) is not None]
        if lengths or self.base is None:
            return min(lengths, default=None)
        return self._with_requested(self.base).max_seq_length or self.base.facts.max_positions

    @property
    def mismatch_limits(self) -> MismatchLimits | None:
        """How far engines and trainer may differ with the loaded base model; None: they are not compared."""
        return self._mismatch_limits_of(self.base) if self.base is not None else None

    @property
    def start_waited_for(self) -> str | None:
        """What requests wait for while no replica is ready."""
        if self.state != "starting":
            return None
        what = "the engine, which is starting" if self._is_alone else "the engines, which are starting"
        return f"{what}. {self.detail or ''}".rstrip()

    def load_waited_for(self, name: str | None = None, *, names_model: bool = True) -> str | None:
        """What the load of the adapter `name`, or of any adapter, waits for (`Engine.load_waited_for`)."""
        reasons = (replica.load_waited_for(name, names_model=names_model) for replica in self.replicas)
        return next((reason for reason in reasons if reason is not None), None)

    def ignored_args(self, requested: Mapping[str, str]) -> list[str]:
        """One sentence for each requested engine argument that is not in effect in some replica. While there is no replica, the
        sentences for the first replica that will join."""
        if self.replicas:
            return list(dict.fromkeys(note for replica in self.replicas for note in replica.ignored_args(requested)))
        if self.base is None:
            return []
        config = self._with_requested(self.base)
        return ignored_args(requested, config, self.max_seq_length, config.record_distributions)

    @property
    def _is_alone(self) -> bool:
        """Whether there is a single replica: nothing has to be chosen, and no other replica serves in its place."""
        return len(self.replicas) == 1

    def _with_requested(self, base: BaseModel) -> ServerConfig:
        return self._config.with_requested(self.requested, base.facts.max_positions)

    async def wait_ready(self, timeout_seconds: float) -> None:
        """Returns when a replica is ready.

        Raises:
            Unavailable: there is no base model yet, or none is ready in time.
        """
        if self.state == "ready":
            return
        with contextlib.suppress(TimeoutError):
            async with self._clock.timeout(timeout_seconds), self._changed:
                await self._changed.wait_for(lambda: self.state in ("ready", "failed"))
        if (state := self.state) != "ready":
            if not self.replicas:
                raise Unavailable(NO_REPLICA, code="engine_not_ready")
            # A replica in this state raises the error with the reason.
            # No replica is ready, so this one raises at once.
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
        """A ready replica that serves the adapter `name` of the folder `path`; `path` None: the base model. Requests with an
        equal `key` get the same replica, unless it is busier than others; a single replica needs no key. The request counts for
        the replica until `stack` ends.

        Raises:
            AdapterRefused: every ready replica refuses the adapter.
            Unavailable: no replica is ready, or has the adapter, in time.
        """
        refusals: dict[int, AdapterRefused] = {}
        deadline = self._clock.monotonic() + timeout_seconds
        while True:
            await self.wait_ready(deadline - self._clock.monotonic())
            candidates = {self._numbers[candidate]: candidate for candidate in self._ready()}
            loads = {
                number: candidate.num_requests for number, candidate in candidates.items() if number not in refusals
            }
            if not loads:
                raise next(iter(refusals.values()))
            number = next(iter(loads)) if self._is_alone else self._router.choose(key(), loads)
            replica = candidates[number]
            with contextlib.ExitStack() as trying:
                replica.num_requests += 1
                trying.callback(_end_request, replica)
                error = None
                if path is not None and not replica.holds(name):
                    error = await self._load_on(replica, name, path)
                if isinstance(error, AdapterRefused):
                    refusals[number] = error
                elif replica.state == "ready" and (path is None or replica.holds(name)):
                    stack.enter_context(trying.pop_all())
                    return replica
                elif self._clock.monotonic() > deadline:
                    reason = "the engine has not loaded it"
                    if error is not None:
                        reason = f"its files cannot be delivered ({error})"
                    raise Unavailable(
                        f"inference waited for {timeout_seconds:.0f} s for adapter '{name}': {reason}; repeat the request, or "
                        "start the server with a larger --wait-limit",
                        code="engine_not_ready",
                    )

    async def tokenize(self, body: dict[str, Any]) -> list[int]:
        """The token ids of a text or of a rendered conversation (`Engine.tokenize`), from the replica with the fewest requests. If
        this replica ends meanwhile, another replica is asked."""
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
        """Freezes all replicas (`Engine.pause`)."""
        await asyncio.gather(*(replica.pause() for replica in self.replicas))

    async def wake_weights(self) -> None:
        """Restores the weights of all replicas (`Engine.wake_weights`)."""
        await asyncio.gather(*(replica.wake_weights() for replica in self.replicas))

    async def resume(self) -> None:
        """Has all replicas continue their requests (`Engine.resume`)."""
        await asyncio.gather(*(replica.resume() for replica in self.replicas))

    # --- adapters ---

    async def load_adapter(self, name: str, path: Path, timeout_seconds: float, *, holds_device: bool = False) -> None:
        """Has all replicas serve the checkpoint `path` as `name`, also after restarts; no-op if they already do. Returns when
        every ready replica serves the adapter. A replica that is starting loads the adapter before it is ready. If a replica
        refuses the adapter, all replicas that did not serve the adapter before unload it.

        A caller that holds the device sets `holds_device`. Each ready vLLM then tries once to load the adapter, and a refusal
        raises nothing; the adapter serves after another call (`Engine.load_paused`).

        Raises:
            PolicyDiffers, AdapterRefused: a replica refuses the adapter.
            Unavailable: no replica is ready in time.
        """
        if holds_device:
            await asyncio.gather(*(replica.load_paused(name, path) for replica in self.replicas))
            return
        others = [replica for replica in self.replicas if not replica.holds(name)]
        while True:
            await self.wait_ready(timeout_seconds)
            missing = [replica for replica in self._ready() if not replica.holds(name)]
            if not missing:
                break
            errors = await asyncio.gather(*(self._load_on(replica, name, path) for replica in missing))
            if refusal := next((error for error in errors if isinstance(error, AdapterRefused)), None):
                for replica in others:
                    replica.unload_adapter(name)
                if not self._is_alone:  # a single replica unloads it before its next load; nobody waits for the device
                    await asyncio.gather(*(replica.tidy() for replica in self._ready()))
                raise refusal
        for replica in self.replicas:
            if replica.state != "ready":
                replica.keep(name, path)

    async def _load_on(self, replica: Engine, name: str, path: Path) -> AdapterRefused | NotDelivered | None:
        """Has a replica load an adapter. Returns the replica's refusal, or why its machine cannot take the files. A replica that
        dies meanwhile refuses nothing. One of several replicas that does not answer, or cannot get the files, is killed, so that
        the step serves from the others."""
        try:
            has_answered = await replica.try_load(name, path)
        except NotDelivered as error:
            if self._is_alone:
                return error
            if replica.state == "ready":
                replica.keep(name, path)  # the next process is not ready before the machine has taken the files
                await replica.end(f"an adapter's files cannot be delivered ({error})")
            return None
        except AdapterRefused as error:
            # vLLM's API process answers with errors while the engine core is dying.
            if await replica.is_alive():
                return error
            has_answered = True
        if not has_answered and replica.state == "ready" and not self._is_alone:
            await replica.end("it did not load an adapter in time")
        elif not replica.holds(name):
            await replica.notice_end()
        return None

    def unload_adapter(self, name: str) -> None:
        """Stops serving an adapter, to which all requests have ended (`Engine.unload_adapter`)."""
        for replica in self.replicas:
            replica.unload_adapter(name)

    def forget_prompts(self) -> None:
        """Has every vLLM empty its prefix cache before its next load (`Engine.forget_prompts`)."""
        for replica in self.replicas:
            replica.forget_prompts()

    def loaded_adapters(self) -> list[str]:
        """The adapters that any replica has loaded."""
        return list(dict.fromkeys(name for replica in self.replicas for name in replica.loaded_adapters()))


def _end_request(replica: Engine) -> None:
    replica.num_requests -= 1
