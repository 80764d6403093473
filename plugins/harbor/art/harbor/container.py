"""The sandbox `Container`: an image in a container of Docker or Podman, by the engine's commands.

A container has no network but its loopback, on which a gateway answers for one session (`holder.py`, which needs root, or Podman without
root). The container's process 1 sleeps: nothing inside can kill the first process. After each command the container is restarted,
which ends all its processes and keeps its files.
"""

import asyncio
import contextlib
import io
import os
import re
import socket
import sys
import tarfile
import tempfile
import time
import uuid
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from art.harbor import boxes
from art.harbor.bubblewrap import HOLDER
from art.harbor.errors import SandboxFailed, TaskRefused
from art.harbor.gateway import PORT, Gateway
from art.harbor.sandbox import MAX_RESULT_BYTES, MAX_RESULTS, OUTPUT_BYTES, Execution, why_no_sandbox
from art.harbor.tasks import Task

LABEL = "art-harbor"
"""The label of a container has the program's process id and start, by which the next program finds what a killed one left."""
SCRIPT = "/art/command.sh"
NO_WORKDIR = "/"
LOGS = ("/logs/agent", "/logs/artifacts", "/logs/verifier")


@dataclass(frozen=True, slots=True)
class Container:
    """A sandbox of containers. The image is the task's `docker_image`, or is built from `environment/Dockerfile`."""

    engine: Literal["docker", "podman"] = "docker"
    memory_mb: int = 2048
    """Memory of a container, without swap."""
    num_processes: int = 256
    """Processes and threads of a container."""

    async def start(self, task: Task) -> "ContainerBox":
        """A container of the task's image.

        Raises:
            TaskRefused: a container cannot give what the task needs.
            SandboxFailed: the engine does not answer, or refuses.
        """
        reason = why_no_sandbox(task, self.memory_mb)
        if reason is not None:
            raise TaskRefused(f"the task {task.name} cannot run in a container: {reason}")
        environment = task.settings.environment
        image = environment.docker_image
        if image is None and not (task.environment / "Dockerfile").exists():
            raise TaskRefused(
                f"the task {task.name} names no image: environment.docker_image or environment/Dockerfile"
            )
        await self._remove_left()
        if image is None:
            image = await self.call("build", "--quiet", str(task.environment))
        name = f"{LABEL}-{uuid.uuid4().hex}"
        words = ["run", "--detach", "--name", name, "--network", "none", "--security-opt", "no-new-privileges"]
        words += ["--memory", f"{self.memory_mb}m", "--memory-swap", f"{self.memory_mb}m"]
        words += [
            "--pids-limit",
            str(self.num_processes),
            "--label",
            f"{LABEL}={os.getpid()}:{boxes.started_at(os.getpid())}",
        ]
        if environment.cpus is not None:
            words += ["--cpus", f"{environment.cpus:g}"]
        words += variables_of(environment.env)
        box = ContainerBox(self, name, task.settings.agent.user)
        try:
            await self.call(*words, "--entrypoint", "sleep", image, "infinity")
            await box.enter(environment.workdir)
        except BaseException:
            await asyncio.shield(box.stop())
            raise
        return box

    async def call(self, *words: str) -> str:
        """What a command of the engine prints.

        Raises:
            SandboxFailed: the engine is not installed, or the command failed.
        """
        return (await self.call_for_bytes(*words)).decode(errors="replace").strip()

    async def call_for_bytes(self, *words: str) -> bytes:
        try:
            process = await asyncio.create_subprocess_exec(
                *(self.engine, *words),
                stdin=asyncio.subprocess.DEVNULL,
                stdout=asyncio.subprocess.PIPE,
                stderr=asyncio.subprocess.PIPE,
            )
        except FileNotFoundError as error:
            raise SandboxFailed(f"the program {self.engine} is not installed") from error
        output, errors = await process.communicate()
        if process.returncode:
            raise SandboxFailed(f"{self.engine} {words[0]} failed: {errors.decode(errors='replace').strip()[-1000:]}")
        return output

    async def _remove_left(self) -> None:
        """Removes the containers of programs that were killed."""
        label = (
            f'{{{{.ID}}}} {{{{index .Labels "{LABEL}"}}}}'
            if self.engine == "podman"
            else f'{{{{.ID}}}} {{{{.Label "{LABEL}"}}}}'
        )
        lines = await self.call("ps", "--all", "--filter", f"label={LABEL}", "--format", label)
        for identifier, pid, started_at in re.findall(r"(?m)^(\S+) (\d+):(\d+)$", lines):
            if boxes.started_at(int(pid)) != started_at:
                await self.call("rm", "--force", "--volumes", identifier)


