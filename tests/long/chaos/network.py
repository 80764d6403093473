"""The network between a host and its server: passes bytes both ways. A stop of this process is a stall of the network.

    python -m tests.long.chaos.network SERVER_PORT

Prints the port at which it listens. What was under way when it stopped arrives when it continues.
"""

import asyncio
import contextlib
import sys

CHUNK_BYTES = 2**16


async def pump(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    with contextlib.closing(writer), contextlib.suppress(ConnectionError):
        while chunk := await reader.read(CHUNK_BYTES):
            writer.write(chunk)
            await writer.drain()


async def main(server_port: int) -> None:
    async def relay(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            far_reader, far_writer = await asyncio.open_connection("127.0.0.1", server_port)
        except OSError:  # no server runs
            writer.close()
            return
        await asyncio.gather(pump(reader, far_writer), pump(far_reader, writer))

    server = await asyncio.start_server(relay, "127.0.0.1", 0)
    print(server.sockets[0].getsockname()[1], flush=True)
    await server.serve_forever()


if __name__ == "__main__":
    asyncio.run(main(int(sys.argv[1])))
