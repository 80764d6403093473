"""A machine that has joined, on the server's side: the connection, the orders, and the machine's children and folders."""

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

from starlette.websockets import WebSocket, WebSocketDisconnect

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
    Message,
    Order,
    Output,
    Put,
    Refusal,
    Reply,
    Send,
    StartEngine,
    StartRank,
    UseBase,
    Write,
)
from art_protocol.log_file import LogFile
from art_server.engine.device.computing import ComputingDevices
from art_server.errors import InvalidInput
from art_server.jobs.replay_record import base_digests
from art_server.jobs.trainer_process import MAX_ANSWER_BYTES
from art_server.process.children import END_SECONDS
from art_server.process.shared.trainer_messages import WorkerConfig
from art_server.settings import ServerConfig
from art_server.store import files
from art_server.store.base_models import BaseModel

logger = logging.getLogger(__name__)

FILES_SECONDS = 1800.0
"""Limit for an order that moves files: a base model may have to be downloaded."""
NOT_SENT = {
    *("host", "port", "inference_port", "path", "base_model", "chat_template", "api_keys", "api_key_file", "trackers"),
    *("serve_devices", "train_devices", "ranks", "gangs", "engines", "cluster", "shares", "shard", "handover"),
}
"""Settings that concern the server only, or its own devices."""
KILLED = -9
"""The status of a process that SIGKILL has ended."""


class HostLost(Exception):
    """The machine is lost, or its connection."""


class OrderFailed(Exception):
    """The machine could not obey an order, and says why."""


