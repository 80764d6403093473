"""The command `art-server`: opens the ports and runs the application."""

import asyncio
import errno
import logging
import os
import signal
import socket
import sys
import time
from collections.abc import Mapping, Sequence
from types import FrameType
from typing import Any

from art_server import __version__
from art_server.engine.device.assignment import check_flags
from art_server.errors import ServerError, UsageError, missing_extra
from art_server.flags import parse
from art_server.process.children import collect_seldom, set_up_logs, take_turns_often, wake_in_batches
from art_server.process.installation import check_system, check_vllm, installed_vllm
from art_server.settings import ServerConfig
from art_server.store import files

logger = logging.getLogger("art_server")

INFERENCE_PORT = 8000
GRACE_SECONDS = 10
"""How long open answers may continue after SIGTERM."""
IDLE_CONNECTION_SECONDS = 600
"""Clients keep connections for reuse; closing one early makes their next request fail."""
PING_SECONDS = 60.0
"""A machine's connection may be silent for this long before it counts as dead. Hosts and server have their own, shorter limit,
which allows for a network that stalls (`art_server/machines`)."""
UVICORN: Mapping[str, Any] = {
    "log_level": "warning",
    "access_log": False,
    "proxy_headers": True,
    "timeout_graceful_shutdown": GRACE_SECONDS,
    "timeout_keep_alive": IDLE_CONNECTION_SECONDS,
    "ws_ping_timeout": PING_SECONDS,
}
"""Any: uvicorn's settings have several types. A proxy on this machine says in its headers that a request came by HTTPS."""


def main(arguments: Sequence[str] | None = None) -> None:
    """Runs the server until a signal stops it. Exits with status 2 and one sentence if the server cannot start."""
    words = sys.argv[1:] if arguments is None else arguments
    if words[:1] == ["host"]:
        from art_server.machines.host import main as offer_machine  # another command; a server loads none of its code

        offer_machine(words[1:])
        return
    try:
        check_system()
        run(parse(arguments))
    except (UsageError, ServerError) as error:
        print(f"art-server: {error}", file=sys.stderr)
        sys.exit(2)


def open_port(host: str, port: int, flag: str, others: str = "or 0 for a free one") -> socket.socket:
    """A listening socket. `others` says for an error which other ports there are.

    Raises:
        UsageError: the port is in use or not permitted.
    """
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    opened = socket.socket(family, socket.SOCK_STREAM)
    opened.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        opened.bind((host, port))
        # uvicorn's own default.
        opened.listen(2048)
    except OSError as error:
        opened.close()
        if isinstance(error, socket.gaierror) or error.errno == errno.EADDRNOTAVAIL:
            raise UsageError(
                f"--host {host}: this machine has no such address ({error.strerror}); use 127.0.0.1, 0.0.0.0 for all of its "
                "addresses, or one of them"
            ) from error
        raise UsageError(f"{flag} {port} on {host}: {error.strerror}; choose another port, {others}") from error
    opened.set_inheritable(False)
    return opened


def open_ports(config: ServerConfig) -> tuple[socket.socket, socket.socket | None]:
    """The control port, and the inference port unless it equals the control port or the default is in use."""
    control = open_port(config.host, config.port, "--port")
    wanted = INFERENCE_PORT if config.inference_port is None else config.inference_port
    if wanted == config.port != 0:
        return control, None
    try:
        return control, open_port(config.host, wanted, "--inference-port")
    except UsageError as error:
        if config.inference_port is not None:
            control.close()
            raise
        logger.warning(
            "NO SECOND INFERENCE PORT: %s. Inference is served on the control port only; clients that use port %d "
            "do not reach this server",
            error,
            wanted,
        )
        return control, None


def run(config: ServerConfig) -> None:
    """Serves until a signal stops it."""
    check_flags(config)
    try:
        import uvicorn
        import uvloop

        from art_server.app import make_app
        from art_server.server import build
    except ModuleNotFoundError as error:  # FastAPI and uvicorn come with the extra `server`
        raise missing_extra(error) from error
    check_vllm(installed_vllm())
    make_private(config)
    set_up_logs()
    logger.info("art-server %s: %s", __version__, config)
    if config.legacy_without_key and config.api_keys:
        logger.warning("--legacy-without-key: anyone who reaches the server can train every model")
    control, inference = open_ports(config)
    url = address(config, control)
    inference_url = address(config, inference) if inference is not None else url

    async def serve() -> None:
        parts = build(config)
        port = inference.getsockname()[1] if inference is not None else None
        app = make_app(parts, port)
        server = uvicorn.Server(uvicorn.Config(app, **UVICORN))
        loop, handle_exit = asyncio.get_running_loop(), server.handle_exit

        def handle_signal(sig: int, frame: FrameType | None) -> None:
            if not server.should_exit:  # by the loop, because a signal may interrupt a line of the log
                loop.call_soon_threadsafe(lambda: logger.info(farewell(sig, parts.queue.pending())))
            handle_exit(sig, frame)

        server.handle_exit = handle_signal  # uvicorn's handler of SIGINT and SIGTERM
        parent = parent_pid()
        files.write_json(config.server_dir / "address.json", own_address(url, inference_url))
        logger.info("listening on %s (inference also on %s/v1)", url, inference_url)
        listeners = [listener for listener in (control, inference) if listener is not None]
        async with asyncio.TaskGroup() as tasks:
            serving = tasks.create_task(server.serve(sockets=listeners))
            while not serving.done():
                # The kernel gives a process whose parent has ended another parent.
                is_orphan = config.exit_with_parent and os.getppid() != parent
                if is_orphan or parts.fatal is not None:
                    server.should_exit = True
                app.state.is_stopping = server.should_exit  # ends the streams of open pages
                await asyncio.wait({serving}, timeout=1.0)
        if parts.fatal is not None:
            raise parts.fatal

    collect_seldom()
    take_turns_often()
    wake_in_batches()
    uvloop.run(serve())


def farewell(number: int, pending: Mapping[str, tuple[int, float]]) -> str:
    """The line about a signal that ends the server, with the number of jobs that the next start continues, by state."""
    num_jobs = {state: pending[state][0] for state in ("running", "queued") if state in pending}
    counts = " and ".join(f"{count} {state}" for state, count in num_jobs.items())
    jobs = "job continues" if sum(num_jobs.values()) == 1 else "jobs continue"
    rest = f"; {counts} {jobs} at the next start" if counts else ""
    return f"{signal.Signals(number).name}: the server ends{rest}"


def parent_pid() -> int:
    """The id of the process that started this one. `LocalBackend` passes the id, because that process may have ended by now."""
    return int(os.environ.pop("ART_PARENT_PID", 0)) or os.getppid()


def make_private(config: ServerConfig) -> None:
    """Takes the rights on the server's folder from other users.

    Raises:
        UsageError: the folder belongs to another user.
    """
    try:
        files.keep_private(config.path)
    except OSError as error:
        raise UsageError(
            f"--path {config.path}: {error.filename} cannot be made private ({error.strerror}): it must belong to the "
            "user who runs art-server"
        ) from error


def own_address(url: str, inference_url: str) -> dict[str, Any]:
    """The content of address.json, by which other programs of this machine find the server."""
    return {
        "pid": os.getpid(),
        "url": url,
        "inference_url": inference_url,
        "started_at": time.time(),
    }


def address(config: ServerConfig, opened: socket.socket) -> str:
    shown = f"[{config.host}]" if ":" in config.host else config.host
    return f"http://{shown}:{opened.getsockname()[1]}"
