"""The trainer process for the server's base model."""

import os
from collections.abc import Sequence
from pathlib import Path

from art_server.engine.device.plan import MemoryPlan
from art_server.jobs.budgets import Budgets
from art_server.jobs.gang import Gang
from art_server.process.place import Place
from art_server.settings import Device, ServerConfig
from art_server.shared.clock import REAL, Clock
from art_server.shared.trainer_messages import BetweenSteps, WorkerConfig

MIN_TOKENS = 64
"""Least tokens of a micro-batch without gradient checkpointing. The plan's number is 0 where checkpointing is always needed."""


class ServerTrainer(Gang):
    """The worker processes that train adapters of the server's base model: a gang of one process, or of as many as `--ranks`.
    With `--gangs` there are several gangs, which train jobs of different models at the same time."""

    def __init__(self, *, config: ServerConfig, device: Device, locations: Sequence[Place], clock: Clock = REAL):
        """`locations` has a place for each rank of each gang."""
        cache_dir = config.server_dir / "unsloth"
        num, meeting = config.num_ranks(device), config.server_dir / "ranks"
        budgets = Budgets(config.server_dir / "budgets.json")
        super().__init__(
            log_dir=config.log_dir,
            locations=locations[:num],
            cache_dir=cache_dir,
            meeting=meeting,
            budgets=budgets,
            clock=clock,
        )
        self.more = [
            Gang(
                log_dir=config.log_dir,
                locations=locations[gang * num : (gang + 1) * num],
                cache_dir=cache_dir,
                meeting=meeting.with_name(f"ranks-of-{gang}"),
                name=f"trainer-of-gang-{gang}",
                budgets=budgets,
                clock=clock,
            )
            for gang in range(1, config.gangs)
        ]
        """The other gangs."""
        self._config = config
        self._device: Device = device

    def set_base(self, path: Path, plan: MemoryPlan | None = None) -> None:
        """Sets the base model's folder and the GPU's memory plan (None on a CPU); the first task starts the process."""
        tokens, factor = self._config.max_tokens_per_micro_batch, None
        if plan is not None:
            tokens = tokens or max(plan.tokens, MIN_TOKENS)
            factor = plan.checkpointed_tokens / tokens
        worker = WorkerConfig(
            base_model=str(path),
            trainer=self._config.trainer,
            dtype=self._config.number_types(self._device)[1],
            # Each rank sees only its own card (`assignment.py:device_environment`).
            device="cpu" if self._device == "cpu" else "cuda:0",
            between_steps=_between_steps(plan),
            max_seq_length=self._config.max_seq_length,
            threads=self._num_threads(),
            max_tokens_per_micro_batch=tokens,
            checkpointing_factor=factor,
            base_name=str(path),
            is_sharded=plan.num_shards > 1 if plan is not None else self._config.shard == "on",
        )
        for gang in (self, *self.more):
            gang.use(worker)

    def _num_threads(self) -> int | None:
        """Threads of each rank; None is torch's choice."""
        if self._device != "cpu":
            return None
        cores = len(self._config.train_devices)
        num = len(self._own) * self._config.gangs
        # By default torch starts a thread for each core, in each of the ranks.
        if num > 1:
            cores = max(1, (cores or os.cpu_count() or 1) // num)
        return cores or None

    @property
    def pids(self) -> dict[str, int | None]:
        pids = super().pids
        for gang in self.more:
            pids |= gang.pids
        return pids

    async def stop(self) -> None:
        await super().stop()
        for gang in self.more:
            await gang.stop()


def _between_steps(plan: MemoryPlan | None) -> BetweenSteps:
    if plan is None or plan.is_base_resident:
        return "stay"
    return "leave" if plan.has_host_copy else "reload"
