"""Gradients of trees against single sequences, for many shapes and in two number types."""

import functools

import torch

from gpu_check.machine import BARS, SMALL, TOY, Cases, Line, Machine, RandomPolicy, distance, step_gradient


def equality(machine: Machine) -> Cases:
    cases: list[Line] = [{"head_dim": size} for size in (64, 128, 256)]
    cases += [{"prompt": 8192, "completion": 1024}, {"prompt": 128, "completion": 32}]
    cases += [{"window": 96}, {"kv": 1}, {"is_checkpointed": True}]
    cases = cases[-3:] if machine.is_toy else cases
    for dtype in (torch.float32, torch.bfloat16):
        for case in cases:
            yield f"{dtype} {case}", functools.partial(_equality, machine, dtype, dict(case))


def _equality(machine: Machine, dtype: torch.dtype, case: Line) -> Line:
    is_checkpointed = case.pop("is_checkpointed", False)
    cell = machine.cell(**({"prompt": 1024, "completion": 256, "turns": 2, "strip": 128} | case))
    shape = (TOY if machine.is_toy else SMALL) | {"vocab": 512} | case
    policy = RandomPolicy(shape, dtype, machine.device)
    groups = machine.groups(shape, cell)
    budget = 64 if is_checkpointed else 10**6
    computed, metrics = step_gradient(policy, groups, budget)
    policy.use_checkpointing(False)
    policy.use_trees(False)
    expected, _ = step_gradient(policy, groups, 2**15)  # rows of 8k tokens in float32 need 25 GiB at once
    apart = distance(computed, expected)
    is_shared = bool(metrics["data/step_is_shared"])
    return {
        "gradient_distance": apart,
        "is_shared": is_shared,
        "tree_gap": policy.tree_gap,
        "ok": machine.ok(apart < BARS[dtype] and is_shared),
    }
