"""The speed of copying a base back to the device."""

import functools
import time

import torch

from art_server.trainer.host_copy import HostCopy
from gpu_check.machine import GIB, Cases, Line, Machine


def transfer(machine: Machine) -> Cases:
    for gib in (8, 16):
        yield f"{gib} GiB", functools.partial(_transfer, machine, gib)


def _transfer(machine: Machine, gib: int) -> Line:
    size = 2**16 if machine.is_toy else 2**26
    count = 4 if machine.is_toy else gib * GIB // size
    weights = [
        torch.nn.Parameter(torch.zeros(size, dtype=torch.uint8, device=machine.device), requires_grad=False)
        for _ in range(count)
    ]
    copy = HostCopy(weights, machine.device)
    copy.leave()
    machine.synchronize()
    started = time.perf_counter()
    copy.return_to_device()
    machine.synchronize()
    speed = copy.num_bytes / GIB / (time.perf_counter() - started)
    return {"plain_gib_per_s": speed, "ok": machine.ok(speed > 10)}
