"""What the trainer's process is told of the memory plan, and which of two processes runs a task."""

import asyncio
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from art_protocol.wire import LoRAConfig, TrainConfig
from art_server.engine.device.plan import MemoryPlan, make_memory_plan
from art_server.jobs.trainer import MIN_TOKENS, Trainer
from art_server.process.children import Children
from art_server.process.shared.trainer_messages import CheckTask, InitTask, LoadTask, Progress, TrainTask, WorkerConfig
from art_server.settings import ServerConfig
from art_server.store.base_models import TINY_DIR
from tests.quick.engine.device.cards import card, demand


def worker_config(plan: MemoryPlan | None, folder: Path, **settings: int) -> WorkerConfig:
    """The settings on the command line of the process."""
    device = "cpu" if plan is None else "cuda"
    config = ServerConfig(path=folder, **settings)  # type: ignore[arg-type]
    trainer = Trainer(config=config, device=device, kept_to=[{}], children=Children(folder, folder))
    trainer.set_base(TINY_DIR, plan)
    return WorkerConfig.model_validate_json(trainer.ranks[0]._command[-1])


def planned(model: str, on: str) -> MemoryPlan:
    return make_memory_plan(card(on), demand(model))


def test_micro_batches_are_as_large_as_the_plan_says(tmp_path: Path) -> None:
    plan = planned("4B", "80 GB")
    config = worker_config(plan, tmp_path)
    assert config.device == "cuda:0" and config.max_tokens_per_micro_batch == plan.tokens > 2048
    assert config.checkpointing_factor == pytest.approx(plan.checkpointed_tokens / plan.tokens)
    limited = worker_config(plan, tmp_path, max_tokens_per_micro_batch=512)
    assert limited.max_tokens_per_micro_batch == 512
    assert limited.checkpointing_factor == pytest.approx(plan.checkpointed_tokens / 512)


def test_a_card_that_always_needs_checkpointing_gets_its_tokens_with_it(tmp_path: Path) -> None:
    plan = replace(planned("4B", "80 GB"), tokens=0)
    config = worker_config(plan, tmp_path)
    assert config.max_tokens_per_micro_batch == MIN_TOKENS
    assert config.checkpointing_factor == pytest.approx(plan.checkpointed_tokens / MIN_TOKENS)


def test_the_base_stays_leaves_or_is_read_again_as_planned(tmp_path: Path) -> None:
    stays, leaves = planned("4B", "80 GB"), planned("8B", "24 GB")
    assert stays.is_base_resident and not leaves.is_base_resident and leaves.has_host_copy
    assert worker_config(stays, tmp_path).between_steps == "stay"
    assert worker_config(leaves, tmp_path).between_steps == "leave"
    assert worker_config(replace(leaves, has_host_copy=False), tmp_path).between_steps == "reload"


def test_on_a_cpu_the_worker_chooses_its_tokens(tmp_path: Path) -> None:
    config = worker_config(None, tmp_path)
    assert config.device == "cpu" and config.between_steps == "stay"
    assert config.max_tokens_per_micro_batch is None and config.checkpointing_factor is None


WORKER = """
import json, sys, time
print('{"event":"ready"}', flush=True)
for line in sys.stdin:
    task = json.loads(line)
    print(json.dumps({"event": "progress", "phase": sys.argv[1], "completed": 0, "total": 1}), flush=True)
    if task["kind"] == "train":
        time.sleep(1000)
    print(json.dumps({"event": "done", "metrics": {}, "notes": [sys.argv[1]]}), flush=True)
"""


@pytest.mark.anyio
async def test_a_task_without_a_device_never_waits_for_a_step(tmp_path: Path) -> None:
    trainer = Trainer(
        config=ServerConfig(path=tmp_path), device="cpu", kept_to=[{}], children=Children(tmp_path, tmp_path)
    )
    trainer.set_base(TINY_DIR)
    settings = WorkerConfig.model_validate_json(trainer._aside._command[-1])
    assert (settings.base_model, settings.device) == (str(TINY_DIR), "cpu")
    trainer.ranks[0]._command = [sys.executable, "-c", WORKER, "main"]
    trainer._aside._command = [sys.executable, "-c", WORKER, "aside"]
    init = InitTask(lora=LoRAConfig(), out_dir=str(tmp_path))
    check = CheckTask(lora=LoRAConfig(), folder=str(tmp_path))
    begun = asyncio.Event()
    load = LoadTask()
    step = TrainTask(lora=LoRAConfig(), in_dir="0", out_dir="1", config=TrainConfig())
    async with asyncio.timeout(100):
        done = await asyncio.gather(trainer.run(load), trainer.run(init), trainer.run(check))
        assert [result.notes for result in done] == [["main"]] * 3, "no step runs: no second process slows the start"
        assert trainer._aside.pid is None

        async def note(_: Progress) -> None:
            begun.set()

        training = asyncio.create_task(trainer.run(step, note))
        await begun.wait()
        done = await asyncio.gather(trainer.run(init), trainer.run(check), trainer.run(init))
        assert [result.notes for result in done] == [["aside"]] * 3
        assert trainer._aside.pid is None, "it ended with its last task"
        assert not training.done() and trainer.ranks[0].pid is not None
    training.cancel()
    await asyncio.wait([training])
