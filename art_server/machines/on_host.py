"""A host as the place of an engine or a rank (`process/place.py`), on the server's side: what the server orders when an engine or a
rank starts there, and when files are delivered. The host's side is `obeying.py`.
"""

import asyncio
import contextlib
import secrets
from collections.abc import Callable, Collection
from pathlib import Path
from typing import NoReturn

from art_protocol.log_file import LogFile
from art_server.engine.command import EngineProgram
from art_server.jobs.trainer_process import RankProgram
from art_server.machines.joined import HostLost, HostProcess, JoinedHost, OrderFailed
from art_server.machines.orders import SILENCE_SECONDS, OrderReply, StartEngine, StartRank
from art_server.process.place import Endpoint, Program
from art_server.settings import Device, ServerConfig
from art_server.shared.switches import SECRET_HEADER
from art_server.store.base_models import BaseModel

NOT_SENT = {
    *("host", "port", "inference_port", "path", "base_model", "chat_template", "api_keys", "api_key_file", "trackers"),
    *("serve_devices", "train_devices", "ranks", "gangs", "engines", "cluster", "shares", "shard", "handover"),
}
"""Settings that concern the server only, or its own devices."""


class OnHost:
    """The place of one engine or one rank on a machine that has joined. Output, records and counters pass through the machine's
    connection; requests go to a port of the engine."""

    silence_seconds = SILENCE_SECONDS

    def __init__(
        self, *, host: JoinedHost, slot: int, config: ServerConfig, base: Callable[[], BaseModel | None]
    ) -> None:
        """`slot` is the index of the engine among the host's engines, or of the rank among its ranks. `base` returns the loaded
        base model."""
        self.host = host
        self.machine = f"host {host.name}"
        self.device: Device = host.greeting.device
        self.address = host.greeting.address
        self.server_address = host.own_address
        self._slot = slot
        self._config = config
        self._base = base
        self._copies: dict[Path, str] = {}
        """By the server's folder, the number of the copy that the machine keeps."""

    @property
    def lost(self) -> str:
        return self.host.reason

    async def free_port(self) -> int:
        return await self.host.free_port()

    # --- processes ---

    async def start(self, program: Program, log: LogFile) -> HostProcess:
        match program:
            case EngineProgram():
                return await self._start_engine(program, log)
            case RankProgram():
                return await self._start_rank(program, log)
            case _:
                raise TypeError(f"no order starts {program!r}")

    async def _start_engine(self, program: EngineProgram, log: LogFile) -> HostProcess:
        """Starts vLLM. A machine that cannot is sent away. For an engine of a lost machine this never returns: the fleet removes
        the engine."""
        try:
            await self.host.use_base(program.base)
            process = self.host.new_process(log, program.receiver)
            secret = secrets.token_hex(16)
            settings = program.config.model_dump(mode="json", exclude=NOT_SENT)
            order = StartEngine(
                child=process.name, slot=self._slot, base=program.base.name, settings=settings, secret=secret
            )
            reply = await self._start(process, order)
        except OrderFailed as error:
            self.host.dismiss(str(error))
            return await wait_for_removal()
        except HostLost:
            return await wait_for_removal()
        shown = f"[{self.address}]" if ":" in self.address else self.address
        process.endpoint = Endpoint(f"http://{shown}:{reply.port}", headers={SECRET_HEADER: secret})
        return process

    async def _start_rank(self, program: RankProgram, log: LogFile) -> HostProcess:
        base = self._base()
        assert base is not None, "a base model is loaded before it is trained"
        await self.host.use_base(base)
        process = self.host.new_process(log)
        worker = program.worker.model_copy(
            update={
                "dtype": self._config.number_types(self.device)[1],
                "between_steps": "stay",  # the rank shares its card with no engine
                "machine": self.machine,
            }
        )
        await self._start(process, StartRank(child=process.name, slot=self._slot, base=base.name, worker=worker))
        return process

    async def _start(self, process: HostProcess, order: StartEngine | StartRank) -> OrderReply:
        """Has the host start a process. After a failure or a cancellation the host has no such process."""
        async with contextlib.AsyncExitStack() as on_failure:
            on_failure.push_async_callback(process.end)
            reply = await self.host.order(order)
            on_failure.pop_all()
        process.host_pid = reply.pid
        return reply

    # --- files ---

    async def deliver(self, folder: Path, names: Collection[str]) -> str:
        number, path = await self.host.put(folder, names)
        earlier, self._copies[folder] = self._copies.get(folder), number
        if earlier is not None:  # the copy of the previous process; the host has linked its files into the next copy
            await self.host.drop(earlier)
        return path

    async def collect(self, folder: Path) -> None:
        await self.host.fetch(self._copies[folder], folder)

    async def forget(self, folder: Path) -> None:
        if (number := self._copies.pop(folder, None)) is not None:
            await self.host.drop(number)

    async def keep_only(self, folders: Collection[Path]) -> None:
        for folder in self._copies.keys() - set(folders):
            await self.forget(folder)


async def wait_for_removal() -> NoReturn:
    """Never returns: the fleet removes the engines of a lost machine."""
    await asyncio.Event().wait()
    raise AssertionError("nobody sets it")
