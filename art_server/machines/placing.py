"""`--cluster`, on the server's side: the child process that has Ray place hosts (`ray_process.py`)."""

import asyncio
import hashlib
import importlib.util
import json
import logging
import os
import secrets
import shutil
import socket
import sys
import tempfile
from pathlib import Path

from art_protocol.log_file import LogFile
from art_server.errors import UsageError, missing_extra
from art_server.machines.orders import HostMessage
from art_server.process.children import Children, kill_left, start_child
from art_server.settings import ApiKey, ServerConfig
from art_server.store import files

logger = logging.getLogger(__name__)

AUTO, ADDRESS_VARIABLE = "auto", "RAY_ADDRESS"
ANSWER_SECONDS = 5.0
"""Limit for the first answer of Ray's address."""
HEAD_SECONDS = 10
"""Ray's head may be away for this long before the process ends and starts anew. Ray's own limit is 60 s."""
CANNOT = 2
"""The process's status when Ray cannot do what is asked."""


class Placing(HostMessage):
    """The hosts that Ray is to place, and the server that they join."""

    address: str | None
    """None: start Ray on this machine."""
    temp_dir: str
    """The folder of a Ray that is started on this machine. Ray's sockets allow short paths only."""
    engines: int
    ranks: int
    url: str
    key: str
    number: str
    """Distinguishes the files of this server's hosts from the files of other servers' hosts on the same machine."""


class RayEnded(Exception):
    """The process has ended, and its hosts with it."""


class RayProcess:
    """The process that has Ray place hosts, started again whenever the process ends."""

    def __init__(self, config: ServerConfig, children: Children):
        """Checks what can be checked before anything starts.

        Raises:
            UsageError: Ray is not installed, or Ray's address does not answer.
        """
        if importlib.util.find_spec("ray") is None:
            raise missing_extra(ModuleNotFoundError(name="ray"), "cluster")
        self._address = config.cluster
        if self._address == AUTO:
            self._address = os.environ.get(ADDRESS_VARIABLE) or None
        if self._address is not None:
            check_answers(self._address)
        self.key = ApiKey(key=secrets.token_urlsafe(32), scopes=frozenset({"host"}))
        """The key with which the hosts join. Each start of the server makes another key."""
        self.fatal: BaseException | None = None
        """Why Ray cannot place the hosts. The server then ends."""
        self._config = config
        self._children = children
        self._log = LogFile(config.log_dir / "ray.log")
        self._number = hashlib.sha256(str(config.server_dir.resolve()).encode()).hexdigest()[:8]
        self._temp_dir = Path(tempfile.gettempdir()) / f"art-ray-{self._number}"
        self._is_first = True

    async def run(self) -> None:
        """Returns if the first process finds that Ray cannot do what is asked; `fatal` is then set.

        Raises:
            RayEnded: the process has ended.
        """
        is_first, self._is_first = self._is_first, False
        await asyncio.to_thread(shutil.rmtree, self._temp_dir, ignore_errors=True)
        self._temp_dir.mkdir(mode=0o700)
        environment = await asyncio.to_thread(self._environment)
        command = [sys.executable, "-m", "art_cluster.ray_process"]
        process = await start_child(command, self._log, environment, max_line_bytes=2**16)
        self._children.add(process.pid)
        try:
            output, _ = await process.communicate(self._placing().model_dump_json().encode())
            kill_left(process.pid)  # Ray's own processes
        finally:
            await asyncio.to_thread(self._children.end, process.pid)
            await asyncio.to_thread(shutil.rmtree, self._temp_dir, ignore_errors=True)
        reason = output.decode(errors="replace").strip()
        if process.returncode == CANNOT and is_first:
            self.fatal = UsageError(reason)
            return
        raise RayEnded(f"{reason or 'Ray is lost'}; the hosts that it placed are placed anew ({self._log.path})")

    def _environment(self) -> dict[str, str]:
        environment = {name: value for name, value in os.environ.items() if name != "OMP_NUM_THREADS"}
        environment |= {
            "RAY_USAGE_STATS_ENABLED": "0",
            "RAY_worker_niceness": "0",  # Ray's default, 15, lets every other process go first
            "RAY_gcs_rpc_server_reconnect_timeout_s": str(HEAD_SECONDS),
        }
        if self._address is None:
            token = self._config.server_dir / "ray_token"
            files.write_file(token, secrets.token_hex(32).encode())
            environment.pop("RAY_AUTH_TOKEN", None)  # Ray would prefer this token to the file
            environment |= {"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN_PATH": str(token.resolve())}
        return environment

    def _placing(self) -> Placing:
        own = json.loads((self._config.server_dir / "address.json").read_text())
        return Placing(
            address=self._address,
            temp_dir=str(self._temp_dir),
            engines=self._config.engines,
            ranks=1 if self._config.ranks is None else self._config.ranks,
            url=own["url"],
            key=self.key.key,
            number=self._number,
        )


def check_answers(address: str) -> None:
    """Checks that something listens at Ray's address.

    Raises:
        UsageError: nothing listens there, or the text is no address.
    """
    host, _, port = address.rpartition(":")
    if not host or not port.isdecimal() or "/" in host:
        raise UsageError(f"--cluster {address}: write 'auto', or the address of Ray's head such as 10.0.0.1:6379")
    try:
        socket.create_connection((host.strip("[]"), int(port)), ANSWER_SECONDS).close()
    except (OSError, OverflowError) as error:
        raise UsageError(
            f"--cluster {address}: nothing answers there ({error}): start Ray with 'ray start --head --port={port}', or check the "
            "address"
        ) from error
