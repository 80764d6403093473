"""Gradients of the Unsloth trainer against ours, where Unsloth is installed."""

import functools
import importlib.util
import subprocess
import sys
from pathlib import Path

import cells
import torch

from art_protocol.wire import LoRAConfig
from art_server.trainer.policy import Policy
from gpu_check.machine import BARS, ROOT, SMALL, Cases, Line, Machine, distance, step_gradient

UNSLOTH_CELL = {"group": 4, "prompt": 512, "completion": 128}


def unsloth(machine: Machine) -> Cases:
    yield "gradients", functools.partial(_unsloth, machine)


def _unsloth(machine: Machine) -> Line:
    """Compares gradients on the files of one model. Unsloth runs in its own process, which imports it first."""
    if not machine.is_gpu or importlib.util.find_spec("unsloth") is None:
        return {"ok": None, "skipped": "Unsloth is not installed, or there is no GPU"}
    folder = machine.models / "unsloth"
    shape = SMALL | {"vocab": 512, "device": "cuda", "dtype": "bfloat16"}
    if not (folder / "adapter").exists():
        cells.make_model(folder, shape)
    policy = Policy(str(folder / "base"), torch.bfloat16)
    policy.load_adapter(LoRAConfig(), folder / "adapter")
    expected, _ = step_gradient(policy, machine.groups(shape, machine.cell(**UNSLOTH_CELL)), 0)
    command = [sys.executable, str(ROOT / "scripts" / "gpu-check"), "--as-unsloth", str(folder)]
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode:
        return {"ok": False, "error": done.stderr[-1000:]}
    theirs = list(torch.load(folder / "gradient.pt", weights_only=True))
    apart = distance([tensor.to(machine.device) for tensor in theirs], expected)
    return {"gradient_distance": apart, "ok": apart < BARS[torch.bfloat16]}


def be_unsloth(folder: Path) -> None:
    from art_server.trainer.unsloth_policy import UnslothPolicy

    machine = Machine(False, folder.parent)
    policy = UnslothPolicy(str(folder / "base"), torch.bfloat16)
    policy.load_adapter(LoRAConfig(), folder / "adapter")
    shape = SMALL | {"vocab": 512}
    computed, _ = step_gradient(policy, machine.groups(shape, machine.cell(**UNSLOTH_CELL)), 0)
    torch.save([tensor.cpu() for tensor in computed], folder / "gradient.pt")
