"""A server that samples "maybe" and trains nothing, for the how-to pages that need no engine."""

import re
from collections.abc import AsyncIterator
from typing import Any

import pytest

import art
from tests.quick.client.conftest import Answer, FakeServer, Request, groups, model

__all__ = ["groups", "model"]

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
        self.steps: dict[str, int] = {}
        self.job_error: dict[str, Any] | None = None

    def _answer(self, request: Request) -> Answer:
        if request.path.endswith("/chat/completions"):
            return Answer(body=self._completion(request))
        if request.path == "/api/models":
            body = request.json()
            return Answer(body=self._info(f"{body['project']}/{body['name']}"))
        found = MODEL.match(request.path)
        assert found is not None, request.path
        if request.path.endswith("/train"):
            return self.train(request, found[1])
        if "/sessions/" in request.path:
            return Answer(body=self._session())
        return Answer(body=self._info(found[1]))

    def train(self, request: Request, model: str) -> Answer:
        started = {"event": "accepted", "job_id": "j"}
        if self.job_error is not None:
            return Answer(
                lines=[started, {"event": "error", "job_id": "j", "error": self.job_error}]
            )
        expected = request.json().get("expected_step")
        if expected not in (None, self.steps[model]):
            error = {"message": "the model is at another step", "code": "step_moved"}
            return Answer(409, {"error": error})
        self.steps[model] += 1
        step = {"step": self.steps[model], "metrics": METRICS}
        trained = {"event": "progress", "job_id": "j", "phase": "train", "completed": 2, "total": 2}
        return Answer(lines=[started, trained, {"event": "done", "job_id": "j", **step}])

    def _info(self, model: str) -> dict[str, Any]:
        project, name = model.split("/")
        step = self.steps.setdefault(model, 0)
        info = {"name": name, "project": project, "step": step, "inference_name": model}
        return info | {"base_model": "art/tiny", "lora": {}}

    @staticmethod
    def _completion(request: Request) -> dict[str, Any]:
        message = {"role": "assistant", "content": "maybe"}
        choice = {"index": 0, "finish_reason": "stop", "message": message, "token_ids": [7, 8]}
        body = {"id": "c", "object": "chat.completion", "model": request.json()["model"]}
        return body | {"choices": [choice], "prompt_token_ids": [1, 2]}

    @staticmethod
    def _session() -> dict[str, Any]:
        message = {"role": "assistant", "content": "maybe"}
        choice = {"index": 0, "finish_reason": "stop", "message": message}
        entries = [{"role": "user", "content": "a question"}, choice]
        return {"histories": [{"messages_and_choices": entries}], "num_choices": 1}


@pytest.fixture
async def fake() -> AsyncIterator[FakeArt]:
    server = FakeArt()
    server.on("GET", "/health", Answer(body={"status": "ok"}))
    await server.start()
    yield server
    await server.stop()


@pytest.fixture
async def backend(fake: FakeArt) -> AsyncIterator[art.Backend]:
    async with art.Backend(fake.url, reconnect_seconds=5) as backend:
        yield backend
