"""A simulated engine: answers chat completions without sampling, and sends records to the ledger as vLLM does.

`gate.py` starts it in place of the engine, with the same arguments, to measure the server alone.
"""

import asyncio
import itertools
import json
import socket
import sys

from art_server.engine.vllm_process.child import LedgerClient
from art_server.shared.engine_messages import is_first_turn

PROMPT = list(range(100, 164))
TOKENS = list(range(200, 232))
LOGPROBS = [-0.5] * len(TOKENS)
HEAD = b"HTTP/1.1 200 OK\r\ncontent-type: application/json\r\ncontent-length: "


async def record(ledger: LedgerClient, request_id: str, prompt: list[int]) -> None:
    """Exchanges the same messages with the ledger as `art_server.engine.vllm_process.child` does for a choice."""
    rendered = prompt if is_first_turn(request_id) else None
    if rendered is None:
        await ledger.fetch_prompt(request_id, prompt)
    ledger.send(
        {
            "request_id": request_id,
            "rendered": rendered,
            "index": 0,
            "text": "simulated",
            "token_ids": TOKENS,
            "logprobs": LOGPROBS,
            "finish_reason": "stop",
            "stop_reason": None,
            "sampling": {"n": 1, "temperature": 1.0},
        }
    )


async def main() -> None:
    records, uds = sys.argv[1], sys.argv[sys.argv.index("--uds") + 1]
    ledger = LedgerClient(records)
    await ledger.connect()
    numbers = itertools.count()

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        while head := await reader.readuntil(b"\r\n\r\n") if not reader.at_eof() else b"":
            headers = dict(row.lower().split(b": ", 1) for row in head.split(b"\r\n")[1:] if b": " in row)
            body = await reader.readexactly(int(headers.get(b"content-length", b"0")))
            content = b'{"data": [{"max_model_len": 4096}]}'
            if b"/v1/chat/completions" in head:
                request_id = "chatcmpl-" + headers[b"x-request-id"].decode()
                await record(ledger, request_id, [*PROMPT, next(numbers) % 1000])
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
