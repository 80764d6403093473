"""The bytes of a token in a step against the figures of the memory plan, which this check can replace."""

import functools
import sys
from collections.abc import Sequence

import torch

from art_server.engine.device import figures as plan_figures
from gpu_check.machine import GIB, Cases, Line, Machine, RandomPolicy, step_gradient


def memory(machine: Machine) -> Cases:
    for name in machine.shapes:
        for is_checkpointed in (False, True):
            yield (
                f"{name} checkpointed={is_checkpointed}",
                functools.partial(_memory, machine, name, is_checkpointed),
            )


def _memory(machine: Machine, name: str, is_checkpointed: bool) -> Line:
    shape = machine.shape(name)
    policy = RandomPolicy(shape, machine.dtype, machine.device)

    def peak(tokens: int) -> float:
        cell = machine.cell(group=2, prompt=tokens, completion=128)
        budget = 64 if is_checkpointed else 10**6
        return machine.peak(lambda: step_gradient(policy, machine.groups(shape, cell), budget))

    peak(1024)  # a warm-up, not counted
    short, long = (2048, 6144)
    per_token = (peak(long) - peak(short)) / (machine.length(long) - machine.length(short))
    figures = plan_figures.read_figures()
    layer = figures.hidden_factor * shape["hidden"] + figures.intermediate_factor * shape["intermediate"]
    planned = 2 * layer * shape["layers"]
    if is_checkpointed:
        planned = 2 * (shape["layers"] * shape["hidden"] + layer)
    return {
        "bytes_per_token": per_token,
        "planned": planned,
        "hidden": shape["hidden"],
        "intermediate": shape["intermediate"],
        "layers": shape["layers"],
        "is_checkpointed": is_checkpointed,
        "ok": machine.ok(0.5 * planned < per_token < 1.1 * planned),
    }


def write_figures(of_device: Sequence[Line], machine: Machine) -> None:
    """Writes the plan's factors, fitted by least squares to the bytes that lines of this device have, and the size of the CUDA
    context."""
    lines = [line for line in of_device if line["check"] == "memory" and not line.get("is_checkpointed")]
    if not machine.is_gpu or len(lines) < 2:
        sys.exit("--write-figures needs at least two results of the memory check on this GPU")
    widths = torch.tensor([[line["hidden"], line["intermediate"]] for line in lines], dtype=torch.float64)
    per_layer = torch.tensor([line["bytes_per_token"] / 2 / line["layers"] for line in lines], dtype=torch.float64)
    factors = torch.linalg.lstsq(widths, per_layer[:, None]).solution[:, 0].tolist()
    free, total = torch.cuda.mem_get_info()
    context = (total - free - torch.cuda.memory_reserved()) / GIB
    figures = plan_figures.read_figures().model_copy(
        update={
            "hidden_factor": round(factors[0], 1),
            "intermediate_factor": round(factors[1], 1),
            "context_gib": round(context, 2),
        }
    )
    plan_figures.FILE.write_text(figures.model_dump_json(indent=2) + "\n")
