"""The machines that have joined a server: the routes for them, and the engines and ranks that they add."""

import asyncio
import contextlib
import logging
import os
from collections import defaultdict
from collections.abc import AsyncIterator, Callable, Sequence
from pathlib import Path

from fastapi import APIRouter, Request, Response
from fastapi.responses import FileResponse
from pydantic import ValidationError
from starlette.websockets import WebSocket, WebSocketDisconnect

from art_protocol.display import counted
from art_server.engine.device.assignment import check_bfloat16
from art_server.engine.device.computing import ComputingDevices
from art_server.engine.device.owner import DeviceOwner
from art_server.engine.engine import Engine
from art_server.engine.fleet import Fleet
from art_server.errors import InvalidInput, NotFound
from art_server.jobs.trainer import ServerTrainer
from art_server.jobs.trainer_process import TrainerProcess
from art_server.ledger.intake import Intake
from art_server.machines.host import NAME_SECONDS, versions
from art_server.machines.joined import HostLost, JoinedHost, OrderFailed, receive_bytes, receive_text
from art_server.machines.obeying import check_path
from art_server.machines.on_host import OnHost
from art_server.machines.orders import (
    DIGEST_HEADER,
    FILES,
    FOLDERS,
    JOIN,
    REACH_SECONDS,
    RECORDS,
    REPLY_SECONDS,
    Greeting,
    Refusal,
    Welcome,
)
from art_server.machines.placing import RayProcess
from art_server.process.background import Background
from art_server.process.children import Children
from art_server.settings import ApiKey, ServerConfig
from art_server.shared.clock import REAL, Clock
from art_server.store import files

logger = logging.getLogger(__name__)

RAY = "Ray"
"""The name of Ray's process among the server's background tasks."""


