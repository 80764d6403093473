"""The device that the checks run on, their models, and the gradient of a step."""

import random
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, TypeAlias

import arms
import cells
import torch

from art_protocol.wire import LoRAConfig
from art_server.trainer.policy import Policy

ROOT = Path(__file__).resolve().parents[2]
PACKAGES = (str(ROOT), str(ROOT / "art_client"))
GIB = 2**30
Line = dict[str, Any]
"""The figures of a case, by name."""
Cases: TypeAlias = Iterator[tuple[str, Callable[[], Line]]]
"""The cases of a check: the name of each, and the function that measures it."""

SHAPES = {
    "0.6b": {"hidden": 1024, "intermediate": 3072, "layers": 28, "heads": 16},
    "4b": {"hidden": 2560, "intermediate": 9728, "layers": 36, "heads": 32},
    "8b": {"hidden": 4096, "intermediate": 12_288, "layers": 36, "heads": 32},
}
REAL = {"kv": 8, "head_dim": 128, "vocab": 151_936}
SMALL = {"hidden": 256, "intermediate": 768, "layers": 4, "heads": 4, "kv": 2, "head_dim": 64}
TOY = {"hidden": 64, "intermediate": 128, "layers": 2, "heads": 2, "kv": 1, "head_dim": 32}
CELL = {"num_groups": 1, "turns": 1, "strip": 0, "tool": 32, "skew": False}
BARS = {torch.float32: 1e-3, torch.bfloat16: 0.05}
"""Largest distance between two gradients, relative to the norm of the expected gradient."""


class RandomPolicy(Policy):
    """A policy whose base is created on the device with random weights, not loaded."""

    def __init__(self, shape: Line, dtype: torch.dtype, device: torch.device) -> None:
        self._shape = shape
        super().__init__(f"{shape['layers']} layers of {shape['hidden']}", dtype, device)
        self.init_adapter(LoRAConfig(), 1)
        chance = torch.Generator(device).manual_seed(2)
        with torch.no_grad():
            for name, parameter in self.parameters.items():
                if "lora_B" in name:
                    parameter.normal_(std=0.02, generator=chance)

    def _load_base(self) -> Any:
        from transformers import Qwen3ForCausalLM

        torch.manual_seed(0)
        with torch.device(self.device):
            config = cells.make_config(self._shape)
            return Qwen3ForCausalLM._from_config(config, dtype=self.dtype).eval()


class Machine:
    """The device that the checks run on, and the sizes of their models and sequences."""

    def __init__(self, is_toy: bool, models: Path, server_flags: Sequence[str] = ()):
        self.is_toy, self.models, self.server_flags = is_toy, models, server_flags
        self.device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
        self.is_gpu = self.device.type == "cuda"
        self.name = torch.cuda.get_device_name() if self.is_gpu else "CPU"
        self.dtype = torch.bfloat16 if self.is_gpu else torch.float32
        self.shapes = tuple(SHAPES)[: 1 if is_toy else None]
        self.suffix = "-toy" if is_toy else ""

    def shape(self, name: str) -> Line:
        return TOY | {"vocab": 512} if self.is_toy else SHAPES[name] | REAL

    def length(self, tokens: int) -> int:
        return max(16, tokens // 64) if self.is_toy else tokens

    def cell(self, **more: Any) -> Line:
        cell = CELL | {"group": 8} | more
        for key in ("prompt", "completion", "strip", "tool"):
            cell[key] = self.length(cell[key]) if cell[key] else 0
        return cell

    def groups(self, shape: Line, cell: Line) -> list[list[dict]]:
        return cells.make_groups(random.Random(0), shape | cell)

    def synchronize(self) -> None:
        if self.is_gpu:
            torch.cuda.synchronize()

    def timed(self, act: Callable[[], Any], times: int = 3) -> float:
        """Median seconds of several calls, without the first."""
        seconds = []
        for _ in range(1 if self.is_toy else times + 1):
            self.synchronize()
            started = time.perf_counter()
            act()
            self.synchronize()
            seconds.append(time.perf_counter() - started)
        return statistics.median(seconds[1:] or seconds)

    def peak(self, act: Callable[[], Any]) -> float:
        """Peak bytes allocated during the call above the bytes allocated before; 0 on a CPU."""
        if not self.is_gpu:
            act()
            return 0.0
        torch.cuda.empty_cache()
        before = torch.cuda.memory_allocated()
        torch.cuda.reset_peak_memory_stats()
        act()
        self.synchronize()
        return float(torch.cuda.max_memory_allocated() - before)

    def ok(self, verdict: bool) -> bool | None:
        return verdict if self.is_gpu else None


def gradient(policy: Policy) -> list[torch.Tensor]:
    return [parameter.grad.detach().float().clone() for parameter in policy.parameters.values()]  # type: ignore[union-attr]


def distance(one: list[torch.Tensor], other: list[torch.Tensor]) -> float:
    norm = sum(float(tensor.square().sum()) for tensor in other) ** 0.5
    apart = sum(float((a - b).square().sum()) for a, b in zip(one, other, strict=True)) ** 0.5
    return apart / norm


def step_gradient(policy: Policy, groups: list[list[dict]], budget: int) -> tuple[list[torch.Tensor], Line]:
    """The gradient and metrics of one step; afterwards the weights are as before."""
    before = {name: parameter.detach().clone() for name, parameter in policy.parameters.items()}
    metrics = arms.prepare_step(policy, groups, budget)()
    computed = gradient(policy)
    with torch.no_grad():
        for name, parameter in policy.parameters.items():
            parameter.copy_(before[name])
    return computed, metrics
