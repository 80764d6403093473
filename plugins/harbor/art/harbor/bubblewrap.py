"""The sandbox `Bubblewrap`: Linux namespaces made by the program `bwrap`, without images and without a daemon.

A box sees the host's system folders read-only, the folders that the user mounts read-only, its workdir, and private folders for the
rest. Its network is a loopback, on which a gateway answers for one session. `holder.py` has the processes and files of a box.

As root, each box has a user id of its own and no capabilities. As another user, a box has the user's id in a user namespace.
"""

import asyncio
import contextlib
import json
import os
import shutil
import socket
import stat
import sys
import time
from collections.abc import Generator, Mapping
from dataclasses import dataclass, field
from io import FileIO
from pathlib import Path, PurePosixPath
from typing import Any

from art.harbor import boxes, holder
from art.harbor.dockerfile import Contents, read_dockerfile
from art.harbor.errors import SandboxFailed, TaskRefused
from art.harbor.gateway import PORT, Gateway
from art.harbor.sandbox import MAX_RESULT_BYTES, MAX_RESULTS, OUTPUT_BYTES, Execution, why_no_sandbox
from art.harbor.seccomp import make_filter
from art.harbor.tasks import Task

HOLDER = Path(holder.__file__)
SYSTEM = ("bin", "sbin", "lib", "lib32", "lib64")
"""Folders of the root that are links into /usr, or folders on old systems."""
OF_ETC = (
    "alternatives",
    "ca-certificates",
    "ld.so.cache",
    "ld.so.conf",
    "ld.so.conf.d",
    "localtime",
    "mime.types",
    "ssl",
)
"""What programs of /usr need of the host's /etc. None of it is secret."""
TAKEN = (
    "/art",
    "/bin",
    "/dev",
    "/etc",
    "/lib",
    "/lib32",
    "/lib64",
    "/logs",
    "/proc",
    "/sbin",
    "/sys",
    "/tests",
    "/tmp",
    "/usr",
    "/var",
)
"""Folders that cannot be the workdir, nor contain it."""
HOME = "/home/agent"
NUM_FILES = 4096
KILLED = 128 + 9
CAPABILITIES = ("CAP_SETUID", "CAP_SETGID", "CAP_SETPCAP")
"""What `setpriv` needs to leave root's id and drop all capabilities."""
SCRIPT = "/art/command.sh"
AND_NOTE = '"$@" 3>&-; echo $? >&3'
"""Runs a command and notes its exit code. A box that was killed from outside notes none."""


