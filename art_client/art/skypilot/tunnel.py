"""`Tunnel`: a port of this machine that leads, through ssh, to a port of another machine's loopback."""

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
"""A connection of its own (no ControlPath), which notices within a minute that the other side is gone."""


class Tunnel:
    """An open tunnel to `remote_port` of `host`, a name of ~/.ssh/config. A tunnel that breaks is opened again."""

    def __init__(self, host: str, remote_port: int) -> None:
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            port: int = free.getsockname()[1]
        self.url = f"http://127.0.0.1:{port}"
        forward = f"127.0.0.1:{port}:127.0.0.1:{remote_port}"
        # `cat` ends with its input, which this program holds: the tunnel ends with the program, even if it is killed.
        command = shlex.join([*SSH, "-L", forward, host, "cat"])
        self._process = subprocess.Popen(
            ["sh", "-c", f"until {command}; do sleep 2; done"],
            stdin=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
            start_new_session=True,  # Ctrl-C is the program's to handle; it then closes the tunnel
        )
        atexit.register(self.close)

    def close(self) -> None:
        """Takes milliseconds."""
        atexit.unregister(self.close)
        if self._process.poll() is None:
            os.killpg(self._process.pid, signal.SIGTERM)
        self._process.communicate()


async def run_ssh(host: str, command: str) -> str:
    """What the command prints on the host. Raises ArtError when ssh or the command fails."""
    return await run_command([*SSH, host, command])


async def run_command(command: list[str]) -> str:
    """What the command prints. Raises ArtError with its last words when it fails."""
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
    raise ArtError(f"`{shown}` ended with {process.returncode}: {reason}")
