"""The engine: vLLM as a supervised child process.

vLLM is started once with a base model and kept running: when the process dies, hangs, or fails to pause or wake, it is
killed with all processes that it spawned and started again when the device is free; then its adapters are loaded again.
The engine's `location` starts the process: this machine or a host (`process/place.py`). On this machine vLLM's HTTP socket is in
a private folder, so no other user of the machine can reach vLLM's own routes. Authentication, the proxy and the pause gate are
elsewhere.
"""

import asyncio
import contextlib
import functools
import json
import logging
import shutil
import signal
import tempfile
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Literal, NamedTuple

import aiohttp

from art_protocol.log_file import LogFile
from art_server.engine.command import EngineProgram, make_run_dir, notes_on_device, seq_length
from art_server.engine.device.owner import DeviceOwner
from art_server.engine.device.plan import MemoryPlan
from art_server.engine.failures import find_cause, refusal_of
from art_server.errors import InvalidInput, Unavailable
from art_server.process.background import Background
from art_server.process.place import Endpoint, Place, PlaceFailed, PlaceLost, Process
from art_server.process.progress import StartProgress
from art_server.process.receiver import Receiver
from art_server.settings import GPU_ENGINE_ARGS, Handover, ServerConfig
from art_server.shared.clock import REAL, Clock
from art_server.shared.engine_messages import new_request_id
from art_server.shared.same_policy import find_fault
from art_server.shared.trainer_messages import MismatchLimits
from art_server.store.base_models import BaseModel
from art_server.store.model_folder import (
    ADAPTER_FILE,
    CONFIG_FILE,
    DESCRIPTION_FILE,
    CheckpointRecord,
)

logger = logging.getLogger(__name__)

EngineState = Literal["none", "starting", "ready", "failed"]

START_TIMEOUT_SECONDS = 1200.0
"""vLLM's start with a large model on a slow disk takes minutes."""
MAX_FAILED_STARTS = 3
"""After this many failed starts in a row the engine is given up until a model is registered again."""
READY_POLL_SECONDS = 0.1
"""Interval of health checks while the engine starts."""
HEALTH_SECONDS = 2.0
"""Interval of health checks while the engine runs."""
HEALTH_TIMEOUT_SECONDS = 5.0
HANG_SECONDS = 45.0
"""An engine is hung if for this long it answers no health check, or computes nothing while requests wait."""
IDLE_SECONDS = 10.0
"""After this long without requests the engine gets a probe request for one token."""
PAUSE_SECONDS, WAKE_SECONDS = 30.0, 120.0
"""Limits for each request of PAUSE and WAKE. An engine that takes longer is killed, and restarts unpaused."""
SLEEP_SECONDS = 300.0
"""Limit for vLLM's sleep. The first sleep allocates locked main memory for all weights, at about 2 GiB a second (vllm #48337)."""
PAUSE: dict[Handover, str] = {
    # By default vLLM empties its prefix cache here, also with mode=keep (0.32, v1/engine/core.py). The base stays the same.
    "none": "/pause?mode=keep&clear_cache=false",
    "sleep": "/sleep?level=1&mode=keep",
}
"""vLLM's route for the start of a step, by handover. Frozen requests stay; after a sleep they are recomputed."""
WAKE: dict[Handover, str] = {
    "none": "/resume",
    "sleep": "/wake_up?tags=kv_cache",
}
"""vLLM's route for the end of a step. After `sleep`, `wake_weights` restores the weights first."""
CONNECT_SECONDS = 10.0
"""Limit for a connection to vLLM, where the network cannot be silent for longer."""
LOAD_SECONDS = 300.0
"""Limit for each of: delivering an adapter's files, vLLM's load of the adapter, and the scores of its probe."""
ENGINE_FILES = (CONFIG_FILE, ADAPTER_FILE, DESCRIPTION_FILE)
"""The files of a checkpoint that vLLM loads. The other files are two thirds of a checkpoint's bytes, and can appear and vanish
while an engine gets the checkpoint."""
DELIVERY_PAUSE_SECONDS = 10.0
"""The pause before files that the engine's machine could not take are sent again: a disk may be full for hours."""
SENT_AGAIN = f"they are sent again every {DELIVERY_PAUSE_SECONDS:.0f} s"
METRICS_SECONDS = 2.0
"""Limit for vLLM's metrics."""
KILLED = (-signal.SIGKILL, -signal.SIGTERM)
"""Exit codes of a process that was killed; a process that fails has another exit code."""
LOG_TAIL_LINES, LOG_SEARCH_LINES = 12, 200
ENGINE_DEFAULTS = {
    "max_logprobs": "20",
    "pipeline_parallel_size": "1",
    "tensor_parallel_size": "1",
}
"""vLLM's defaults of arguments that clients often request: requesting the default is no conflict."""


