"""A step over trees against TRL, where it is installed (`scripts/bench/trainer`)."""

import functools
import importlib.util
import json
import os
import subprocess
import sys

from gpu_check.machine import PACKAGES, ROOT, Cases, Line, Machine


def trl(machine: Machine) -> Cases:
    for name in machine.shapes:
        yield f"{name} G=8 P=2048 R=256", functools.partial(_trl, machine, name)


def _trl(machine: Machine, name: str) -> Line:
    if importlib.util.find_spec("trl") is None:
        return {"ok": None, "skipped": "TRL is not installed"}
    cell = machine.cell(prompt=2048, completion=256)
    flags = machine.shape(name) | {key: cell[key] for key in ("group", "num_groups", "prompt", "completion")}
    flags |= {"device": machine.device.type, "dtype": "bfloat16" if machine.is_gpu else "float32"}
    flags |= {"base": machine.models / name, "arms": "ours,trl_best,trl_checkpointed"}
    command = [sys.executable, str(ROOT / "scripts" / "bench" / "trainer")]
    for key, value in flags.items():
        command += [f"--{key.replace('_', '-')}", str(value)]
    path = os.pathsep.join(filter(None, (*PACKAGES, os.environ.get("PYTHONPATH"))))
    environment = os.environ | {"PYTHONPATH": path}
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True, env=environment)
    line = json.loads(done.stdout)
    ratio = min(line["ratio_vs_trl_best"], line["ratio_vs_trl_checkpointed"])
    memory = min(line["memory_ratio_vs_trl_best"], line["memory_ratio_vs_trl_checkpointed"])
    return line | {"ok": machine.ok(not line["is_void"] and ratio >= 3 and memory <= 0.5)}
