"""A host at work for its server: starts engines and ranks, keeps their files, and reports their output and their end. The server's
side of a start is `on_host.py`. The server names the files of a folder, and `FILE_NAME` refuses a name that leads out of the folder.
"""

import asyncio
import contextlib
import hashlib
import logging
import os
import re
import shutil
import socket
import time
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import BinaryIO

import aiohttp

from art_protocol.log_file import LogFile
from art_server.engine.command import EngineProgram, make_run_dir
from art_server.engine.device.assignment import device_environment
from art_server.engine.device.detection import Machine
from art_server.errors import ServerError
from art_server.jobs.replay_record import base_digests
from art_server.jobs.trainer_process import MAX_ANSWER_BYTES, RankProgram
from art_server.machines.orders import (
    DIGEST_HEADER,
    FILES,
    FOLDERS,
    RECORDS,
    Alive,
    Beat,
    Cancel,
    Drop,
    End,
    Ended,
    FreePort,
    HostMessage,
    Order,
    OrderReply,
    Output,
    Put,
    Send,
    StartEngine,
    StartRank,
    UseBase,
    Write,
)
from art_server.process.children import Children
from art_server.process.conversion import find_converted
from art_server.process.place import Here, ProcessHere
from art_server.process.receiver import Receiver
from art_server.settings import ServerConfig
from art_server.store import files
from art_server.store.base_facts import CACHE_DIR
from art_server.store.base_models import BaseModel, find_base_model

logger = logging.getLogger(__name__)

FILE_NAME = re.compile(r"(\w[\w.-]*/)?\w[\w.-]*", re.ASCII)
"""The path of a file in its folder or in one subfolder: `mlp.up_proj/adapter_model.safetensors`."""
LOG_SECONDS = 0.5
"""The pause between two reads of a child's log."""
CHUNK_BYTES = 2**18


@dataclass(frozen=True)
class HostOffer:
    """A machine, and the devices of each engine and rank on it. On a CPU engines and ranks share the cores."""

    name: str
    machine: Machine
    serving: tuple[tuple[int, ...], ...]
    """The GPUs of each engine; on a CPU an engine has none."""
    training: tuple[tuple[int, ...], ...]
    """The GPUs of each rank; on a CPU a rank has none."""

    @property
    def numbers(self) -> tuple[int, int]:
        """The number of engines, and the number of ranks."""
        return len(self.serving), len(self.training)


@dataclass(eq=False)
class Child:
    """A process that an order has started."""

    process: ProcessHere
    log: LogFile
    undo: contextlib.AsyncExitStack
    """Closed after the process has ended."""
    watch: asyncio.Task[None] | None = None


class Relay(Receiver):
    """Passes an engine's records to the server, and the ledger's answers back."""

    def __init__(self, session: aiohttp.ClientSession, child: str):
        super().__init__()
        self._session = session
        self._child = child

    async def read(self, reader: asyncio.StreamReader, write: Callable[[bytes], None]) -> None:
        """Returns when one side closes. The other side is then closed, too, and vLLM ends itself."""
        with contextlib.suppress(aiohttp.ClientError, OSError):
            # The ledger's answer has a whole prompt, which may be longer than aiohttp's limit of 4 MiB.
            async with self._session.ws_connect(f"{RECORDS}/{self._child}", max_msg_size=0) as connection:
                up = asyncio.create_task(send_up(reader, connection))
                try:
                    async for message in connection:
                        if message.type is aiohttp.WSMsgType.BINARY:
                            write(message.data)
                finally:
                    up.cancel()


