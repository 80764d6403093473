"""A machine that has joined, on the server's side: the connection, the orders, and the machine's processes and folders."""

import asyncio
import contextlib
import functools
import itertools
import logging
import secrets
import uuid
from collections import defaultdict
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from pathlib import Path

from pydantic import ValidationError
from starlette.websockets import WebSocket, WebSocketDisconnect

from art_protocol.log_file import LogFile
from art_server.engine.device.computing import ComputingDevices
from art_server.errors import InvalidInput
from art_server.jobs.replay_record import base_digests
from art_server.jobs.trainer_process import MAX_ANSWER_BYTES
from art_server.machines.orders import (
    BEAT_SECONDS,
    FROM_HOST,
    REPLY_SECONDS,
    SILENCE_SECONDS,
    Alive,
    Beat,
    Cancel,
    Drop,
    End,
    Ended,
    FreePort,
    Greeting,
    HostMessage,
    Order,
    OrderReply,
    Output,
    Put,
    Refusal,
    Send,
    UseBase,
    Write,
)
from art_server.process.children import END_SECONDS
from art_server.process.place import Counters, Endpoint, PlaceFailed, PlaceLost
from art_server.process.receiver import Receiver
from art_server.shared.clock import REAL, Clock
from art_server.store import files
from art_server.store.base_models import BaseModel

logger = logging.getLogger(__name__)

FILES_SECONDS = 1800.0
"""Limit for an order that moves files: a base model may have to be downloaded."""
KILLED = -9
"""The status of a process that SIGKILL has ended."""


class HostLost(PlaceLost):
    """The machine is lost, or its connection."""


class OrderFailed(PlaceFailed):
    """The machine could not obey an order, and says why."""


@dataclass(eq=False, kw_only=True)
class HostProcess:
    """A process on a host (`process/place.py:Process`): the host reports its output, its counters and its end."""

    name: str
    host: "JoinedHost"
    log: LogFile
    receiver: Receiver | None = None
    """Takes the records of an engine; a rank has none."""
    endpoint: Endpoint | None = None
    host_pid: int = 0
    """The process's id on the host."""
    _lines: asyncio.StreamReader = field(default_factory=lambda: asyncio.StreamReader(limit=MAX_ANSWER_BYTES))
    _counters: Counters = field(default_factory=lambda: Counters(b"", 0.0, 0.0))
    _status: asyncio.Future[int] = field(default_factory=lambda: asyncio.get_running_loop().create_future())

    pid = None
    """The process has no id on this machine."""

    @property
    def returncode(self) -> int | None:
        return self._status.result() if self._status.done() else None

    async def wait(self) -> int:
        return await asyncio.shield(self._status)

    async def send(self, line: bytes) -> None:
        self.host.tell(Write(child=self.name, line=line.decode()))

    async def read_line(self) -> bytes:
        return await self._lines.readline()

    def cancel(self) -> None:
        self.host.tell(Cancel(child=self.name))

    def counters(self) -> Counters:
        return self._counters

    async def end(self) -> None:
        """Kills the process with all processes that it spawned. A host whose connection is lost does so itself."""
        if self.returncode is None:
            with contextlib.suppress(HostLost, OrderFailed):
                # The host waits for END_SECONDS itself, until the session is empty (`Children.end`).
                await self.host.order(End(child=self.name), END_SECONDS + REPLY_SECONDS)
        self.host.processes.pop(self.name, None)
        self.note_end(KILLED)

    # --- the host's reports ---

    def note_output(self, output: Output) -> None:
        if output.is_log:
            with contextlib.suppress(OSError), open(self.log.path, "ab") as log:
                log.write(output.text.encode())
        elif not self._status.done():  # a lost host speaks until its connection is closed
            self._lines.feed_data(output.text.encode())

    def note_beat(self, beat: Beat) -> None:
        if self.name in beat.work:
            self._counters = Counters(bytes.fromhex(beat.work[self.name]), 0.0, beat.at)
        elif self.name in beat.cpu_seconds:
            self._counters = Counters(b"", beat.cpu_seconds[self.name], beat.at)

    def note_end(self, status: int) -> None:
        if not self._status.done():
            self._lines.feed_eof()
            self._status.set_result(status)


