"""The interface of a sandbox. A sandbox starts a box for each rollout, a box runs commands, and is stopped.

box = await sandbox.start(task)
execution = await box.exec("bash /tests/test.sh", env={}, timeout_seconds=600, folders={"/tests": task.tests})
await box.stop()
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Protocol

from art.harbor.gateway import Gateway
from art.harbor.tasks import Task

MAX_RESULT_BYTES = 1 << 20
"""Largest file of `Execution.results`."""
MAX_RESULTS = 64
"""Most files of `Execution.results`, in the order of their names."""
OUTPUT_BYTES = 1 << 16
"""Bytes of the end of a command's output that are kept."""


@dataclass(frozen=True, slots=True)
class Execution:
    """How a command ended. None of its processes is left."""

    exit_code: int | None
    """As in a shell: 128 plus the signal's number after a signal. None: the command took too long and was killed."""
    seconds: float
    output: str
    """The end of what the command printed, stdout and stderr together."""
    results: dict[str, bytes | None] = field(default_factory=dict[str, bytes | None], repr=False)
    """The files of the command's folder for results. None: no plain file, or larger than `MAX_RESULT_BYTES`."""


class Box(Protocol):
    """A running sandbox. The workdir keeps its files from one command to the next."""

    async def exec(
        self,
        command: str,
        *,
        env: Mapping[str, str],
        timeout_seconds: float,
        cwd: str | None = None,
        files: Mapping[str, str] | None = None,
        folders: Mapping[str, Path] | None = None,
        results: str | None = None,
        gateway: Gateway | None = None,
    ) -> Execution:
        """Runs a command of bash. When this returns, no process of the command is left.

        `cwd` is the workdir by default. Only this command sees `files` (paths with texts), `folders` (paths
        with copies of the host's folders) and `results`, a folder that is empty at first. With a gateway the command reaches one
        session of a server, and else nothing.

        Raises:
            SandboxFailed: the sandbox ended before the command.
        """
        ...

    async def stop(self) -> None:
        """Ends all processes and removes all files of the box. May be repeated."""
        ...


class Sandbox(Protocol):
    """Starts boxes. One object serves any number of rollouts side by side."""

    async def start(self, task: Task) -> Box:
        """A box whose workdir has the task's files.

        Raises:
            TaskRefused: the sandbox cannot give what the task needs.
            SandboxFailed: the sandbox does not start.
        """
        ...
