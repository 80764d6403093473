"""A server that keeps sessions: it answers as a test says, and trains nothing. tests/contracts.py holds its base to the real one."""

import re
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from typing import Any

from art_protocol.sampling import read
from tests.fakes.server import Answer, FakeArt, Request

IN_PATH = re.compile(r"^/s/([^/]+)/v1/chat/completions$")


class PolicyServer(FakeArt):
    """A conversation of a session is one request and its answer."""

    def __init__(self) -> None:
        super().__init__()
        self.steps = {"demo/agent": 0}
        self.answer: Callable[[str, int], str] = lambda question, number: ("yes", "no")[number % 2]
        """Of a question, and how often it was asked before."""
        self.sessions: dict[str, list[dict[str, Any]]] = {}
        self.asked: list[dict[str, Any]] = []
        self.jobs: dict[str, int] = {}
        """The step of each idempotency key."""
        self.metrics_of: dict[str, dict[str, float]] = {}
        """The metrics of each idempotency key's job."""
        self.bodies: dict[str, bytes] = {}
        """The body that each key came with at first."""
        self.failed: set[str] = set()
        """Keys of jobs that failed: they fail again."""
        self.report: dict[str, Any] | None = None
        """Of each job."""
        self.finish_reason = "stop"
        self.trained: list[dict[str, Any]] = []
        self.logged: list[dict[str, Any]] = []
        self.num_base_answers = 0
        """Of sessions without answers of the policy."""
        self.best_step: int | None = None
        """None: the newest."""
        self.optimizer_steps = 0
        """Of the newest checkpoint."""
        self.num_unnamed = 0
        """Requests without a session."""
        self._counts: Counter[str] = Counter()

    def _answer(self, request: Request) -> Answer:
        if request.path.endswith("/checkpoints"):
            kept: list[dict[str, Any]] = [
                {"step": step, "created_at": 0.0, "size_bytes": 1} for step in range(max(self.steps.values()) + 1)
            ]
            kept[-1]["optimizer_steps"] = self.optimizer_steps
            kept[-1 if self.best_step is None else self.best_step]["is_best"] = True
            return Answer(body={"checkpoints": kept})
        if "/sessions/" in request.path:
            histories = self.sessions.get(request.path.rpartition("/")[2], [])
            reply: dict[str, Any] = {"histories": histories, "num_choices": len(histories)}
            empty = {"num_base_answers": self.num_base_answers, "num_unnamed_requests": self.num_unnamed}
            return Answer(body=reply if histories else reply | empty)
        if request.path.endswith("/log"):
            self.logged.append(request.json())
        return super()._answer(request)

    def train(self, request: Request, model: str) -> Answer:
        key = request.headers["idempotency-key"]
        if self.bodies.setdefault(key, request.body) != request.body:
            error = {"message": "this key came with another body", "type": "invalid", "code": "key_reused"}
            return Answer(status=409, body={"error": error})
        if key in self.jobs:
            done = {"event": "done", "job_id": key, "step": self.jobs[key], "metrics": self.metrics_of[key]}
            return Answer(lines=[done])
        error = {"message": "out of memory", "code": "out_of_memory"}
        if key in self.failed:
            return Answer(lines=[{"event": "error", "job_id": key, "error": error}])
        if self.job_error is not None:
            self.failed.add(key)
        answer = super().train(request, model)
        if answer.status == 200 and self.job_error is None:
            self.jobs[key], self.metrics_of[key] = self.steps[model], self.metrics
            self.trained.append(request.json())
            assert answer.lines is not None, "a job is followed by its lines"
            *events, done = answer.lines
            report = {"num_unnamed_requests": self.num_unnamed, **(self.report or {})}
            return replace(answer, lines=[*events, done | {"report": report}])
        return answer

    def _completion(self, request: Request) -> dict[str, Any]:
        asked = request.json() | {"step": request.headers.get("x-art-step")}
        self.asked.append(asked)
        question = asked["messages"][-1]["content"]
        self.text = self.answer(question, self._counts[question])
        self._counts[question] += 1
        match = IN_PATH.match(request.path)
        named = match[1] if match else request.headers.get("x-art-session")
        session, asked["sampling"] = (None, {}) if named is None else read(named)
        body = super()._completion(request)
        body["choices"][0]["finish_reason"] = self.finish_reason
        if session is None:
            self.num_unnamed += 1
        else:
            entries = [*asked["messages"], body["choices"][0] | {"token_ids": [7, 8]}]
            self.sessions.setdefault(session, []).append({"messages_and_choices": entries})
        return body
