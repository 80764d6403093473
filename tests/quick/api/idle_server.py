"""A server that knows model p/run and runs no process, and requests to it as NVIDIA's plugin sends them."""

from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

from fastapi import FastAPI

from art_protocol.wire import JobEvent
from art_server.api.art_wire import _log_note_once
from art_server.app import make_app
from art_server.server import Server, build
from art_server.settings import ServerConfig
from art_server.store.base_models import TINY_DIR, BaseModel
from tests.makers import art_wire_bodies
from tests.makers.new_models import add_model

MODEL: dict[str, Any] = {
    "name": "run",
    "project": "p",
    "entity": None,
    "id": None,
    "run_id": None,
    "config": None,
    "trainable": True,
    "inference_api_key": None,
    "inference_base_url": None,
    "inference_model_name": "run@0",
    "base_path": ".art",
    "report_metrics": None,
    "base_model": "art/tiny",
    "_internal_config": {"init_args": None, "engine_args": None, "trainer_args": None},
}


def choice(number: int = 5, **more: Any) -> dict[str, Any]:
    entry = {"token": "ok", "bytes": [111, 107], "logprob": -0.25, "top_logprobs": []}
    message = {"content": "ok", "refusal": None, "role": "assistant", "annotations": None}
    message |= {"audio": None, "function_call": None, "tool_calls": None}
    fields = {"finish_reason": "stop", "index": 0, "message": message}
    fields |= {"logprobs": {"content": [entry], "refusal": None}}
    return fields | {"token_ids": [number], "prompt_token_ids": [1, 2]} | more


def train_body(*choices: dict[str, Any], **more: Any) -> dict[str, Any]:
    episodes = [[{"role": "user", "content": "hi"}, answer] for answer in choices]
    return art_wire_bodies.train_body(MODEL, *episodes) | more


def make(path: Path, **settings: Any) -> tuple[FastAPI, Server]:
    """A server that knows model p/run at step 0, on a base model whose engine does not run."""
    server = build(ServerConfig(path=path, **settings))
    add_model(server.registry, "run", "art/tiny")
    (engine,) = server.fleet.replicas
    server.fleet.base = engine.base = BaseModel("art/tiny", TINY_DIR)
    engine.state = "ready"
    _log_note_once.cache_clear()
    return make_app(server, inference_port=8000), server


def follow_with(server: Server, *events: JobEvent) -> None:
    """Has every job end with these events."""

    async def follow(job_id: str, after: int = -1) -> AsyncIterator[JobEvent]:
        for event in events:
            yield event

    server.runner.follow = follow  # type: ignore[method-assign]


DONE = JobEvent(event="done", job_id="j", step=1, metrics={"loss/train": 0.5, "data/step_num_gradient_steps": 1.0})
