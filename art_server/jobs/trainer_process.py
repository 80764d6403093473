"""The trainer process from the server's side: starts it, sends it tasks, notices when it dies.

    trainer = TrainerProcess(location=Here(device="cpu"), log_path=log_path, cache_dir=cache_dir)
    trainer.use(WorkerConfig(base_model="Qwen/Qwen3-0.6B"))
    done = await trainer.run(task, on_progress)
    await trainer.stop()

The `location` starts the process: this machine or a host (`process/place.py`). This module imports no torch. The process is
always ended by SIGKILL: a kill loses nothing, because a step exists only once the server has renamed its folder.
"""

import asyncio
import contextlib
import logging
import os
import sys
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple, TypeVar

from pydantic import TypeAdapter, ValidationError

from art_protocol.log_file import LogFile
from art_server.jobs.budgets import Budgets
from art_server.process.place import Command, Place, PlaceFailed, PlaceLost, Process
from art_server.settings import Device
from art_server.shared.clock import REAL, Clock
from art_server.shared.trainer_messages import (
    Done,
    Failed,
    LayersTask,
    Learned,
    Progress,
    Ready,
    Task,
    TrainerReply,
    TrainTask,
    WorkerConfig,
)
from art_server.store.model_folder import CONTENT_FILES

logger = logging.getLogger(__name__)

T = TypeVar("T")

ANSWER = TypeAdapter[Ready | Progress | Learned | Done | Failed](TrainerReply)

MAX_ANSWER_BYTES = 2**26
"""Longest line of the process. Answers are metrics and messages, so a longer line is not an answer."""

FIRST_PROGRESS_SECONDS = 1800.0
"""A process that has finished no task may take this long to send a line: it loads a base model and compiles kernels."""
SHORTEST_LIMIT_SECONDS, TIMES_ITS_PACE = 300.0, 20.0
"""A process is hung if it sends no line for at least this long, and for this many times its longest pause so far."""


class TrainerError(Exception):
    """A task was refused or failed; the process continues."""

    def __init__(self, code: str, message: str, retryable: bool = False) -> None:
        """`retryable`: the same task may succeed later without a change."""
        super().__init__(f"{code}: {message}")
        self.code = code
        self.message = message
        self.retryable = retryable


class TrainerDied(TrainerError):
    """The process ended or hung during a task or its start; the next `run` or `start` starts another process."""

    def __init__(self, message: str) -> None:
        super().__init__("trainer_died", message, retryable=True)


class RankLost(TrainerError):
    """The machine of a rank is lost, or the network to this machine or between the ranks. No job is the cause."""

    def __init__(self, message: str) -> None:
        super().__init__("connection_lost", message, retryable=True)


def worker_command(config: WorkerConfig) -> list[str]:
    """The command line of a worker, with this Python interpreter."""
    module = "unsloth_worker" if config.trainer == "unsloth" else "worker"
    settings = config.model_dump_json(exclude_defaults=True)
    return [sys.executable, "-m", f"art_server.trainer.{module}", settings]


def worker_environment(cache_dir: Path, inherited: Mapping[str, str]) -> dict[str, str]:
    """The environment of a worker, without the server's API key. Unsloth writes its compiled code into `cache_dir`."""
    # Without PASSIVE, OpenMP threads spin at each barrier. That is slow beside an engine on the same cores: a step of
    # 45 ms took 2.1 s while other processes used both of two cores.
    return {
        "OMP_WAIT_POLICY": "PASSIVE",
        **{name: value for name, value in inherited.items() if name != "ART_API_KEY"},
        "DO_NOT_TRACK": "1",
        "HF_HUB_DISABLE_TELEMETRY": "1",
        "UNSLOTH_DISABLE_STATISTICS": "1",
        "UNSLOTH_COMPILE_LOCATION": str(cache_dir.resolve()),
    }


class Usage(NamedTuple):
    """The CPU time that a process had used at one moment."""

    cpu_seconds: float
    at: float
    """When the CPU time was read, on the clock of the process's machine."""


@dataclass(frozen=True, slots=True)
class RankProgram:
    """A worker, as a place starts it (`process/place.py`)."""

    worker: WorkerConfig
    cache_dir: Path
    """The folder for code that Unsloth compiles."""

    async def prepare(self) -> Command:
        return Command(
            arguments=worker_command(self.worker),
            environment=worker_environment(self.cache_dir, os.environ),
            max_line_bytes=MAX_ANSWER_BYTES,
        )


