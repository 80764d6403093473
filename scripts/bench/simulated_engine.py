"""An engine that samples nothing: answers chat completions at once and speaks the ledger's line as vLLM's process does.

For `gate.py`, which measures the server alone. Started as the engine's process would be, with the same arguments.
"""

import asyncio
import itertools
import json
import socket
import sys

PROMPT = list(range(100, 164))
TOKENS = list(range(200, 232))
LOGPROBS = [-0.5] * len(TOKENS)
HEAD = b"HTTP/1.1 200 OK\r\ncontent-type: application/json\r\ncontent-length: "


class Line:
    """The line to the ledger: prompts asked, samples told."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter):
        self._reader = reader
        self._writer = writer
        self._asked: dict[str, asyncio.Future[None]] = {}
        self._task = asyncio.create_task(self._read())

    async def record(self, request_id: str, prompt: list[int]) -> None:
        asked = self._asked[request_id] = asyncio.get_running_loop().create_future()
        self.tell({"kind": "prompt", "request_id": request_id, "token_ids": prompt})
        await asked
        sample = {
            "kind": "sample",
            "request_id": request_id,
            "index": 0,
            "text": "simulated",
            "token_ids": TOKENS,
            "logprobs": LOGPROBS,
            "finish_reason": "stop",
            "stop_reason": None,
            "sampling": {"n": 1, "temperature": 1.0},
        }
        self.tell(sample)

    def tell(self, message: dict[str, object]) -> None:
        self._writer.write(json.dumps(message, separators=(",", ":")).encode() + b"\n")

    async def _read(self) -> None:
        while line := await self._reader.readline():
            self._asked.pop(json.loads(line)["request_id"]).set_result(None)


async def main() -> None:
    records, uds = sys.argv[1], sys.argv[sys.argv.index("--uds") + 1]
    line = Line(*await asyncio.open_unix_connection(records, limit=1 << 24))
    numbers = itertools.count()

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        while head := await reader.readuntil(b"\r\n\r\n") if not reader.at_eof() else b"":
            headers = dict(
                row.lower().split(b": ", 1) for row in head.split(b"\r\n")[1:] if b": " in row
            )
            body = await reader.readexactly(int(headers.get(b"content-length", b"0")))
            content = b"{}"
            if b"/v1/chat/completions" in head:
                request_id = "chatcmpl-" + headers[b"x-request-id"].decode()
                await line.record(request_id, [*PROMPT, next(numbers) % 1000])
                message = {"role": "assistant", "content": "simulated"}
                choice = {"index": 0, "message": message, "logprobs": None, "finish_reason": "stop"}
                answer = {"id": request_id, "object": "chat.completion", "choices": [choice]}
                answer["model"] = json.loads(body)["model"]
                content = json.dumps(answer, separators=(",", ":")).encode()
            writer.write(HEAD + str(len(content)).encode() + b"\r\n\r\n" + content)

    listening = socket.socket(socket.AF_UNIX)
    listening.bind(uds)
    server = await asyncio.start_unix_server(serve, sock=listening)
    await server.serve_forever()


if __name__ == "__main__":
    asyncio.run(main())