class JoinedHost:
    """One connection of a machine. The loss of the connection ends every process on the machine."""

    def __init__(
        self,
        *,
        greeting: Greeting,
        own_address: str,
        connection: WebSocket,
        devices: ComputingDevices,
        offered: defaultdict[str, list[Path]],
        tickets: dict[str, Path],
        clock: Clock = REAL,
    ):
        self.greeting = greeting
        self.own_address = own_address
        """The server's address, as the machine reaches the server."""
        self._connection = connection
        self._clock = clock
        self._devices = devices
        self.offered = offered
        """Files that hosts may fetch, by digest. Several files may have the same content."""
        self.tickets = tickets
        """Folders that hosts may fill."""
        self.reason = ""
        """Why the machine was lost; empty while the machine is connected."""
        self._is_lost = asyncio.Event()
        self.processes: dict[str, HostProcess] = {}
        """The processes on the machine, by the names that the server gave them."""
        self._outgoing: asyncio.Queue[HostMessage] = asyncio.Queue()
        self._numbers = itertools.count(1)
        self._replies: dict[int, asyncio.Future[OrderReply]] = {}
        self._bases: dict[str, asyncio.Task[None]] = {}

    @property
    def name(self) -> str:
        return self.greeting.name

    # --- the connection ---

    async def serve(self) -> None:
        """Passes messages until the machine is lost or dismissed. Afterwards all processes on the machine have ended."""
        sending = asyncio.create_task(self._send())
        try:
            while not self.reason:
                async with self._clock.timeout(SILENCE_SECONDS):
                    message = FROM_HOST.validate_json(await receive_text(self._connection))
                self._take(message)
        except TimeoutError:
            self.lose(f"it was silent for {SILENCE_SECONDS:.0f} s")
        except (WebSocketDisconnect, RuntimeError):
            self.lose("its connection ended")
        except ValidationError as error:
            self.lose(f"it sent an unknown message: {error.errors()[0]['msg']}")
        except ValueError as error:
            self.lose(f"it sent an unknown message: {error}")
        finally:
            self.lose("the server ends")
            await asyncio.wait({sending}, timeout=BEAT_SECONDS)
            sending.cancel()
            with contextlib.suppress(RuntimeError, WebSocketDisconnect):
                await self._connection.close()

    def dismiss(self, reason: str) -> None:
        """Sends the machine away for good."""
        self.tell(Refusal(reason=reason))
        self.lose(reason)

    def lose(self, reason: str) -> None:
        """Marks the machine as lost: its processes count as killed, and its open orders fail."""
        if self.reason:
            return
        self.reason = reason
        self._is_lost.set()
        self.tell(Alive())  # is not sent: `_send` sees that the machine is lost, and ends
        logger.warning("host %s is lost: %s", self.name, reason)
        for process in self.processes.values():
            process.note_end(KILLED)
        for reply in self._replies.values():
            if not reply.done():
                reply.set_exception(HostLost(f"host {self.name} was lost: {reason}"))

    async def until_lost(self) -> None:
        """Returns as soon as the machine counts as lost. A lost machine may answer no more, so that its connection is closed much
        later (`serve`)."""
        await self._is_lost.wait()

    async def _send(self) -> None:
        while True:
            message: HostMessage = Alive()
            async with self._clock.at_most(BEAT_SECONDS):
                message = await self._outgoing.get()
            is_refusal = isinstance(message, Refusal)
            # A lost machine gets no more orders. A dismissed machine still gets the reason.
            if self.reason and not is_refusal:
                return
            try:
                await self._connection.send_text(message.model_dump_json())
            except (WebSocketDisconnect, RuntimeError, OSError):
                return
            if is_refusal:
                return

    def _take(self, message: OrderReply | Output | Ended | Beat) -> None:
        match message:
            case OrderReply():
                if (reply := self._replies.pop(message.number, None)) is not None and not reply.done():
                    reply.set_result(message)
            case Beat():
                for process in self.processes.values():
                    process.note_beat(message)
            case Output():
                if (process := self.processes.get(message.child)) is not None:
                    process.note_output(message)
            case Ended():
                if (process := self.processes.get(message.child)) is not None:
                    process.note_end(message.status)

    def tell(self, message: HostMessage) -> None:
        """Sends a message that has no reply."""
        self._outgoing.put_nowait(message)

    async def order(self, order: Order, seconds: float = REPLY_SECONDS) -> OrderReply:
        """Gives an order.

        Raises:
            HostLost: the machine is lost, or does not answer in time.
            OrderFailed: the machine could not obey the order.
        """
        if self.reason:
            raise HostLost(f"host {self.name} was lost: {self.reason}")
        number = next(self._numbers)
        reply = self._replies[number] = asyncio.get_running_loop().create_future()
        self.tell(order.model_copy(update={"number": number}))
        try:
            async with self._clock.timeout(seconds):
                answer = await reply
        except TimeoutError as error:
            self.lose(f"it did not obey the order '{type(order).__name__}' within {seconds:.0f} s")
            raise HostLost(f"host {self.name} was lost: {self.reason}") from error
        finally:
            self._replies.pop(number, None)
        if answer.error:
            raise OrderFailed(f"host {self.name}: {answer.error}")
        return answer

    # --- base models and processes ---

    async def use_base(self, base: BaseModel) -> None:
        """Has the machine find a base model, and compare its own files with the server's. Dismisses the machine if this fails.

        Raises:
            OrderFailed: the machine has other files, or none, or its devices cannot compute the model.
            HostLost: the machine is lost.
        """
        if base.name not in self._bases:
            self._bases[base.name] = asyncio.create_task(self._use_base(base))
        try:
            # Other engines and ranks wait for the same task, which a cancelled caller would cancel.
            await asyncio.shield(self._bases[base.name])
        except OrderFailed as error:
            self.dismiss(str(error))
            raise

    async def _use_base(self, base: BaseModel) -> None:
        try:
            await asyncio.to_thread(self._devices.check_offer, self.greeting, base)
        except InvalidInput as error:
            raise OrderFailed(f"host {self.name}: {error.message}") from error
        digests = await asyncio.to_thread(base_digests, base.path)
        template = await asyncio.to_thread(base.template.read_text) if base.template is not None else None
        await self.order(UseBase(name=base.name, digests=digests, template=template), FILES_SECONDS)

    def new_process(self, log: LogFile, receiver: Receiver | None = None) -> HostProcess:
        """A process that the host is to start."""
        log.open().close()  # notes that the process's output begins here
        name = uuid.uuid4().hex
        process = self.processes[name] = HostProcess(name=name, host=self, log=log, receiver=receiver)
        return process

    def receiver_of(self, name: str) -> Receiver | None:
        """The receiver of an engine's records; None if no such engine runs on the machine."""
        process = self.processes.get(name)
        return process.receiver if process is not None and not self.reason else None

    # --- files ---

    async def put(self, folder: Path, names: Collection[str]) -> tuple[str, str]:
        """Has the machine keep a copy of a folder, with only the files that `names` lists. Without names the copy is an empty
        folder. Returns the copy's number, and its path on the machine. After a failure or a cancellation the machine keeps nothing.

        Raises:
            OrderFailed, HostLost: the machine cannot take the files.
        """
        digests = await asyncio.to_thread(folder_digests, folder, names) if names else {}
        number = uuid.uuid4().hex
        with contextlib.ExitStack() as undo, contextlib.ExitStack() as offers:
            undo.callback(self.tell, Drop(folder=number))
            for file, digest in digests.items():
                self.offered[digest].append(file)
                offers.callback(self.offered[digest].remove, file)
            digests_by_name = {file.name: digest for file, digest in digests.items()}
            reply = await self.order(Put(folder=number, files=digests_by_name), FILES_SECONDS)
            undo.pop_all()
        return number, reply.path

    async def drop(self, number: str) -> None:
        """Has the machine delete a folder."""
        with contextlib.suppress(HostLost, OrderFailed):
            await self.order(Drop(folder=number))

    async def fetch(self, number: str, target: Path) -> None:
        """Copies the files of a folder of the machine into a folder of the server.

        Raises:
            OrderFailed, HostLost: not every file has arrived whole.
        """
        ticket = secrets.token_hex(16)
        self.tickets[ticket] = target
        try:
            await self.order(Send(folder=number, ticket=ticket), FILES_SECONDS)
        finally:
            del self.tickets[ticket]

    async def free_port(self) -> int:
        """A port of the machine that is free at this moment."""
        return (await self.order(FreePort())).port


