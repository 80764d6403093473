"""AdamW over the adapter. Its state is saved as safetensors: no pickle, and every number is exact."""

from collections.abc import Mapping
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file

from art_server.store.adapter_tensors import STATE_KEYS


def make_optimizer(parameters: Mapping[str, torch.nn.Parameter], learning_rate: float) -> torch.optim.AdamW:
    """AdamW without weight decay.

    Source: Loshchilov and Hutter 2017, arXiv:1711.05101.
    """
    return torch.optim.AdamW(
        list(parameters.values()), lr=learning_rate, betas=(0.9, 0.999), eps=1e-8, weight_decay=0.0
    )


def save_optimizer(optimizer: torch.optim.AdamW, parameters: Mapping[str, torch.nn.Parameter], path: Path) -> None:
    """Writes the state as tensors named PARAMETER.KEY. An optimizer that has never stepped writes no file."""
    tensors: dict[str, torch.Tensor] = {}
    for name, parameter in parameters.items():
        if parameter in optimizer.state:
            for key in STATE_KEYS:
                tensors[f"{name}.{key}"] = optimizer.state[parameter][key].contiguous()
    if tensors:
        save_file(tensors, path)


def load_optimizer(optimizer: torch.optim.AdamW, parameters: Mapping[str, torch.nn.Parameter], path: Path) -> None:
    """Loads the saved state into a fresh optimizer. Without a file the optimizer stays fresh.

    Raises:
        ValueError: the file has state of other parameters.
    """
    if not path.exists():
        return
    tensors = load_file(path)
    for name, parameter in parameters.items():
        # AdamW gives no state to a parameter that never had a gradient.
        if f"{name}.step" not in tensors:
            continue
        state = {key: tensors.pop(f"{name}.{key}") for key in STATE_KEYS}
        if state["exp_avg"].shape != parameter.shape:
            raise ValueError(
                f"{path} holds shape {tuple(state['exp_avg'].shape)} for {name}, the adapter {tuple(parameter.shape)}"
            )
        # "step" stays on the CPU, where AdamW keeps it.
        optimizer.state[parameter] = {
            "step": state["step"],
            "exp_avg": state["exp_avg"].to(parameter.device),
            "exp_avg_sq": state["exp_avg_sq"].to(parameter.device),
        }
    if tensors:
        raise ValueError(f"{path} holds state of parameters that the adapter lacks: {sorted(tensors)[:3]}")


def steps_taken(optimizer: torch.optim.AdamW) -> int:
    """The number of optimizer steps that the moments are made of, over all jobs since they were zero."""
    return max((int(state["step"]) for state in optimizer.state.values()), default=0)
