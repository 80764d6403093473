"""Trainer processes that share the seconds of their imports: one parent imports the trainer, and forks each process.

`start_child` is used in place of `process/children.py`'s. Apart from the imports a process is as one that Python started: it has
a session, a log, an environment and pipes of its own, and can be killed and stopped.

    python -m tests.fakes.forked SOCKET     the parent; ends with the process that started it
"""

import asyncio
import contextlib
import json
import os
import runpy
import select
import signal
import socket
import subprocess
import sys
import tempfile
import traceback
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import NoReturn

from art_protocol.log_file import LogFile
from art_server.process import children

FORKED = ("art_server.trainer.worker", "art_server.trainer.unsloth_worker", "faulty_rank.py")
"""Programs of the trainer; all others are started as usual."""
MAX_MESSAGE_BYTES = 2**20

Pipe = tuple[asyncio.StreamReader, asyncio.StreamWriter]


class Forked:
    """A process, as `asyncio.subprocess.Process`."""

    def __init__(self, pid: int, pipe: Pipe, control: Pipe) -> None:
        self.pid = pid
        self.returncode: int | None = None
        self.stdout, self.stdin = pipe
        self._exit = asyncio.create_task(self._wait(control))

    async def _wait(self, control: Pipe) -> int:
        reader, writer = control
        self.returncode = int(await reader.readline())
        for open_end in (self.stdin, writer):
            open_end.close()
            with contextlib.suppress(ConnectionError):
                await open_end.wait_closed()
        return self.returncode

    async def wait(self) -> int:
        return await asyncio.shield(self._exit)

    def send_signal(self, number: int) -> None:
        if self.returncode is not None:
            raise ProcessLookupError
        os.kill(self.pid, number)


class Parent:
    """The parent of this program's trainer processes, which starts with the first of them."""

    def __init__(self) -> None:
        self._process: subprocess.Popen[bytes] | None = None
        self._folder = tempfile.TemporaryDirectory(prefix="art-forked-")
        self._socket = Path(self._folder.name) / "socket"

    def _start(self) -> subprocess.Popen[bytes]:
        if self._process is None:
            command = [sys.executable, "-m", "tests.fakes.forked", str(self._socket)]
            self._process = subprocess.Popen(command, stdin=subprocess.DEVNULL, start_new_session=True)
        return self._process

    async def connect(self) -> socket.socket:
        process = self._start()
        while not self._socket.exists():
            await asyncio.sleep(0.05)
            assert process.poll() is None, "the parent of the trainer processes ended"
        assert process.poll() is None, "the parent of the trainer processes ended"
        connection = socket.socket(socket.AF_UNIX)
        connection.connect(str(self._socket))
        return connection


parent = Parent()


async def start_child(
    command: Sequence[str],
    log: LogFile,
    environment: Mapping[str, str] | None = None,
    max_line_bytes: int | None = None,
    inherited: Sequence[int] = (),
) -> "asyncio.subprocess.Process | Forked":
    """As `children.start_child`."""
    if not any(part.endswith(FORKED) for part in command[1:3]):
        return await children.start_child(command, log, environment, max_line_bytes, inherited)
    assert max_line_bytes is not None, "a trainer has pipes"
    message = {
        "arguments": command[1:],
        "environment": {**(os.environ if environment is None else environment)},
        "folder": os.getcwd(),
    }
    connection = await parent.connect()
    own_end, end = socket.socketpair()
    with contextlib.ExitStack() as undo:  # a start can be cancelled; the process then ends at the end of its stdin
        with end, log.open() as file:
            socket.send_fds(connection, [json.dumps(message).encode()], [end.fileno(), file.fileno()])
        control = await asyncio.open_connection(sock=connection)
        undo.callback(control[1].close)
        pipe = await asyncio.open_connection(sock=own_end, limit=max_line_bytes)
        undo.callback(pipe[1].close)
        pid = int(await control[0].readline())
        undo.pop_all()
    return Forked(pid, pipe, control)


def main(path: str) -> None:
    """Forks a process for each connection. The connection gets the process id, and later the exit code."""
    import art_server.trainer.tasks  # noqa: F401  # what all processes share

    children.be_child()
    listening = socket.socket(socket.AF_UNIX)
    listening.bind(path + ".new")
    listening.listen()
    os.rename(path + ".new", path)
    running: dict[int, tuple[int, socket.socket]] = {}
    """The process id and the connection by the file descriptor that becomes readable when the process ends."""
    while True:
        ready, _, _ = select.select([listening, *running], [], [])
        for descriptor in ready:
            if isinstance(descriptor, socket.socket):
                connection, _ = listening.accept()
                content, descriptors, _, _ = socket.recv_fds(connection, MAX_MESSAGE_BYTES, 2)
                if not content:  # the program that asked for the process was cancelled
                    connection.close()
                    continue
                pid = os.fork()
                if pid == 0:
                    for _, other in running.values():
                        other.close()
                    listening.close()
                    os.setsid()
                    with contextlib.suppress(BrokenPipeError), connection:
                        connection.sendall(b"%d\n" % os.getpid())  # whoever knows the process may kill its session
                    become(json.loads(content), *descriptors)
                for handed_on in descriptors:
                    os.close(handed_on)
                running[os.pidfd_open(pid)] = (pid, connection)
            else:
                pid, connection = running.pop(descriptor)
                os.close(descriptor)
                _, status = os.waitpid(pid, 0)
                with contextlib.suppress(BrokenPipeError), connection:
                    connection.sendall(b"%d\n" % os.waitstatus_to_exitcode(status))


def become(message: dict[str, object], pipe: int, log: int) -> NoReturn:
    """Becomes the program of a message."""
    code = 1
    try:
        for descriptor, number in ((pipe, 0), (pipe, 1), (log, 2)):
            os.dup2(descriptor, number)
        os.close(pipe)
        os.close(log)
        os.chdir(str(message["folder"]))
        os.environ.clear()
        os.environ.update(message["environment"], **{children.PARENT_VARIABLE: str(os.getppid())})  # type: ignore[arg-type]
        signal.set_wakeup_fd(-1)
        sys.argv = list(message["arguments"])  # type: ignore[call-overload]
        if sys.argv[0] == "-m":
            del sys.argv[0]
            runpy.run_module(sys.argv[0], run_name="__main__", alter_sys=True)
        else:
            runpy.run_path(sys.argv[0], run_name="__main__")
        code = 0
    except SystemExit as error:
        code = error.code if isinstance(error.code, int) else 0 if error.code is None else 1
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stderr.flush()
        os._exit(code)


if __name__ == "__main__":
    main(sys.argv[1])