async def receive_text(connection: WebSocket) -> str:
    """The text of a host's next message.

    Raises:
        ValueError: the message is a binary frame.
        WebSocketDisconnect, RuntimeError: the connection has ended.
    """
    try:
        return await connection.receive_text()
    except KeyError as error:  # the message of a binary frame has no text (ASGI)
        raise ValueError("a binary frame") from error


async def receive_bytes(connection: WebSocket) -> bytes:
    """The next records of an engine on a host.

    Raises:
        ValueError: the message is a text frame.
        WebSocketDisconnect, RuntimeError: the connection has ended.
    """
    try:
        return await connection.receive_bytes()
    except KeyError as error:  # as in `receive_text`
        raise ValueError("a text frame") from error


def folder_digests(folder: Path, names: Collection[str]) -> Mapping[Path, str]:
    """The SHA-256 of each file of a folder that `names` lists."""
    stats = {file: file.stat() for file in sorted(folder.iterdir()) if file.name in names}
    return {file: _digest(file, stat.st_size, stat.st_mtime_ns) for file, stat in stats.items()}


@functools.lru_cache(maxsize=1000)
def _digest(file: Path, size: int, changed_at: int) -> str:
    """The SHA-256 of a file. Cached, because each engine and rank of each machine gets the same file."""
    del size, changed_at  # part of the cache's key: a changed file is read again
    return files.file_digest(file)
