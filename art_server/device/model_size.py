"""The size of a base model, from its configuration and the headers of its weight files; no tensor is read."""

import json
import math
import struct
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from art_server.base_models import has_experts, is_attention

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
    kv_width: int
    """Numbers that one layer keeps in the KV cache for a token."""
    lora_width: int
    """Sum of inputs and outputs of all linear layers that LoRA adapts: an adapter's parameters per rank."""
    max_positions: int
    lora_modules: tuple[str, ...] = ()
    """Names of the layers that LoRA adapts; empty if it adapts all linear layers."""
    quantized_bytes: int = 0
    """Bytes of quantised weights, which are the same in every number type that the model runs in."""
    kv_heads: int = 1
    """Heads of keys and values; 1 for latent attention, which keeps one vector."""
    vocabulary: int = 0
    """Number of tokens."""

    def weights(self, itemsize: float) -> float:
        """Bytes of all weights, with `itemsize` bytes for each floating-point weight."""
        return self.num_parameters * itemsize + self.quantized_bytes

    @property
    def kv_per_token(self) -> int:
        """Numbers that the KV cache keeps for a token, in all layers."""
        return self.num_layers * self.kv_width


def read_model_size(folder: Path) -> ModelSize:
    """The size of the model in `folder`, read from `config.json` and the safetensors headers."""
    config = json.loads((folder / "config.json").read_text())
    text: dict[str, Any] = config.get("text_config", config)
    tensors = [each for file in sorted(folder.glob("*.safetensors")) for each in _read_head(file)]
    floats = [(name, shape) for name, dtype, shape in tensors if dtype in FLOATS]
    quantized = [math.prod(shape) for _, dtype, shape in tensors if dtype not in FLOATS]
    hidden = int(text["hidden_size"])
    inner = int(text.get("intermediate_size") or 4 * hidden)
    adapted = floats
    if is_mixture := has_experts(text):
        active = int(text.get("num_experts_per_tok") or 1)
        inner = int(text.get("moe_intermediate_size") or inner) * active
        adapted = [(name, shape) for name, shape in floats if is_attention(name)]
    return ModelSize(
        num_parameters=sum(math.prod(shape) for _, shape in floats),
        quantized_bytes=sum(quantized),
        num_layers=int(text["num_hidden_layers"]),
        hidden=hidden,
        intermediate=inner,
        kv_width=_kv_width(text),
        lora_width=_usual_lora_width(text, inner)
        if quantized
        else sum(_lora_width(name, shape) for name, shape in adapted),
        max_positions=int(text.get("max_position_embeddings", 2048)),
        lora_modules=_attention_layers(tensors) if is_mixture else (),
        kv_heads=_kv_heads(text),
        vocabulary=int(text.get("vocab_size", 0)),
    )


def _read_head(file: Path) -> list[tuple[str, str, list[int]]]:
    """Name, number type and shape of each tensor. Source: safetensors format, an 8-byte length and a JSON header."""
    with file.open("rb") as opened:
        (length,) = struct.unpack("<Q", opened.read(8))
        head = json.loads(opened.read(length))
    head.pop("__metadata__", None)
    return [(name, entry["dtype"], entry["shape"]) for name, entry in head.items()]


def _attention_layers(tensors: list[tuple[str, str, list[int]]]) -> tuple[str, ...]:
    weights = (
        name.split(".") for name, _, shape in tensors if is_attention(name) and len(shape) > 1
    )
    return tuple(sorted({parts[-2] for parts in weights}))


def _kv_width(text: dict[str, Any]) -> int:
    if rank := text.get("kv_lora_rank"):  # multi-head latent attention keeps one small vector
        return int(rank) + int(text["qk_rope_head_dim"])
    heads = int(text["num_attention_heads"])
    size = int(text.get("head_dim") or int(text["hidden_size"]) // heads)
    return 2 * _kv_heads(text) * size


def _kv_heads(text: dict[str, Any]) -> int:
    if text.get("kv_lora_rank"):
        return 1
    return int(text.get("num_key_value_heads") or text["num_attention_heads"])


def _usual_lora_width(text: dict[str, Any], inner: int) -> int:
    """`lora_width` for packed weights: assumes four projections and a gated network in each layer."""
    hidden, kv = int(text["hidden_size"]), _kv_width(text) // 2
    return int(text["num_hidden_layers"]) * (4 * hidden + 2 * (hidden + kv) + 3 * (hidden + inner))


def _lora_width(name: str, shape: list[int]) -> int:
    """Inputs plus outputs of a weight matrix in a layer; 0 for other tensors."""
    return sum(shape) if len(shape) == 2 and ".layers." in name else 0
