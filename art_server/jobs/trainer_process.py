"""The trainer process from the server's side: starts it, sends it tasks, notices when it dies.

    trainer = TrainerProcess(worker_command(WorkerConfig(base_model="Qwen/Qwen3-0.6B")), log_path)
    done = await trainer.run(task, on_progress)
    await trainer.stop()

This module imports no torch. The process is always ended by SIGKILL: a kill loses nothing, because a step exists only
once the server has renamed its folder.
"""

import asyncio
import contextlib
import logging
import os
import signal
import sys
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple, Protocol, TypeVar

from pydantic import TypeAdapter, ValidationError

from art_protocol.log_file import LogFile
from art_server.jobs.budgets import Budgets
from art_server.process.children import Child, Children, start_child
from art_server.process.shared.trainer_messages import (
    Done,
    Failed,
    Learned,
    Progress,
    Ready,
    Task,
    TrainerReply,
    WorkerConfig,
)

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
    """The process ended or hung during a task or its start; the next task starts another process."""

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


def cpu_seconds(pid: int) -> float:
    """CPU time of a process with all its threads and all processes that it started, also the ended ones: torch compiles
    kernels in child processes. 0 if the CPU time cannot be read."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
        children = " ".join(file.read_text() for file in Path(f"/proc/{pid}/task").glob("*/children"))
    except OSError:
        return 0.0
    # utime, stime, cutime and cstime of proc(5), counted behind the process's name.
    own = sum(map(int, fields[11:15])) / os.sysconf("SC_CLK_TCK")
    return own + sum(cpu_seconds(int(child)) for child in children.split())


class Usage(NamedTuple):
    """The CPU time that a process had used at one moment."""

    cpu_seconds: float
    at: float
    """When the CPU time was read, on the clock of the process's machine."""


class Lines(Protocol):
    """The lines that a process writes."""

    async def readline(self) -> bytes: ...


class Input(Protocol):
    """The lines that a process reads."""

    def write(self, data: bytes) -> None: ...

    async def drain(self) -> None: ...


class Process(Child, Protocol):
    """A worker's process; it may run on another machine."""

    @property
    def stdin(self) -> Input | None: ...

    @property
    def stdout(self) -> Lines | None: ...

    def send_signal(self, signal: int) -> None: ...


class TrainerProcess:
    """One worker process, which runs one task at a time. The first task starts the process, and after a death the next task.

    Use it from the main thread's event loop, because the worker dies with the thread that started it.
    """

    silence_seconds = 0.0
    """For how long the server may receive nothing from a healthy process: the network to its machine may stall."""

    def __init__(
        self,
        command: Sequence[str],
        log_path: Path,
        *,
        environment: Mapping[str, str] | None = None,
        children: Children | None = None,
    ) -> None:
        """`environment` None is the environment of this process. The worker is added to `children`."""
        self.machine = "this machine"
        """The machine on which the process runs, for messages."""
        self.device = ""
        """The kind of its device, cpu or cuda."""
        self.budgets: Budgets | None = None
        """Stores the token budgets that the process learns."""
        self._command = list(command)
        self._children = children
        self._log = LogFile(log_path)
        self._environment = environment
        self._process: Process | None = None
        self._is_ready = False
        self._is_training = self._has_trained = False
        self._longest_pause = 0.0
        self._lock = asyncio.Lock()

    def use(self, config: WorkerConfig) -> None:
        """Sets the configuration of the process that the next task starts."""
        self._command = worker_command(config)
        self.device = config.device.partition(":")[0]

    @property
    def name(self) -> str:
        return self._log.path.stem

    @property
    def pid(self) -> int | None:
        """The id of the process and of its process group on this machine; None while no process runs."""
        return self._process.pid if self._process is not None else None

    def usage(self) -> Usage | None:
        """The newest reading of the CPU time of the process, with all its threads; None without a reading."""
        used = cpu_seconds(self.pid) if self.pid is not None else 0.0
        return Usage(used, time.monotonic()) if used else None

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
            TrainerError: the task failed.
            TrainerDied: the process ended or hung.
        """
        async with self._lock:
            await self._ensure_started()
            process = self._process
            assert process is not None
            async with contextlib.AsyncExitStack() as on_failure:
                on_failure.push_async_callback(self.stop)
                self._is_training = task.kind == "train"
                on_failure.callback(setattr, self, "_is_training", False)
                # A process that does not read leaves a large batch in the pipe.
                await self._in_time(_send(process, _task_line(task, batch)))
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
            with contextlib.suppress(ProcessLookupError):
                self._process.send_signal(signal.SIGUSR1)

    async def _receive_in_time(self, process: Process) -> Ready | Progress | Learned | Done | Failed:
        """The next answer of the process.

        Raises:
            TrainerDied: the process ended or hung.
        """
        started = time.monotonic()
        answer = await self._in_time(self._receive(process))
        self._longest_pause = max(self._longest_pause, time.monotonic() - started)
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
            async with asyncio.timeout(limit):
                return await exchange
        except TimeoutError as error:
            raise TrainerDied(
                f"the trainer process was ended: it showed no progress for {limit:.0f} s; its last log lines:\n{self._log.tail()}"
            ) from error

    async def stop(self) -> None:
        """Kills the process and its children; a running task ends with TrainerDied."""
        process, self._process, self._is_ready = self._process, None, False
        if process is None:
            return
        await self._kill(process)

    async def _ensure_started(self) -> None:
        if self._process is not None and self._process.returncode is not None:
            await self.stop()
        if self._is_ready:
            return
        process = await self._launch()
        self._process, self._has_trained, self._longest_pause = process, False, 0.0
        async with contextlib.AsyncExitStack() as on_failure:
            on_failure.push_async_callback(self.stop)
            answer = await self._receive_in_time(process)
            assert isinstance(answer, Ready), f"the trainer's first answer is {answer!r}"
            on_failure.pop_all()
        self._is_ready = True
        logger.info("trainer %d ready", process.pid)

    async def _launch(self) -> Process:
        process = await start_child(self._command, self._log, self._environment, MAX_ANSWER_BYTES)
        if self._children is not None:
            self._children.add(process.pid)
        return process

    async def _kill(self, process: Process) -> None:
        """Ends a process with its children."""
        # After the end of the process another program may have its id. Then `_children` kills what is left of its session.
        if process.returncode is None:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
        await process.wait()
        if self._children is not None:
            self._children.remove(process.pid)

    async def _receive(self, process: Process) -> Ready | Progress | Learned | Done | Failed:
        assert process.stdout is not None
        line = await process.stdout.readline()
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


async def _send(process: Process, line: bytes) -> None:
    assert process.stdin is not None
    process.stdin.write(line)
    # If the process has died, reading its answer raises an error with the reason.
    with contextlib.suppress(ConnectionError):
        await process.stdin.drain()
