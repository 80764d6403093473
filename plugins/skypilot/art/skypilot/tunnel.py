"""`Tunnel`: forwards a port of this machine through ssh to a port on another machine's loopback."""

import asyncio
import atexit
import os
import shlex
import signal
import socket
import subprocess

from art.errors import ArtError

SSH = shlex.split(
    "ssh -T -o BatchMode=yes -o ControlPath=none -o ConnectTimeout=15 -o LogLevel=ERROR "
    "-o ServerAliveInterval=15 -o ServerAliveCountMax=4 -o ExitOnForwardFailure=yes"
)
"""A separate connection (no ControlPath) that notices within a minute when the other machine is gone."""


PAUSE_SECONDS: float = 2  # as an integer, which every shell can sleep
"""Pause between the end of a tunnel and the start of the next tunnel."""


class Tunnel:
    """An open tunnel to `remote_port` of `host`, a name in ~/.ssh/config. A broken tunnel is opened again."""

    def __init__(self, host: str, remote_port: int) -> None:
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            port: int = free.getsockname()[1]
        self.url = f"http://127.0.0.1:{port}"
        forward = f"127.0.0.1:{port}:127.0.0.1:{remote_port}"
        # `cat` ends when this program closes its input, so the tunnel ends with the program, even if the program is killed.
        command = shlex.join([*SSH, "-L", forward, host, "cat"])
        self._process = subprocess.Popen(
            [
                "sh",
                "-c",
                f"until {command}; do kill -0 {os.getpid()} 2>/dev/null || exit; sleep {PAUSE_SECONDS}; done",
            ],
            stdin=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
            start_new_session=True,  # Ctrl-C reaches only the program, which then closes the tunnel
        )
        atexit.register(self.close)

    def close(self) -> None:
        """Closes the tunnel, which takes milliseconds."""
        atexit.unregister(self.close)
        if self._process.poll() is None:
            os.killpg(self._process.pid, signal.SIGTERM)
        self._process.communicate()


async def run_ssh(host: str, command: str) -> str:
    """The output of the command on the host.

    Raises:
        ArtError: ssh or the command fails.
    """
    return await run_process([*SSH, host, command])


async def run_process(command: list[str]) -> str:
    """The output of the command.

    Raises:
        ArtError: the command fails; the message contains its error output.
    """
    process = await asyncio.create_subprocess_exec(
        *command, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.PIPE
    )
    try:
        output, errors = await process.communicate()
    finally:
        if process.returncode is None:
            process.kill()
    if process.returncode == 0:
        return output.decode()
    reason = errors.decode(errors="replace").strip()
    shown = shlex.join([command[0], "...", *command[-2:]])
    raise ArtError(f"`{shown}` ended with exit code {process.returncode}: {reason}")
