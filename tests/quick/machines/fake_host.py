"""A machine that only speaks as one: it greets a server with any devices, over the real wire, obeys each order at once, and computes
nothing. Its engines are a fake vLLM in this process; its ranks answer what the test tells them."""

import asyncio
import contextlib
import json
import socket
import time
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import aiohttp

from art_server.machines.host import versions
from art_server.machines.orders import (
    FROM_SERVER,
    JOIN,
    Alive,
    Beat,
    Greeting,
    HostMessage,
    Order,
    OrderReply,
    Output,
    Refusal,
    StartEngine,
    StartRank,
    UseBase,
    Write,
)
from art_server.settings import Device
from art_server.shared.trainer_messages import Done, Failed
from tests.fakes.vllm import FakeVllm

DONE = Done(metrics={})
ENDS = Failed(code="non_finite", message="the test ends the job")


class FakeHost:
    """One connection of a machine to a server."""

    def __init__(
        self,
        name: str,
        device: Device,
        folder: Path,
        engines: int = 0,
        ranks: int = 0,
        serves: bool = False,
        has_base: bool = True,
        without_bfloat16: str = "",
    ):
        """`folder` holds what its orders put there. Its engines answer if it `serves`, else they start for ever. Without the base
        model it downloads it for ever."""
        self.name = name
        self.vllm = FakeVllm()
        self.tasks: list[dict[str, Any]] = []
        """What its ranks were asked."""
        self.orders: list[Order] = []
        self.refusal: str | None = None
        self._greeting: dict[str, Any] = {"name": name, "device": device, "engines": engines, "ranks": ranks}
        self._greeting["without_bfloat16"] = without_bfloat16
        self._folder = folder
        self._serves = serves
        self._has_base = has_base
        (folder / "adapter_config.json").write_text("{}")

    @contextlib.asynccontextmanager
    async def joined(self, url: str, key: str) -> AsyncIterator["FakeHost"]:
        """Returns when the server has answered it; the block ends its connection."""
        headers = {"authorization": f"Bearer {key}"}
        async with aiohttp.ClientSession(url, headers=headers) as session, session.ws_connect(JOIN) as connection:
            with socket.create_server(("127.0.0.1", 0)) as trial:
                self._port = trial.getsockname()[1]
                if self._serves:
                    self._port = int((await self.vllm.listen()).rpartition(":")[2])
                greeting = Greeting(address="127.0.0.1", port=self._port, versions=versions(), **self._greeting)
                await connection.send_str(greeting.model_dump_json())
                answer = FROM_SERVER.validate_json(await connection.receive_str())
            if isinstance(answer, Refusal):
                self.refusal = answer.reason
            obeying = asyncio.create_task(self._obey(connection))
            try:
                yield self
            finally:
                obeying.cancel()
                await asyncio.wait({obeying})
                await self.vllm.stop()

    async def _obey(self, connection: aiohttp.ClientWebSocketResponse) -> None:
        async for message in connection:
            order = FROM_SERVER.validate_json(message.data)
            if isinstance(order, Refusal):
                self.refusal = order.reason
                return
            assert isinstance(order, Order)
            for answer in self._answers(order):
                await connection.send_str(answer.model_dump_json())

    def _answers(self, order: Order) -> list[HostMessage]:
        if isinstance(order, Alive):
            return [Beat(at=time.monotonic())]
        self.orders.append(order)
        if isinstance(order, UseBase) and not self._has_base:
            return []
        if isinstance(order, Write):
            task = json.loads(order.line)
            self.tasks.append(task)
            return [line(order.child, ENDS if task["kind"] == "train" else DONE)]
        replies: list[HostMessage] = [OrderReply(number=order.number, path=str(self._folder), port=self._port, pid=1)]
        if isinstance(order, StartRank):
            replies.append(Output(child=order.child, text='{"event":"ready"}\n', is_log=False))
        return replies

    def settings(self) -> list[dict[str, Any]]:
        """With which its engines were started."""
        return [order.settings for order in self.orders if isinstance(order, StartEngine)]

    def number_types(self) -> list[str]:
        """In which its ranks were started."""
        return [order.worker.dtype for order in self.orders if isinstance(order, StartRank)]


def line(child: str, answer: Done | Failed) -> Output:
    return Output(child=child, text=f"{answer.model_dump_json()}\n", is_log=False)
