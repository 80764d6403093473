"""Several ranks of the trainer as real processes, and what goes wrong in one of them."""

import asyncio
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unittest.mock import patch

from safetensors.torch import load_file

from art_protocol.wire import LoRAConfig, TrainConfig
from art_server.jobs.budgets import Budgets
from art_server.jobs.gang import Gang
from art_server.process import place as place_module
from art_server.shared.trainer_messages import Batch, Done, TrainTask, WorkerConfig
from tests.fakes import forked
from tests.fakes.places import HereInstead
from tests.makers.architectures import start
from tests.makers.forests import random_forest

BUDGET = 64
"""Tokens of a micro-batch."""
RATE = 3e-3
FAULTY = Path(__file__).parent / "fakes" / "faulty_rank.py"
NOTHING: Mapping[str, Any] = {}


@dataclass
class Ranks:
    """A gang, and the loop that it lives in."""

    gang: Gang
    folder: Path
    _runner: asyncio.Runner

    def train(self, start: Path, out: Path, config: TrainConfig, batches: Sequence[Batch], **fields: Any) -> list[Done]:
        """Takes one job after another, from `start` into numbered folders of `out`."""
        done: list[Done] = []
        for number, batch in enumerate(batches, 1):
            task = TrainTask(
                lora=LoRAConfig(),
                in_dir=str(start),
                out_dir=str(out / str(number)),
                config=config,
                batch=batch,
                seed=number,
                **fields,
            )
            done.append(self._runner.run(self.gang.run(task)))
            start = out / str(number)
        return done

    def end(self) -> None:
        self._runner.run(self.gang.stop())

    def break_next(self, rank: int, stage: str, fault: str) -> None:
        """Has a rank fail when it next comes to a stage (`faulty_rank.py`)."""
        (self.folder / f"fault-{rank}").write_text(f"{stage} {fault}")


@contextmanager
def running(
    base: Path,
    folder: Path,
    number: int,
    unlike: Mapping[str, Any] = NOTHING,
    code: str = "",
    *,
    on_hosts: bool = False,
    **settings: Any,
) -> Iterator[Ranks]:
    """`number` ranks on this base, which end with the block. `settings` are fields of WorkerConfig, and `unlike` other ones of
    the last rank, as on a machine of its own. Each rank runs `code` first (`faulty_rank.py`). With `on_hosts` the server takes
    each rank for one on another machine."""
    folder.mkdir(parents=True)

    def faulty(worker: WorkerConfig) -> list[str]:
        config = worker.model_copy(update={"machine": f"host {worker.rank}"})
        if worker.rank == number - 1:
            config = config.model_copy(update=unlike)
        return [sys.executable, str(FAULTY), config.model_dump_json(), str(folder / f"fault-{worker.rank}"), code]

    variables = {"PYTHONPATH": str(FAULTY.parents[2])}
    gang = Gang(
        log_dir=folder,
        locations=[
            HereInstead(faulty, variables, f"host {rank}" if on_hosts else "this machine") for rank in range(number)
        ],
        cache_dir=folder,
        meeting=folder / "meeting",
        budgets=Budgets(folder / "budgets.json"),
    )
    gang.use(WorkerConfig(base_model=str(base), device="cpu", threads=1, **settings))
    with patch.object(place_module, "start_child", forked.start_child), asyncio.Runner() as runner:
        try:
            yield Ranks(gang, folder, runner)
        finally:
            runner.run(gang.stop())


class World:
    """A random base, a checkpoint, three jobs of several micro-batches, and gangs of each size."""

    def __init__(self, folder: Path, stack: ExitStack, architecture: str = "qwen3") -> None:
        policy, self.start = start(architecture, folder)
        self.base = folder / "base"
        self.batches = [random_forest(policy, seed, 0.05) for seed in (1, 2, 3)]
        self.folder = folder
        self._stack = stack
        self._gangs: dict[str, Ranks] = {}

    def forget_budgets(self) -> None:
        """Deletes what the gangs have learned of their memory."""
        for ranks in self._gangs.values():
            (ranks.folder / "budgets.json").unlink(missing_ok=True)

    def gang(self, size: int, *, is_sharded: bool = False) -> Ranks:
        name = f"{size}-sharded" if is_sharded else str(size)
        if name not in self._gangs:
            folder = self.folder / f"ranks-{name}"
            settings = {"max_tokens_per_micro_batch": BUDGET, "is_sharded": is_sharded}
            self._gangs[name] = self._stack.enter_context(running(self.base, folder, size, **settings))
        return self._gangs[name]


def difference(one: Path, other: Path) -> float:
    """The norm of the difference of two files' tensors, relative to that of the tensors."""
    first, second = load_file(one), load_file(other)
    assert first.keys() == second.keys()
    names = [name for name in first if not name.endswith(".step")]
    of_difference = sum(float((first[name] - second[name]).double().square().sum()) for name in names)
    norm = sum(float(first[name].double().square().sum()) for name in names)
    return (of_difference / norm) ** 0.5
