"""Adapter changes under requests with every fault of a broadcast: real vLLM and the server's own parts in this process, whose
replicas the test can have refuse, hang and die at the right moment."""

import asyncio
import contextlib
import os
import signal
import sys
from collections import Counter
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
import safetensors.torch
import torch

from art_server.app import make_app
from art_server.engine import engine as engine_module
from art_server.engine.engine import AdapterRefused, Engine
from art_server.engine.fleet import Fleet
from art_server.server import Server, build
from art_server.settings import ServerConfig
from art_server.store.model_folder import ADAPTER_FILE, CheckpointRecord, copy_content
from art_server.store.registry import RegisteredModel
from tests.asgi_client import client
from tests.long.fleet.fleets import IS_FULL
from tests.waiting import PATIENCE_SECONDS, until

pytestmark = [pytest.mark.anyio, pytest.mark.skipif(sys.platform != "linux", reason="processes are in /proc")]

NUM_CHANGES, AT_A_TIME = 200 if IS_FULL else 36, 32
FAULTS = ("refuses", "dies while it loads", "does not answer", "dies before the alias", "is slow")
"""One in each `NUM_CHANGES // 6` changes; a replica that died comes back in the middle of later ones."""


@contextlib.asynccontextmanager
async def serving(folder: Path) -> AsyncIterator[Server]:
    server = build(ServerConfig(path=folder, base_model="art/tiny", engines=2, exact=True, max_seq_length=512))
    await server.start()
    try:
        await until(lambda: all(replica.state == "ready" for replica in server.fleet.replicas))
        yield server
    finally:
        await server.stop()


def write_step(model: RegisteredModel, step: int) -> None:
    """A step whose weights are those of no other."""
    checkpoint = model.folder.checkpoints_dir / ".made"
    copy_content(model.folder.checkpoint_dir(0), checkpoint)
    tensors = safetensors.torch.load_file(checkpoint / ADAPTER_FILE)
    torch.manual_seed(step)
    safetensors.torch.save_file(
        {name: 0.02 * torch.randn(tensor.shape) for name, tensor in tensors.items()}, checkpoint / ADAPTER_FILE
    )
    model.folder.commit_checkpoint(checkpoint, CheckpointRecord(step=step))


async def loaded(replica: Engine) -> set[str]:
    """The adapters that vLLM itself lists."""
    async with replica.http.get("/v1/models") as response:
        return {model["id"] for model in (await response.json())["data"]} - {"art/tiny"}


class Change:
    """The model's step changes as a job changes it, while one replica has a fault."""

    def __init__(self, server: Server, model: RegisteredModel):
        assert isinstance(server.fleet, Fleet)
        self.fleet, self.model = server.fleet, model
        self.refused: set[str] = set()

    async def make(self, step: int, fault: str | None, victim: Engine) -> bool:
        """Whether the step serves."""
        name, folder = self.model.adapter_name(step), self.model.folder.checkpoint_dir(step)
        try:
            with self.faulty(fault, victim):
                await self.fleet.load_adapter(name, folder, PATIENCE_SECONDS)
        except AdapterRefused:
            assert fault == "refuses"
            self.refused.add(name)
            return False
        assert fault != "refuses"
        if fault == "dies before the alias":
            kill(victim, signal.SIGKILL)
        assert all(replica.holds(name) for replica in self.fleet.replicas if replica.state == "ready")
        self.model.step = step
        for old in self.fleet.loaded_adapters():  # as `Attempt._unload_old`
            if old not in (name, self.model.adapter_name(step - 1), self.model.adapter_name(step - 2)):
                self.fleet.unload_adapter(old)
        return True

    @contextlib.contextmanager
    def faulty(self, fault: str | None, victim: Engine) -> Any:
        post = victim._post_load

        async def load(name: str, path: Path) -> None:
            if fault == "refuses":
                path = path / "nothing"
            if fault == "is slow":
                await asyncio.sleep(0.3)
            if fault == "dies while it loads":
                kill(victim, signal.SIGKILL)
            if fault == "does not answer":
                kill(victim, signal.SIGSTOP)
            await post(name, path)

        victim._post_load = load  # type: ignore[method-assign]
        before, engine_module.LOAD_SECONDS = engine_module.LOAD_SECONDS, 3.0 if fault == "does not answer" else 300.0
        try:
            yield
        finally:
            victim._post_load = post  # type: ignore[method-assign]
            engine_module.LOAD_SECONDS = before


def kill(replica: Engine, number: int) -> None:
    assert replica.pid is not None
    os.kill(replica.pid, number)


async def test_a_step_serves_from_all_replicas_or_from_none(tmp_path: Path) -> None:
    async with serving(tmp_path) as server, client(make_app(server, inference_port=None)) as http:
        body = {"name": "m", "project": "p", "base_model": "art/tiny"}
        assert (await http.post("/api/models", json=body)).status_code == 200
        model = server.registry.get("p", "m")
        change, seen, over = Change(server, model), Counter[str](), asyncio.Event()

        async def keep_asking(number: int) -> None:
            messages = [{"role": "user", "content": f"respond with yes, no, maybe {number}"}]
            while not over.is_set():
                first = model.step
                body = {"model": "p/m", "messages": messages, "max_tokens": 12, "ignore_eos": True}
                response = await http.post("/v1/chat/completions", json=body)
                assert response.status_code == 200, response.text
                step = response.json()["choices"][0]["art"]["step"]
                assert first <= step <= model.step and model.adapter_name(step) not in change.refused
                seen[f"step {step}"] += 1

        async with asyncio.TaskGroup() as tasks:
            for number in range(AT_A_TIME):
                tasks.create_task(keep_asking(number))
            await make_changes(change, model)
            over.set()
        await until(lambda: all(replica.state == "ready" for replica in change.fleet.replicas))
        await change.fleet.load_adapter(
            model.adapter_name(model.step), model.folder.checkpoint_dir(model.step), PATIENCE_SECONDS
        )
        for replica in change.fleet.replicas:
            there = await loaded(replica)
            assert model.adapter_name(model.step) in there and not there & change.refused
        print(f"{seen.total()} answers of {len(seen)} steps; {len(change.refused)} steps refused")
        assert seen.total() > NUM_CHANGES


async def make_changes(change: Change, model: RegisteredModel) -> None:
    faults = {NUM_CHANGES * (n + 1) // (len(FAULTS) + 1): fault for n, fault in enumerate(FAULTS)}
    for step in range(1, NUM_CHANGES + 1):
        await asyncio.to_thread(write_step, model, step)
        fault = faults.get(step)
        if fault is not None:  # the other one serves meanwhile
            await until(lambda: all(replica.state == "ready" for replica in change.fleet.replicas))
        victim = change.fleet.replicas[step % 2]
        serves = await change.make(step, fault, victim)
        assert serves == (fault != "refuses")
        if fault == "refuses":
            for replica in change.fleet.replicas:
                assert not await loaded(replica) & change.refused
        await asyncio.sleep(0.05)
