"""Seconds of a step with our LoRA layers, with PEFT's, and with PEFT's in TF32."""

import functools

import arms
import torch

from art_server.trainer.lora import fuse_lora
from gpu_check.machine import Cases, Line, Machine, RandomPolicy, gradient


def lora(machine: Machine) -> Cases:
    for name in machine.shapes[:2]:
        yield name, functools.partial(_lora, machine, name)


def _lora(machine: Machine, name: str) -> Line:
    from peft.tuners.lora.layer import Linear

    shape = machine.shape(name)
    cell = machine.cell(prompt=2048, completion=256)
    policy = RandomPolicy(shape, machine.dtype, machine.device)
    groups = machine.groups(shape, cell)
    take_step = arms.prepare_step(policy, groups, 0)
    ours = machine.timed(take_step)
    fused = gradient(policy)
    for layer in policy.model.modules():
        if isinstance(layer, Linear):
            vars(layer).pop("forward", None)
    peft = machine.timed(take_step)
    torch.set_float32_matmul_precision("high")
    with_tf32 = machine.timed(take_step)
    torch.set_float32_matmul_precision("highest")
    fuse_lora(policy.model)
    ids = torch.randint(0, shape["vocab"], (1, machine.length(4096)), device=machine.device)

    def forward() -> None:
        with torch.no_grad(), policy.model.disable_adapter():
            policy.model.get_base_model().model(input_ids=ids, use_cache=False)  # type: ignore[operator, union-attr]

    policy.use_trees(False)
    return {
        "step_s": {"ours": ours, "peft": peft, "peft_tf32": with_tf32},
        "base_forward_s": machine.timed(forward),
        "grad_norm": sum(float(tensor.square().sum()) for tensor in fused) ** 0.5,
        "speedup": peft / ours,
        "ok": machine.ok(ours < peft),
    }
