"""Fakes of the engine and the trainer, without processes. Tests set what they do next."""

import asyncio
import json
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

from art_server.engine.engine import AdapterRefused, PolicyDiffers, State
from art_server.errors import Unavailable
from art_server.jobs.trainer_process import TrainerError
from art_server.process.shared.trainer_messages import (
    Done,
    GapBars,
    InitTask,
    LayersTask,
    Probe,
    Progress,
    Task,
    TrainTask,
)
from art_server.store.base_models import TINY_DIR, BaseModel

BASE = BaseModel("base", TINY_DIR)


async def keep_all(_: object) -> None:
    """What a job runner calls after a step; deletes none."""


class FakeEngine:
    """Has the interface of `engine.Engine`."""

    def __init__(self) -> None:
        self.state: State = "ready"
        self.detail: str | None = None
        self.base: BaseModel | None = BASE
        self.gap_bars: GapBars | None = None
        self.max_seq_length = 4096
        self.is_paused = False
        self.refused: set[str] = set()
        """Names of adapters that it refuses."""
        self.differs: set[str] = set()
        """Names of adapters with which it computes another policy."""
        self.adapters: dict[str, Path] = {}

    def ignored_args(self, requested: dict[str, str]) -> list[str]:
        return []

    @property
    def start_waited_for(self) -> str | None:
        return "the engine" if self.state == "starting" else None

    async def wait_ready(self, timeout_seconds: float) -> None:
        del timeout_seconds
        await asyncio.sleep(0)
        if self.state != "ready":
            raise Unavailable("the engine could not be started", code="engine_failed")

    async def is_alive(self) -> bool:
        return self.state == "ready"

    async def pause(self) -> None:
        self.is_paused = True

    async def resume(self) -> None:
        self.is_paused = False

    async def wake_weights(self) -> None: ...

    async def load_adapter(self, name: str, path: Path, timeout_seconds: float, *, holds_device: bool = False) -> None:
        if not holds_device:
            await self.wait_ready(timeout_seconds)
        if name in self.differs and not holds_device:
            self.adapters.pop(name, None)
            raise PolicyDiffers(name, "its log-probabilities differ")
        if name in self.refused:
            if not holds_device:
                raise AdapterRefused(f"vLLM refused adapter '{name}': its rank is too high")
        elif self.state == "ready":
            self.adapters[name] = path

    def unload_adapter(self, name: str) -> None:
        self.adapters.pop(name, None)

    def loaded_adapters(self) -> list[str]:
        return list(self.adapters)


class FakeTrainer:
    """Has the interface of `trainer.Trainer`. Each train task takes the next of `events`: an error is raised, a
    function is called with the task. A task that raises nothing writes an adapter."""

    def __init__(self) -> None:
        self.events: list[Exception | Callable[[TrainTask], Any]] = []
        self.tasks: list[TrainTask] = []
        self.probe: Probe | None = None
        """Of each step."""
        self.layer_probes: dict[str, Probe] = {}
        self.batches: list[Any] = []
        self.is_waiting = asyncio.Event()
        """Set when a task waits to be cancelled."""
        self._cancelled = asyncio.Event()

    async def run(
        self,
        task: Task,
        on_progress: Callable[[Progress], Awaitable[None]] | None = None,
        batch: bytes | None = None,
    ) -> Done:
        await asyncio.sleep(0)
        if isinstance(task, TrainTask):
            self.tasks.append(task)
            self.batches.append(json.loads(batch or b"null"))
            event = self.events.pop(0) if self.events else None
            if isinstance(event, Exception):
                raise event
            if event is not None:
                await event(task)
            if on_progress is not None:
                await on_progress(Progress(phase="save", completed=0, total=1))
        if isinstance(task, LayersTask):
            for kind in self.layer_probes:
                (Path(task.out_dir) / kind).mkdir()
            return Done(metrics={}, layer_probes=self.layer_probes)
        if isinstance(task, InitTask | TrainTask):
            folder = Path(task.out_dir)
            (folder / "adapter_config.json").write_text("{}")
            (folder / "adapter_model.safetensors").write_bytes(b"weights")
        if not isinstance(task, TrainTask):
            return Done(metrics={"loss/train": 0.5})
        (Path(task.out_dir) / "optimizer.safetensors").write_bytes(b"moments")
        return Done(
            metrics={"loss/train": 0.5},
            optimizer_steps=(task.optimizer_steps or 0) + 1,
            probe=self.probe,
        )

    @property
    def was_cancelled(self) -> bool:
        return self._cancelled.is_set()

    async def wait_to_be_cancelled(self, task: TrainTask) -> None:
        """For `events`: waits to be cancelled, as a task between two micro-batches does, and raises."""
        del task
        self.is_waiting.set()
        await self._cancelled.wait()
        raise TrainerError("cancelled", "the job was cancelled", retryable=True)

    def cancel(self) -> None:
        self._cancelled.set()
