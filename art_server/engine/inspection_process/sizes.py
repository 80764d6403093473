"""Sizes of a model without weights that its configuration does not state: of layers, of the KV cache, of states.

A configuration of transformers has a class for each family, so `text` is untyped: only the fields that language models share
are read.
"""

import math
from typing import Any

import torch
from transformers import PreTrainedModel
from transformers.pytorch_utils import Conv1D

from art_server.store.adapter_layers import Layers

FUSED = ("qkv_proj", "kv_proj", "query_key_value", "c_attn", "Wqkv", "W_pack", "att_proj")
"""Layers that compute keys and values at once, and most also queries."""
STATE_SIZES = (
    ("num_heads", "head_dim", "ssm_state_size"),
    ("num_v_heads", "head_k_dim", "head_v_dim"),
)
"""transformers' names of the sizes of a recurrent state: of state-space layers, of gated delta rules."""
ACTIVE_EXPERTS = ("num_experts_per_tok", "top_k_experts", "moe_k", "moe_topk")


def intermediate(model: PreTrainedModel, text: Any, layers: Layers) -> int:
    """The inner width of a layer's feed-forward network; in a mixture of experts, of the active experts together."""
    inner = _largest(getattr(text, "intermediate_size", None) or 4 * text.hidden_size)
    if not layers.is_mixture:
        widest = max(map(max, layers.shapes.values()))
        return min(inner, widest)  # LFM2's layers are narrower than its file says
    counts = [getattr(text, name, None) for name in ACTIVE_EXPERTS]
    active = next(filter(None, counts), 1)
    return _largest(getattr(text, "moe_intermediate_size", None) or inner) * _largest(active)


def _largest(value: Any) -> int:
    """The largest number in a field that has one number, or one for each layer. Any: a field of a configuration."""
    return int(max(value) if isinstance(value, list | tuple) else value)


def kv_heads(text: Any) -> int:
    """The number of heads of keys and values, in the layer with the fewest: Gemma 4's layers differ."""
    return min(
        int(getattr(layer, "num_key_value_heads", None) or layer.num_attention_heads)
        for layer in getattr(text, "per_layer_config", [text])
    )


def kv_per_token(model: PreTrainedModel, text: Any) -> int:
    """How many numbers the KV cache keeps for a token: the outputs that make keys and values, in all layers that have them."""
    total = 0
    for path, module in model.get_decoder().named_modules():
        widths = _output_widths(module)
        if "kv_a_proj_with_mqa" in widths:  # multi-head latent attention keeps one small vector
            total += widths["kv_a_proj_with_mqa"]
        elif "linear" in path:  # a recurrent state, which does not grow
            continue
        elif "k_proj" in widths:
            total += widths["k_proj"] + widths.get("v_proj", widths["k_proj"])
        elif not widths.keys().isdisjoint(FUSED):
            heads = text.num_attention_heads
            size = getattr(text, "head_dim", None) or text.hidden_size // heads
            total += 2 * int(getattr(text, "num_key_value_heads", None) or heads) * int(size)
    return total


def _output_widths(module: torch.nn.Module) -> dict[str, int]:
    """The output width of each layer with weights directly inside a module, by name."""
    widths: dict[str, int] = {}
    for name, child in module.named_children():
        shape = weight_shape(child)
        if shape:
            widths[name] = shape[0]
    return widths


def state_per_sequence(model: PreTrainedModel) -> int:
    """How many numbers recurrent layers keep for a sequence: of each convolution the inputs of the tokens before the last, and
    the heads' matrices of state-space layers and gated delta rules."""
    total = 0
    for module in model.get_decoder().modules():
        convolutions = [child for child in module.children() if isinstance(child, torch.nn.Conv1d)]
        if not convolutions:
            continue
        for convolution in convolutions:
            total += convolution.in_channels * (convolution.kernel_size[0] - 1)
        decay = getattr(module, "A_log", None)
        if isinstance(decay, torch.Tensor) and decay.dim() == 2:
            total += decay.numel()  # the state of the first Mamba: channels x state
        for names in STATE_SIZES:
            if all(hasattr(module, name) for name in names):
                total += math.prod(int(getattr(module, name)) for name in names)
    return total


def weight_shape(module: torch.nn.Module) -> tuple[int, ...]:
    """The shape of a layer's weights, outputs first; empty without weights."""
    weight = getattr(module, "weight", None)
    shape = tuple(weight.shape) if isinstance(weight, torch.Tensor) else ()
    # transformers' Conv1D, of GPT-2, keeps its weights with the inputs first.
    return shape[::-1] if isinstance(module, Conv1D) else shape
