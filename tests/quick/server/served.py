"""A server in this process over real HTTP: everything but vLLM and the trainer, which are fakes."""

import asyncio
import contextlib
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import uvicorn

import art
from art_server.app import make_app
from art_server.server import build
from art_server.settings import ServerConfig
from art_server.shared.clock import REAL, Clock
from art_server.shared.same_policy import mismatch_limits
from tests.fakes.parts import FakeEngine, FakeTrainer


class Served:
    """A server, its address and its fakes."""

    def __init__(self, config: ServerConfig, clock: Clock = REAL):
        self.engine, self.trainer = FakeEngine(), FakeTrainer()
        self.engine.mismatch_limits = mismatch_limits(("float32", "float32"))
        engine: Any = self.engine
        trainer: Any = self.trainer
        self.server = build(config, make_fleet=lambda **_: engine, make_trainer=lambda **_: trainer, clock=clock)
        self.engine.vllm.take_samples = self.server.ledger.take_samples
        self.app = make_app(self.server, inference_port=None)
        self.url = ""


@contextlib.asynccontextmanager
async def serving(folder: Path, clock: Clock = REAL, **settings: Any) -> AsyncIterator[Served]:
    """A server that answers at its `url`."""
    served = Served(ServerConfig(path=folder, **settings), clock)
    await served.engine.listen()
    server = uvicorn.Server(uvicorn.Config(served.app, port=0, log_level="warning"))
    server.install_signal_handlers = lambda: None  # type: ignore[attr-defined]
    running = asyncio.create_task(server.serve())
    try:
        while not server.started:  # noqa: ASYNC110
            await asyncio.sleep(0.01)
        port = server.servers[0].sockets[0].getsockname()[1]
        served.url = f"http://127.0.0.1:{port}"
        yield served
    finally:
        server.should_exit = True
        await running


async def sample_group(model: art.TrainableModel, **asked: Any) -> art.TrajectoryGroup:
    """Two rollouts with different rewards, sampled from the model. `asked`: the requests' further arguments."""
    trajectories: list[art.Trajectory] = []
    for reward in (0.0, 1.0):
        messages: Any = [{"role": "user", "content": f"question {reward}"}]
        completion = await model.openai_client().chat.completions.create(
            model=model.get_inference_name(), messages=messages, **asked
        )
        entries = [*messages, completion.choices[0]]
        trajectories.append(art.Trajectory(messages_and_choices=entries, reward=reward))
    return art.TrajectoryGroup(trajectories)