LOST = (aiohttp.ClientError, TimeoutError)
"""What a request to vLLM raises if vLLM ends, or does not answer within the request's limit."""


class EngineDied(Unavailable):
    """vLLM ended, was not ready in time, or refused a necessary request."""

    def __init__(self, message: str):
        super().__init__(message, code="engine_failed")


class AdapterRefused(EngineDied):
    """vLLM runs but refuses an adapter; it would refuse the same adapter again."""

    retryable = False

    def __init__(self, message: str):
        super().__init__(message)
        self.code = "adapter_refused"


class PolicyDiffers(AdapterRefused):
    """vLLM computes another policy with an adapter than the trainer that made the adapter, which was unloaded."""

    def __init__(self, name: str, fault: str):
        super().__init__(
            f"the engine computes another policy for '{name}' than the trainer: {fault}. The step does not serve, and "
            "nothing is trained from it. Check that both have the same base weights and that no --engine-arg changes the "
            "model (quantization), restart the server, or compute both in float32 (--exact); --gap-limit 0 turns this off"
        )
        self.code = "policy_differs"
        self.fault = fault
        """What differs, without the rest of the message."""


class NotDelivered(TimeoutError):
    """The engine's machine could not take an adapter's files; the text is the reason."""


class Undelivered(NamedTuple):
    """An adapter whose files the engine's machine could not take."""

    reason: str
    again_at: float
    """When the files are sent again (`Clock.monotonic`)."""


