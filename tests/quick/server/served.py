"""A server in this process over real HTTP: everything but vLLM and the trainer, which are fakes."""

import asyncio
import contextlib
import json
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import aiohttp
import uvicorn
from aiohttp import web

import art
from art_server.app import make_app
from art_server.jobs.gap_bars import gap_bars
from art_server.ledger.ledger import Ledger
from art_server.process.progress import StartProgress
from art_server.process.shared.engine_messages import Sample
from art_server.server import build
from art_server.settings import ServerConfig
from tests.fakes import FakeEngine, FakeTrainer

VLLM_METRICS = "# TYPE vllm:num_requests_running gauge\nvllm:num_requests_running 3.0\n"
PROMPT, ANSWER = [5, 6, 7], [8, 9]


class FakeVllm(FakeEngine):
    """Answers chat completions and `/metrics`, and records what it samples, as vLLM does."""

    ledger: Ledger

    def __init__(self) -> None:
        super().__init__()
        self.num_starts = 1
        self.gap_bars = gap_bars(("float32", "float32"))
        self.pid, self.log_path = None, Path("engine.log")
        self.progress = StartProgress()
        self.http: Any = None
        self.num_dying = 0
        """For so many requests it dies while it answers, and is back afterwards."""
        self.was_killed = False
        self._is_dead = False
        self._runner = web.AppRunner(web.Application())
        self._runner.app.add_routes([web.post("/v1/chat/completions", self._chat), web.get("/metrics", self._metrics)])

    async def start(self) -> None:
        await self._runner.setup()
        await web.TCPSite(self._runner, "127.0.0.1", 0).start()
        host, port = self._runner.addresses[0]
        self.http = aiohttp.ClientSession(f"http://{host}:{port}")

    async def die(self) -> None:
        """Closes its port."""
        await self._runner.cleanup()

    async def stop(self) -> None:
        await self.http.close()
        await self.die()

    async def is_alive(self) -> bool:
        was_dead, self._is_dead = self._is_dead, False
        return not was_dead

    async def notice_end(self) -> None:
        """It is back at once."""

    async def _metrics(self, request: web.Request) -> web.Response:
        return web.Response(text=VLLM_METRICS)

    async def _chat(self, request: web.Request) -> web.Response:
        body = await request.json()
        is_stream = body.get("stream", False)
        if self.num_dying:
            self.num_dying -= 1
            self._is_dead = True
            error = {"error": {"message": "EngineCore encountered an issue.", "code": 500}}
            return events(error) if is_stream else web.json_response(error, status=500)
        request_id = request.headers["x-request-id"]
        sample = Sample(
            request_id=request_id,
            rendered=PROMPT,
            index=0,
            text="a private answer",
            token_ids=ANSWER,
            logprobs=[-0.5] * len(ANSWER),
            finish_reason="stop",
            stop_reason=None,
            sampling={"n": 1, "temperature": 1.0},
        )
        self.ledger.take_samples([(request_id, 0, 0, sample)])
        message = {"role": "assistant", "content": "a private answer"}
        choice = {"index": 0, "finish_reason": "stop", "message": message, "logprobs": None}
        if body.get("logprobs"):
            choice["logprobs"] = {"content": [{"token": "t", "logprob": -0.5} for _ in ANSWER]}
        answer = {"id": request_id, "object": "chat.completion", "created": 0, "choices": [choice]}
        if is_stream:
            return events({**answer, "choices": [{**choice, "delta": message}]})
        return web.json_response({**answer, "model": body["model"]})


def events(*contents: Any) -> web.Response:
    """Server-sent events, written as vLLM does."""
    texts = [json.dumps(each, separators=(",", ":")) for each in contents]
    text = "".join(f"data: {each}\n\n" for each in [*texts, "[DONE]"])
    return web.Response(text=text, content_type="text/event-stream")


class StoppedTrainer(FakeTrainer):
    """With what the server's end and its look at memory use."""

    pid = None

    async def stop(self) -> None: ...


class Served:
    """A server, its address and its fakes."""

    def __init__(self, config: ServerConfig):
        self.engine, self.trainer = FakeVllm(), StoppedTrainer()
        engine: Any = self.engine
        trainer: Any = self.trainer
        self.server = build(config, make_engine=lambda *_: engine, make_trainer=lambda *_: trainer)
        self.engine.ledger = self.server.ledger
        self.app = make_app(self.server, inference_port=None)
        self.url = ""


@contextlib.asynccontextmanager
async def serving(folder: Path, **settings: Any) -> AsyncIterator[Served]:
    """A server that answers at its `url`."""
    served = Served(ServerConfig(path=folder, **settings))
    await served.engine.start()
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