@dataclass(frozen=True, slots=True)
class Bubblewrap:
    """A sandbox for Linux, from bubblewrap's program `bwrap`. The kernel is the host's: see SECURITY.md."""

    mounts: Mapping[str, str | Path] = field(default_factory=dict[str, str | Path])
    """Folders of the host by their paths in the box, read-only: {"/opt/agents": "~/agents"}."""
    memory_mb: int = 2048
    """Memory of a box. For all its processes where this user can make cgroups, else for each process."""
    disk_mb: int = 1024
    """Size of the workdir, and of all other files together. Both are in memory."""
    num_processes: int = 256
    """Processes and threads of a box."""

    async def start(self, task: Task) -> "BubblewrapBox":
        """A box whose workdir has the files that the task's Dockerfile copies.

        Raises:
            TaskRefused: bubblewrap cannot give what the task needs.
            SandboxFailed: bubblewrap does not work here.
        """
        contents = self._contents(task)
        try:
            folder = await asyncio.to_thread(boxes.new_folder)
        except OSError as error:
            raise SandboxFailed(f"no folder for a box can be made in {boxes.state_folder()}: {error}") from error
        box = BubblewrapBox(self, contents, folder)
        try:
            await box.start()
        except BaseException:
            await asyncio.shield(box.stop())
            raise
        return box

    def _contents(self, task: Task) -> Contents:
        reason = self._why_not(task)
        if reason is not None:
            raise TaskRefused(f"the task {task.name} cannot run in bubblewrap: {reason}")
        has_file = (task.environment / "Dockerfile").exists()
        contents = read_dockerfile(task.environment) if has_file else Contents()
        workdir = PurePosixPath(task.settings.environment.workdir or contents.workdir or "/app")
        if not workdir.is_absolute() or ".." in workdir.parts or str(workdir) == "/":
            raise TaskRefused(f"the task {task.name}: the workdir {workdir} is no absolute path below /")
        if any(workdir.is_relative_to(folder) or PurePosixPath(folder).is_relative_to(workdir) for folder in TAKEN):
            raise TaskRefused(f"the task {task.name}: the workdir {workdir} is a folder of the box itself")
        if not has_file and task.environment.is_dir():
            contents.copies = [(task.environment, workdir, False)]
        for source, path, _ in contents.copies:
            if not path.is_relative_to(workdir):
                raise TaskRefused(
                    f"the task {task.name}: COPY {source.name} goes to {path}, outside of the workdir {workdir}"
                )
        contents.variables |= task.settings.environment.env
        contents.workdir = workdir
        return contents

    def _why_not(self, task: Task) -> str | None:
        """What the task needs and bubblewrap cannot give; None: nothing."""
        environment = task.settings.environment
        reasons = {
            "environment.docker_image names an image, and there are no images": environment.docker_image is not None,
            "agent.user root: a box has no root": task.settings.agent.user in (0, "root"),
            f"environment.storage_mb is more than Bubblewrap(disk_mb={self.disk_mb})": (environment.storage_mb or 0)
            > self.disk_mb,
        }
        return why_no_sandbox(task, self.memory_mb) or next((reason for reason in reasons if reasons[reason]), None)


