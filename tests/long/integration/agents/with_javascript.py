"""Agents of JavaScript clients, in a process of Node.js that all rollouts share: `with_javascript.py CLIENT` (`clients.mjs`)."""

import asyncio
import contextlib
import http.server
import itertools
import json
import sys
import threading
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import task

import art

PROGRAM = Path(__file__).parents[4] / ".build" / "agents" / "clients.mjs"
"""The copy beside its packages (`scripts/setup-agents`)."""


class Node:
    """The process, and the questions that it has not answered."""

    def __init__(self, process: asyncio.subprocess.Process, tools: str):
        self._process = process
        self._tools = tools
        self._open: dict[int, asyncio.Future[dict]] = {}
        self._numbers = itertools.count()

    async def run_agent(self, r: art.Rollout, question: str) -> str:
        number = next(self._numbers)
        answered = self._open[number] = asyncio.get_running_loop().create_future()
        asked = {
            "id": number,
            "base_url": r.base_url,
            "api_key": r.api_key,
            "model": r.model.get_inference_name(),
            "question": question,
            "schemas": task.SCHEMAS,
            "max_tokens": task.MAX_TOKENS,
            "tools": self._tools,
        }
        self._process.stdin.write(json.dumps(asked).encode() + b"\n")
        answer = await answered
        if "error" in answer:
            raise RuntimeError(answer["error"])
        return answer["text"]

    async def read(self) -> None:
        async for line in self._process.stdout:
            answer = json.loads(line)
            self._open.pop(answer["id"]).set_result(answer)


class Tools(http.server.BaseHTTPRequestHandler):
    def do_POST(self) -> None:
        call = json.loads(self.rfile.read(int(self.headers["content-length"])))
        result = task.call_tool(call["name"], call["arguments"]).encode()
        self.send_response(200)
        self.send_header("content-length", str(len(result)))
        self.end_headers()
        self.wfile.write(result)

    def log_message(self, *_: object) -> None: ...


@contextlib.contextmanager
def serving_tools() -> Iterator[str]:
    """The address at which tools run."""
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), Tools) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{server.server_port}"
        server.shutdown()


@contextlib.asynccontextmanager
async def running_node(client: str) -> AsyncIterator[Node]:
    with serving_tools() as tools:
        pipe = asyncio.subprocess.PIPE
        process = await asyncio.create_subprocess_exec("node", PROGRAM, client, stdin=pipe, stdout=pipe)
        node = Node(process, tools)
        reading = asyncio.create_task(node.read())
        try:
            yield node
        finally:
            process.stdin.close()
            await process.wait()
            await reading


async def train(client: str) -> None:
    async with running_node(client) as node:
        await task.train(f"javascript-{client}", node.run_agent)


if __name__ == "__main__":
    asyncio.run(train(sys.argv.pop(1)))
