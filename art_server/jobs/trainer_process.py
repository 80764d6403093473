"""The trainer process as the server holds it: start it, give it tasks, learn of its death.

    trainer = TrainerProcess(worker_command("Qwen/Qwen3-0.6B"), log_path)
    done = await trainer.run(task, on_progress)
    await trainer.stop()

Imports no torch. The process holds nothing that a kill could lose (a step is visible when the server renames its
folder), so it is always ended by SIGKILL.
"""

import asyncio
import contextlib
import logging
import os
import signal
import sys
import time
from asyncio.subprocess import Process
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Literal

from pydantic import TypeAdapter, ValidationError

from art.log_file import LogFile
from art_server.children import Children, start_child
from art_server.shared.tasks import (
    Answer,
    BetweenSteps,
    CheckTask,
    Done,
    Failed,
    InitTask,
    LoadTask,
    Progress,
    Ready,
    TrainTask,
)

logger = logging.getLogger(__name__)

ANSWER = TypeAdapter[Ready | Progress | Done | Failed](Answer)

MAX_ANSWER_BYTES = 2**26
"""Answers are metrics and messages; a line above this is not one of ours."""

FIRST_PROGRESS_SECONDS = 1800.0
"""A process that has finished no task loads a base and compiles kernels before it shows any progress."""
SHORTEST_LIMIT_SECONDS, TIMES_ITS_PACE = 300.0, 20.0
"""A process is hung that shows no progress for so many times its longest pause so far, and at least for so long."""


class TrainerError(Exception):
    """The trainer refused or failed a task, and goes on."""

    def __init__(self, code: str, message: str, retryable: bool = False) -> None:
        """`retryable`: the same task may succeed later, unchanged."""
        super().__init__(f"{code}: {message}")
        self.code = code
        self.message = message
        self.retryable = retryable


class TrainerDied(TrainerError):
    """The process ended under a task or while starting; the next task starts another."""

    def __init__(self, message: str) -> None:
        super().__init__("trainer_died", message, retryable=True)


def worker_command(
    base_model: str,
    *,
    trainer: Literal["auto", "unsloth", "peft"] = "auto",
    dtype: str = "auto",
    device: str = "auto",
    between_steps: BetweenSteps = "stay",
    max_seq_length: int | None = None,
    threads: int | None = None,
    max_tokens_per_micro_batch: int | None = None,
    checkpointing_factor: float | None = None,
    budgets: Path | None = None,
) -> list[str]:
    """The command line of a worker in this interpreter."""
    module = "unsloth_worker" if trainer == "unsloth" else "worker"
    command = [sys.executable, "-m", f"art_server.trainer.{module}"]
    command += ["--base-model", base_model, "--trainer", trainer, "--dtype", dtype]
    command += ["--device", device, "--between-steps", between_steps]
    if max_seq_length is not None:
        command += ["--max-seq-length", str(max_seq_length)]
    if threads is not None:
        command += ["--threads", str(threads)]
    if max_tokens_per_micro_batch is not None:
        command += ["--max-tokens-per-micro-batch", str(max_tokens_per_micro_batch)]
    if checkpointing_factor is not None:
        command += ["--checkpointing-factor", str(checkpointing_factor)]
    if budgets is not None:
        command += ["--budgets", str(budgets)]
    return command


def worker_environment(cache_dir: Path, inherited: Mapping[str, str]) -> dict[str, str]:
    """The environment of a worker, without the server's keys. Unsloth writes the code that it compiles into `cache_dir`."""
    # OpenMP threads otherwise spin at each barrier. Beside an engine on the same cores that is ruinous: a step of 45 ms took
    # 2.1 s with both of two cores busy elsewhere.
    return {
        "OMP_WAIT_POLICY": "PASSIVE",
        **{name: value for name, value in inherited.items() if name != "ART_API_KEY"},
        "DO_NOT_TRACK": "1",
        "HF_HUB_DISABLE_TELEMETRY": "1",
        "UNSLOTH_DISABLE_STATISTICS": "1",
        "UNSLOTH_COMPILE_LOCATION": str(cache_dir.resolve()),
    }


