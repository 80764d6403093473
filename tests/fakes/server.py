"""A server on loopback that answers as a test tells it to, over real sockets, so that it can also hang up; and one that
samples one text and makes steps without training. tests/contracts.py holds the second to the real server."""

import asyncio
import json
import re
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any

from art_protocol.wire import NDJSON


@dataclass
class Request:
    method: str
    path: str
    headers: dict[str, str]
    body: bytes

    def json(self) -> Any:
        """The body; that of a train or log request with the groups of its further lines."""
        if self.headers.get("content-type") != NDJSON:
            return json.loads(self.body)
        first, *groups = map(json.loads, self.body.split(b"\n"))
        return {**first, "groups": groups}


@dataclass
class Answer:
    """An answer; with `lines`, a stream of NDJSON, cut off after the last line when `hang_up` is set."""

    status: int = 200
    body: Any = None
    lines: Iterable[dict[str, Any]] | None = None
    hang_up: bool = False
    headers: dict[str, str] = field(default_factory=dict)
    seconds: float = 0.0
    """Until it is sent."""
    after: asyncio.Event | None = None
    """It is sent after this."""


class FakeServer:
    """Answers by (method, path); `requests` holds what came in."""

    def __init__(self) -> None:
        self.requests: list[Request] = []
        self.routes: dict[tuple[str, str], Callable[[Request], Answer]] = {}
        self.otherwise: Callable[[Request], Answer] = lambda _: Answer(404, {"detail": "no such route"})
        self.port = 0
        self._server: asyncio.Server | None = None
        self._writers: set[asyncio.StreamWriter] = set()

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    def on(self, method: str, path: str, answer: Answer | Callable[[Request], Answer]) -> None:
        self.routes[method, path] = answer if callable(answer) else lambda _: answer

    def sent(self, method: str, path: str) -> list[Request]:
        return [r for r in self.requests if (r.method, r.path) == (method, path)]

    async def start(self) -> None:
        self._server = await asyncio.start_server(self._serve, "127.0.0.1", self.port)
        self.port = self._server.sockets[0].getsockname()[1]

    async def stop(self) -> None:
        assert self._server is not None
        self._server.close()
        for writer in self._writers:
            writer.transport.abort()
        await self._server.wait_closed()
        await asyncio.sleep(0)

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._writers.add(writer)
        try:
            while await self._answer_one(reader, writer):
                pass
        except (ConnectionError, asyncio.IncompleteReadError):
            pass
        finally:
            self._writers.discard(writer)
            writer.close()

    async def _answer_one(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> bool:
        head = (await reader.readuntil(b"\r\n\r\n")).decode().split("\r\n")
        method, path, _ = head[0].split(" ")
        headers = {k.lower(): v for k, v in (line.split(": ", 1) for line in head[1:] if line)}
        body = await reader.readexactly(int(headers.get("content-length", 0)))
        request = Request(method, path, headers, body)
        self.requests.append(request)
        route = self.routes.get((method, path), self.otherwise)
        answer = route(request)
        await asyncio.sleep(answer.seconds)
        if answer.after is not None:
            await answer.after.wait()
        if answer.lines is None and answer.hang_up:
            writer.transport.abort()
            return False
        content = answer.body if isinstance(answer.body, bytes) else json.dumps(answer.body).encode()
        length = "transfer-encoding: chunked"
        if answer.lines is None:
            length = f"content-length: {len(content)}"
        extra = [f"{k}: {v}" for k, v in answer.headers.items()]
        head_out = [f"HTTP/1.1 {answer.status} X", "content-type: application/json", length, *extra]
        writer.write(("\r\n".join(head_out) + "\r\n\r\n").encode())
        if answer.lines is None:
            writer.write(content)
            return True
        for line in answer.lines:
            data = json.dumps(line).encode() + b"\n"
            writer.write(f"{len(data):x}\r\n".encode() + data + b"\r\n")
            await writer.drain()
        if answer.hang_up:
            await asyncio.sleep(0.02)  # let what was written arrive
            writer.transport.abort()
            return False
        writer.write(b"0\r\n\r\n")
        return True


MODEL_INFO = {
    "name": "agent",
    "project": "demo",
    "base_model": "art/tiny",
    "step": 3,
    "inference_name": "demo/agent",
    "lora": {},
}


METRICS = {
    "train/reward": 1.0,
    "loss/logprob_gap_mean": 4e-7,
    "loss/logprob_gap_max": 2e-6,
    "loss/importance_ratio_p99": 1.0,
    "loss/corrected_token_fraction": 0.0,
}
MODEL = re.compile(r"/api/models/([^/]+/[^/]+)")


class FakeArt(FakeServer):
    """Keeps models with their steps. Each train call makes a step, unless `job_error` is set."""

    def __init__(self) -> None:
        super().__init__()
        self.otherwise = self._answer
        self.on("GET", "/health", Answer(body={"status": "ok"}))
        self.steps: dict[str, int] = {}
        self.deleted: set[int] = set()
        """Steps without a checkpoint, of all models."""
        self.job_error: dict[str, Any] | None = None
        self.ended: dict[str, dict[str, Any]] = {}
        """The last event of each job, by its id."""
        self.text = "maybe"
        self.metrics = METRICS

    def _answer(self, request: Request) -> Answer:
        if request.path.endswith("/chat/completions"):
            return Answer(body=self._completion(request))
        if (request.method, request.path) == ("GET", "/api/models"):
            return Answer(body={"models": [self._info(model) for model in self.steps]})
        if request.path == "/api/models":
            body = request.json()
            return Answer(body=self._info(f"{body['project']}/{body['name']}"))
        if request.path.startswith("/api/jobs/"):
            return Answer(lines=[self.ended[request.path.split("/")[3]]])
        match = MODEL.match(request.path)
        assert match is not None, request.path
        if request.method == "DELETE":
            info = self._info(match[1])
            del self.steps[match[1]]
            return Answer(body=info)
        if request.path.endswith("/train"):
            return self.train(request, match[1])
        if "/sessions/" in request.path:
            return Answer(body=self._session())
        if request.path.endswith("/learning"):
            step = self.steps[match[1]]
            info = {"state": "off", "policy": {}, "reason": "learning is off", "counts": {}}
            return Answer(body=info | {"serving_step": step, "newest_step": step})
        if request.path.endswith("/log"):
            return Answer(body={"step": self.steps[match[1]], "metrics": {}})
        if request.path.endswith("/checkpoints"):
            kept = [step for step in range(self.steps[match[1]] + 1) if step not in self.deleted]
            return Answer(body={"checkpoints": [{"step": step, "created_at": 0.0, "size_bytes": 1} for step in kept]})
        return Answer(body=self._info(match[1]))

    def train(self, request: Request, model: str) -> Answer:
        job = {"job_id": f"j{len(self.ended)}"}
        started = {"event": "accepted", **job}
        if self.job_error is not None:
            self.ended[job["job_id"]] = {"event": "error", **job, "error": self.job_error}
            return Answer(lines=[started, self.ended[job["job_id"]]])
        expected = request.json().get("expected_step")
        if expected not in (None, self.steps[model]):
            error = {"message": "the model is at another step", "code": "step_moved"}
            return Answer(409, {"error": error})
        self.steps[model] += 1
        step = {"step": self.steps[model], "metrics": self.metrics}
        trained = {"event": "progress", **job, "phase": "train", "completed": 2, "total": 2}
        self.ended[job["job_id"]] = {"event": "done", **job, **step}
        return Answer(lines=[started, trained, self.ended[job["job_id"]]])

    def _info(self, model: str) -> dict[str, Any]:
        project, name = model.split("/")
        step = self.steps.setdefault(model, 0)
        return MODEL_INFO | {"name": name, "project": project, "step": step, "inference_name": model}

    def _completion(self, request: Request) -> dict[str, Any]:
        message = {"role": "assistant", "content": self.text}
        choice: dict[str, Any] = {"index": 0, "finish_reason": "stop", "message": message}
        asked, more = request.json(), dict[str, Any]()
        if asked.get("return_token_ids"):
            choice["token_ids"], more["prompt_token_ids"] = [7, 8], [1, 2]
        body = {"id": "c", "object": "chat.completion", "model": asked["model"]}
        return body | {"choices": [choice], **more}

    def _session(self) -> dict[str, Any]:
        message = {"role": "assistant", "content": self.text}
        choice = {"index": 0, "finish_reason": "stop", "message": message}
        entries = [{"role": "user", "content": "a question"}, choice]
        return {"histories": [{"messages_and_choices": entries}], "num_choices": 1}
