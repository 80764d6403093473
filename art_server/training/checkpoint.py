"""A checkpoint: a PEFT folder as vLLM loads it, plus the optimizer's state.

    adapter_config.json  adapter_model.safetensors  optimizer.safetensors (absent before the first step)

Whoever asked for the folder renames it into place, so it is visible whole or not at all.
"""

import os
from pathlib import Path

import torch

from art.wire import LoRAConfig
from art_server.training.optimizer import load_optimizer, make_optimizer, save_optimizer
from art_server.training.policy import Policy, write_fresh_adapter

OPTIMIZER_FILE = "optimizer.safetensors"


def load_checkpoint(
    policy: Policy, lora: LoRAConfig, folder: Path, learning_rate: float
) -> torch.optim.AdamW:
    """Put the folder's adapter into the policy; the optimizer that goes on with it."""
    policy.load_adapter(lora, folder)
    optimizer = make_optimizer(policy.parameters, learning_rate)
    load_optimizer(optimizer, policy.parameters, folder / OPTIMIZER_FILE)
    return optimizer


def write_first_checkpoint(base_model: str, lora: LoRAConfig, seed: int, folder: Path) -> None:
    """Write step 0, an adapter that changes nothing; on return it is on the disk. Uses no device."""
    write_fresh_adapter(base_model, lora, seed, folder)
    _sync_all(folder)


def save_checkpoint(policy: Policy, optimizer: torch.optim.AdamW, folder: Path) -> None:
    """Write adapter and optimizer state; on return they are on the disk, not only in its cache."""
    folder.mkdir(parents=True, exist_ok=True)
    policy.save_adapter(folder)
    save_optimizer(optimizer, policy.parameters, folder / OPTIMIZER_FILE)
    _sync_all(folder)


def _sync_all(folder: Path) -> None:
    for path in [*folder.iterdir(), folder]:
        descriptor = os.open(path, os.O_RDONLY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)
