"""The number of compiled graphs for forests of many lengths."""

import time

import torch

from gpu_check.machine import Cases, Line, Machine, RandomPolicy, step_gradient


def compiles(machine: Machine) -> Cases:
    def count() -> Line:
        torch._dynamo.reset()
        counters = torch._dynamo.utils.counters
        counters.clear()
        shape = machine.shape("0.6b")
        policy = RandomPolicy(shape, machine.dtype, machine.device)
        started, first = time.perf_counter(), 0.0
        for length in range(200, 1200, 100):
            cell = machine.cell(group=4, prompt=length, completion=50)
            step_gradient(policy, machine.groups(shape, cell), 0)
            machine.synchronize()
            first = first or time.perf_counter() - started
        graphs = counters["stats"]["unique_graphs"]
        return {
            "graphs": graphs,
            "first_step_s": first,
            "later_steps_s": (time.perf_counter() - started - first) / 9,
            "ok": machine.ok(0 < graphs <= 8),
        }

    yield "forests of ten lengths", count