class TrainerProcess:
    """One worker process, which runs one task at a time. `run` and `start` start the process if none runs.

    Use it from the main thread's event loop, because the worker dies with the thread that started it.
    """

    def __init__(self, *, location: Place, log_path: Path, cache_dir: Path, clock: Clock = REAL) -> None:
        """`location` starts the process, whose compiled code is kept in `cache_dir`."""
        self.location = location
        self.worker: WorkerConfig | None = None
        """The configuration of the next process."""
        self.budgets: Budgets | None = None
        """Stores the token budgets that the process learns."""
        self.facts: Mapping[str, str] = {}
        """What the process that was started last computes with, by name."""
        self._cache_dir = cache_dir
        self._clock = clock
        self._log = LogFile(log_path)
        self._process: Process | None = None
        self._is_ready = False
        self._is_training = self._has_trained = False
        self._longest_pause = 0.0
        self._lock = asyncio.Lock()

    def use(self, config: WorkerConfig) -> None:
        """Sets the configuration of the next process."""
        self.worker = config

    @property
    def name(self) -> str:
        return self._log.path.stem

    @property
    def machine(self) -> str:
        """The machine on which the process runs, for messages."""
        return self.location.machine

    @property
    def device(self) -> Device:
        """The kind of the process's device."""
        return self.location.device

    @property
    def silence_seconds(self) -> float:
        """For how long the server may receive nothing from a healthy process."""
        return self.location.silence_seconds

    @property
    def pid(self) -> int | None:
        """The id of the process and of its process group on this machine; None while no process runs here."""
        return self._process.pid if self._process is not None else None

    def usage(self) -> Usage | None:
        """The newest reading of the CPU time of the process, with all its threads; None without a reading."""
        if self._process is None:
            return None
        reading = self._process.counters()
        return Usage(reading.cpu_seconds, reading.at) if reading.cpu_seconds else None

    @property
    def is_running(self) -> bool:
        return self._process is not None and self._process.returncode is None

    async def run(
        self,
        task: Task,
        on_progress: Callable[[Progress], Awaitable[None]] | None = None,
        batch: bytes | None = None,
    ) -> Done:
        """Runs a task and returns its result. `batch` is the JSON of a train task's batch, which is passed on unread.
        If this call is cancelled, the process is killed; `cancel` ends a train task and keeps the process.

        Raises:
            TrainerError: the task failed, or the process's machine could not do what was asked.
            TrainerDied: the process ended or hung.
            RankLost: the process's machine is lost.
        """
        with self._errors_of_the_place():
            async with self._delivered(task) as task_there:
                return await self._run(task_there, on_progress, batch)

    async def start(self) -> None:
        """Starts the process, unless it runs. Afterwards `facts` are known.

        Raises:
            TrainerError: the process's machine could not do what was asked.
            TrainerDied: the process ended or hung.
            RankLost: the process's machine is lost.
        """
        with self._errors_of_the_place():
            async with self._lock:
                await self._ensure_started()

    @contextlib.contextmanager
    def _errors_of_the_place(self) -> Iterator[None]:
        """Raises what the place raises as errors of the trainer."""
        try:
            yield
        except PlaceLost as error:
            raise RankLost(str(error)) from error
        except PlaceFailed as error:
            raise TrainerError("host_failed", str(error), retryable=True) from error
        except TrainerDied as error:
            if not self.location.lost:
                raise
            raise RankLost(f"{self.machine} was lost: {self.location.lost}") from error

    @contextlib.asynccontextmanager
    async def _delivered(self, task: Task) -> AsyncIterator[Task]:
        """The task with the paths of its folders on the process's machine. After the block the server's folder has the result."""
        if not isinstance(task, TrainTask | LayersTask):
            yield task
            return
        out_dir = Path(task.out_dir)
        async with contextlib.AsyncExitStack() as stack:
            paths = {"out_dir": await self.location.deliver(out_dir, ())}
            stack.push_async_callback(self.location.forget, out_dir)
            if isinstance(task, TrainTask):
                in_dir = Path(task.in_dir)
                paths["in_dir"] = await self.location.deliver(in_dir, CONTENT_FILES)
                stack.push_async_callback(self.location.forget, in_dir)
            yield task.model_copy(update=paths)
            if self.worker is not None and self.worker.rank == 0:  # only rank 0 writes the result
                await self.location.collect(out_dir)

    async def _run(
        self, task: Task, on_progress: Callable[[Progress], Awaitable[None]] | None, batch: bytes | None
    ) -> Done:
        async with self._lock:
            await self._ensure_started()
            process = self._process
            assert process is not None
            async with contextlib.AsyncExitStack() as on_failure:
                on_failure.push_async_callback(self.stop)
                self._is_training = task.kind == "train"
                on_failure.callback(setattr, self, "_is_training", False)
                # A process that does not read leaves a large batch in the pipe.
                await self._in_time(process.send(_task_line(task, batch)))
                while True:
                    answer = await self._receive_in_time(process)
                    if isinstance(answer, Done | Failed):
                        break
                    if isinstance(answer, Progress) and on_progress is not None:
                        await on_progress(answer)
                    if isinstance(answer, Learned) and self.budgets is not None:
                        await asyncio.to_thread(self.budgets.learn, answer.key, answer.tokens)
                on_failure.pop_all()
                self._has_trained |= self._is_training
                self._is_training = False
        if isinstance(answer, Failed):
            raise TrainerError(answer.code, answer.message, answer.retryable)
        return answer

    def cancel(self) -> None:
        """Requests that the running train task stops before its next micro-batch; the task then fails as
        "cancelled". Does nothing while no train task runs, or before the process has begun the task: call this again at the
        task's next progress."""
        if self._process is not None and self._is_training:
            self._process.cancel()

    async def _receive_in_time(self, process: Process) -> Ready | Progress | Learned | Done | Failed:
        """The next answer of the process.

        Raises:
            TrainerDied: the process ended or hung.
        """
        started = self._clock.monotonic()
        answer = await self._in_time(self._receive(process))
        self._longest_pause = max(self._longest_pause, self._clock.monotonic() - started)
        return answer

    async def _in_time(self, exchange: Awaitable[T]) -> T:
        """The result of an exchange with the process.

        Raises:
            TrainerDied: the exchange took much longer than the process's longest pause.
        """
        limit = FIRST_PROGRESS_SECONDS
        if self._has_trained:
            limit = max(SHORTEST_LIMIT_SECONDS, TIMES_ITS_PACE * self._longest_pause)
        try:
            async with self._clock.timeout(limit):
                return await exchange
        except TimeoutError as error:
            raise TrainerDied(
                f"the trainer process was ended: it showed no progress for {limit:.0f} s; its last log lines:\n{self._log.tail()}"
            ) from error

    async def stop(self) -> None:
        """Kills the process and its children; a running task ends with TrainerDied."""
        process, self._process, self._is_ready = self._process, None, False
        if process is not None:
            await process.end()

    async def _ensure_started(self) -> None:
        # It ended by itself: `Children.end` kills what is left of its session, and takes it from the list.
        if self._process is not None and self._process.returncode is not None:
            await self.stop()
        if self._is_ready:
            return
        assert self.worker is not None, "`use` comes first"
        process = await self.location.start(RankProgram(self.worker, self._cache_dir), self._log)
        self._process, self._has_trained, self._longest_pause = process, False, 0.0
        async with contextlib.AsyncExitStack() as on_failure:
            on_failure.push_async_callback(self.stop)
            answer = await self._receive_in_time(process)
            assert isinstance(answer, Ready), f"the trainer's first answer is {answer!r}"
            on_failure.pop_all()
        self.facts, self._is_ready = answer.facts, True
        logger.info("%s: the process answers, on %s", self.name, self.machine)

    async def _receive(self, process: Process) -> Ready | Progress | Learned | Done | Failed:
        try:
            line = await process.read_line()
        except ValueError as error:  # asyncio's readline refuses a line above its limit
            raise TrainerDied(
                f"the trainer process was ended: it sent an answer of more than {MAX_ANSWER_BYTES} bytes"
            ) from error
        # asyncio's readline returns a line without its end only when the stream has ended.
        if not line.endswith(b"\n"):
            status = await process.wait()
            raise TrainerDied(
                f"the trainer process ended with status {status}; its last log lines:\n{self._log.tail()}"
            )
        try:
            return ANSWER.validate_json(line)
        except ValidationError as error:
            raise TrainerDied(f"the trainer process was ended: it sent an unknown answer {line[:200]!r}") from error


def _task_line(task: Task, batch: bytes | None) -> bytes:
    if batch is None:
        return task.model_dump_json().encode() + b"\n"
    return task.model_dump_json(exclude={"batch"}).encode()[:-1] + b',"batch":' + batch + b"}\n"
