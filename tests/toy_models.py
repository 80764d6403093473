"""Models of many families with random weights, as small as each family allows, with art/tiny's tokenizer."""

import json
import shutil
from pathlib import Path
from typing import Any

import torch
from transformers import AutoConfig

from art_server.base_models import TINY_DIR
from art_server.trainer.base import find_class

SHAPE = {
    "vocab_size": 1408,
    "hidden_size": 128,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "max_position_embeddings": 1024,
    "bos_token_id": None,
    "eos_token_id": 1401,
    "pad_token_id": 1399,
    "tie_word_embeddings": False,
    "initializer_range": 0.1,
}
EXPERTS = {
    "num_experts": 4,
    "num_local_experts": 4,
    "n_routed_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 32,
}
SHARED_EXPERTS = EXPERTS | {
    "n_shared_experts": 1,
    "first_k_dense_replace": 1,
    "n_group": 1,
    "topk_group": 1,
}
LATENT = {
    "q_lora_rank": 32,
    "kv_lora_rank": 256,
    "qk_nope_head_dim": 32,
    "qk_rope_head_dim": 64,
    "v_head_dim": 48,
    "head_dim": 64,
    "num_key_value_heads": 4,
}
"""Multi-head latent attention."""

FAMILIES: dict[str, dict[str, Any]] = {
    "llama": {},
    "mistral": {"sliding_window": None},
    "qwen2": {},
    "qwen3": {},
    "smollm3": {},
    "phi3": {},
    "granite": {"logits_scaling": 2.0},
    "gemma2": {"sliding_window": 16, "tie_word_embeddings": True},
    "gemma3_text": {"sliding_window": 16},
    "gemma4_text": {"sliding_window": 16, "hidden_size_per_layer_input": 32},
    "seed_oss": {},
    "qwen3_5_text": {},
    "mixtral": EXPERTS,
    "qwen3_moe": EXPERTS,
    "gpt_oss": EXPERTS | {"sliding_window": 16},
    "glm4_moe": SHARED_EXPERTS,
    "minimax_m2": EXPERTS | {"rotary_dim": 32, "scoring_func": "sigmoid", "use_routing_bias": True},
    "deepseek_v3": SHARED_EXPERTS | LATENT | {"topk_method": "noaux_tc"},
}
"""transformers' name of each family, and its settings beyond SHAPE. vLLM reads some fields that transformers lacks."""

ORIGINAL = 32
"""Positions before a rotary embedding was stretched to those of SHAPE."""
HALF = SHAPE["head_dim"] // 2
ROPES: dict[str, dict[str, Any]] = {
    "phi3 longrope": {
        "rope_type": "longrope",
        "short_factor": [1.0] * HALF,
        "long_factor": [1.0 + index / 2 for index in range(HALF)],
        "original_max_position_embeddings": ORIGINAL,
    },
    "llama dynamic": {"rope_type": "dynamic", "factor": 4.0},
    "llama linear": {"rope_type": "linear", "factor": 4.0},
    "llama yarn": {
        "rope_type": "yarn",
        "factor": 32.0,
        "original_max_position_embeddings": ORIGINAL,
    },
    "llama llama3": {
        "rope_type": "llama3",
        "factor": 32.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": ORIGINAL,
    },
    "ministral3 yarn": {
        "rope_type": "yarn",
        "factor": 32.0,
        "original_max_position_embeddings": ORIGINAL,
        "llama_4_scaling_beta": 0.5,
    },
}
"""Kinds of rotary embeddings (after the family's name), and an attention whose temperature grows with the position."""

WITHOUT_TREES = ("gemma2", "gpt_oss", "qwen3_5_text")
"""Families that train each sequence alone: soft-capped scores, attention sinks, layers with a recurrent state."""


def make_model(name: str, folder: Path) -> Path:
    """Writes the model of FAMILIES or ROPES into a new folder, in float32; returns the folder."""
    family = name.partition(" ")[0]
    settings = SHAPE | FAMILIES.get(family, {})
    if name in ROPES:
        settings |= {"rope_parameters": {"rope_theta": 10000.0, **ROPES[name]}}
        if "original_max_position_embeddings" in ROPES[name]:
            settings |= {"original_max_position_embeddings": ORIGINAL}
    config = AutoConfig.for_model(family, **settings)
    config.dtype = "float32"
    torch.manual_seed(0)
    model = find_class(config)(config)
    model.save_pretrained(folder)
    for name in ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja"):
        shutil.copy(TINY_DIR / name, folder / name)
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": 1401}))
    return folder