class Engine:
    """vLLM's process, its state, and its loaded adapters."""

    def __init__(
        self,
        *,
        location: Place,
        config: ServerConfig,
        owner: DeviceOwner,
        receiver: Receiver,
        is_busy: Callable[[], bool],
        background: Background,
        name: str,
        progress: StartProgress,
        changed: asyncio.Condition,
        mismatch_limits_of: Callable[[BaseModel], MismatchLimits | None] = lambda _: None,
        clock: Clock = REAL,
    ):
        """`location` starts vLLM. The engines of a fleet share `progress` and `changed`, which is notified when the state changes."""
        self.name = name
        self.state: EngineState = "none"
        self.detail: str | None = None
        self.base: BaseModel | None = None
        self.progress = progress
        self.num_starts = 0
        """Starts of vLLM's process so far."""
        self.num_requests = 0
        """Requests that the fleet has sent to this engine, and that have not ended."""
        self._supervisor = f"{name} supervisor"
        self._log = LogFile(config.log_dir / f"{name}.log")
        self._server_config = config
        self._config = config
        """`_server_config` plus the engine arguments of the registration that started the engine."""
        self.location = location
        self._owner = owner
        self._plan: MemoryPlan | None = None
        self._seq_length: int | None = None
        """The context length as configured; once vLLM is ready, as vLLM reports it."""
        self._receiver = receiver
        self._is_busy = is_busy
        self._background = background
        self._mismatch_limits_of = mismatch_limits_of
        self._clock = clock
        self._adapters: dict[str, Path] = {}
        self._compared: set[str] = set()
        """Adapters that vLLM's process has loaded and scores as the trainer does. Only these adapters serve."""
        self._loads: dict[str, asyncio.Task[bool]] = {}
        self._undelivered: dict[str, Undelivered] = {}
        """The reasons by the adapter's name."""
        self._leaving: dict[str, Path] = {}
        """Adapters that vLLM still holds and nobody can request."""
        self._has_stale_prompts = False
        """vLLM's prefix cache may contain prompts of an adapter whose name will get other weights."""
        self._paused = False
        self._has_weights = True
        self._ended: str | None = None
        """Why we killed the process; the supervisor reports it as the reason for the restart."""
        self._changed = changed
        self._process: Process | None = None
        self.was_killed = False
        """Whether somebody other than this server killed the last process: then its requests are not to blame."""
        self._run_dir: Path | None = None
        self._endpoint: Endpoint | None = None
        self._http: aiohttp.ClientSession | None = None
        """The client for `_endpoint`."""

    # --- life ---

    def start(self, base: BaseModel, requested: Mapping[str, str], plan: MemoryPlan | None = None) -> None:
        """Starts vLLM with `base` in the background; `wait_ready` returns when it serves. `requested` are a client's
        engine arguments, as in `ServerConfig.with_requested`; `plan` is a GPU's memory plan."""
        assert self.base is None, "an engine serves one base model"
        self._config = self._server_config.with_requested(self._possible(requested), base.facts.max_positions)
        self._seq_length = seq_length(self._config, base, self.location.device)
        for note in notes_on_device(self.location.device, base.facts):
            self.progress.note(f"{self.name}: {note}")
        self._plan = plan
        self.base = base
        self.state = "starting"
        self._background.start(self._supervisor, self._supervise)

    async def stop(self) -> None:
        """Ends vLLM. The engine can be started again, with another base model."""
        self.was_killed |= bool(self.location.lost)  # its requests are not to blame for a lost machine
        # Before the process is ended: the supervisor would start another one.
        await self._background.stop(self._supervisor)
        await self._set_state("none")  # nobody uses an engine that ends
        await self._end_process()
        if self._http is not None:
            await self._http.close()
            self._http = self._endpoint = None
        await self._receiver.close()
        if self._run_dir is not None:
            shutil.rmtree(self._run_dir, ignore_errors=True)
            self._run_dir = None
        self.base = None
        self._adapters.clear()
        self._compared.clear()
        self._undelivered.clear()
        await self.location.keep_only(())

    @property
    def http(self) -> aiohttp.ClientSession:
        """The HTTP client for vLLM; only the proxy and this class use it."""
        assert self._http is not None, "wait_ready() comes first"
        return self._http

    @property
    def max_seq_length(self) -> int | None:
        """The maximum of prompt plus completion, in tokens: as vLLM reports it, before vLLM's report as configured, else the
        model's own limit. None without a base model."""
        if self.base is None:
            return None
        return self._seq_length or self.base.facts.max_positions

    @property
    def mismatch_limits(self) -> MismatchLimits | None:
        """How far engine and trainer may differ with the loaded base model; None: engine and trainer are not compared."""
        return self._mismatch_limits_of(self.base) if self.base is not None else None

    @property
    def _handover(self) -> Handover:
        return self._plan.handover if self._plan is not None else "none"

    def ignored_args(self, requested: Mapping[str, str]) -> list[str]:
        """One sentence for each requested engine argument that is not in effect."""
        records = self._config.records_distributions(self.location.device)
        return ignored_args(self._possible(requested), self._config, self.max_seq_length, records)

    def _possible(self, requested: Mapping[str, str]) -> dict[str, str]:
        """The requested engine arguments that an engine on this device can have; another replica may have the rest."""
        has_gpu = self.location.device == "cuda"
        return {name: value for name, value in requested.items() if has_gpu or name not in GPU_ENGINE_ARGS}

    @property
    def silence_seconds(self) -> float:
        """For how long the server may hear nothing from a healthy vLLM."""
        return self.location.silence_seconds

    @property
    def log_path(self) -> Path:
        return self._log.path

    @property
    def pid(self) -> int | None:
        """The id of vLLM's process on this machine; None while there is no process here."""
        return self._process.pid if self._process is not None else None

    async def wait_ready(self, timeout_seconds: float) -> None:
        """Returns when vLLM serves with all of its adapters.

        Raises:
            Unavailable: there is no base model yet, or the engine was given up or is not ready in time.
        """
        if self.state == "ready":
            return
        try:
            async with self._clock.timeout(timeout_seconds), self._changed:
                await self._changed.wait_for(lambda: self.state in ("ready", "failed"))
        except TimeoutError as error:
            raise Unavailable(self._why_not_ready(), code="engine_not_ready") from error
        if self.state == "failed":
            raise Unavailable(self._why_not_ready(), code="engine_failed")

    def _why_not_ready(self) -> str:
        if self.state == "none":
            return "no model is registered, so no engine runs: register one, or start art-server with --base-model"
        if self.state == "failed":
            return f"the engine could not be started: {self.detail} (log: {self._log.path})"
        return f"the engine is starting; repeat the request shortly. {self.detail or ''}".rstrip()

    async def _set_state(self, state: EngineState, detail: str | None = None) -> None:
        async with self._changed:
            self.state = state
            self.detail = detail
            self._changed.notify_all()

    # --- supervision ---

    async def _supervise(self) -> None:
        """Starts vLLM, and restarts it when it ends or hangs, until the engine is given up. After an error on our side,
        such as a full disk, `Background` calls this again after a pause, without limit."""
        failures, has_served = 0, False
        await self._end_process()
        await self._set_state("starting", self._why_restarted())
        while failures < MAX_FAILED_STARTS:
            # vLLM must not start on a device that the trainer holds.
            async with self._owner.held():
                await self._start_process()
                try:
                    await self._bring_up()
                except (EngineDied, *LOST) as error:
                    failures += 1
                    last_lines = f"{error}; last log lines:\n{self._log.tail(LOG_TAIL_LINES)}"
                    await self._end_process()  # vLLM's log is complete then
                    cause = find_cause(self._log.tail(LOG_SEARCH_LINES))
                    self.detail = cause.sentence if cause is not None else last_lines
                    logger.error("%s start %d failed: %s", self.name, failures, self.detail)
                    self.progress.note(f"{self.name}: start {failures} failed")
                    if cause is not None and cause.is_lasting and not has_served:
                        break
                    continue
            failures, has_served = 0, True
            self.progress.note(f"{self.name}: ready")
            reason = await self._watch()
            await self._set_state("starting", f"It is being restarted because {reason}.")
            self.progress.begin(f"{self.name}: restarts because {reason}")
            logger.error(
                "%s restarts because %s; last log lines:\n%s",
                self.name,
                reason,
                self._log.tail(LOG_TAIL_LINES),
            )
            await self._end_process()
        await self._set_state("failed", self.detail)

    def _why_restarted(self) -> str | None:
        fault = self._background.faults.get(self._supervisor)
        return f"It is being restarted because of {fault}." if fault else self.detail

    async def _start_process(self) -> None:
        assert self.base is not None
        if self._run_dir is None:
            self._run_dir = make_run_dir(self._config.server_dir, self.name)
        self.progress.note(f"{self.name}: vLLM starts, which imports its code and loads the weights")
        if not self._config.records_distributions(self.location.device):
            logger.info(
                "tokens sampled at another temperature than 1, from a part of the vocabulary or under a grammar will be "
                "trained with ratio 1: start with --record-distributions for exact ratios"
            )
        program = EngineProgram(
            config=self._config,
            base=self.base,
            device=self.location.device,
            run_dir=self._run_dir,
            receiver=self._receiver,
            plan=self._plan,
        )
        self._process = await self.location.start(program, self._log)
        assert self._process.endpoint is not None, "vLLM answers HTTP"
        await self._connect(self._process.endpoint)
        self._leaving.clear()
        self._has_stale_prompts = False
        self.num_starts += 1

    async def _connect(self, endpoint: Endpoint) -> None:
        """Makes the HTTP client for a process. On this machine every process of the engine answers at the same socket."""
        if endpoint == self._endpoint:
            return
        if self._http is not None:
            await self._http.close()
        # aiohttp, because httpx takes more than half of the server's time for a request.
        if endpoint.socket is None:
            # aiohttp would hold back all requests above 100, and vLLM would not have them in its batch.
            connector: aiohttp.BaseConnector = aiohttp.TCPConnector(limit=0)
        else:
            connector = aiohttp.UnixConnector(str(endpoint.socket), limit=0)
        # No total limit: a client's request takes as long as its answer.
        timeout = aiohttp.ClientTimeout(total=None, connect=max(CONNECT_SECONDS, self.silence_seconds))
        self._http = aiohttp.ClientSession(endpoint.url, connector=connector, timeout=timeout, headers=endpoint.headers)
        self._endpoint = endpoint

    async def _deliver(self, folder: Path) -> str:
        """The path of an adapter's folder for vLLM.

        Raises:
            AdapterRefused: the folder is deleted.
            NotDelivered: vLLM's machine cannot take the files.
            TimeoutError: the machine is lost.
        """
        try:
            async with self._clock.timeout(LOAD_SECONDS):
                return await self.location.deliver(folder, ENGINE_FILES)
        except (OSError, PlaceFailed, PlaceLost) as error:
            if not (folder / ADAPTER_FILE).exists():
                raise AdapterRefused(f"the adapter in {folder.name} was deleted while the engine fetched it") from error
            if isinstance(error, PlaceLost):
                raise TimeoutError(str(error)) from error
            # An error of this machine's disk has a path, which has the model's name.
            reason = error.strerror if isinstance(error, OSError) else str(error)
            raise NotDelivered(reason or f"they had not arrived after {LOAD_SECONDS:.0f} s") from error

    async def _end_process(self) -> None:
        """Kills vLLM with all processes that it spawned, and waits for the end of its main process."""
        if self._process is not None:
            await self._process.end()
            await self._process.wait()
            self._process = None
            await self.location.keep_only({*self._adapters.values()})  # what the next process will load

    async def _bring_up(self) -> None:
        """Waits until vLLM answers, loads its adapters, and samples one token as a warm-up."""
        assert self._process is not None and self.base is not None
        try:
            async with self._clock.timeout(START_TIMEOUT_SECONDS):
                while not await self._answers(timeout_seconds=5.0):
                    if self._process.returncode is not None:
                        raise EngineDied(f"vLLM ended with exit code {self._process.returncode}")
                    await self._clock.sleep(READY_POLL_SECONDS)
        except TimeoutError as error:
            raise EngineDied(f"vLLM was not ready after {START_TIMEOUT_SECONDS:.0f} s") from error
        self.progress.note(f"{self.name}: vLLM answers; it samples a first token to warm up")
        self._paused, self._has_weights, self._ended = False, True, None
        self._seq_length = await self._read_seq_length()
        self._compared.clear()
        await self._load_kept()
        await self._sample_once(timeout_seconds=START_TIMEOUT_SECONDS)
        await self._load_kept()  # adapters that a fleet has added meanwhile
        await self._set_state("ready")

    async def _load_kept(self) -> None:
        """Has a new process load the adapters that are not loaded yet. Waits for a machine that cannot take their files."""
        while missing := {name: path for name, path in self._adapters.items() if name not in self._compared}:
            for name, path in missing.items():
                try:
                    await self._post_load(name, path)
                    await self._compare(name, path)
                except AdapterRefused as error:  # a request for this adapter gets the error again
                    logger.error("%s", error.message)
                    self._adapters.pop(name, None)
                except NotDelivered as error:
                    detail = f"It waits because an adapter's files cannot be delivered ({error}); {SENT_AGAIN}."
                    if detail != self.detail:
                        logger.error("%s: the files of '%s' cannot be delivered: %s", self.name, name, error)
                    await self._set_state("starting", detail)
                    await self._clock.sleep(DELIVERY_PAUSE_SECONDS)
                    break  # nobody may need the adapter any more

    async def _read_seq_length(self) -> int:
        async with self.http.get("/v1/models") as response:
            # vLLM lists the base model before its adapters.
            return int((await response.json())["data"][0]["max_model_len"])

    async def is_alive(self) -> bool:
        """Whether vLLM's health check succeeds. After the engine core's death vLLM's API process answers for a moment longer, with
        errors."""
        return self.state == "ready" and await self._answers(HEALTH_TIMEOUT_SECONDS + self.silence_seconds)

    async def notice_end(self) -> None:
        """Waits until the supervisor knows that the engine has ended. Returns at once if the engine still answers. On a busy
        machine vLLM takes seconds from its core's death to its end."""
        if await self.is_alive():
            return
        with contextlib.suppress(TimeoutError):
            async with self._clock.timeout(HANG_SECONDS), self._changed:
                await self._changed.wait_for(lambda: self.state != "ready")

    async def _answers(self, timeout_seconds: float) -> bool:
        try:
            async with self._clock.timeout(timeout_seconds), self.http.get("/health") as response:
                return response.status == 200
        except LOST:
            return False

    async def _sample_once(self, timeout_seconds: float) -> None:
        """Samples one token from the base model, which exercises all of vLLM's processes."""
        assert self.base is not None
        body = {"model": self.base.name, "prompt": [1], "max_tokens": 1}
        status, text = await self._post("/v1/completions", body, timeout_seconds)
        if status != 200:
            raise EngineDied(f"vLLM cannot sample a token: {text[:500]}")

    async def _post(
        self,
        path: str,
        body: dict[str, Any] | None = None,
        timeout_seconds: float = 300.0,
        headers: Mapping[str, str] | None = None,
    ) -> tuple[int, str]:
        """Status and text of vLLM's answer."""
        async with (
            self._clock.timeout(timeout_seconds),
            self.http.post(path, json=body, headers=headers) as response,
        ):
            return response.status, await response.text()

    async def _watch(self) -> str:
        """Watches a running engine. Returns the reason why the engine must be restarted. Only observed time counts: from one
        reading of the work counters to the next, and at most as long as an interval with its health check may take. So a
        stalled network, or a stalled event loop here, is not taken for a hung vLLM."""
        assert self._process is not None
        now = answered = moved = used = 0.0
        reading = self._process.counters()
        work, read_at = reading.work, reading.at
        probe = None
        exited = asyncio.create_task(self._process.wait())
        try:
            while True:
                # `asyncio.wait` leaves the task running when the pause ends; awaited alone, the task would be cancelled.
                async with self._clock.at_most(HEALTH_SECONDS):
                    await asyncio.wait({exited})
                if exited.done():
                    self.was_killed = self._ended is None and exited.result() in KILLED
                    return self._ended or f"vLLM ended with exit code {exited.result()}"
                does_answer = await self._answers(timeout_seconds=HEALTH_TIMEOUT_SECONDS)
                reading = self._process.counters()
                now += min(reading.at - read_at, HEALTH_SECONDS + HEALTH_TIMEOUT_SECONDS)
                read_at = reading.at
                if does_answer:
                    answered = now
                is_probed = is_running(probe)
                if now - answered > HANG_SECONDS:
                    return f"vLLM did not answer for {HANG_SECONDS:.0f} s"
                if reading.work != work or self._paused or is_probed:
                    used = now
                if reading.work != work or self._paused or not (self._is_busy() or is_probed):
                    work, moved = reading.work, now
                if now - moved > HANG_SECONDS:
                    return f"vLLM computed nothing for {HANG_SECONDS:.0f} s while requests waited"
                # Also while requests are open: the client of the only open request may have stopped reading.
                if now - used > IDLE_SECONDS:
                    probe = asyncio.create_task(self._probe())
        finally:
            exited.cancel()
            if probe is not None:
                probe.cancel()

    async def _probe(self) -> None:
        """Has an engine that computes nothing sample one token; `_watch` reads in the work counters whether the engine does."""
        with contextlib.suppress(*LOST, EngineDied):
            await self._sample_once(timeout_seconds=2 * HANG_SECONDS)

    # --- requests ---

    async def metrics(self) -> bytes:
        """vLLM's own metrics, in Prometheus' text format; empty if vLLM does not answer in time."""
        if self.state != "ready":
            return b""
        try:
            async with self._clock.timeout(METRICS_SECONDS), self.http.get("/metrics") as response:
                return await response.read() if response.status == 200 else b""
        except LOST:
            return b""

    # --- tokenising ---

    async def tokenize(self, body: dict[str, Any]) -> list[int]:
        """The token ids of a text (`prompt`) or of a rendered conversation (`messages`, `tools`).

        Raises:
            Unavailable: the engine is not ready.
            InvalidInput: the chat template refuses the conversation.
        """
        await self.wait_ready(START_TIMEOUT_SECONDS)
        assert self.base is not None
        try:
            status, text = await self._post("/tokenize", {"model": self.base.name, **body})
        except LOST as error:
            raise EngineDied("the engine ended while it rendered a conversation: repeat the request") from error
        if status != 200:
            raise InvalidInput(
                f"a conversation in the trajectories cannot be rendered: {refusal_of(text)}",
                code="cannot_render",
                param="groups",
            )
        return json.loads(text)["tokens"]

    # --- pausing ---

    async def pause(self) -> None:
        """Freezes vLLM and releases the memory that the plan's handover names; requests in flight continue after
        `resume`. The caller holds the device."""
        await self._tidy()
        # Before the request: `_watch` takes a vLLM for hung that computes nothing while requests wait.
        self._paused, self._has_weights = True, self._handover != "sleep"
        limit = SLEEP_SECONDS if self._handover == "sleep" else PAUSE_SECONDS
        await self._post_control(PAUSE[self._handover], limit)

    async def wake_weights(self) -> None:
        """Restores the weights, so that adapters can be loaded. The caller holds the device, free of the trainer."""
        if not self._has_weights:
            self._has_weights = True
            await self._post_control("/wake_up?tags=weights", WAKE_SECONDS)

    async def resume(self) -> None:
        """Restores the weights and the KV cache, where they were released, and continues requests."""
        await self.wake_weights()
        await self._post_control(WAKE[self._handover], WAKE_SECONDS)
        self._paused = False

    async def _post_control(self, path: str, timeout_seconds: float) -> None:
        """Posts to a control route of vLLM, if it is ready. If the request fails, vLLM is killed and restarts unpaused."""
        if self.state != "ready":
            return
        try:
            status, text = await self._post(path, timeout_seconds=timeout_seconds + self.silence_seconds)
        except LOST as error:
            reason = f"{path} failed ({error!r})"
        else:
            if status == 200:
                return
            reason = f"vLLM refused {path}: {text[:500]}"
        await self.end(reason)

    async def end(self, reason: str) -> None:
        """Kills a failing vLLM. `reason` is the failure, for log and state. The supervisor starts vLLM again."""
        logger.error("killing the %s: %s", self.name, reason)
        self._ended = reason
        await self._set_state("starting", f"It is being restarted because {reason}.")
        if self._process is not None:
            await self._process.end()

    # --- adapters ---

    async def load_paused(self, name: str, path: Path) -> None:
        """Tries once to have a paused vLLM load an adapter, for a caller that holds the device. A refusal raises nothing. The
        adapter serves after `try_load`, because a paused vLLM cannot score the adapter's probe."""
        if self.state == "ready":
            # `NotDelivered` is a TimeoutError, so it is one of LOST.
            with contextlib.suppress(*LOST, AdapterRefused):
                await self._load(name, path)

    async def try_load(self, name: str, path: Path) -> bool:
        """Tries once to have vLLM load an adapter and compare it. The adapter then serves, also after restarts, unless vLLM was
        not ready or ended. False: vLLM did not answer in time.

        Raises:
            PolicyDiffers: the checkpoint has a probe, and vLLM scores the probe as another policy.
            AdapterRefused: vLLM refuses the adapter.
            NotDelivered: vLLM's machine cannot take the adapter's files.
        """
        if name not in self._loads:
            self._loads[name] = asyncio.create_task(self._load_after_pause(name, path))
            self._loads[name].add_done_callback(functools.partial(self._loaded, name))
        # vLLM continues to load for callers that have left, and holds the device meanwhile.
        return await asyncio.shield(self._loads[name])

    def load_waited_for(self, name: str | None = None, *, names_model: bool = True) -> str | None:
        """What the load of the adapter `name`, or of any adapter, waits for; None while no load waits. The answer has the
        adapter's name if `names_model`."""
        for adapter, undelivered in self._undelivered.items():
            if adapter in self._loads and name in (None, adapter):
                whose = f"'{adapter}'" if names_model else "a model"
                return f"the files of {whose}, which cannot be delivered ({undelivered.reason}); {SENT_AGAIN}"
        return None

    async def _load_after_pause(self, name: str, path: Path) -> bool:
        """As `try_load`, after a pause if the adapter's files could not be delivered before. The pause is shared by all callers,
        and does not hold the device."""
        earlier = self._undelivered.get(name)
        if earlier is not None:
            await self._clock.sleep(max(0.0, earlier.again_at - self._clock.monotonic()))
        try:
            return await self._load_alone(name, path)
        except NotDelivered as error:
            self._undelivered[name] = Undelivered(str(error), self._clock.monotonic() + DELIVERY_PAUSE_SECONDS)
            if earlier is None:
                logger.error("%s: the files of '%s' cannot be delivered: %s", self.name, name, error)
            raise

    async def _load_alone(self, name: str, path: Path) -> bool:
        async with self._owner.held():
            await self._tidy()
            if self.state == "ready":
                try:
                    await self._load(name, path)
                    await self._compare(name, path)
                except NotDelivered:
                    raise
                except LOST as error:
                    await self._clock.sleep(0.2)  # vLLM died: wait for its restart
                    return not isinstance(error, TimeoutError)
        return True

    def _loaded(self, name: str, load: asyncio.Task[bool]) -> None:
        del self._loads[name]
        # Callers get the exception; asyncio would log an exception that nobody reads.
        error = None if load.cancelled() else load.exception()
        if not isinstance(error, NotDelivered):
            self._undelivered.pop(name, None)

    async def _load(self, name: str, path: Path) -> None:
        if name not in self._adapters:
            await self._post_load(name, path)
            self._adapters[name] = path

    async def _compare(self, name: str, path: Path) -> None:
        """Compares a loaded adapter with its checkpoint's probe, if there is a probe, before the adapter serves."""
        fault = await self._find_fault(name, path)
        if fault is not None:
            self.unload_adapter(name)
            self.forget_prompts()  # vLLM has cached the probe, which other weights of this name must not find
            raise PolicyDiffers(name, fault)
        if name in self._adapters:  # else the adapter was unloaded meanwhile
            self._compared.add(name)

    async def _find_fault(self, name: str, path: Path) -> str | None:
        description = path / DESCRIPTION_FILE
        limits = self.mismatch_limits
        if limits is None or not description.exists():
            return None
        probe = CheckpointRecord.model_validate_json(description.read_bytes()).probe
        if probe is None or not probe.is_of_step:
            return None
        logprobs, scaled = await self.score(name, probe.token_ids), list[float]()
        if probe.factor > 1:
            # A new folder for each comparison: vLLM's prefix cache finds prompts by the adapter's name and path.
            with tempfile.TemporaryDirectory(dir=self._run_dir) as folder:
                make_scaled_adapter(path, Path(folder), probe.factor)
                await self._post_load(f"{name}*{probe.factor}", Path(folder))
                try:
                    scaled = await self.score(f"{name}*{probe.factor}", probe.token_ids)
                    await self._post("/v1/unload_lora_adapter", {"lora_name": f"{name}*{probe.factor}"})
                finally:
                    await self.location.forget(Path(folder))
        return find_fault(probe, logprobs, scaled, limits)

    async def score(self, name: str, token_ids: list[int]) -> list[float]:
        """The log-probability of each token but the first.

        Raises:
            AdapterRefused: vLLM has no such adapter, or cannot compute with it.
        """
        # With 0 vLLM returns the log-probabilities of the prompt's own tokens. It samples one token at least.
        choice = await self.complete(name, {"prompt": token_ids, "max_tokens": 1, "prompt_logprobs": 0})
        scores = choice["prompt_logprobs"]
        return [entry[str(token)]["logprob"] for token, entry in zip(token_ids[1:], scores[1:], strict=True)]

    async def complete(self, name: str, body: dict[str, Any]) -> dict[str, Any]:
        """The choice of a completion that is no client's. The ledger does not record it.

        Raises:
            AdapterRefused: vLLM has no such adapter, or cannot compute with it.
        """
        # A first turn: the ledger has no tokens for it.
        headers = {"x-request-id": new_request_id(is_first_turn=True)}
        status, text = await self._post("/v1/completions", {"model": name, **body}, LOAD_SECONDS, headers)
        if status != 200:
            raise AdapterRefused(f"vLLM cannot compute with adapter '{name}': {text[:500]}")
        return json.loads(text)["choices"][0]

    def unload_adapter(self, name: str) -> None:
        """Stops serving an adapter. All requests to the adapter must have ended. vLLM unloads the adapter before the next
        pause or load, because the caller must not wait for the device."""
        self._compared.discard(name)
        self._undelivered.pop(name, None)
        if (folder := self._adapters.pop(name, None)) is not None:
            self._leaving[name] = folder

    def forget_prompts(self) -> None:
        """Has vLLM empty its prefix cache, before other weights are loaded under a known name: the cache finds prompts by the
        adapter's name. Requests in flight are computed again."""
        self._has_stale_prompts = True

    async def _tidy(self) -> None:
        """Does what `unload_adapter` and `forget_prompts` left. The caller holds the device, and vLLM is awake."""
        while self._leaving and self.state == "ready":
            name, folder = self._leaving.popitem()
            with contextlib.suppress(*LOST):
                await self._post("/v1/unload_lora_adapter", {"lora_name": name})
                await self.location.forget(folder)
        if self._has_stale_prompts and self.state == "ready":
            self._has_stale_prompts = False
            # Without this parameter vLLM keeps the cache while any request runs (0.32, v1/core/sched/scheduler.py).
            await self._post_control("/reset_prefix_cache?reset_running_requests=true", PAUSE_SECONDS)

    async def tidy(self) -> None:
        """Has vLLM unload at once what `unload_adapter` left, as soon as the device is free."""
        async with self._owner.held():
            await self._tidy()

    def loaded_adapters(self) -> list[str]:
        return list(self._adapters)

    def holds(self, name: str) -> bool:
        """Whether the adapter serves."""
        return name in self._compared

    @property
    def kept(self) -> Mapping[str, Path]:
        """The folders of the adapters that vLLM loads after each start, by name."""
        return self._adapters

    def keep(self, name: str, path: Path) -> None:
        """Has an engine that is starting load an adapter before it is ready."""
        self._adapters.setdefault(name, path)

    async def _post_load(self, name: str, path: Path) -> None:
        body = {"lora_name": name, "lora_path": await self._deliver(path)}
        status, text = await self._post("/v1/load_lora_adapter", body, LOAD_SECONDS)
        if status == 400 and "already been loaded" in text:
            # An earlier request was given up before vLLM answered. The name may have other weights now.
            await self._post("/v1/unload_lora_adapter", {"lora_name": name})
            status, text = await self._post("/v1/load_lora_adapter", body, LOAD_SECONDS)
        if status != 200:
            await self.location.forget(path)
            raise AdapterRefused(f"vLLM refused adapter '{name}': {text[:500]}")


def ignored_args(
    requested: Mapping[str, str], config: ServerConfig, max_seq_length: int | None, records_distributions: bool
) -> list[str]:
    """One sentence for each requested engine argument that an engine with this configuration does not have."""
    running = ENGINE_DEFAULTS | dict(config.engine_args)
    running |= {
        "max_seq_length": str(max_seq_length),
        "record_distributions": str(records_distributions).lower(),
    }
    return [
        f"{name}={value} is not applied: the engine was started with {running.get(name, 'its default')}. Such "
        "settings apply from the command line (art-server --help) or from the registration that starts the engine"
        for name, value in requested.items()
        if running.get(name) != value
    ]


def make_scaled_adapter(source: Path, target: Path, factor: int) -> None:
    """Makes a PEFT folder with the same weights and `factor` times the alpha."""
    config = json.loads((source / CONFIG_FILE).read_bytes())
    config["lora_alpha"] *= factor
    (target / CONFIG_FILE).write_text(json.dumps(config))
    (target / ADAPTER_FILE).symlink_to((source / ADAPTER_FILE).resolve())


def is_running(task: asyncio.Task[None] | None) -> bool:
    return task is not None and not task.done()
