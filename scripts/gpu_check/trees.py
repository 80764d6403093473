"""A step over trees against a step over single sequences."""

import functools

import arms
import torch

from gpu_check.machine import BARS, GIB, Cases, Line, Machine, RandomPolicy, distance, step_gradient

TREES = ((8, 2048, 256), (8, 1024, 1024), (16, 8192, 1024))
"""Rollouts of a group, tokens of its prompt, tokens of each completion."""


def trees(machine: Machine) -> Cases:
    for name in machine.shapes:
        for group, prompt, completion in TREES:
            case = f"{name} G={group} P={prompt} R={completion}"
            yield case, functools.partial(_trees, machine, name, group, prompt, completion)


def _trees(machine: Machine, name: str, group: int, prompt: int, completion: int) -> Line:
    shape = machine.shape(name)
    policy = RandomPolicy(shape, machine.dtype, machine.device)
    groups = machine.groups(shape, machine.cell(group=group, prompt=prompt, completion=completion))
    computed, _ = step_gradient(policy, groups, 0)
    take_step = arms.prepare_step(policy, groups, 0)
    ours = machine.timed(take_step)
    ours_peak = machine.peak(take_step)
    del policy, take_step
    policy = RandomPolicy(shape, machine.dtype, machine.device)
    policy.use_trees(False)
    expected, _ = step_gradient(policy, groups, 0)
    take_step = arms.prepare_step(policy, groups, 0)
    rows = machine.timed(take_step)
    rows_peak = machine.peak(take_step)
    apart, ratio = distance(computed, expected), rows / ours
    is_goal = (group, prompt, completion) == (8, 2048, 256)
    return {
        "seconds": {"ours": ours, "rows": rows},
        "peak_gib": {"ours": ours_peak / GIB, "rows": rows_peak / GIB},
        "ratio": ratio,
        "gradient_distance": apart,
        "ok": machine.ok(apart < BARS[torch.bfloat16] and ratio > (3 if is_goal else 1)),
    }