class BubblewrapBox:
    """A running box. Not for commands side by side."""

    def __init__(self, sandbox: Bubblewrap, contents: Contents, folder: boxes.BoxFolder) -> None:
        self._sandbox, self._contents, self._folder = sandbox, contents, folder
        self._user = folder.user if os.getuid() == 0 else None
        self._process: asyncio.subprocess.Process | None = None
        self._socket, self._far = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._socket.setblocking(False)
        self._cgroups: list[Path] = []
        self._is_stopped = False

    async def start(self) -> None:
        programs = ["bwrap", *(["setpriv"] if self._user is not None else [])]
        for program in programs:
            if shutil.which(program) is None:
                package = {"bwrap": "bubblewrap", "setpriv": "util-linux"}[program]
                raise SandboxFailed(f"the program {program} is not installed (package {package})")
        self._process = await asyncio.create_subprocess_exec(
            *(sys.executable, "-SEs", HOLDER, str(self._far.fileno()), self._folder.path),
            pass_fds=[self._far.fileno()],
            stdin=asyncio.subprocess.DEVNULL,
            stdout=asyncio.subprocess.DEVNULL,
            stderr=asyncio.subprocess.DEVNULL,
            env={},
            start_new_session=True,
        )
        self._far.close()
        folder, disk_bytes = self._folder.path, self._sandbox.disk_mb << 20
        boxes.note_holder(folder, self._process.pid)
        memory_bytes = (self._sandbox.memory_mb << 20) + disk_bytes
        self._cgroups = boxes.make_cgroups(
            folder, memory_bytes, self._sandbox.num_processes + len(AND_NOTE.split(";")) + 1
        )
        await self._send({"num_bytes": disk_bytes})
        with closing(await self._receive_descriptor()) as root:
            await asyncio.to_thread(self._copy_task, Path(f"/proc/self/fd/{root}"))
        execution = await self.exec("true", env={}, timeout_seconds=60)
        if execution.exit_code != 0:
            raise SandboxFailed(
                f"bubblewrap runs no command here (exit code {execution.exit_code}): {execution.output.strip()}"
            )

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
        """See `sandbox.Box.exec`. Everything but the workdir is new for each command: home, /tmp, /logs, namespaces."""
        await self._send({"do": "empty"})
        with closing(await self._receive_descriptor()) as root:
            scratch = Path(f"/proc/self/fd/{root}")
            binds = await asyncio.to_thread(
                self._fill, scratch, {SCRIPT: command, **(files or {})}, folders or {}, results
            )
            variables = {
                "HOME": HOME,
                "LANG": "C.UTF-8",
                "PATH": "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin",
                "USER": "agent",
                **self._contents.variables,
                **env,
            }
            message = {
                "do": "run",
                "command": self._arguments(binds, cwd),
                "environment": variables,
                "cgroups": [str(group / "cgroup.procs") for group in self._cgroups],
                "limits": self._limits(),
                "filter": make_filter().hex(),
                "port": PORT,
            }
            execution = await self._run(message, timeout_seconds, gateway)
            if results is not None:
                execution.results.update(await asyncio.to_thread(read_results, root))
        return execution

    async def stop(self) -> None:
        """Ends the box's process, with which all its processes, mounts and files end, and removes its folder."""
        if self._is_stopped:
            return
        self._is_stopped = True
        self._socket.close()
        self._far.close()
        if self._process is not None:
            await self._process.wait()
        await asyncio.to_thread(self._folder.remove)

    async def _run(self, message: dict[str, Any], timeout_seconds: float, gateway: Gateway | None) -> Execution:
        begun, is_late, outer = time.monotonic(), False, 0
        with pipe() as (output, output_end), pipe() as (record, record_end):
            await self._send(message, output_end.fileno(), record_end.fileno())
            output_end.close()
            record_end.close()
            tail = asyncio.create_task(read_tail(output))
            try:
                try:
                    async with asyncio.timeout(timeout_seconds):
                        outer = await self._until_ended(gateway)
                except TimeoutError:
                    is_late = True
                    await self._send({"do": "kill"})
                    await self._until_ended(None)
                text = (await tail).decode(errors="replace")
            finally:
                tail.cancel()
            noted = (record.read(16) or b"").decode(errors="replace").strip()
        if self._user is None and outer == KILLED and not noted:
            noted = str(KILLED)  # with the agent's own user id, the agent can kill the shell that notes the exit code
        if not noted.isdecimal() and not is_late:
            last_words = text.strip()[-1000:] or "none"
            raise SandboxFailed(f"the sandbox ended before its command. Its last words: {last_words}")
        return Execution(None if is_late else int(noted), time.monotonic() - begun, text)

    async def _until_ended(self, gateway: Gateway | None) -> int:
        """Waits until no process of the command is left. The gateway serves the command meanwhile. Returns the exit code of bubblewrap."""
        async with contextlib.AsyncExitStack() as stack:
            while True:
                message, descriptors = await self._receive()
                if "ended" in message:
                    return message["ended"]
                for descriptor in descriptors:
                    listener = socket.socket(fileno=descriptor)
                    if gateway is None:
                        listener.close()
                    else:
                        await stack.enter_async_context(gateway.serving(listener))

    def _copy_task(self, root: Path) -> None:
        workdir = self._contents.workdir
        assert workdir is not None, "`Bubblewrap._contents` sets it"
        for source, path, is_folder in self._contents.copies:
            target = root / path.relative_to(workdir)
            copy_in(source, target / source.name if is_folder and source.is_file() else target)
        self._give(root)

    def _fill(
        self, scratch: Path, files: Mapping[str, str], folders: Mapping[str, Path], results: str | None
    ) -> dict[str, tuple[str, bool]]:
        """Makes the folders and files of one command. Maps their paths in the box to their paths on the host, and whether the command
        may write there."""
        folder = self._folder.path / "scratch"
        binds: dict[str, tuple[str, bool]] = {}
        private = {"/tmp": "tmp", "/dev/shm": "shm", HOME: "home", "/logs": "logs"}
        for path, name in private.items():
            (scratch / name).mkdir()
            binds[path] = (str(folder / name), True)
        for name in ("agent", "artifacts", "verifier"):
            (scratch / "logs" / name).mkdir()
        if results is not None:
            (scratch / "results").mkdir()
            binds[results] = (str(folder / "results"), True)
        for number, (path, source) in enumerate(folders.items()):
            copy_in(source, scratch / f"folder-{number}")
            binds[path] = (str(folder / f"folder-{number}"), True)
        user = self._user if self._user is not None else os.getuid()
        group = self._user if self._user is not None else os.getgid()
        texts = {
            **files,
            "/etc/passwd": f"root:x:0:0::/:/bin/false\nagent:x:{user}:{group}::{HOME}:/bin/bash\n",
            "/etc/group": f"root:x:0:\nagent:x:{group}:\n",
            "/etc/hosts": "127.0.0.1 localhost box\n::1 localhost\n",
            "/etc/nsswitch.conf": "passwd: files\ngroup: files\nhosts: files\n",
        }
        for number, (path, text) in enumerate(texts.items()):
            (scratch / f"file-{number}").write_text(text)
            binds[path] = (str(folder / f"file-{number}"), False)
        self._give(scratch)
        return binds

    def _give(self, root: Path) -> None:
        """Gives all files below a folder to the box's user. All may enter the folder itself, which has the mode of a task's private folder
        otherwise: bubblewrap goes there before it takes the user's id."""
        os.chmod(root, 0o755)
        if self._user is None:
            return
        for path, folders, files in os.walk(f"{root}/"):
            for name in ("", *folders, *files):
                os.chown(os.path.join(path, name), self._user, self._user, follow_symlinks=not name)

    def _arguments(self, binds: Mapping[str, tuple[str, bool]], cwd: str | None) -> list[str]:
        """The command line of `bwrap`."""
        words = [
            shutil.which("bwrap") or "bwrap",
            "--unshare-ipc",
            "--unshare-pid",
            "--unshare-uts",
            "--unshare-cgroup-try",
        ]
        words += ["--die-with-parent", "--new-session", "--hostname", "box", "--seccomp", str(holder.FILTER)]
        if self._user is None:
            words += ["--unshare-user"]
        else:
            words += ["--cap-drop", "ALL", *(word for name in CAPABILITIES for word in ("--cap-add", name))]
        workdir = str(self._contents.workdir)
        # Made first: bubblewrap gives the folders above a mount to root alone.
        folders = {
            str(folder)
            for path in ("/etc/passwd", workdir, *binds, *self._sandbox.mounts)
            for folder in PurePosixPath(path).parents
        }
        words += [word for folder in sorted({*folders, "/run", "/var"} - {"/"}) for word in ("--dir", folder)]
        words += ["--ro-bind", "/usr", "/usr"]
        for name in SYSTEM:
            path = Path("/", name)
            if path.is_symlink():
                words += ["--symlink", os.readlink(path).lstrip("/"), str(path)]
            elif path.is_dir():
                words += ["--ro-bind", str(path), str(path)]
        for name in OF_ETC:
            words += ["--ro-bind-try", f"/etc/{name}", f"/etc/{name}"]
        words += ["--proc", "/proc", "--dev", "/dev", "--symlink", "../tmp", "/var/tmp"]
        words += ["--bind", str(self._folder.path / "work"), workdir]
        for path, (source, is_writable) in binds.items():
            words += ["--bind" if is_writable else "--ro-bind", source, path]
        for path, source in self._sandbox.mounts.items():
            words += ["--ro-bind", str(Path(source).expanduser().absolute()), path]
        words += ["--remount-ro", "/dev", "--remount-ro", "/", "--chdir", cwd or workdir]
        words += ["--", "/bin/sh", "-c", AND_NOTE, "sh"]
        if self._user is not None:
            ids = f"--reuid={self._user} --regid={self._user} --clear-groups".split()
            words += ["setpriv", *ids, "--inh-caps=-all", "--bounding-set=-all", "--no-new-privs"]
        return [*words, "/bin/bash", SCRIPT]

    def _limits(self) -> dict[str, int]:
        """Limits of each process (setrlimit(2)). Memory that is only reserved does not count as DATA; where cgroups limit the memory of
        the box, there is no such limit, because some runtimes map more than they use."""
        limits = {
            "NPROC": self._sandbox.num_processes,
            "FSIZE": self._sandbox.disk_mb << 20,
            "CORE": 0,
            "NOFILE": NUM_FILES,
        }
        has_memory_limit = any(
            (group / name).exists() for group in self._cgroups for name in ("memory.max", "memory.limit_in_bytes")
        )
        return limits if has_memory_limit else {**limits, "DATA": self._sandbox.memory_mb << 20}

    async def _send(self, message: dict[str, Any], *descriptors: int) -> None:
        try:
            holder.send(self._socket, message, *descriptors)
        except OSError as error:
            raise SandboxFailed(f"the sandbox's process has ended ({error})") from error

    async def _receive(self) -> tuple[dict[str, Any], list[int]]:
        """The holder's next message."""
        loop = asyncio.get_running_loop()
        while True:
            try:
                text, descriptors, _, _ = socket.recv_fds(self._socket, holder.MAX_MESSAGE_BYTES, 1)
            except BlockingIOError:
                readable = loop.create_future()
                loop.add_reader(self._socket, lambda future=readable: future.done() or future.set_result(None))
                try:
                    await readable
                finally:
                    loop.remove_reader(self._socket)
                continue
            except OSError as error:
                raise SandboxFailed(f"the sandbox's process has ended ({error})") from error
            if not text:
                raise SandboxFailed(
                    "the sandbox's process has ended: it was killed, or its user namespaces are forbidden here"
                )
            message = json.loads(text)
            if "error" in message:
                raise SandboxFailed(message["error"])
            return message, descriptors

    async def _receive_descriptor(self) -> int:
        _, (descriptor,) = await self._receive()
        return descriptor


