"""A checkpoint: a PEFT folder that vLLM can load, with the optimizer's state.

    adapter_config.json  adapter_model.safetensors  optimizer.safetensors (absent before the first step)

The server renames the finished folder into place, so it is never visible in part.
"""

from pathlib import Path

import torch

from art_protocol.wire import LoRAConfig
from art_server.store.files import sync
from art_server.trainer.optimizer import load_optimizer, make_optimizer, save_optimizer
from art_server.trainer.policy import Policy

OPTIMIZER_FILE = "optimizer.safetensors"


def load_checkpoint(policy: Policy, lora: LoRAConfig, folder: Path, learning_rate: float) -> torch.optim.AdamW:
    """Loads the checkpoint's adapter into the policy and returns an optimizer with its saved state."""
    policy.load_adapter(lora, folder)
    optimizer = make_optimizer(policy.parameters, learning_rate)
    load_optimizer(optimizer, policy.parameters, folder / OPTIMIZER_FILE)
    return optimizer


def save_checkpoint(policy: Policy, optimizer: torch.optim.AdamW, folder: Path) -> None:
    """Writes adapter and optimizer state, and syncs them to disk."""
    folder.mkdir(parents=True, exist_ok=True)
    policy.save_adapter(folder)
    save_optimizer(optimizer, policy.parameters, folder / OPTIMIZER_FILE)
    # The folder, too: a file's name is on disk when its folder is.
    for path in [*folder.iterdir(), folder]:
        sync(path)
