"""The size of a base model, from its facts and the headers of its weight files; no tensor is read."""

import json
import math
import struct
from dataclasses import dataclass
from pathlib import Path

from art_server.store.base_facts import Facts, read_facts
from art_server.store.base_models import weight_files

FLOATS = ("F64", "F32", "F16", "BF16")
"""Floating-point types, as safetensors names them."""


@dataclass(frozen=True, slots=True)
class ModelSize:
    """The numbers from which the memory plan is computed."""

    num_parameters: int
    """Number of floating-point weights; quantised weights count in `quantized_bytes`."""
    num_layers: int
    hidden: int
    intermediate: int
    """Inner width of a layer's feed-forward network; in a mixture of experts, of the active experts together."""
    kv_per_token: int
    """Numbers that the KV cache keeps for a token, in all layers."""
    lora_width: int
    """Sum of inputs and outputs of all linear layers that LoRA adapts: an adapter's parameters per rank."""
    max_positions: int
    quantized_bytes: int = 0
    """Bytes of quantised weights, which are the same in every number type that the model runs in."""
    kv_heads: int = 1
    """Heads of keys and values; 1 for latent attention, which keeps one vector."""
    vocabulary: int = 0
    """Number of tokens."""
    state_per_sequence: int = 0
    """Numbers that recurrent layers keep for a sequence."""

    def weights(self, itemsize: float) -> float:
        """Bytes of all weights, with `itemsize` bytes for each floating-point weight."""
        return self.num_parameters * itemsize + self.quantized_bytes


def read_model_size(folder: Path, facts: Facts | None = None) -> ModelSize:
    """The size of the model in `folder`, from its facts and the headers of its weights."""
    facts = facts or read_facts(folder)
    tensors = [tensor for file in weight_files(folder) for tensor in _read_head(file)]
    return ModelSize(
        num_parameters=sum(math.prod(shape) for _, kind, shape in tensors if kind in FLOATS),
        num_layers=facts.num_layers,
        hidden=facts.hidden,
        intermediate=facts.intermediate,
        kv_per_token=facts.kv_per_token,
        lora_width=facts.lora_width,
        max_positions=facts.max_positions,
        quantized_bytes=sum(math.prod(shape) for _, kind, shape in tensors if kind not in FLOATS),
        kv_heads=facts.kv_heads,
        vocabulary=facts.vocabulary,
        state_per_sequence=facts.state_per_sequence,
    )


def _read_head(file: Path) -> list[tuple[str, str, list[int]]]:
    """Name, number type and shape of each tensor. Source: safetensors format, an 8-byte length and a JSON header."""
    with file.open("rb") as opened:
        (length,) = struct.unpack("<Q", opened.read(8))
        head = json.loads(opened.read(length))
    head.pop("__metadata__", None)
    return [(name, entry["dtype"], entry["shape"]) for name, entry in head.items()]