@contextlib.contextmanager
def closing(descriptor: int) -> Generator[int]:
    try:
        yield descriptor
    finally:
        os.close(descriptor)


def copy_in(source: Path, target: Path) -> None:
    """Copies a file, or what is in a folder, to where no command has written yet. Links are copied as links.

    Raises:
        TaskRefused: the files cannot be read, or are too large for the box.
    """
    try:
        if source.is_dir():
            shutil.copytree(source, target, symlinks=True, dirs_exist_ok=True)
        else:
            target.parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(source, target)
    except (OSError, shutil.Error) as error:
        raise TaskRefused(f"{source} cannot be copied into the box: {error}") from error


@contextlib.contextmanager
def pipe() -> Generator[tuple[FileIO, FileIO]]:
    """The two ends of a pipe, of which the first is read."""
    reading, writing = os.pipe()
    with FileIO(reading, "rb") as reading_end, FileIO(writing, "wb") as writing_end:
        yield reading_end, writing_end


async def read_tail(pipe: FileIO) -> bytes:
    """The end of what comes out of a pipe."""
    reader = asyncio.StreamReader()
    transport, _ = await asyncio.get_running_loop().connect_read_pipe(
        lambda: asyncio.StreamReaderProtocol(reader), pipe
    )
    tail = b""
    try:
        while block := await reader.read(OUTPUT_BYTES):
            tail = (tail + block)[-OUTPUT_BYTES:]
    finally:
        transport.close()
    return tail


def read_results(root: int) -> dict[str, bytes | None]:
    """The files of the folder for results, below the descriptor of a box's files. No link is followed, and no process is left that
    could change them."""
    folder = os.open("results", os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW, dir_fd=root)
    try:
        names = sorted(os.listdir(folder))[:MAX_RESULTS]
        return {name: read_plain_file(name, folder) for name in names}
    finally:
        os.close(folder)


def read_plain_file(name: str, folder: int) -> bytes | None:
    try:
        descriptor = os.open(name, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK, dir_fd=folder)
    except OSError:
        return None
    with closing(descriptor):
        status = os.fstat(descriptor)
        if not stat.S_ISREG(status.st_mode) or status.st_size > MAX_RESULT_BYTES:
            return None
        return os.read(descriptor, MAX_RESULT_BYTES)
