"""What the trainer's process is told of the memory plan."""

from dataclasses import replace
from pathlib import Path

import pytest

from art_server.engine.device.plan import MemoryPlan, make_memory_plan
from art_server.jobs.trainer import MIN_TOKENS, ServerTrainer
from art_server.process.place import Here
from art_server.settings import ServerConfig
from art_server.shared.trainer_messages import WorkerConfig
from art_server.store.base_models import TINY_DIR
from tests.quick.engine.device.cards import card, demand


def worker_config(plan: MemoryPlan | None, folder: Path, **settings: int) -> WorkerConfig:
    """The settings of the process."""
    device = "cpu" if plan is None else "cuda"
    config = ServerConfig(path=folder, **settings)  # type: ignore[arg-type]
    trainer = ServerTrainer(config=config, device=device, locations=[Here(device=device)])
    trainer.set_base(TINY_DIR, plan)
    (rank,) = trainer.ranks
    assert rank.worker is not None
    return rank.worker


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