@dataclass(eq=False)
class RemoteChild:
    """A process on a host, with the interface of `asyncio.subprocess.Process`."""

    name: str
    _host: "JoinedHost"
    _log: LogFile
    pid: int = 0
    """The process's id on the host."""
    stdout: asyncio.StreamReader = field(default_factory=lambda: asyncio.StreamReader(limit=MAX_ANSWER_BYTES))
    work: bytes = b""
    cpu_seconds: float = 0.0
    read_at: float = 0.0
    """When `work` and `cpu_seconds` were read, on the host's clock."""
    _status: asyncio.Future[int] = field(default_factory=lambda: asyncio.get_running_loop().create_future())

    @property
    def returncode(self) -> int | None:
        return self._status.result() if self._status.done() else None

    @property
    def stdin(self) -> "RemoteChild":
        """This object: its `write` and `drain` send lines to the process."""
        return self

    def write(self, data: bytes) -> None:
        self._host.tell(Write(child=self.name, line=data.decode()))

    async def drain(self) -> None:
        """Waits for nothing: the connection's queue holds the lines that are not sent yet."""

    def send_signal(self, signal: int) -> None:
        del signal  # SIGUSR1, the only signal that the trainer sends
        self._host.tell(Cancel(child=self.name))

    async def wait(self) -> int:
        return await asyncio.shield(self._status)

    def take(self, output: Output) -> None:
        """Takes text that the process has written."""
        if not output.is_log:
            self.stdout.feed_data(output.text.encode())
            return
        with contextlib.suppress(OSError), open(self._log.path, "ab") as log:
            log.write(output.text.encode())

    def end(self, status: int) -> None:
        if not self._status.done():
            self.stdout.feed_eof()
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
    ):
        self.greeting = greeting
        self.own_address = own_address
        """The server's address, as the machine reaches the server."""
        self._connection = connection
        self._devices = devices
        self.offered = offered
        """Files that hosts may fetch, by digest. Several files may have the same content."""
        self.tickets = tickets
        """Folders that hosts may fill."""
        self.reason = ""
        """Why the machine was lost; empty while the machine is connected."""
        self._children: dict[str, RemoteChild] = {}
        self._outgoing: asyncio.Queue[Message] = asyncio.Queue()
        self._numbers = itertools.count(1)
        self._replies: dict[int, asyncio.Future[Reply]] = {}
        self._bases: dict[str, asyncio.Task[None]] = {}

    @property
    def name(self) -> str:
        return self.greeting.name

    # --- the connection ---

    async def serve(self) -> None:
        """Passes messages until the machine is lost or dismissed. Afterwards all children of the machine have ended."""
        sending = asyncio.create_task(self._send())
        try:
            while not self.reason:
                async with asyncio.timeout(SILENCE_SECONDS):
                    message = FROM_HOST.validate_json(await self._connection.receive_text())
                self._take(message)
        except TimeoutError:
            self.lose(f"it was silent for {SILENCE_SECONDS:.0f} s")
        except (WebSocketDisconnect, RuntimeError):
            self.lose("its connection ended")
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
        """Marks the machine as lost: its children count as killed, and its open orders fail."""
        if self.reason:
            return
        self.reason = reason
        logger.warning("host %s is lost: %s", self.name, reason)
        for child in self._children.values():
            child.end(KILLED)
        for reply in self._replies.values():
            if not reply.done():
                reply.set_exception(HostLost(f"host {self.name} was lost: {reason}"))

    async def _send(self) -> None:
        while True:
            try:
                async with asyncio.timeout(BEAT_SECONDS):
                    message = await self._outgoing.get()
            except TimeoutError:
                message = Alive()
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

    def _take(self, message: Reply | Output | Ended | Beat) -> None:
        match message:
            case Reply():
                if (reply := self._replies.pop(message.number, None)) is not None and not reply.done():
                    reply.set_result(message)
            case Beat():
                self._take_beat(message)
            case Output():
                if (child := self._children.get(message.child)) is not None:
                    child.take(message)
            case Ended():
                if (child := self._children.get(message.child)) is not None:
                    child.end(message.status)

    def _take_beat(self, beat: Beat) -> None:
        for name, child in self._children.items():
            if name in beat.work:
                child.work, child.read_at = bytes.fromhex(beat.work[name]), beat.at
            elif name in beat.cpu_seconds:
                child.cpu_seconds, child.read_at = beat.cpu_seconds[name], beat.at

    def tell(self, message: Message) -> None:
        """Sends a message that has no reply."""
        self._outgoing.put_nowait(message)

    async def order(self, order: Order, seconds: float = REPLY_SECONDS) -> Reply:
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
            async with asyncio.timeout(seconds):
                answer = await reply
        except TimeoutError as error:
            self.lose(f"it did not obey the order '{type(order).__name__}' within {seconds:.0f} s")
            raise HostLost(f"host {self.name} was lost: {self.reason}") from error
        finally:
            self._replies.pop(number, None)
        if answer.error:
            raise OrderFailed(f"host {self.name}: {answer.error}")
        return answer

    # --- base models and children ---

    async def use_base(self, base: BaseModel) -> None:
        """Has the machine find a base model, and compare its own files with the server's. Dismisses the machine if this fails.

        Raises:
            OrderFailed: the machine has other files, or none, or its devices cannot compute the model.
            HostLost: the machine is lost.
        """
        if base.name not in self._bases:
            self._bases[base.name] = asyncio.create_task(self._use_base(base))
        try:
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

    async def start_engine(
        self, slot: int, base: BaseModel, config: ServerConfig, log: LogFile, secret: str
    ) -> tuple[RemoteChild, int]:
        """Starts vLLM. Returns the process, and the port at which vLLM will answer.

        Raises:
            OrderFailed, HostLost: vLLM was not started.
        """
        await self.use_base(base)
        child = self._new_child(log)
        settings = config.model_dump(mode="json", exclude=NOT_SENT)
        order = StartEngine(child=child.name, slot=slot, base=base.name, settings=settings, secret=secret)
        reply = await self.order(order)
        child.pid = reply.pid
        return child, reply.port

    async def start_rank(self, slot: int, base: BaseModel, worker: WorkerConfig, log: LogFile) -> RemoteChild:
        """Starts a rank of the trainer.

        Raises:
            OrderFailed, HostLost: the rank was not started.
        """
        await self.use_base(base)
        child = self._new_child(log)
        reply = await self.order(StartRank(child=child.name, slot=slot, base=base.name, worker=worker))
        child.pid = reply.pid
        return child

    def _new_child(self, log: LogFile) -> RemoteChild:
        log.open().close()  # notes that the child's output begins here
        name = uuid.uuid4().hex
        child = self._children[name] = RemoteChild(name, self, log)
        return child

    def has_child(self, name: str) -> bool:
        return name in self._children and not self.reason

    async def end(self, child: RemoteChild) -> None:
        """Kills a child with all processes that it spawned. A host whose connection is lost ends its children itself."""
        if child.returncode is None:
            with contextlib.suppress(HostLost, OrderFailed):
                await self.order(End(child=child.name), END_SECONDS + REPLY_SECONDS)
        self._children.pop(child.name, None)
        child.end(KILLED)

    # --- files ---

    async def put(self, folder: Path | None = None, names: Collection[str] = ()) -> tuple[str, str]:
        """Has the machine keep a copy of a folder, with only the files that `names` lists. Without `folder` the copy is an empty
        folder. Returns the copy's number, and its path on the machine. After a failure or a cancellation the machine keeps nothing.

        Raises:
            OrderFailed, HostLost: the machine cannot take the files.
        """
        digests = await asyncio.to_thread(folder_digests, folder, names) if folder is not None else {}
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


def folder_digests(folder: Path, names: Collection[str]) -> Mapping[Path, str]:
    """The SHA-256 of each file of a folder that `names` lists."""
    stats = {file: file.stat() for file in sorted(folder.iterdir()) if file.name in names}
    return {file: _digest(file, stat.st_size, stat.st_mtime_ns) for file, stat in stats.items()}


@functools.lru_cache(maxsize=1000)
def _digest(file: Path, size: int, changed_at: int) -> str:
    """The SHA-256 of a file. Cached, because each engine and rank of each machine gets the same file."""
    del size, changed_at  # part of the cache's key: a changed file is read again
    return files.file_digest(file)