class Machinery:
    """Obeys the orders of one connection."""

    def __init__(
        self,
        *,
        offer: HostOffer,
        address: str,
        folder: Path,
        children: Children,
        session: aiohttp.ClientSession,
        report: Callable[[HostMessage], None],
    ):
        self._offer = offer
        self._address = address
        self._folder = folder
        self._list = children
        self._session = session
        self._report = report
        self._work = folder / "folders"
        shutil.rmtree(self._work, ignore_errors=True)  # the folders of an earlier connection
        self._bases: dict[str, BaseModel] = {}
        self._children: dict[str, Child] = {}
        self._digests: dict[str, set[Path]] = {}
        """The files of all folders, by digest."""
        self._fetching: dict[str, asyncio.Lock] = {}
        self._putting: dict[str, asyncio.Task[None]] = {}
        """The running orders that fill a folder, by the folder's name."""
        self._starting: dict[str, asyncio.Task[None]] = {}
        """The running orders that start a child, by the child's name."""

    def begin(self, order: Order, tasks: asyncio.TaskGroup) -> None:
        """Obeys an order, in a task if the order takes time. An error becomes the order's reply."""
        child = self._children.get(order.child) if isinstance(order, Write | Cancel) else None
        if isinstance(order, Write):
            if child is not None:
                # Without a task: a rank reads its lines in the server's order.
                child.process.write(order.line.encode())
        elif isinstance(order, Cancel):
            if child is not None:
                child.process.cancel()
        elif not isinstance(order, Alive):
            task = tasks.create_task(self._obey(order))
            if isinstance(order, Put):
                self._putting[order.folder] = task
                task.add_done_callback(lambda _: self._putting.pop(order.folder))
            elif isinstance(order, StartEngine | StartRank):
                self._starting[order.child] = task
                task.add_done_callback(lambda _: self._starting.pop(order.child))

    async def _obey(self, order: Order) -> None:
        try:
            reply = await self._do(order)
        except ServerError as error:
            reply = OrderReply(error=error.message)
        except (OSError, aiohttp.ClientError, TimeoutError, ValueError) as error:
            reply = OrderReply(error=str(error) or type(error).__name__)
        self._report(reply.model_copy(update={"number": order.number}))

    async def _do(self, order: Order) -> OrderReply:
        match order:
            case UseBase():
                await self._use_base(order)
            case StartEngine():
                return await self._start_engine(order)
            case StartRank():
                return await self._start_rank(order)
            case End():
                if (task := self._starting.get(order.child)) is not None:  # the server no longer waits for the child
                    await asyncio.wait({task})
                await self._end(order.child)
            case Put():
                return OrderReply(path=str(await self._put(order)))
            case Send():
                await self._send(order)
            case Drop():
                if (task := self._putting.get(order.folder)) is not None:  # the server no longer waits for the folder
                    task.cancel()
                    await asyncio.wait({task})
                await asyncio.to_thread(self._drop, order.folder)
            case FreePort():
                with contextlib.closing(listen(self._address)) as trial:
                    return OrderReply(port=trial.getsockname()[1])
            case _:
                raise ValueError(f"unknown order {order!r}")
        return OrderReply()

    def beat(self) -> Beat:
        """The present work counters of engines and processor time of ranks."""
        readings = {name: child.process.counters() for name, child in self._children.items()}
        return Beat(
            work={name: reading.work.hex() for name, reading in readings.items() if reading.work},
            cpu_seconds={name: reading.cpu_seconds for name, reading in readings.items() if not reading.work},
            at=time.monotonic(),
        )

    async def end_all(self) -> None:
        """Ends all children."""
        await asyncio.gather(*(self._end(name) for name in list(self._children)))

    # --- base models ---

    async def _use_base(self, order: UseBase) -> None:
        base = await find_converted(
            partial(find_base_model, order.name, CACHE_DIR),
            children=self._list,
            log_dir=self._folder / "logs",
            report=logger.info,
        )
        own_digests = await asyncio.to_thread(base_digests, base.path)
        if own_digests != order.digests:
            all_names = own_digests.keys() | order.digests
            names = sorted(name for name in all_names if own_digests.get(name) != order.digests.get(name))
            raise ValueError(
                f"base model '{order.name}' has other files on this machine than on the server ({', '.join(names[:3])}): copy "
                "the server's, or delete these"
            )
        template = None
        if order.template is not None:
            template = self._folder / "chat_template.jinja"
            files.write_file(template, order.template.encode())
        self._bases[order.name] = BaseModel(base.name, base.path, template)

    # --- children ---

    async def _start_engine(self, order: StartEngine) -> OrderReply:
        devices = self._offer.serving[order.slot]
        settings = ServerConfig.model_validate(order.settings).model_copy(update={"serve_devices": devices})
        log = LogFile(self._folder / "logs" / f"engine-{order.slot}.log")
        relay = Relay(self._session, order.child)
        async with contextlib.AsyncExitStack() as undo:
            run_dir = make_run_dir(self._folder, f"engine-{order.slot}")
            undo.callback(shutil.rmtree, run_dir, ignore_errors=True)
            undo.push_async_callback(relay.close)
            # vLLM inherits the descriptor: the port stays bound when this process closes its own.
            with contextlib.closing(listen(self._address)) as port:
                program = EngineProgram(
                    config=settings,
                    base=self._bases[order.base],
                    device=self._offer.machine.kind,
                    run_dir=run_dir,
                    receiver=relay,
                    port=port.fileno(),
                    secret=order.secret,
                )
                process = await self._here(devices).start(program, log)
                self._keep(order.child, Child(process, log, undo.pop_all()))
                return OrderReply(pid=process.pid, port=port.getsockname()[1])

    async def _start_rank(self, order: StartRank) -> OrderReply:
        machine, (_, ranks) = self._offer.machine, self._offer.numbers
        cores = len(machine.cores)
        worker = order.worker.model_copy(
            update={
                "base_model": str(self._bases[order.base].path),
                "device": "cuda:0" if machine.gpus else "cpu",
                "threads": max(1, cores // ranks) if not machine.gpus and ranks > 1 else None,
            }
        )
        log = LogFile(self._folder / "logs" / f"trainer-{order.slot}.log")
        program = RankProgram(worker, self._folder / "unsloth")
        process = await self._here(self._offer.training[order.slot]).start(program, log)
        self._keep(order.child, Child(process, log, contextlib.AsyncExitStack()))
        return OrderReply(pid=process.pid)

    def _here(self, devices: tuple[int, ...]) -> Here:
        machine = self._offer.machine
        return Here(device=machine.kind, children=self._list, variables=device_environment(devices, machine))

    def _keep(self, name: str, child: Child) -> None:
        self._children[name] = child
        child.watch = asyncio.create_task(self._watch(name, child))

    async def _watch(self, name: str, child: Child) -> None:
        """Reports a child's output, and the child's end after all output."""
        position, process = child.log.start, child.process
        exited = asyncio.create_task(process.wait())
        lines = asyncio.create_task(self._read_lines(name, process))
        async with contextlib.AsyncExitStack() as at_end:
            at_end.push_async_callback(child.undo.aclose)
            at_end.callback(self._children.pop, name, None)
            while True:
                done, _ = await asyncio.wait({exited}, timeout=LOG_SECONDS)
                position, text = await asyncio.to_thread(read_from, child.log.path, position)
                if text:
                    self._report(Output(child=name, text=text, is_log=True))
                if done:
                    break
            await lines
            await process.end()  # what is left of its session
            self._report(Ended(child=name, status=exited.result()))

    async def _read_lines(self, name: str, process: ProcessHere) -> None:
        """Reports a rank's lines. Ends a rank that writes what is no answer; the rank's log then has the reason."""
        try:
            while line := await process.read_line():
                self._report(Output(child=name, text=line.decode(errors="replace"), is_log=False))
        except ValueError:  # asyncio's readline refuses a line above its limit
            reason = f"the rank was ended: it sent an answer of more than {MAX_ANSWER_BYTES} bytes"
            logger.error(reason)
            self._report(Output(child=name, text=f"{reason}\n", is_log=True))
            await process.end()

    async def _end(self, name: str) -> None:
        if (child := self._children.get(name)) is not None:
            await child.process.end()
            assert child.watch is not None, "set with the child"
            await child.watch

    # --- files ---

    def _path(self, folder: str) -> Path:
        assert folder.isalnum(), "the server names folders by random digits"
        return self._work / folder

    async def _put(self, order: Put) -> Path:
        """Makes a folder of files. A file is linked to the same file in another folder, or fetched from the server."""
        target = self._path(order.folder)
        temporary = target.with_name(f".{order.folder}")
        temporary.mkdir(parents=True)
        with contextlib.ExitStack() as undo:
            undo.callback(self._forget, target)
            undo.callback(shutil.rmtree, temporary, ignore_errors=True)
            for name, digest in order.files.items():
                file = temporary / check_path(name)
                file.parent.mkdir(exist_ok=True)
                # All engines and ranks of this machine get the same file at once: one fetches it, and the others link it.
                async with self._fetching.setdefault(digest, asyncio.Lock()):
                    if not self._link(digest, file):
                        await self._fetch(digest, file)
                    self._digests.setdefault(digest, set()).add(target / name)
            os.rename(temporary, target)
            undo.pop_all()
        return target

    def _link(self, digest: str, file: Path) -> bool:
        for known in list(self._digests.get(digest, ())):
            with contextlib.suppress(OSError):
                os.link(known, file)
                return True
        return False

    async def _fetch(self, digest: str, file: Path) -> None:
        hasher = hashlib.sha256()
        async with self._session.get(f"{FILES}/{digest}") as response:
            response.raise_for_status()
            # Opened here, not in a thread: if this task is cancelled meanwhile, nobody would close the thread's file.
            with open(file, "wb") as opened:  # noqa: ASYNC230
                async for chunk in response.content.iter_chunked(CHUNK_BYTES):
                    hasher.update(chunk)
                    await asyncio.to_thread(opened.write, chunk)
        if hasher.hexdigest() != digest:
            raise ValueError(f"{file.name} came with other content than its digest says")

    async def _send(self, order: Send) -> None:
        folder = self._path(order.folder)
        for file in sorted(path for path in folder.rglob("*") if path.is_file()):
            name = file.relative_to(folder).as_posix()
            headers = {DIGEST_HEADER: await asyncio.to_thread(files.file_digest, file)}
            url = f"{FOLDERS}/{order.ticket}/{name}"
            with open(file, "rb") as opened:  # noqa: ASYNC230 - as in `_fetch`
                async with self._session.put(url, data=read_all(opened), headers=headers) as response:
                    if response.status != 200:
                        raise OSError(f"the server refused {name}: {(await response.text())[:500]}")

    def _drop(self, folder: str) -> None:
        target = self._path(folder)
        self._forget(target)
        shutil.rmtree(target, ignore_errors=True)

    def _forget(self, target: Path) -> None:
        for digest, known in list(self._digests.items()):
            kept = {file for file in known if not file.is_relative_to(target)}
            if kept:
                self._digests[digest] = kept
            else:
                del self._digests[digest]
                self._fetching.pop(digest, None)


async def send_up(reader: asyncio.StreamReader, connection: aiohttp.ClientWebSocketResponse) -> None:
    """Sends an engine's records to the server until the engine ends."""
    with contextlib.suppress(ConnectionError):
        while chunk := await reader.read(CHUNK_BYTES):
            await connection.send_bytes(chunk)
        await connection.close()


async def read_all(file: BinaryIO) -> AsyncIterator[bytes]:
    while chunk := await asyncio.to_thread(file.read, CHUNK_BYTES):
        yield chunk


def listen(address: str) -> socket.socket:
    """A socket that listens at an address of this machine, on a free port."""
    return socket.create_server((address, 0), family=socket.AF_INET6 if ":" in address else socket.AF_INET)


def read_from(file: Path, position: int) -> tuple[int, str]:
    """The end of a log, in bytes, and the text between `position` and the end."""
    with open(file, "rb") as opened:
        opened.seek(position)
        text = opened.read()
    return position + len(text), text.decode(errors="replace")


def check_path(name: str) -> str:
    """Checks the path of a file in its folder or in one subfolder, and returns the path.

    Raises:
        ValueError: the path could lead out of the folder, such as '../key'.
    """
    if not FILE_NAME.fullmatch(name):
        raise ValueError(f"{name[:200]!r} is no file's name")
    return name
