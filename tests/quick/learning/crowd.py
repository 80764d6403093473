"""A model in use: answers and their scores over HTTP, on a server whose engine and trainer are fakes."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import httpx

from art_server.shared.clock import REAL, Clock
from tests.quick.server.served import Served, serving

NAME = "shop/helper"
ROUTES = f"/api/models/{NAME}"


class Crowd:
    """The clients of a served model."""

    def __init__(self, served: Served, http: httpx.AsyncClient):
        self.served, self.http = served, http

    async def answer(self, number: int = 0, **more: Any) -> str:
        """The id of a new answer."""
        messages = [{"role": "user", "content": f"question {number}"}]
        reply = await self.http.post("/v1/chat/completions", json={"model": NAME, "messages": messages, **more})
        assert reply.status_code == 200, reply.text
        return reply.json()["id"]

    async def score(self, answer: str, value: Any = 1, **more: Any) -> dict[str, Any]:
        reply = await self.http.post(f"{ROUTES}/feedback", json={"answer": answer, "value": value, **more})
        assert reply.status_code == 202, reply.text
        return reply.json()

    async def learn(self, **policy: Any) -> dict[str, Any]:
        reply = await self.http.put(f"{ROUTES}/learning", json=policy)
        assert reply.status_code == 200, reply.text
        return reply.json()

    async def info(self) -> dict[str, Any]:
        return (await self.http.get(f"{ROUTES}/learning")).json()

    async def scores(self, **query: Any) -> list[dict[str, Any]]:
        return (await self.http.get(f"{ROUTES}/feedback", params=query)).json()["scores"]

    async def trained(self, step: int) -> dict[str, Any]:
        """How the model learns, once a step serves and no job of scores has the scores."""
        while True:
            info = await self.info()
            if info["serving_step"] == step and not info["counts"].get("queued"):
                return info
            await asyncio.sleep(0.02)


@asynccontextmanager
async def crowd(folder: Path, clock: Clock = REAL, **settings: Any) -> AsyncIterator[Crowd]:
    async with serving(folder, clock, **settings) as served, httpx.AsyncClient(base_url=served.url, timeout=60) as http:
        body = {"project": "shop", "name": "helper", "base_model": "base"}
        registered = await http.post("/api/models", json=body)
        assert registered.status_code == 200, registered.text
        yield Crowd(served, http)
