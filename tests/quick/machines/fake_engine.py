"""An engine's process with a fake vLLM (`tests/fakes/vllm.py`): it listens as the real one does on a host, checks the secret and
records what it samples.

    python tests/quick/machines/fake_engine.py RECORDS_SOCKET
"""

import asyncio
import dataclasses
import os
import socket
import sys
from pathlib import Path
from typing import Any

import msgspec
from aiohttp import web

sys.path.insert(0, str(Path(__file__).parents[3]))

from art_server.process.children import be_child
from art_server.shared.switches import PORT_SWITCH, SECRET_HEADER, SECRET_SWITCH
from art_server.shared.work_counters import FILE_VARIABLE, WorkCounter
from tests.fakes.vllm import FakeVllm


async def serve(records_path: str) -> None:
    reader, writer = await asyncio.open_unix_connection(records_path)
    counter = WorkCounter(Path(os.environ[FILE_VARIABLE]), 0)
    secret = os.environ[SECRET_SWITCH]
    fake = FakeVllm()

    def send(samples: list[Any]) -> None:
        counter.add(1)
        for request_id, _, _, choice in samples:
            writer.write(
                msgspec.json.encode(dataclasses.asdict(choice) | {"request_id": f"chatcmpl-{request_id}"}) + b"\n"
            )

    @web.middleware
    async def check(request: web.Request, handler: Any) -> web.StreamResponse:
        if request.headers.get(SECRET_HEADER) != secret:
            return web.Response(status=401)
        return await handler(request)

    fake.take_samples = send
    app = web.Application(middlewares=[check])
    app.add_routes(fake.routes())
    runner = web.AppRunner(app)
    await runner.setup()
    await web.SockSite(runner, socket.socket(fileno=int(os.environ[PORT_SWITCH]))).start()
    await reader.read()
    os._exit(1)  # as vLLM does when the server is gone


if __name__ == "__main__":
    be_child()
    asyncio.run(serve(sys.argv[1]))
