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


def why_no_sandbox(task: Task, memory_mb: int) -> str | None:
    """What the task needs and no sandbox here gives; None: nothing. `memory_mb` is the sandbox's memory."""
    settings, environment = task.settings, task.settings.environment
    session_only = "a box reaches the session and nothing else"
    reasons = {
        "it has a compose file, and one container has no services beside it": any(
            task.environment.glob("*compose*.y*ml")
        ),
        "environment.mcp_servers are not started": bool(environment.mcp_servers),
        "environment.healthcheck waits for services, which are not started": environment.healthcheck is not None,
        "environment.gpus: a box has no devices": environment.gpus > 0,
        "steps: a task has one instruction here": bool(settings.steps),
        "verifier.environment_mode: the tests run in the agent's environment": settings.verifier.environment_mode
        not in (None, "shared"),
        "verifier.environment: the tests run in the agent's environment": settings.verifier.environment is not None,
        f"environment.os {environment.os}: a box has Linux": environment.os.lower() != "linux",
        f"environment.allow_internet: {session_only}. If the task needs no internet, leave the key out": bool(
            environment.allow_internet
        ),
        f"environment.memory_mb is more than the sandbox's memory_mb={memory_mb}": (environment.memory_mb or 0)
        > memory_mb,
    }
    modes = {"agent": settings.agent.network_mode, "verifier": settings.verifier.network_mode}
    for name, mode in {**modes, "environment": environment.network_mode}.items():
        reason = f"{name}.network_mode {mode}: {session_only}. If the task needs no network, write no-network"
        reasons[reason] = mode not in (None, "no-network")
    sections = {"environment": environment.env, "verifier": settings.verifier.env, "solution": settings.solution.env}
    for name, variables in sections.items():
        for variable, value in variables.items():
            reasons[f"{name}.env.{variable} takes a value of the host: {value}"] = "${" in value
    return next((reason for reason in reasons if reasons[reason]), None)
