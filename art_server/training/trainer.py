"""The trainer of the server's base model: its process, started once the base is known, and listed among the children."""

import os
from collections.abc import Callable, Mapping
from pathlib import Path

from art_server.children import Children
from art_server.device.plan import Plan
from art_server.settings import Device, ServerConfig
from art_server.training.process import TrainerProcess, worker_command, worker_environment
from art_server.training.task import (
    BetweenSteps,
    CheckTask,
    Done,
    InitTask,
    LoadTask,
    Progress,
    TrainTask,
)

MIN_TOKENS = 64
"""At a time without gradient checkpointing, where the plan has no room for a row without it."""


class Trainer:
    """Runs tasks in one worker process; starts another when that dies."""

    def __init__(
        self, config: ServerConfig, device: Device, kept_to: Mapping[str, str], children: Children
    ):
        self._config = config
        self._device: Device = device
        self._kept_to = kept_to
        """Variables that keep the process to devices of its own."""
        self._dtype = config.number_types(device)[1]
        self._children = children
        self._process: TrainerProcess | None = None
        self._listed: int | None = None

    @property
    def pid(self) -> int | None:
        return self._process.pid if self._process is not None else None

    def set_base(self, path: Path, plan: Plan | None = None) -> None:
        """Name the weights to train; the process starts with the first task. The plan is that of a device which the engine
        uses too."""
        tokens, factor = self._config.max_tokens_per_micro_batch, None
        if plan is not None:
            tokens = tokens or max(plan.tokens, MIN_TOKENS)
            factor = plan.checkpointed_tokens / tokens
        command = worker_command(
            str(path),
            trainer=self._config.trainer,
            dtype=self._dtype,
            device="cpu" if self._device == "cpu" else "cuda:0",
            between_steps=_between_steps(plan),
            max_seq_length=self._config.max_seq_length,
            threads=len(self._config.train_devices) or None if self._device == "cpu" else None,
            max_tokens_per_micro_batch=tokens,
            checkpointing_factor=factor,
            budgets=self._config.server_dir / "budgets.json",
        )
        environment = worker_environment(self._config.server_dir / "unsloth", os.environ)
        log_path = self._config.log_dir / "trainer.log"
        self._process = TrainerProcess(command, log_path, {**environment, **self._kept_to})

    async def run(
        self,
        task: InitTask | CheckTask | LoadTask | TrainTask,
        on_progress: Callable[[Progress], None] | None = None,
        batch: bytes | None = None,
    ) -> Done:
        """Have a task done; takes and raises what `TrainerProcess.run` does."""
        assert self._process is not None, "set_base() comes first"
        await self._process.start()
        self._list(self._process.pid)
        return await self._process.run(task, on_progress, batch)

    def cancel(self) -> None:
        """End the train task under way, as `TrainerProcess.cancel` does."""
        if self._process is not None:
            self._process.cancel()

    async def stop(self) -> None:
        if self._process is not None:
            await self._process.stop()
        self._list(None)

    def _list(self, pid: int | None) -> None:
        if pid == self._listed:
            return
        if self._listed is not None:
            self._children.remove(self._listed)
        if pid is not None:
            self._children.add(pid)
        self._listed = pid


def _between_steps(plan: Plan | None) -> BetweenSteps:
    if plan is None or plan.is_base_resident:
        return "stay"
    return "leave" if plan.has_host_copy else "reload"
