"""What a trainer process tells before it imports the rest of the trainer, and what ranks cannot change: the device, the number
types and the packages. Ranks that differ in these facts cannot train a job together.

Only torch is imported here: the server compares the ranks' facts seconds before the ranks can compute.
"""

import os
from importlib.metadata import version
from typing import Literal

import torch

from art_server import __version__
from art_server.shared.trainer_messages import WorkerConfig

AttentionKind = Literal["segments", "flex"]


def own_facts(config: WorkerConfig) -> dict[str, str]:
    """What no rank can change and what must be equal on all ranks, by name.

    Versions have their build tags: another build has other kernels and another NCCL. Cards may differ, except where the ranks
    share the weights: whether attention compiles depends on the card, and a rank that fails alone would leave the others in a
    pass.

    Raises:
        ValueError: torch does not find the device.
    """
    device = find_device(config.device) or usual_device()
    dtype = str(usual_dtype(device)).removeprefix("torch.") if config.dtype == "auto" else config.dtype
    facts = {
        "device": device.type,
        "number type": dtype,
        "attention": default_kind(device),
        "precision of float32 products": torch.get_float32_matmul_precision(),
        "NVIDIA_TF32_OVERRIDE": os.environ.get("NVIDIA_TF32_OVERRIDE", "unset"),
        "trainer": config.trainer,
        "torch": torch.__version__,
        **{name: version(name) for name in ("transformers", "peft")},
        "agent-reinforcement-trainer": __version__,
    }
    if config.is_sharded and device.type == "cuda":
        facts["compute capability"] = ".".join(map(str, torch.cuda.get_device_capability(device)))
    return facts


def find_device(name: str) -> torch.device | None:
    """The device of the command line; None for "auto".

    Raises:
        ValueError: torch does not find this device. Another device would not fit the server's memory plan.
    """
    if name == "auto":
        return None
    device = torch.device(name)
    if device.type == "cuda" and not torch.cuda.is_available():
        raise ValueError(f"--device {name}: torch finds no GPU here")
    return device


def usual_device() -> torch.device:
    """The device if none is requested."""
    return torch.device("cuda" if torch.cuda.is_available() else "cpu")


def usual_dtype(device: torch.device) -> torch.dtype:
    """The number type of a base model on this device if none is requested."""
    return torch.bfloat16 if device.type == "cuda" else torch.float32


def default_kind(device: torch.device) -> AttentionKind:
    return "segments" if device.type == "cpu" else "flex"
