"""Rotary embeddings whose factors do not depend on the call.

transformers chooses the factors of LongRoPE and dynamic NTK by the longest position of a call. A micro-batch holds many
sequences, so a sequence's log-probabilities would depend on its neighbours. vLLM chooses once, by its context. These
are vLLM's choices (0.32, vllm/model_executor/layers/rotary_embedding: phi3_long_rope_scaled_rope.py and
dynamic_ntk_scaling_rope.py). Other kinds (linear, yarn, llama3, proportional) are the same for every call.
"""

import math
from typing import Any

from transformers import PreTrainedModel
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

FIXED = "fixed"
"""transformers' `dynamic_rope_update` leaves a module with this `rope_type` alone."""


def fix_rope(model: PreTrainedModel, max_seq_length: int | None) -> None:
    """Gives the language model the factors of an engine whose context has `max_seq_length` tokens (None: the model's number of
    positions). A later call with another context replaces these factors."""
    for module in model.get_decoder().modules():
        rotary: Any = module  # Any: rotary modules of transformers have no common class
        kind = getattr(rotary, "rope_type", None)
        if isinstance(kind, str):
            rotary.rope_type = _fix(rotary, kind, None, max_seq_length)
        elif isinstance(kind, dict):
            rotary.rope_type = {
                layer: _fix(rotary, of_layer, layer, max_seq_length) for layer, of_layer in kind.items()
            }


def _fix(module: Any, kind: str, layer: str | None, max_seq_length: int | None) -> str:
    """Fixes the factors of one type of layers (None: of all), if they depend on the call. Returns the `rope_type`."""
    config = module.config
    parameters = config.rope_parameters if layer is None else config.rope_parameters[layer]
    positions = config.max_position_embeddings
    if parameters["rope_type"] == "longrope":
        length = max_seq_length or positions
        scale = _long_rope_scale(parameters, length, positions)
    elif parameters["rope_type"] == "dynamic":
        if "alpha" in parameters:
            # Hunyuan: the factors are final when the module is made. vLLM and transformers leave out the `factor` beside `alpha`.
            return FIXED
        # transformers stretches from `positions` on, vLLM from the trained positions, if they are named.
        length = positions**2 / parameters.get("max_trained_positions", positions)
        scale = 1.0
    else:
        return kind
    inv_freq, _ = ROPE_INIT_FUNCTIONS[parameters["rope_type"]](config, seq_len=length, layer_type=layer)
    prefix = "" if layer is None else f"{layer}_"
    buffer = getattr(module, f"{prefix}inv_freq")
    setattr(module, f"{prefix}inv_freq", inv_freq.to(buffer))
    setattr(module, f"{prefix}attention_scaling", scale)
    return FIXED


def _long_rope_scale(parameters: Any, length: int, positions: int) -> float:
    """The scale of LongRoPE for a context of `length` tokens. Any: a dictionary of the configuration."""
    original = parameters["original_max_position_embeddings"]
    scale = parameters.get("long_mscale" if length > original else "short_mscale")
    if scale:
        return scale
    stretch = positions / original
    return math.sqrt(1 + math.log(stretch) / math.log(original)) if stretch > 1 else 1.0
