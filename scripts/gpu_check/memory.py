"""The bytes of a token in a step against the figures of the memory plan."""

import functools

from art_server.engine.device.plan import activation_bytes
from gpu_check.machine import Cases, Line, Machine, RandomPolicy, step_gradient


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
    planned, checkpointed = activation_bytes(shape["layers"], shape["hidden"], shape["intermediate"], itemsize=2)
    if is_checkpointed:
        planned = checkpointed
    return {
        "bytes_per_token": per_token,
        "planned": planned,
        "hidden": shape["hidden"],
        "intermediate": shape["intermediate"],
        "layers": shape["layers"],
        "is_checkpointed": is_checkpointed,
        "ok": machine.ok(0.5 * planned < per_token < 1.1 * planned),
    }
