"""A checkpoint: a PEFT folder that vLLM can load, with the optimizer's state.

    adapter_config.json  adapter_model.safetensors  optimizer.safetensors (absent before the first step)

The server renames the finished folder into place, so it is never visible in part.
"""

from pathlib import Path

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file

from art_protocol.wire import LoRAConfig
from art_server.store.files import sync
from art_server.trainer.base import meta_model
from art_server.trainer.layers import renamed
from art_server.trainer.optimizer import (
    STATE_KEYS,
    load_optimizer,
    make_optimizer,
    save_optimizer,
)
from art_server.trainer.policy import (
    ADAPTER_FILE,
    Policy,
    adapter_tensors,
    outline_adapter,
    write_fresh_adapter,
)

OPTIMIZER_FILE = "optimizer.safetensors"
NUMBER_TYPES = (torch.float32, torch.float16, torch.bfloat16)


class BadCheckpoint(ValueError):
    """The checkpoint does not fit this base and LoRA shape."""


def load_checkpoint(policy: Policy, lora: LoRAConfig, folder: Path, learning_rate: float) -> torch.optim.AdamW:
    """Loads the checkpoint's adapter into the policy and returns an optimizer with its saved state."""
    policy.load_adapter(lora, folder)
    optimizer = make_optimizer(policy.parameters, learning_rate)
    load_optimizer(optimizer, policy.parameters, folder / OPTIMIZER_FILE)
    return optimizer


def write_first_checkpoint(base_model: str, lora: LoRAConfig, seed: int, folder: Path) -> None:
    """Writes step 0, an adapter that changes nothing, and syncs it to disk. Uses no device."""
    write_fresh_adapter(base_model, lora, seed, folder)
    for path in [*folder.iterdir(), folder]:
        sync(path)


def check_checkpoint(base_model: str, lora: LoRAConfig, folder: Path, known: LoRAConfig | None = None) -> LoRAConfig:
    """Checks that a folder's tensors are the tensors of this adapter on this base, and finite. Loads no base, uses no device.
    Returns the configuration, with layers that are listed by path in their shortest form, or as `known` names them.

    Raises:
        BadCheckpoint: the tensors are others, or not finite.
    """
    try:
        model = outline_adapter(base_model, lora)
    except ValueError as error:
        raise BadCheckpoint(str(error)) from error
    shapes = {name: tensor.shape for name, tensor in adapter_tensors(model).items()}
    tensors = _load_tensors(folder / ADAPTER_FILE)
    if different := shapes.keys() ^ tensors.keys():
        verb = "lacks" if min(different) in shapes else "has, unlike the base,"
        raise BadCheckpoint(
            f"target_modules is {_shown(lora.target_modules)}, and {len(different)} tensors differ from those of these layers: "
            f"{ADAPTER_FILE} {verb} {min(different)[:200]}. Let target_modules list the layers that were trained, and nothing "
            "else be saved (modules_to_save, embeddings)"
        )
    _check_tensors(tensors, shapes)
    if (folder / OPTIMIZER_FILE).exists():
        state = _load_tensors(folder / OPTIMIZER_FILE)
        trained = {name: parameter for name, parameter in model.named_parameters() if parameter.requires_grad}
        parameters = {name: trained[name].shape for name in _stepped(state) & trained.keys()}
        _check_tensors(
            state,
            {f"{name}.{key}": shape for name, shape in parameters.items() for key in STATE_KEYS[1:]}
            | {f"{name}.step": torch.Size() for name in parameters},
        )
    preferred = [] if known is None else [known.target_modules]
    names = renamed(lora.target_modules, preferred, meta_model(base_model))
    return lora.model_copy(update={"target_modules": names})


def _shown(targets: list[str] | None) -> str:
    return "all linear layers" if targets is None else ", ".join(targets)[:200]


def _load_tensors(file: Path) -> dict[str, torch.Tensor]:
    try:
        return load_file(file)
    except (SafetensorError, OSError) as error:
        raise BadCheckpoint(
            f"{file.name} is not a safetensors file ({error}): save the adapter with safe_serialization=True"
        ) from error


def _stepped(state: dict[str, torch.Tensor]) -> set[str]:
    """Names of the parameters for which the optimizer has state."""
    return {name.removesuffix(".step") for name in state if name.endswith(".step")}


def _check_tensors(tensors: dict[str, torch.Tensor], shapes: dict[str, torch.Size]) -> None:
    for name, tensor in tensors.items():
        if name not in shapes:
            raise BadCheckpoint(f"'{name[:200]}' belongs to no parameter of the adapter")
        if tensor.shape != shapes[name]:
            raise BadCheckpoint(f"{name} has shape {list(tensor.shape)}, the base takes {list(shapes[name])}")
        if tensor.dtype not in NUMBER_TYPES:
            raise BadCheckpoint(f"{name} has number type {tensor.dtype}, which no adapter has")
        if not torch.isfinite(tensor).all():
            raise BadCheckpoint(f"{name} contains numbers that are not finite")
    if missing := shapes.keys() - tensors.keys():
        raise BadCheckpoint(f"{min(missing)} is missing")


def save_checkpoint(policy: Policy, optimizer: torch.optim.AdamW, folder: Path) -> None:
    """Writes adapter and optimizer state, and syncs them to disk."""
    folder.mkdir(parents=True, exist_ok=True)
    policy.save_adapter(folder)
    save_optimizer(optimizer, policy.parameters, folder / OPTIMIZER_FILE)
    for path in [*folder.iterdir(), folder]:
        sync(path)
