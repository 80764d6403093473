"""Runs fixed jobs with a real job runner, a real trainer and a fake engine, and dies at a named point.

ART_CHAOS_POINT="step renamed:2" python -m tests.long.chaos.steps FOLDER NUM_JOBS
"""

import asyncio
import os
import random
import sys
from pathlib import Path

from art.types import TrainSFTConfig
from art_protocol.wire import JobReport, LoRAConfig, TrainConfig
from art_server.engine.device.owner import DeviceOwner
from art_server.engine.pause_gate import PauseGate
from art_server.jobs.job_row import Payload
from art_server.jobs.queue import JobQueue
from art_server.jobs.runner import JobRunner
from art_server.jobs.trainer import ServerTrainer
from art_server.process.background import Background
from art_server.process.children import Children
from art_server.process.place import Here
from art_server.settings import ServerConfig
from art_server.shared.trainer_messages import (
    Batch,
    TokenSequence,
    TrainableGroup,
    TrainableTrajectory,
)
from art_server.store.base_models import TINY_DIR
from art_server.store.model_folder import CheckpointRecord, ModelRecord
from art_server.store.registry import Registry
from tests.fakes.parts import FakeEngine, keep_all
from tests.long.chaos.server import VARIABLE, arm
from tests.makers.first_steps import write_first_checkpoint

POLICY = TrainConfig(learning_rate=1e-3, mini_batches=2, passes=2)
SUPERVISED = TrainSFTConfig(learning_rate=[2e-3, 1e-3], batch_size=1).to_train_config()


def job(index: int) -> tuple[TrainConfig, Batch]:
    """Supervised and policy steps in turn."""
    is_supervised = index % 2 == 0
    return SUPERVISED if is_supervised else POLICY, random_batch(index, is_supervised)


def random_batch(seed: int, is_supervised: bool) -> Batch:
    """Two groups of four answers with eight tokens each; a group shares one prompt. In a supervised batch each token has
    the advantage 1."""
    chance = random.Random(seed)

    def tokens(count: int) -> list[int]:
        return [chance.randrange(1000) for _ in range(count)]

    def group() -> TrainableGroup:
        prompt = tokens(12)
        sequences = [
            TokenSequence(
                token_ids=prompt + tokens(8),
                logprobs=[None] * 12 + [-5.0] * 8,
                advantages=dict.fromkeys(range(12, 20), 1.0) if is_supervised else {},
            )
            for _ in range(4)
        ]
        return TrainableGroup(
            trajectories=[
                TrainableTrajectory(reward=float(index), sequences=[sequence])
                for index, sequence in enumerate(sequences)
            ]
        )

    return Batch(groups=[group(), group()])


def add_model(registry: Registry, log: Path) -> None:
    if registry.find("p", "a") is not None:
        return
    folder, lora = registry.folder("p", "a"), LoRAConfig(rank=4)
    if folder.newest_step() is None:
        first = folder.new_checkpoint_dir()
        write_first_checkpoint(str(TINY_DIR), lora, 0, first)
        folder.commit_checkpoint(first, CheckpointRecord(step=0))
    record = ModelRecord(name="a", project="p", base_model="base", lora=lora)
    folder.create(record, log)
    registry.add(folder, record)


async def main(folder: Path, num_jobs: int) -> None:
    config = ServerConfig(path=folder)
    registry = Registry(folder)
    queue = JobQueue(registry.database)
    children = Children(config.server_dir, config.log_dir)
    children.reap()
    here = Here(device="cpu", children=children)
    trainer = ServerTrainer(config=config, device="cpu", locations=[here])
    trainer.set_base(TINY_DIR)
    add_model(registry, folder / "engine.log")
    for index in range(num_jobs):
        train_config, batch = job(index)
        payload = Payload.make(batch)
        queue.insert(registry.get("p", "a").number, f"job-{index}", "digest", train_config, payload, JobReport())
    runner = JobRunner(
        queue=queue,
        registry=registry,
        fleet=FakeEngine(),  # type: ignore[arg-type]
        gate=PauseGate(),
        trainer=trainer,
        owner=DeviceOwner(),
        retain=keep_all,
    )
    background = Background()
    background.start("job runner", runner.run_forever)
    while queue.waiting():  # noqa: ASYNC110 - the queue has no event to wait for
        await asyncio.sleep(0.05)
    await background.stop()
    await trainer.stop()


if __name__ == "__main__":
    if wanted := os.environ.pop(VARIABLE, None):
        name, _, number = wanted.partition(":")
        arm(name, int(number))
    asyncio.run(main(Path(sys.argv[1]), int(sys.argv[2])))