class TrainerProcess:
    """One worker process: started by the first task, started again after a death, one task at a time.

    Use it from the main thread's event loop: the worker dies with the thread that starts it.
    """

    def __init__(
        self,
        command: Sequence[str],
        log_path: Path,
        environment: Mapping[str, str] | None = None,
        children: Children | None = None,
    ) -> None:
        """`environment` is this process's where it is None. `children` is the list that the process is put on."""
        self._command = list(command)
        self._children = children
        self._log = LogFile(log_path)
        self._environment = environment
        self._process: Process | None = None
        self._is_ready = False
        self._has_finished_one = False
        self._longest_pause = 0.0
        self._lock = asyncio.Lock()

    @property
    def pid(self) -> int | None:
        """None while no process runs. The pid is also the process group's."""
        return self._process.pid if self._process is not None else None

    async def start(self) -> None:
        """Start the process unless it runs; return once it takes tasks.

        Raises TrainerDied when it ends before that.
        """
        async with self._lock:
            await self._ensure_started()

    async def run(
        self,
        task: InitTask | CheckTask | LoadTask | TrainTask,
        on_progress: Callable[[Progress], None] | None = None,
        batch: bytes | None = None,
    ) -> Done:
        """Have a task done. `batch` is the JSON of a train task's batch, which is not read here. A cancelled call kills the
        process; `cancel` ends a step and keeps it.

        Raises TrainerError when the task fails, TrainerDied when the process ends or hangs.
        """
        async with self._lock:
            await self._ensure_started()
            process = self._process
            assert process is not None
            async with contextlib.AsyncExitStack() as on_failure:
                on_failure.push_async_callback(self.stop)
                await _send(process, _task_line(task, batch))
                while True:
                    answer = await self._receive_in_time(process)
                    if isinstance(answer, Done | Failed):
                        break
                    if isinstance(answer, Progress) and on_progress is not None:
                        on_progress(answer)
                on_failure.pop_all()
                self._has_finished_one = True
        if isinstance(answer, Failed):
            raise TrainerError(answer.code, answer.message, answer.retryable)
        return answer

    def cancel(self) -> None:
        """Ask for the end of the train task under way, before its next micro-batch; it then fails as "cancelled"."""
        if self._process is not None:
            with contextlib.suppress(ProcessLookupError):
                self._process.send_signal(signal.SIGUSR1)

    async def _receive_in_time(self, process: Process) -> Ready | Progress | Done | Failed:
        """
        Raises TrainerDied when the process shows nothing for much longer than its own pace.
        """
        limit = FIRST_PROGRESS_SECONDS
        if self._has_finished_one:
            limit = max(SHORTEST_LIMIT_SECONDS, TIMES_ITS_PACE * self._longest_pause)
        started = time.monotonic()
        try:
            async with asyncio.timeout(limit):
                answer = await self._receive(process)
        except TimeoutError as error:
            raise TrainerDied(
                f"the trainer process was ended: it showed no progress for {limit:.0f} s; its last lines:\n{self._log.tail()}"
            ) from error
        self._longest_pause = max(self._longest_pause, time.monotonic() - started)
        return answer

    async def stop(self) -> None:
        """End the process and its children; a task under way ends with TrainerDied."""
        process, self._process, self._is_ready = self._process, None, False
        if process is None:
            return
        # Gone already: its end has not reached the event loop yet.
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        await process.wait()
        if self._children is not None:
            self._children.remove(process.pid)

    async def _ensure_started(self) -> None:
        if self._process is not None and self._process.returncode is not None:
            await self.stop()
        if self._is_ready:
            return
        process = await start_child(self._command, self._log, self._environment, MAX_ANSWER_BYTES)
        if self._children is not None:
            self._children.add(process.pid)
        self._process, self._has_finished_one, self._longest_pause = process, False, 0.0
        async with contextlib.AsyncExitStack() as on_failure:
            on_failure.push_async_callback(self.stop)
            answer = await self._receive_in_time(process)
            assert isinstance(answer, Ready), f"the trainer's first line is {answer!r}"
            on_failure.pop_all()
        self._is_ready = True
        logger.info("trainer %d ready", process.pid)

    async def _receive(self, process: Process) -> Ready | Progress | Done | Failed:
        assert process.stdout is not None
        line = await process.stdout.readline()
        if not line.endswith(b"\n"):
            status = await process.wait()
            raise TrainerDied(
                f"the trainer process ended with status {status}; its last lines:\n{self._log.tail()}"
            )
        try:
            return ANSWER.validate_json(line)
        except ValidationError as error:
            raise TrainerDied(
                f"the trainer process was ended: it answered {line[:200]!r}"
            ) from error


def _task_line(task: InitTask | CheckTask | LoadTask | TrainTask, batch: bytes | None) -> bytes:
    if batch is None:
        return task.model_dump_json().encode() + b"\n"
    return task.model_dump_json(exclude={"batch"}).encode()[:-1] + b',"batch":' + batch + b"}\n"


async def _send(process: Process, line: bytes) -> None:
    assert process.stdin is not None
    process.stdin.write(line)
    # A process that died meanwhile shows, with its reason, when its answer is read.
    with contextlib.suppress(ConnectionError):
        await process.stdin.drain()
