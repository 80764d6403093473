"""A job runner over real folders and a real queue, with a fake engine and a fake trainer."""

import contextlib
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path
from typing import Any

from art_protocol.history import pack_rows
from art_protocol.wire import JobReport, TrainConfig
from art_server.engine.device.computing import ComputingDevices
from art_server.engine.device.owner import DeviceOwner
from art_server.engine.pause_gate import PauseGate
from art_server.jobs.job_row import Payload
from art_server.jobs.layer_check import LayerCheck
from art_server.jobs.queue import JobQueue
from art_server.jobs.runner import JobRunner
from art_server.process.background import Background
from art_server.settings import ServerConfig
from art_server.shared.trainer_messages import Batch, MismatchLimits, Probe
from art_server.store.registry import RegisteredModel, Registry
from tests.fakes.clock import FakeClock
from tests.fakes.parts import FakeEngine, FakeTrainer, keep_all
from tests.makers.new_models import add_model
from tests.waiting import until

LIMITS = MismatchLimits(high=1e-4, wrong=4e-4)


class House:
    """A job runner over real folders and a real queue."""

    def __init__(
        self,
        folder: Path,
        retain: Callable[[RegisteredModel], Awaitable[None]] = keep_all,
        num_gangs: int = 1,
        clock: FakeClock | None = None,
        **queue: Any,
    ):
        self.folder, self.clock = folder, clock or FakeClock()
        self.engine, self.trainer, self.gate = FakeEngine(), FakeTrainer(), PauseGate()
        self.more_trainers = [FakeTrainer() for _ in range(num_gangs - 1)]
        self.background = Background(clock=self.clock)
        self.registry = Registry(folder)
        self.queue = JobQueue(self.registry.database, clock=self.clock, **queue)
        self.runner = JobRunner(
            queue=self.queue,
            registry=self.registry,
            fleet=self.engine,  # type: ignore[arg-type]
            gate=self.gate,
            trainer=self.trainer,  # type: ignore[arg-type]
            owner=DeviceOwner() if num_gangs == 1 else None,
            retain=retain,
            more_trainers=self.more_trainers,  # type: ignore[arg-type]
            clock=self.clock,
        )

    def check_layers(self) -> None:
        layers = LayerCheck(self.folder / "layers", ComputingDevices(ServerConfig(), "cpu"))
        self.runner._layers, self.engine.mismatch_limits = layers, LIMITS
        self.trainer.layer_probes = {"attn.q_proj": PROBE, "attn.kv_b_proj": PROBE}

    def add_model(self, name: str, base_model: str = "base") -> RegisteredModel:
        return add_model(self.registry, name, base_model)

    def add_job(
        self,
        name: str,
        key: str | None = None,
        reward: float = 0.25,
        sampled_step: int | None = None,
        expected_step: int | None = None,
    ) -> str:
        payload = Payload.make(Batch(groups=[]), pack_rows([{"trajectories": []}]))
        report = JobReport(sampled_steps={} if sampled_step is None else {sampled_step: 8})
        metrics = {"train/reward": reward}
        model = self.registry.get("p", name)
        request = (model.number, key, "digest", TrainConfig(), payload, report, metrics)
        job = self.queue.insert(*request, expected_step=expected_step, newest_step=model.folder.newest_step)
        return job.job_id

    def state(self, job: str) -> str:
        return self.queue.get(job).state

    async def wait(self, *jobs: str) -> list[str]:
        await until(lambda: all(self.state(job) in ("done", "failed", "cancelled") for job in jobs))
        await until(lambda: not self.runner._attempts)
        return [self.state(job) for job in jobs]


@contextlib.asynccontextmanager
async def running(
    folder: Path,
    *models: str,
    retain: Callable[[RegisteredModel], Awaitable[None]] = keep_all,
    num_gangs: int = 1,
    clock: FakeClock | None = None,
    **queue: Any,
) -> AsyncIterator[House]:
    house = House(folder, retain, num_gangs, clock, **queue)
    for name in models:
        house.add_model(name)
    house.background.start("job runner", house.runner.run_forever)
    yield house
    await house.background.stop()
    house.registry.database.close()


PROBE = Probe(token_ids=[1, 2], logprobs=[-1.0], base_logprobs=[-1.5], moved=[0.5])
