"""A server that samples "maybe" and trains nothing, for the how-to pages that need no engine."""

from collections.abc import AsyncIterator

import pytest

import art
from tests.fakes.server import FakeArt
from tests.quick.client.conftest import groups, model

__all__ = ["groups", "model"]


@pytest.fixture
async def fake() -> AsyncIterator[FakeArt]:
    server = FakeArt()
    await server.start()
    yield server
    await server.stop()


@pytest.fixture
async def backend(fake: FakeArt) -> AsyncIterator[art.Backend]:
    async with art.Backend(fake.url, reconnect_seconds=5) as backend:
        yield backend
