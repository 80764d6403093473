"""A client of the fake server (tests/fakes/server.py)."""

from collections.abc import AsyncIterator

import pytest

import art
from art import bars
from tests.fakes.server import MODEL_INFO, Answer, FakeServer, Request
from tests.quick.client.demonstrations import TRAIN

__all__ = ["MODEL_INFO", "Answer", "FakeServer", "Request"]


@pytest.fixture(autouse=True)
def every_line_of_bars(monkeypatch: pytest.MonkeyPatch) -> None:
    """A bar prints each of its states, also into the captured stderr, which is no terminal."""
    monkeypatch.setattr(bars, "SECONDS", 0.0)


@pytest.fixture
async def server() -> AsyncIterator[FakeServer]:
    fake = FakeServer()
    fake.on("GET", "/health", Answer(body={"status": "ok"}))
    fake.on("POST", "/api/models", Answer(body=MODEL_INFO))
    fake.on("GET", "/api/models/demo/agent", Answer(body=MODEL_INFO))
    await fake.start()
    yield fake
    await fake.stop()


@pytest.fixture
def make_server() -> type[FakeServer]:
    return FakeServer


@pytest.fixture
def answer() -> type[Answer]:
    return Answer


@pytest.fixture
async def backend(server: FakeServer) -> AsyncIterator[art.Backend]:
    async with art.Backend(server.url, reconnect_seconds=5) as backend:
        yield backend


@pytest.fixture
async def model(backend: art.Backend) -> art.TrainableModel:
    model = art.TrainableModel(name="agent", project="demo", base_model="art/tiny")
    await model.register(backend)
    return model


@pytest.fixture
def groups() -> list[art.TrajectoryGroup]:
    def trajectory(reward: float) -> art.Trajectory:
        return art.Trajectory(messages_and_choices=[{"role": "user", "content": "hi"}], reward=reward)

    return [art.TrajectoryGroup([trajectory(0.0), trajectory(1.0)])]


@pytest.fixture
def server_trains(server: FakeServer) -> None:
    """Each train call makes step 4."""
    done = {"event": "done", "job_id": "j", "step": 4, "metrics": {"loss/train": 0.5}}
    server.on("POST", TRAIN, Answer(lines=[done]))
