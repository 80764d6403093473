"""A server over HTTP whose connections can break, and the command `art` in this process."""

import contextlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from fastapi import FastAPI
from starlette.types import Message, Receive, Scope, Send

from art_server.store.model_folder import ADAPTER_FILE, ModelFolder
from art_server.store.registry import Registry
from art_watch.terminal.cli import main as art
from tests.http_server import served
from tests.quick.models.house import House


def run(*arguments: object) -> None:
    art([str(argument) for argument in arguments])


def model(root: Path, name: str, project: str = "q") -> ModelFolder:
    return Registry(root).get(project, name).folder


def same_weights(one: Path, other: Path) -> bool:
    return (one / ADAPTER_FILE).read_bytes() == (other / ADAPTER_FILE).read_bytes()


PIECE_BYTES = 50_000


class BreaksOnce:
    """The first download and the first upload end after so many bytes, as when a connection is lost."""

    def __init__(self, app: FastAPI, after: int):
        self.app, self.state, self.after = app, app.state, after
        self.broken: set[str] = set()
        self.seen: list[str] = []

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http" or not scope["path"].endswith(".tar"):
            return await self.app(scope, receive, send)
        self.seen.append(scope["method"])
        is_first = scope["method"] not in self.broken
        count, held = 0, list[Message]()

        async def counted_send(message: Message) -> None:
            nonlocal count
            if scope["method"] == "GET" and is_first:
                count += len(message.get("body", b""))
                if count > self.after:
                    self.broken.add("GET")
                    raise ConnectionResetError
            await send(message)

        async def counted_receive() -> Message:
            nonlocal count
            if scope["method"] == "PUT" and is_first and count > self.after:
                self.broken.add("PUT")
                return {"type": "http.disconnect"}
            message = held.pop() if held else await receive()
            if len(body := message.get("body", b"")) > PIECE_BYTES:  # however much came together
                held.append({**message, "body": body[PIECE_BYTES:]})
                message.update({"body": body[:PIECE_BYTES], "more_body": True})
            count += len(message.get("body", b""))
            return message

        await self.app(scope, counted_receive, counted_send)


@contextlib.contextmanager
def serving(root: Path, after: int = 2**40, **config: Any) -> Iterator[tuple[str, BreaksOnce]]:
    """A server on a real port. What its engine and trainer would do, the house's do."""
    breaking = BreaksOnce(House(root, **config).app, after)
    with served(breaking) as url:
        yield url, breaking
