"""How large a base model is, from its configuration and the heads of its weight files; no tensor is read."""

import json
import math
import struct
from dataclasses import dataclass
from pathlib import Path
from typing import Any


@dataclass(frozen=True, slots=True)
class ModelSize:
    """What memory follows from."""

    num_parameters: int
    num_layers: int
    hidden: int
    intermediate: int
    """Inner width of what a token passes through in a layer: of a mixture, of its active experts."""
    kv_width: int
    """Numbers that a layer keeps in the KV cache for a token."""
    lora_width: int
    """Inputs and outputs of all linear layers that LoRA adapts: an adapter has so many parameters per rank."""
    max_positions: int

    @property
    def kv_per_token(self) -> int:
        """Numbers that the KV cache keeps for a token."""
        return self.num_layers * self.kv_width


def read_model_size(folder: Path) -> ModelSize:
    """The size of the model whose `config.json` and safetensors lie in `folder`."""
    config = json.loads((folder / "config.json").read_text())
    text: dict[str, Any] = config.get("text_config", config)
    shapes = [shape for file in sorted(folder.glob("*.safetensors")) for shape in _shapes(file)]
    hidden = int(text["hidden_size"])
    inner = int(text.get("intermediate_size") or 4 * hidden)
    if experts := text.get("num_experts_per_tok"):
        inner = int(text.get("moe_intermediate_size") or inner) * int(experts)
    return ModelSize(
        num_parameters=sum(math.prod(shape) for _, shape in shapes),
        num_layers=int(text["num_hidden_layers"]),
        hidden=hidden,
        intermediate=inner,
        kv_width=_kv_width(text),
        lora_width=sum(_lora_width(name, shape) for name, shape in shapes),
        max_positions=int(text.get("max_position_embeddings", 2048)),
    )


def _shapes(file: Path) -> list[tuple[str, list[int]]]:
    """Name and shape of each tensor. Source: the safetensors format, an 8-byte length and a JSON head."""
    with file.open("rb") as opened:
        (length,) = struct.unpack("<Q", opened.read(8))
        head = json.loads(opened.read(length))
    return [(name, entry["shape"]) for name, entry in head.items() if name != "__metadata__"]


def _kv_width(text: dict[str, Any]) -> int:
    if rank := text.get("kv_lora_rank"):  # multi-head latent attention keeps one small vector
        return int(rank) + int(text["qk_rope_head_dim"])
    heads = int(text["num_attention_heads"])
    size = int(text.get("head_dim") or int(text["hidden_size"]) // heads)
    return 2 * int(text.get("num_key_value_heads") or heads) * size


def _lora_width(name: str, shape: list[int]) -> int:
    """Of a weight matrix inside a layer, or of a stack of experts' matrices."""
    if len(shape) < 2 or ".layers." not in name:
        return 0
    return math.prod(shape[:-2]) * sum(shape[-2:])