class Hosts:
    """Admits machines. While a machine is connected, its engines belong to the fleet and its ranks to the trainer."""

    def __init__(
        self,
        *,
        config: ServerConfig,
        fleet: Fleet,
        trainer: ServerTrainer,
        devices: ComputingDevices,
        intake: Intake,
        changed: asyncio.Condition,
        is_busy: Callable[[], bool],
        background: Background,
        children: Children,
        clock: Clock = REAL,
    ):
        self._config = config
        self._clock = clock
        self._fleet = fleet
        self._trainer = trainer
        self._devices = devices
        self._intake = intake
        self._changed = changed
        self._is_busy = is_busy
        self._background = background
        self._ray = RayProcess(config, children) if config.cluster is not None else None
        self.keys: Sequence[ApiKey] = (self._ray.key,) if self._ray is not None else ()
        self._joined: list[JoinedHost] = []
        self._offered: defaultdict[str, list[Path]] = defaultdict(list)
        self._tickets: dict[str, Path] = {}
        self.router = APIRouter()
        self.router.add_api_websocket_route(JOIN, self._join)
        self.router.add_api_websocket_route(f"{RECORDS}/{{child}}", self._take_records)
        self.router.add_api_route(f"{FILES}/{{digest}}", self._give_file, include_in_schema=False)
        self.router.add_api_route(
            f"{FOLDERS}/{{ticket}}/{{name:path}}", self._take_file, methods=["PUT"], include_in_schema=False
        )

    def start(self) -> None:
        """With `--cluster`, has Ray place hosts on its machines."""
        if self._ray is not None:
            self._background.start(RAY, self._ray.run)

    @property
    def fatal(self) -> BaseException | None:
        """Why Ray cannot place hosts; None while no reason is known."""
        return self._ray.fatal if self._ray is not None else None

    async def stop(self) -> None:
        """Ends the connections. Each machine then ends its processes, and tries to join the next server."""
        await self._background.stop(RAY)
        for host in list(self._joined):
            host.lose("the server ends")
        async with self._changed:
            await self._changed.wait_for(lambda: not self._joined)

    # --- joining ---

    async def _join(self, connection: WebSocket) -> None:
        await connection.accept()
        try:
            async with self._clock.timeout(REPLY_SECONDS):
                greeting = Greeting.model_validate_json(await receive_text(connection))
        # starlette raises a RuntimeError for a connection that had ended before the call.
        except (WebSocketDisconnect, RuntimeError):
            return
        except (TimeoutError, ValidationError):
            await refuse(connection, "it is another version of art-server than the server: install the same on both")
            return
        except ValueError as error:
            await refuse(connection, f"it sent no greeting, but {error}")
            return
        # ASGI lets a server leave this out.
        server = connection.scope.get("server") or ("127.0.0.1", 0)
        host = JoinedHost(
            greeting=greeting,
            own_address=server[0],
            connection=connection,
            devices=self._devices,
            offered=self._offered,
            tickets=self._tickets,
            clock=self._clock,
        )
        if (reason := await self._find_fault(host)) is not None:
            logger.warning("host %s is refused: %s", greeting.name, reason)
            await refuse(connection, reason)
            return
        self._joined.append(host)
        host.tell(Welcome())
        serving = asyncio.create_task(host.serve())
        try:
            if (base := self._fleet.base) is not None:
                await host.use_base(base)
            async with self._offered_devices(host):
                await host.until_lost()
        except (OrderFailed, HostLost):  # the host was dismissed, or its connection is lost
            pass
        finally:
            host.lose("the server ends")
            self._joined.remove(host)
            await serving
            async with self._changed:
                self._changed.notify_all()

    async def _find_fault(self, host: JoinedHost) -> str | None:
        """Why a machine cannot join; None if it can."""
        greeting, own = host.greeting, versions()
        if greeting.versions != own:
            differing = sorted(n for n in own.keys() | greeting.versions if own.get(n) != greeting.versions.get(n))
            listed = ", ".join(
                f"{n} {greeting.versions.get(n, 'is missing')} here, {own.get(n)} there" for n in differing
            )
            return f"its packages differ from the server's ({listed}): install the same versions on both"
        try:
            check_bfloat16(self._config, greeting.without_bfloat16)
        except InvalidInput as error:
            return error.message
        try:
            async with self._clock.timeout(REACH_SECONDS):
                _, writer = await asyncio.open_connection(greeting.address, greeting.port)
            writer.close()
        except (OSError, TimeoutError) as error:
            return (
                f"the server cannot reach its ports at {greeting.address} ({error or 'no answer'}): both must be in one network "
                "without a firewall or NAT between them"
            )
        # A machine that was killed may be back before its old connection is known to be lost.
        try:
            async with self._clock.timeout(NAME_SECONDS):
                while greeting.name in {joined.name for joined in self._joined}:
                    await self._clock.sleep(1.0)
        except TimeoutError:
            return f"a host named '{greeting.name}' has joined already: give this one another --name"
        return None

    @contextlib.asynccontextmanager
    async def _offered_devices(self, host: JoinedHost) -> AsyncIterator[None]:
        """During the block the host's engines belong to the fleet, and its ranks to the trainer."""
        greeting = host.greeting
        self._devices.join(greeting)
        engines = [self._engine(host, slot) for slot in range(greeting.engines)]
        ranks = [self._rank(host, slot) for slot in range(greeting.ranks)]
        self._trainer.add(ranks)
        for engine in engines:
            self._fleet.add(engine)
        try:
            if self._fleet.base is not None:
                for engine in engines:
                    engine.start(self._fleet.base, self._fleet.requested)
            offers = f"{counted(greeting.engines, 'engine')}, {counted(greeting.ranks, 'rank')}"
            self._fleet.progress.note(f"host {greeting.name} joined from {greeting.address} with {offers}")
            yield
        finally:
            # First: a lost host gets no order, so the end of its engines waits for no reply (`HostProcess.end`).
            host.lose("the server ends")
            self._trainer.remove(ranks)
            self._devices.leave(greeting)
            await asyncio.gather(*(self._fleet.remove(engine) for engine in engines))

    def _engine(self, host: JoinedHost, slot: int) -> Engine:
        return Engine(
            location=self._location(host, slot),
            config=self._config,
            owner=DeviceOwner(),
            receiver=self._intake.receiver(),
            is_busy=self._is_busy,
            background=self._background,
            name=f"engine-{host.name}-{slot}",
            progress=self._fleet.progress,
            changed=self._changed,
            mismatch_limits_of=self._devices.mismatch_limits,
            clock=self._clock,
        )

    def _rank(self, host: JoinedHost, slot: int) -> TrainerProcess:
        return TrainerProcess(
            location=self._location(host, slot),
            log_path=self._config.log_dir / f"trainer-{host.name}-{slot}.log",
            cache_dir=self._config.server_dir / "unsloth",
            clock=self._clock,
        )

    def _location(self, host: JoinedHost, slot: int) -> OnHost:
        """Where an engine or a rank of the machine runs."""
        return OnHost(host=host, slot=slot, config=self._config, base=lambda: self._fleet.base)

    # --- records and files ---

    async def _take_records(self, connection: WebSocket, child: str) -> None:
        """Passes an engine's records to the engine's receiver, as the socket of an engine on this machine does. When the connection
        ends, the host ends the engine."""
        host = next((host for host in self._joined if host.receiver_of(child) is not None), None)
        if host is None or (receiver := host.receiver_of(child)) is None:
            await connection.close()
            return
        await connection.accept()
        reader = asyncio.StreamReader()
        answers: asyncio.Queue[bytes] = asyncio.Queue()
        reading = asyncio.create_task(receiver.read(reader, answers.put_nowait))
        sending = asyncio.create_task(send_all(connection, answers))
        try:
            while True:
                reader.feed_data(await receive_bytes(connection))
        except (WebSocketDisconnect, RuntimeError):
            pass
        except ValueError as error:
            logger.warning(
                "host %s sent %s in place of an engine's records: this connection is closed", host.name, error
            )
        finally:
            reader.feed_eof()
            await reading
            sending.cancel()

    async def _give_file(self, digest: str) -> Response:
        for file in self._offered.get(digest, ()):
            return FileResponse(file)
        raise NotFound("no file with this digest is offered", code="unknown_file")

    async def _take_file(self, request: Request, ticket: str, name: str) -> Response:
        if (folder := self._tickets.get(ticket)) is None:
            raise NotFound("no folder is expected under this ticket", code="unknown_ticket")
        try:
            target = folder / check_path(name)
        except ValueError as error:
            raise InvalidInput(str(error), code="bad_name", param="name") from error
        target.parent.mkdir(parents=True, exist_ok=True)
        temporary = target.with_name(f".{target.name}.tmp")
        with files.disk_errors(name):
            with open(temporary, "wb") as file:  # noqa: ASYNC230 - as in `obeying.py`
                async for chunk in request.stream():
                    await asyncio.to_thread(file.write, chunk)
            await asyncio.to_thread(files.sync, temporary)
        if await asyncio.to_thread(files.file_digest, temporary) != request.headers.get(DIGEST_HEADER):
            temporary.unlink()
            raise InvalidInput(
                f"{name} came with other content than its digest says", code="wrong_digest", param="name"
            )
        os.replace(temporary, target)
        return Response()


async def refuse(connection: WebSocket, reason: str) -> None:
    with contextlib.suppress(RuntimeError, WebSocketDisconnect):
        await connection.send_text(Refusal(reason=reason).model_dump_json())
        await connection.close()


async def send_all(connection: WebSocket, answers: asyncio.Queue[bytes]) -> None:
    """Sends answers until the connection ends."""
    with contextlib.suppress(RuntimeError, WebSocketDisconnect):
        while True:
            await connection.send_bytes(await answers.get())
