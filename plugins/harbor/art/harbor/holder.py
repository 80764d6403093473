"""The process that holds one box: its files, and the processes of one command after the other. Runs as a script, without `art`.

    python -SEs holder.py FD FOLDER      holds the box of a folder for the program at the other end of the Unix socket FD
    python -SEs holder.py FD PORT PID    sends a socket that listens on PORT in the network of the process PID, a container's

The box's files are in memory: file systems with a limit on their size, in a mount namespace of this process. All of it ends with this
process, and this process ends when the program closes the socket, so also if the program is killed.

Each command runs in bubblewrap, in namespaces of its own. This process is the subreaper of the command's processes: a command has ended
when this process has no child. A listening socket belongs to the network namespace in which it was made, whoever accepts its
connections. So the program serves the box's loopback from outside, and the box needs no file and no program for its way out.
"""

import array
import ctypes
import fcntl
import json
import os
import resource
import select
import signal
import socket
import struct
import sys
from collections.abc import Callable
from typing import Any

NEW_MOUNTS, NEW_USER, NEW_NETWORK = 0x20000, 0x10000000, 0x40000000
NO_SUID, NO_DEVICES, RECURSIVE, PRIVATE, DETACH = 2, 4, 0x4000, 0x40000, 2
DEATH_SIGNAL, SUBREAPER = 1, 36
GET_FLAGS, SET_FLAGS, UP = 0x8913, 0x8914, 1
"""ioctl(2) of network interfaces (netdevice(7))."""
MAX_MESSAGE_BYTES = 1 << 17
OUTPUT, RECORD, FILTER = 1, 3, 4
"""File descriptors of a command: stdout and stderr, the pipe for its exit code, and the filter of system calls."""


def call(name: str, *arguments: Any) -> None:
    """A function of libc that returns 0.

    Raises:
        OSError: the function failed.
    """
    if getattr(ctypes.CDLL(None, use_errno=True), name)(*arguments) != 0:
        number = ctypes.get_errno()
        raise OSError(number, f"{name}: {os.strerror(number)}")


def listen(port: int) -> socket.socket:
    """A socket that listens on the loopback of this process's network."""
    listener = socket.socket(socket.AF_INET, socket.SOCK_STREAM)
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    listener.bind(("127.0.0.1", port))
    listener.listen(128)
    return listener


