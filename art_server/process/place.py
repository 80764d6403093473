"""Where a process runs: the seam between an engine or a rank and the machine of its process.

An engine and a rank are given a place. `Here` is this machine; `machines/on_host.py` is a machine that has joined. A place starts
a process, delivers folders of files to it, and forgets them. The process has an id, counters of its work and, if it answers HTTP,
an endpoint.
"""

import asyncio
import contextlib
import os
import signal
import socket
import time
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple, Protocol

from art_protocol.log_file import LogFile
from art_server.process.children import Children, start_child
from art_server.settings import Device
from art_server.shared.work_counters import read_work


class PlaceLost(Exception):
    """The machine of a place is lost, or the connection to the machine."""


class PlaceFailed(Exception):
    """The machine of a place could not do what it was asked; the text is the reason."""


class Counters(NamedTuple):
    """How much a process had computed at one moment."""

    work: bytes
    """An engine's work counters (`shared/work_counters.py`); empty for a rank."""
    cpu_seconds: float
    """A rank's CPU time; 0 for an engine, and without a reading."""
    at: float
    """When the counters were read, on the clock of the process's machine."""


@dataclass(frozen=True, slots=True)
class Endpoint:
    """Where a process answers HTTP."""

    url: str
    socket: Path | None = None
    """The Unix socket behind the URL; None: the URL names a port."""
    headers: Mapping[str, str] = field(default_factory=dict)
    """The headers that each request must have."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Command:
    """How a program is started on the machine that runs the program."""

    arguments: Sequence[str]
    environment: Mapping[str, str]
    max_line_bytes: int | None = None
    """The longest line of a process that reads and writes lines; None: the process has no stdin, and writes into its log only."""
    inherited: Sequence[int] = ()
    """File descriptors that the process gets."""
    work_file: Path | None = None
    """The file of the work counters."""
    endpoint: Endpoint | None = None


class Program(Protocol):
    """What a place starts: `EngineProgram` or `RankProgram`. A host gets the settings in an order, and makes the program from
    them."""

    async def prepare(self) -> Command:
        """Makes ready what the process needs, on the machine that runs the process, and returns the command."""
        ...


class Process(Protocol):
    """A process that a place has started."""

    @property
    def pid(self) -> int | None:
        """The process's id on this machine; None: the process runs on another machine."""
        ...

    @property
    def returncode(self) -> int | None: ...

    @property
    def endpoint(self) -> Endpoint | None: ...

    async def wait(self) -> int: ...

    async def send(self, line: bytes) -> None:
        """Sends a line to the process. A process that has ended raises nothing here; `read_line` returns no whole line."""
        ...

    async def read_line(self) -> bytes:
        """The next line of the process; empty after the last one."""
        ...

    def cancel(self) -> None:
        """Has a rank end its job before the next micro-batch."""
        ...

    def counters(self) -> Counters:
        """The newest reading."""
        ...

    async def end(self) -> None:
        """Kills the process with all processes that it spawned, and waits for the end of them all."""
        ...


class Place(Protocol):
    """A machine, as one engine or one rank uses the machine."""

    @property
    def machine(self) -> str:
        """The machine's name, for messages."""
        ...

    @property
    def device(self) -> Device: ...

    @property
    def silence_seconds(self) -> float:
        """For how long nothing may come from a healthy process: the network to its machine may stall."""
        ...

    @property
    def lost(self) -> str:
        """Why the machine is lost; empty while the machine is there."""
        ...

    @property
    def address(self) -> str:
        """The machine's address, as other machines reach the machine; empty: the server's machine."""
        ...

    @property
    def server_address(self) -> str:
        """The server's address, as the machine reaches the server; empty: the server's machine."""
        ...

    async def free_port(self) -> int:
        """A port of the machine that is free at this moment."""
        ...

    async def start(self, program: Program, log: LogFile) -> Process:
        """Starts a process, whose log appears in `log` on this machine."""
        ...

    async def deliver(self, folder: Path, names: Collection[str]) -> str:
        """Makes those files of a folder that `names` lists available to the process. Returns the folder's path on the machine. A
        folder without names is one that the process fills.

        Raises:
            PlaceFailed, PlaceLost, OSError: the files were not delivered.
        """
        ...

    async def collect(self, folder: Path) -> None:
        """Copies the files that the process has written into a delivered folder into the server's `folder`."""
        ...

    async def forget(self, folder: Path) -> None:
        """Deletes what `deliver` has copied to the machine."""
        ...

    async def keep_only(self, folders: Collection[Path]) -> None:
        """Forgets all delivered folders but these."""
        ...


class ProcessHere:
    """A process on this machine, which leads its own session."""

    def __init__(self, process: asyncio.subprocess.Process, command: Command, children: Children | None):
        self._process = process
        self._work_file = command.work_file
        self._children = children
        self.endpoint = command.endpoint

    @property
    def pid(self) -> int:
        return self._process.pid

    @property
    def returncode(self) -> int | None:
        return self._process.returncode

    async def wait(self) -> int:
        return await self._process.wait()

    def write(self, line: bytes) -> None:
        """Sends a line, and waits for nothing."""
        assert self._process.stdin is not None, "the command has lines"
        self._process.stdin.write(line)

    async def send(self, line: bytes) -> None:
        self.write(line)
        assert self._process.stdin is not None
        with contextlib.suppress(ConnectionError):
            await self._process.stdin.drain()

    async def read_line(self) -> bytes:
        return await self._process.stdout.readline() if self._process.stdout is not None else b""

    def cancel(self) -> None:
        with contextlib.suppress(ProcessLookupError):
            self._process.send_signal(signal.SIGUSR1)  # cancels the job (`art_server/trainer/worker.py`)

    def counters(self) -> Counters:
        if self._work_file is not None:
            return Counters(read_work(self._work_file), 0.0, time.monotonic())
        return Counters(b"", cpu_seconds(self.pid), time.monotonic())

    async def end(self) -> None:
        # After the end of the process another program may have its id. Then `Children` kills what is left of its session.
        if self.returncode is None:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self.pid, signal.SIGKILL)
        await self._process.wait()
        if self._children is not None:
            await asyncio.to_thread(self._children.end, self.pid)


class Here:
    """This machine, with the devices of one engine or one rank."""

    machine = "this machine"
    silence_seconds = 0.0
    lost = address = server_address = ""

    def __init__(self, *, device: Device, children: Children | None = None, variables: Mapping[str, str] | None = None):
        """The processes are added to `children`. `variables` of the environment restrict a process to its devices."""
        self.device: Device = device
        self.variables = variables or {}
        self._children = children

    async def free_port(self) -> int:
        with socket.create_server(("", 0)) as trial:
            return trial.getsockname()[1]

    async def start(self, program: Program, log: LogFile) -> ProcessHere:
        command = await program.prepare()
        environment = {**command.environment, **self.variables}
        process = await start_child(command.arguments, log, environment, command.max_line_bytes, command.inherited)
        if self._children is not None:
            self._children.add(process.pid)
        return ProcessHere(process, command, self._children)

    async def deliver(self, folder: Path, names: Collection[str]) -> str:
        return str(folder)  # the process reads the server's own files

    async def collect(self, folder: Path) -> None:
        """Copies nothing: the process has written into the server's folder."""

    async def forget(self, folder: Path) -> None:
        """Deletes nothing: there is no copy."""

    async def keep_only(self, folders: Collection[Path]) -> None:
        """Deletes nothing: there are no copies."""


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
