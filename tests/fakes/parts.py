"""A fake engine and a fake trainer, without processes. Tests set what they do next; tests/contracts.py holds the engine to
the real one."""

import asyncio
import contextlib
import json
from collections.abc import Awaitable, Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import aiohttp

from art_server.engine.device.plan import MemoryPlan
from art_server.engine.engine import AdapterRefused, EngineState, PolicyDiffers
from art_server.errors import Unavailable
from art_server.jobs.trainer_process import TrainerError
from art_server.process.progress import StartProgress
from art_server.shared.trainer_messages import (
    Done,
    LayersTask,
    MismatchLimits,
    Probe,
    Progress,
    Task,
    TrainTask,
)
from art_server.store.base_models import TINY_DIR, BaseModel
from tests.fakes.vllm import PROMPT, FakeVllm

BASE = BaseModel("base", TINY_DIR)


async def keep_all(_: object) -> None:
    """What a job runner calls after a step; deletes none."""


class FakeEngine:
    """Has the interface of `fleet.Fleet` with a single engine, and of this engine. It is ready at once; after `listen`, a fake
    vLLM answers at its `http`."""

    silence_seconds = 0.0

    def __init__(self) -> None:
        self.state: EngineState = "ready"
        self.detail: str | None = None
        self.base: BaseModel | None = BASE
        self.progress = StartProgress()
        self.name = "engine"
        self.num_starts = 1
        self.num_requests = 0
        self.was_killed = False
        self.pid: int | None = None
        self.log_path = Path("engine.log")
        self.mismatch_limits: MismatchLimits | None = None
        self.max_seq_length = 4096
        self.is_paused = False
        self.vllm = FakeVllm()
        self.http: Any = None
        self.refused: set[str] = set()
        """Names of adapters that it refuses."""
        self.differs: set[str] = set()
        """Names of adapters with which it computes another policy."""
        self.adapters: dict[str, Path] = {}
        self.started: list[dict[str, str]] = []
        """The requested arguments of each start."""
        self.asked: list[str] = []
        """What it was asked to unload and to forget."""
        self.rendered: list[dict[str, Any]] = []
        """The bodies of the requests to render a conversation."""
        self.when_unloading: Callable[[], object] = lambda: None

    def load(self, *names: str) -> None:
        self.adapters = {name: Path(name) for name in names}

    async def listen(self) -> None:
        self.http = aiohttp.ClientSession(await self.vllm.listen())

    def start(self, base: BaseModel, requested: Mapping[str, str], plan: MemoryPlan | None = None) -> None:
        del plan
        assert self.base is None, "an engine serves one base model"
        self.started.append(dict(requested))
        self.base, self.state = base, "ready"

    async def stop(self) -> None:
        if self.http is not None:
            await self.http.close()
        await self.vllm.stop()
        self.base, self.state = None, "none"
        self.adapters.clear()

    def ignored_args(self, requested: Mapping[str, str]) -> list[str]:
        return []

    @property
    def start_waited_for(self) -> str | None:
        return "the engine" if self.state == "starting" else None

    def load_waited_for(self, name: str | None = None, *, names_model: bool = True) -> str | None:
        return None

    async def wait_ready(self, timeout_seconds: float) -> None:
        del timeout_seconds
        await asyncio.sleep(0)
        if self.state != "ready":
            raise Unavailable("the engine could not be started", code="engine_failed")

    @property
    def replicas(self) -> tuple["FakeEngine"]:
        return (self,)

    async def reach(
        self,
        name: str,
        path: Path | None,
        key: Callable[[], bytes],
        timeout_seconds: float,
        stack: contextlib.ExitStack,
    ) -> Any:
        assert key(), "a fleet of several engines calls it"
        del stack
        if path is not None:
            await self.load_adapter(name, path, timeout_seconds)
        await self.wait_ready(timeout_seconds)
        return self

    async def complete(self, name: str, body: dict[str, Any]) -> dict[str, Any]:
        async with self.http.post("/v1/completions", json={"model": name, **body}) as response:
            if response.status != 200:
                raise AdapterRefused(f"vLLM cannot compute with adapter '{name}': {await response.text()}")
            return (await response.json())["choices"][0]

    async def tokenize(self, body: dict[str, Any]) -> list[int]:
        """`PROMPT`, and behind it the length of each paragraph of the last message but the first."""
        self.rendered.append(body)
        await self.wait_ready(0)
        _, *paragraphs = body["messages"][-1]["content"].split("\n\n")
        return [*PROMPT, *map(len, paragraphs)]

    async def score(self, name: str, token_ids: list[int]) -> list[float]:
        choice = await self.complete(name, {"prompt": token_ids, "max_tokens": 1, "prompt_logprobs": 0})
        scores = choice["prompt_logprobs"]
        return [entry[str(token)]["logprob"] for token, entry in zip(token_ids[1:], scores[1:], strict=True)]

    async def metrics(self) -> bytes:
        try:
            async with self.http.get("/metrics") as response:
                return await response.read()
        except aiohttp.ClientError:
            return b""

    async def is_alive(self) -> bool:
        """Not if vLLM died in its last request. It is back after this."""
        was_dead, self.vllm.is_dead = self.vllm.is_dead, False
        return self.state == "ready" and not was_dead

    async def notice_end(self) -> None: ...

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
        self.asked.append(f"unload {name}")
        self.when_unloading()
        self.adapters.pop(name, None)

    def forget_prompts(self) -> None:
        self.asked.append("forget")

    def loaded_adapters(self) -> list[str]:
        return list(self.adapters)


class FakeTrainer:
    """Has the interface of `ServerTrainer`. Each train task takes the next of `events`: an error is raised, a
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
        self.pids: dict[str, int | None] = {"trainer": None}
        self.more: list[FakeTrainer] = []
        self.joined: list[Any] = []
        """The ranks of machines."""
        self._cancelled = asyncio.Event()

    def add(self, ranks: Sequence[Any]) -> None:
        self.joined += ranks

    def remove(self, ranks: Sequence[Any]) -> None:
        self.joined = [rank for rank in self.joined if rank not in ranks]

    async def stop(self) -> None: ...

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
        if not isinstance(task, TrainTask):
            return Done(metrics={"loss/train": 0.5})
        folder = Path(task.out_dir)
        (folder / "adapter_config.json").write_text("{}")
        (folder / "adapter_model.safetensors").write_bytes(b"weights")
        (folder / "optimizer.safetensors").write_bytes(b"moments")
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