class ContainerBox:
    """A running container. Not for commands side by side."""

    def __init__(self, sandbox: Container, name: str, user: str | int | None) -> None:
        self._sandbox, self._name, self._user = sandbox, name, user
        self._workdir = NO_WORKDIR
        self._temporary: list[str] = []
        """What only the last command may see."""
        self._is_stopped = False

    async def enter(self, workdir: str | None) -> None:
        """Makes a folder the workdir of commands; None: the image's."""
        workdir = workdir or await self._sandbox.call("inspect", "--format", "{{.Config.WorkingDir}}", self._name)
        self._workdir = workdir or NO_WORKDIR
        await self._sandbox.call("exec", "--user", "0", self._name, "mkdir", "-p", "--", self._workdir, *LOGS)
        await self._sandbox.call("exec", "--user", "0", self._name, "chmod", "777", *LOGS)

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
        """See `sandbox.Box.exec`. The container keeps all files but those of the command."""
        call, name = self._sandbox.call, self._name
        texts = {SCRIPT: command, **(files or {})}
        fresh = [*texts, *(folders or {}), *([results] if results else [])]
        empty = sorted(
            {*(str(Path(path).parent) for path in texts), *(folders or {}), *([results] if results else [])} - {"/"}
        )
        await call("exec", "--user", "0", name, "rm", "-rf", "--", *self._temporary, *fresh)
        await call("exec", "--user", "0", name, "mkdir", "-p", "--", *empty)
        self._temporary = fresh
        with tempfile.TemporaryDirectory() as folder:
            for number, (path, text) in enumerate(texts.items()):
                await call("cp", write_readable(Path(folder, str(number)), text), f"{name}:{path}")
        for path, source in (folders or {}).items():
            await call("cp", f"{source}/.", f"{name}:{path}")
        if results is not None:
            await call("exec", "--user", "0", name, "chmod", "777", results)
        execution = await self._run(env, timeout_seconds, cwd or self._workdir, gateway)
        await call("restart", "--time", "0", name)
        if results is not None:
            archive = await self._sandbox.call_for_bytes("cp", f"{name}:{results}/.", "-")
            execution.results.update(read_archive(archive))
        return execution

    async def stop(self) -> None:
        """Removes the container with its volumes."""
        if not self._is_stopped:
            self._is_stopped = True
            await self._sandbox.call("rm", "--force", "--volumes", self._name)

    async def _run(
        self, env: Mapping[str, str], timeout_seconds: float, cwd: str, gateway: Gateway | None
    ) -> Execution:
        words = ["exec", "--workdir", cwd, *variables_of(env)]
        if self._user is not None:
            words += ["--user", str(self._user)]
        begun, tail = time.monotonic(), b""
        async with contextlib.AsyncExitStack() as stack:
            if gateway is not None:
                await stack.enter_async_context(gateway.serving(await self._listen()))
            process = await asyncio.create_subprocess_exec(
                *(self._sandbox.engine, *words, self._name, "bash", SCRIPT),
                stdin=asyncio.subprocess.DEVNULL,
                stdout=asyncio.subprocess.PIPE,
                stderr=asyncio.subprocess.STDOUT,
            )
            assert process.stdout is not None, "it is a pipe"
            try:
                async with asyncio.timeout(timeout_seconds):
                    while block := await process.stdout.read(OUTPUT_BYTES):
                        tail = (tail + block)[-OUTPUT_BYTES:]
                    exit_code: int | None = await process.wait()
            except TimeoutError:
                exit_code = None
            finally:
                with contextlib.suppress(ProcessLookupError):  # the command has ended
                    process.kill()
                await process.wait()
        is_running = await self._sandbox.call("inspect", "--format", "{{.State.Running}}", self._name)
        if is_running != "true":
            raise SandboxFailed(
                f"the container ended before its command. Its last words: {tail[-1000:].decode(errors='replace')}"
            )
        return Execution(exit_code, time.monotonic() - begun, tail.decode(errors="replace"))

    async def _listen(self) -> socket.socket:
        """A socket that listens on the container's loopback.

        Raises:
            SandboxFailed: this user may not join the container's network.
        """
        pid = await self._sandbox.call("inspect", "--format", "{{.State.Pid}}", self._name)
        near, far = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with near, far:
            process = await asyncio.create_subprocess_exec(
                *(sys.executable, "-SEs", HOLDER, str(far.fileno()), str(PORT), pid),
                pass_fds=[far.fileno()],
                stderr=asyncio.subprocess.PIPE,
            )
            _, errors = await process.communicate()
            if process.returncode:
                raise SandboxFailed(
                    "the container's network cannot be joined: with Docker the program has to run as root "
                    f"({errors.decode(errors='replace').strip()[-200:]})"
                )
            _, (descriptor,), _, _ = socket.recv_fds(near, 16, 1)
        return socket.socket(fileno=descriptor)


def variables_of(env: Mapping[str, str]) -> list[str]:
    """The options that set environment variables. None of them is secret: the key is the gateway's."""
    return [word for name, value in env.items() for word in ("--env", f"{name}={value}")]


def write_readable(file: Path, text: str) -> str:
    """Writes a file that every user may read. Returns the file's path."""
    file.write_text(text)
    file.chmod(0o644)
    return str(file)


def read_archive(archive: bytes) -> dict[str, bytes | None]:
    """The files at the top of a tar archive. Links and the files in folders are not read."""
    results: dict[str, bytes | None] = {}
    with tarfile.open(fileobj=io.BytesIO(archive)) as tar:
        for member in tar:
            name = member.name.removeprefix("./").rstrip("/")
            if name in ("", ".") or "/" in name:
                continue
            file = tar.extractfile(member) if member.isreg() and member.size <= MAX_RESULT_BYTES else None
            results[name] = file.read() if file is not None else None
    return dict(sorted(results.items())[:MAX_RESULTS])