def send(program: socket.socket, message: dict[str, Any], *descriptors: int) -> None:
    rights = [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", descriptors))] if descriptors else []
    program.sendmsg([json.dumps(message).encode()], rights)


def make_namespaces() -> None:
    """Gives this process mounts of its own. Without root's rights, a user namespace gives the right to mount."""
    user, group = os.getuid(), os.getgid()
    if user != 0:
        call("unshare", NEW_USER | NEW_MOUNTS)
        for name, text in (("setgroups", "deny"), ("uid_map", f"{user} {user} 1"), ("gid_map", f"{group} {group} 1")):
            with open(f"/proc/self/{name}", "w") as file:
                file.write(text)
    else:
        call("unshare", NEW_MOUNTS)
    call("mount", b"none", b"/", None, RECURSIVE | PRIVATE, None)


def mount_files(folder: str, num_bytes: int) -> int:
    """Mounts an empty file system in memory. Returns a descriptor of its root."""
    options = f"size={num_bytes},nr_inodes={max(1024, num_bytes >> 12)},mode=0755".encode()
    call("mount", b"tmpfs", folder.encode(), b"tmpfs", NO_SUID | NO_DEVICES, options)
    return os.open(folder, os.O_RDONLY | os.O_DIRECTORY)


def bring_loopback_up() -> None:
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as any_socket:
        flags = fcntl.ioctl(any_socket, GET_FLAGS, struct.pack("16sH14x", b"lo", 0))
        flags = struct.unpack("16sH14x", flags)[1] | UP
        fcntl.ioctl(any_socket, SET_FLAGS, struct.pack("16sH14x", b"lo", flags))


def hold(program: socket.socket, folder: str) -> None:
    """Obeys the program's messages until the program ends."""
    call("prctl", SUBREAPER, 1, 0, 0, 0)
    num_bytes = json.loads(program.recv(MAX_MESSAGE_BYTES))["num_bytes"]
    work, scratch = f"{folder}/work", f"{folder}/scratch"
    try:
        make_namespaces()
        send(program, {}, mount_files(work, num_bytes))
    except OSError as error:
        return send(program, {"error": f"no file system in memory can be mounted here ({error})"})
    wakeup = signals_of_children()
    is_mounted = False
    while True:
        text, descriptors, _, _ = socket.recv_fds(program, MAX_MESSAGE_BYTES, 2)
        if not text:
            return None
        message = json.loads(text)
        if message["do"] == "empty":
            if is_mounted:
                call("umount2", scratch.encode(), DETACH)
            root = mount_files(scratch, num_bytes)
            is_mounted = True
            send(program, {}, root)
            os.close(root)
        elif message["do"] == "run":
            child = os.fork()
            if child == 0:
                become_command(program, message, *descriptors)
            for descriptor in descriptors:
                os.close(descriptor)
            exit_code = wait_for_all(program, child, wakeup)
            if exit_code is None:
                return None
            send(program, {"ended": exit_code})


def become_command(program: socket.socket, message: dict[str, Any], output: int, record: int) -> None:
    """Makes this new process the command, in bubblewrap. An error is written into the command's output."""
    try:
        os.dup2(output, OUTPUT)
        os.dup2(output, 2)
        os.setsid()
        call("prctl", DEATH_SIGNAL, signal.SIGKILL, 0, 0, 0)
        for file in message["cgroups"]:
            with open(file, "w") as processes:
                processes.write(str(os.getpid()))
        call("unshare", NEW_NETWORK)
        bring_loopback_up()
        listener = listen(message["port"])
        send(program, {"listening": True}, listener.fileno())
        reading, writing = os.pipe()
        os.write(writing, bytes.fromhex(message["filter"]))
        # Copies above the numbers that the command gets, which may be in use.
        sources = [fcntl.fcntl(descriptor, fcntl.F_DUPFD, 64) for descriptor in (record, reading)]
        os.closerange(RECORD, 64)
        os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
        for source, number in zip(sources, (RECORD, FILTER), strict=True):
            os.dup2(source, number)
        os.closerange(FILTER + 1, 4096)
        for name, value in message["limits"].items():
            limit = getattr(resource, f"RLIMIT_{name}")
            hard = resource.getrlimit(limit)[1]
            value = value if hard == resource.RLIM_INFINITY else min(value, hard)
            resource.setrlimit(limit, (value, value))
        signal.set_wakeup_fd(-1)
        for number in (signal.SIGINT, signal.SIGPIPE, signal.SIGCHLD):
            signal.signal(number, signal.SIG_DFL)
        os.execve(message["command"][0], message["command"], message["environment"])
    except OSError as error:
        os.write(2, f"the sandbox does not start: {error}\n".encode())
    finally:
        os._exit(125)


def signals_of_children() -> int:
    """A descriptor that can be read after a child has ended."""
    reading, writing = os.pipe()
    os.set_blocking(reading, False)
    os.set_blocking(writing, False)
    signal.set_wakeup_fd(writing, warn_on_full_buffer=False)
    do_nothing: Callable[..., None] = lambda *_: None  # noqa: E731
    signal.signal(signal.SIGCHLD, do_nothing)
    return reading


def wait_for_all(program: socket.socket, child: int, wakeup: int) -> int | None:
    """Waits until all processes of a command have ended, and kills them when the program asks for that or has ended. Returns the exit
    code of bubblewrap's outer process, below 0 after a signal; None if the program has ended."""
    is_over, exit_code = False, 0
    watched = [program.fileno(), wakeup]
    while True:
        try:
            while (ended := os.waitpid(-1, os.WNOHANG))[0] != 0:
                if ended[0] == child:  # what is inside ends with the outer process
                    exit_code = os.waitstatus_to_exitcode(ended[1])
                    kill_children()
        except ChildProcessError:
            return None if is_over else exit_code
        ready = select.select(watched, [], [], 1.0)[0]
        if wakeup in ready:
            os.read(wakeup, 4096)
        if program.fileno() in ready:
            if not program.recv(MAX_MESSAGE_BYTES):
                is_over = True
                watched = [wakeup]
            kill_children()


def kill_children() -> None:
    """Kills the children of this process. The first process of a namespace takes all others of the namespace with it."""
    with open(f"/proc/self/task/{os.getpid()}/children") as file:
        for child in file.read().split():
            os.kill(int(child), signal.SIGKILL)  # still ours: only this thread waits for children


def send_listener(program: socket.socket, port: int, process: str) -> None:
    """Sends a socket that listens in the network of another process. The process's user namespace is joined if it is another."""
    if os.stat(f"/proc/{process}/ns/user").st_ino != os.stat("/proc/self/ns/user").st_ino:
        call("setns", os.open(f"/proc/{process}/ns/user", os.O_RDONLY), NEW_USER)
    call("setns", os.open(f"/proc/{process}/ns/net", os.O_RDONLY), NEW_NETWORK)
    listener = listen(port)
    send(program, {}, listener.fileno())


if __name__ == "__main__":
    connection = socket.socket(fileno=int(sys.argv[1]))
    if len(sys.argv) == 3:
        hold(connection, sys.argv[2])
    else:
        send_listener(connection, int(sys.argv[2]), sys.argv[3])
