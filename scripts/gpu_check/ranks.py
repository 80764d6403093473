"""Two ranks of the trainer against one, whole and with the base divided, and a rank that is killed."""

import asyncio
import functools
import os
import shutil
import signal
import time
from pathlib import Path
from typing import Any

import arms
import cells
import torch

from gpu_check.machine import BARS, PACKAGES, SHAPES, SMALL, Cases, Line, Machine, distance

SMALL_RANKS = "small in float32"
GANGS = {"one": (1, False), "two": (2, False), "two_sharded": (2, True)}
"""Number of ranks, and whether they share the base's weights."""
NUM_JOBS = 3


def ranks(machine: Machine) -> Cases:
    yield SMALL_RANKS, functools.partial(_ranks, machine, SMALL_RANKS)
    yield "a rank is killed", lambda: asyncio.run(_lose_rank(machine))
    for name in machine.shapes[:2]:
        yield name, functools.partial(_ranks, machine, name)


def scale_model(machine: Machine, name: str) -> tuple[Path, list[list[dict]]]:
    """A model's folder, and groups of three trees, so that one of two ranks has more trees than the other."""
    is_small = name not in SHAPES
    shape = machine.shape(name) if machine.is_toy or not is_small else SMALL | {"vocab": 512}
    folder = machine.models / f"ranks-{name.partition(' ')[0]}{machine.suffix}"
    dtype = torch.float32 if is_small else machine.dtype
    if not (folder / "adapter").exists():
        settings = {"device": machine.device.type, "dtype": str(dtype).removeprefix("torch.")}
        cells.make_model(folder, shape | settings)
    cell = machine.cell(num_groups=3, group=8, prompt=2048, completion=256)
    return folder, machine.groups(shape, cell)


def make_gang(machine: Machine, model: Path, groups: list[list[dict]], number: int, is_sharded: bool) -> Any:
    """Ranks that compute one tree at a time. Ranks share cards where there are fewer cards than ranks."""
    from art_server.jobs.gang import Gang
    from art_server.process.place import Here
    from art_server.shared.trainer_messages import WorkerConfig

    path = os.pathsep.join(filter(None, (*PACKAGES, os.environ.get("PYTHONPATH"))))
    variables = {"PYTHONPATH": path}
    cards = torch.cuda.device_count()
    if machine.is_gpu and cards < number:
        variables["NCCL_MULTI_RANK_GPU_ENABLE"] = "1"
    locations = [
        Here(
            device="cuda" if machine.is_gpu else "cpu",
            variables=variables | {"CUDA_VISIBLE_DEVICES": str(rank % max(cards, 1))},
        )
        for rank in range(number)
    ]
    gang = Gang(log_dir=model, locations=locations, cache_dir=model, meeting=model / "meeting")
    tree = sum(len(row["tokens"]) - row["num_context"] for row in groups[0]) + groups[0][0]["num_context"]
    config = WorkerConfig(
        base_model=str(model / "base"),
        device="cuda:0" if machine.is_gpu else "cpu",
        threads=None if machine.is_gpu else 1,
        max_tokens_per_micro_batch=tree,
        is_sharded=is_sharded,
    )
    gang.use(config)
    return gang


async def take_jobs(gang: Any, model: Path, groups: list[list[dict]], out: Path) -> list[Line]:
    """Metrics of jobs that continue one another, into numbered folders of `out`."""
    task, metrics, start = arms.make_task(groups), [], model / "adapter"
    for number in range(1, NUM_JOBS + 1):
        update = {"in_dir": str(start), "out_dir": str(out / str(number)), "seed": number}
        done = await gang.run(task.model_copy(update=update))
        metrics.append(done.metrics)
        start = out / str(number)
    return metrics


def apart(one: Path, other: Path) -> float:
    from safetensors.torch import load_file

    first, second = load_file(one), load_file(other)
    names = [name for name in first if not name.endswith(".step")]
    return distance([first[name] for name in names], [second[name] for name in names])


def _ranks(machine: Machine, name: str) -> Line:
    model, groups = scale_model(machine, name)
    line: Line = {"cards": torch.cuda.device_count(), "nccl": nccl_version(machine)}
    line |= {"step_s": {}, "peak_gib": {}, "gradient_distance": {}, "weight_distance": {}, "start_s": {}}

    async def measure(gang_name: str) -> None:
        number, is_sharded = GANGS[gang_name]
        gang = make_gang(machine, model, groups, number, is_sharded)
        out = model / gang_name
        shutil.rmtree(out, ignore_errors=True)
        begun = time.perf_counter()
        try:
            metrics = await take_jobs(gang, model, groups, out)
        finally:
            await gang.stop()
        seconds = [job["time/step_forward_backward_s"] for job in metrics]
        line["step_s"][gang_name] = seconds[-1]
        line["start_s"][gang_name] = time.perf_counter() - begun - sum(seconds[1:])
        line["peak_gib"][gang_name] = metrics[-1]["data/step_peak_memory_gib"]
        if gang_name != "one":
            for key, of in (("gradient", "1/optimizer"), ("weight", f"{NUM_JOBS}/adapter_model")):
                files = [folder / f"{of}.safetensors" for folder in (out, model / "one")]
                line[f"{key}_distance"][gang_name] = apart(*files)

    for gang_name in GANGS:
        asyncio.run(measure(gang_name))
    bar = 1e-6 if name not in SHAPES else BARS[torch.bfloat16]
    return line | {"ok": machine.ok(max(line["gradient_distance"].values()) < bar)}


def nccl_version(machine: Machine) -> str | None:
    return ".".join(map(str, torch.cuda.nccl.version())) if machine.is_gpu else None  # type: ignore[attr-defined]


async def _lose_rank(machine: Machine) -> Line:
    """The second rank is killed while it computes. The job fails at once, and the next try makes the same files."""
    from art_server.jobs.trainer_process import TrainerDied

    model, groups = scale_model(machine, SMALL_RANKS)
    line: Line = {"cards": torch.cuda.device_count(), "seconds": {}, "is_equal": {}}
    for is_sharded in (False, True):
        gang = make_gang(machine, model, groups, 2, is_sharded)
        folders = [model / f"{stage}-{is_sharded}" for stage in ("before", "broken", "after")]
        for folder in folders:
            shutil.rmtree(folder, ignore_errors=True)
        task = arms.make_task(groups).model_copy(update={"in_dir": str(model / "adapter")})
        task_of = {folder: task.model_copy(update={"out_dir": str(folder / "1")}) for folder in folders}
        killed_at: list[float] = []

        async def kill(progress: Any, gang: Any = gang, killed_at: list[float] = killed_at) -> None:
            if not killed_at and progress.completed:
                killed_at.append(time.perf_counter())
                os.kill(gang.ranks[1].pid, signal.SIGKILL)

        try:
            await gang.run(task_of[folders[0]])
            try:
                await gang.run(task_of[folders[1]], kill)
            except TrainerDied:
                line["seconds"][str(is_sharded)] = time.perf_counter() - killed_at[0]
            await gang.run(task_of[folders[2]])
        finally:
            await gang.stop()
        files = [folder / "1/adapter_model.safetensors" for folder in (folders[0], folders[2])]
        line["is_equal"][str(is_sharded)] = files[0].read_bytes() == files[1].read_bytes()
    is_noticed = len(line["seconds"]) == 2
    return line | {"ok": machine.ok(is_noticed and all(line["is_equal"].values()))}
