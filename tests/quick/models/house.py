"""A server's parts around checkpoints: real folders, registry, queue, gate and routes; an engine and a trainer that hold
nothing."""

import contextlib
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import httpx
from fastapi import FastAPI

from art_protocol.history import history_row
from art_protocol.wire import JobReport, LoRAConfig, TrainConfig
from art_server.app import make_app
from art_server.jobs.job_row import Payload
from art_server.server import build
from art_server.settings import ServerConfig
from art_server.shared.clock import REAL, Clock
from art_server.shared.trainer_messages import Batch
from art_server.store.base_models import TINY_DIR, BaseModel
from art_server.store.model_folder import (
    CheckpointRecord,
    ModelFolder,
    ModelRecord,
    copy_content,
)
from tests.asgi_client import client
from tests.fakes.parts import FakeEngine, FakeTrainer

TINY_LORA = LoRAConfig(rank=4, target_modules=["q_proj", "v_proj"])


def add_model(root: Path, adapter: Path, name: str = "a", steps: int = 1) -> ModelFolder:
    """A model in project p, on art/tiny, with so many steps of the same weights; train/reward of step k is k / 10, and each
    took three optimizer steps."""
    folder = ModelFolder(root, "p", name)
    record = ModelRecord(name=name, project="p", base_model="art/tiny", lora=TINY_LORA)
    for step in range(steps):
        commit(folder, adapter, step)
        if step:
            metrics = {"train/reward": step / 10, "sampled_step": float(step)}
            folder.append_history({**history_row(step, metrics, "then"), "job_id": f"job {step}"})
    folder.create(record, root / "engine.log")
    return folder


def commit(folder: ModelFolder, adapter: Path, step: int, **fields: Any) -> None:
    content = folder.checkpoints_dir / ".made"
    copy_content(adapter, content)
    job = f"job {step}" if step else None
    values = {"created_at": 1.0, "optimizer_steps": 3 * step, **fields}
    described = CheckpointRecord(step=step, job_id=job, **values)
    folder.commit_checkpoint(content, described)


class House:
    """A server that runs no process."""

    def __init__(
        self, root: Path, make_trainer: Callable[..., Any] | None = None, clock: Clock = REAL, **settings: Any
    ):
        config = ServerConfig(path=root, **settings)
        self.engine = FakeEngine()
        self.engine.base = BaseModel("art/tiny", TINY_DIR)
        engine: Any = self.engine
        trainer: Any = FakeTrainer()
        make_trainer = make_trainer or (lambda **_: trainer)
        self.server = build(config, make_fleet=lambda **_: engine, make_trainer=make_trainer, clock=clock)
        self.checkpoints, self.uploads = self.server.checkpoints, self.server.uploads
        self.registry = self.server.registry
        self.gate, self.queue = self.server.gate, self.server.queue
        self.app: FastAPI = make_app(self.server, inference_port=None)

    def client(self, **options: Any) -> httpx.AsyncClient:
        return client(self.app, **options)

    def add_job(self, name: str = "a", key: str | None = None) -> str:
        payload = Payload.make(Batch(groups=[]))
        model = self.registry.get("p", name).number
        return self.queue.insert(model, key, "digest", TrainConfig(), payload, JobReport()).job_id


@contextlib.asynccontextmanager
async def house(root: Path, **settings: Any) -> AsyncIterator[House]:
    here = House(root, **settings)
    try:
        yield here
    finally:
        here.server.close()
