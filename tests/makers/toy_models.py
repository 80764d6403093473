"""Models of many families with random weights, as small as each family allows, with art/tiny's tokenizer."""

import json
import shutil
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from transformers import AutoConfig

from art_server.store.base_models import TINY_DIR, BaseModel
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
SHARED_EXPERTS = EXPERTS | {"n_shared_experts": 1, "first_k_dense_replace": 1, "n_group": 1, "topk_group": 1}
SCALED = {"norm_topk_prob": True, "routed_scaling_factor": 2.5}
GRANITE = {
    "embedding_multiplier": 12.0,
    "attention_multiplier": 0.1,
    "residual_multiplier": 0.22,
    "logits_scaling": 2.0,
}
GEMMA3 = {
    "sliding_window": 16,
    "query_pre_attn_scalar": 24,
    "rope_parameters": {
        "full_attention": {"rope_type": "linear", "rope_theta": 1e6, "factor": 8.0},
        "sliding_attention": {"rope_type": "default", "rope_theta": 10000.0},
    },
}
LATENT = {
    "q_lora_rank": 32,
    "kv_lora_rank": 512,
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
    "smollm3": {"no_rope_layers": [1, 0]},
    "phi3": {},
    "granite": GRANITE,
    "gemma2": {"sliding_window": 16, "query_pre_attn_scalar": 24, "tie_word_embeddings": True},
    "gemma3_text": GEMMA3,
    "gemma4_text": {"sliding_window": 16, "hidden_size_per_layer_input": 32},
    "seed_oss": {},
    "qwen3_5_text": {},
    "mixtral": EXPERTS,
    "qwen3_moe": EXPERTS | {"norm_topk_prob": True},
    "gpt_oss": EXPERTS | {"sliding_window": 16},
    "glm4_moe": SHARED_EXPERTS | SCALED | {"use_qk_norm": True},
    "minimax_m2": EXPERTS | {"rotary_dim": 32, "scoring_func": "sigmoid", "use_routing_bias": True},
    "deepseek_v3": SHARED_EXPERTS
    | LATENT
    | SCALED
    | {"topk_method": "noaux_tc", "scoring_func": "sigmoid", "n_group": 2},
}
"""transformers' name of each family, and its settings beyond SHAPE. Factors are not 1, which would hide that one side leaves them
out. vLLM reads some fields that transformers lacks."""

TIED = SHAPE | {"tie_word_embeddings": True}
MAMBA = {
    "mamba_n_heads": 8,
    "mamba_d_head": 32,
    "mamba_n_groups": 1,
    "mamba_d_state": 16,
    "mamba_expand": 2,
    "mamba_d_conv": 4,
}
NEMOTRON = {
    "num_hidden_layers": 3,
    "mamba_num_heads": 8,
    "mamba_head_dim": 32,
    "n_groups": 1,
    "ssm_state_size": 16,
    "conv_kernel": 4,
}
GATED = {
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 128,
    "linear_value_head_dim": 128,
    "num_hidden_layers": 4,
}
"""Layers of the gated delta rule, three in four. vLLM's kernel for CPUs takes no smaller heads."""
MROPE = {"rope_parameters": {"rope_type": "default", "rope_theta": 1e6, "mrope_section": [6, 5, 5]}}
SEES = {"hidden_size": 32, "intermediate_size": 32, "num_attention_heads": 2, "num_hidden_layers": 1}
PIXELS = SEES | {"image_size": 28, "patch_size": 14}
QWEN_SEES = {"depth": 1, "hidden_size": 32, "intermediate_size": 32, "num_heads": 2, "out_hidden_size": 128}
QWEN_IDS = {"image_token_id": 1390, "video_token_id": 1391, "vision_start_token_id": 1392, "vision_end_token_id": 1393}
GEMMA4_SEES = PIXELS | {"head_dim": 16, "num_key_value_heads": 2, "position_embedding_size": 16}
GEMMA4_IDS = {
    "audio_config": None,
    "image_token_id": 1390,
    "audio_token_id": 1391,
    "boi_token_id": 1392,
    "eoi_token_id": 1393,
}
GEMMA4_HEARS = {
    "hidden_size": 32,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "subsampling_conv_channels": [8, 4],
    "output_proj_dims": 32,
}
MISTRAL_SEES = {
    "vision_config": PIXELS | {"model_type": "pixtral", "head_dim": 16},
    "image_token_index": 10,
    "spatial_merge_size": 1,
}
MINISTRAL = SHAPE | {"model_type": "ministral3", "sliding_window": None}
GLM_SEES = SEES | {"depth": 1, "num_heads": 2, "out_hidden_size": 128}
GLM_BIAS = {
    "attention_bias": True,
    "rope_parameters": {
        "rope_type": "default",
        "rope_theta": 10000.0,
        "partial_rotary_factor": 0.5,
        "mrope_section": [2, 3, 3],
    },
}
LFM = {"conv_dim": 128, "conv_dim_out": 128, "block_dim": 128, "block_ff_dim": 128}
HUNYUAN = {
    "rope_parameters": {
        "rope_type": "dynamic",
        "rope_theta": 10000.0,
        "alpha": 1000.0,
        "factor": 1.0,
        "beta_fast": 32,
        "beta_slow": 1,
        "mscale": 1.0,
        "mscale_all_dim": 0.0,
    },
    "use_qk_norm": True,
}
ONE_OF_EACH = {"layer_types": ["sliding_attention", "full_attention"], "sliding_window": 16}

PUBLISHED: dict[str, dict[str, Any]] = {
    "qwen3_next": SHAPE | EXPERTS | GATED | {"shared_expert_intermediate_size": 32},
    "qwen3_5": {
        "text_config": TIED | GATED,
        "vision_config": QWEN_SEES | {"num_position_embeddings": 16},
        "tie_word_embeddings": True,
        **QWEN_IDS,
    },
    "qwen3_5_moe": {
        "text_config": SHAPE | EXPERTS | GATED | {"shared_expert_intermediate_size": 32},
        "vision_config": QWEN_SEES | {"num_position_embeddings": 16},
        **QWEN_IDS,
    },
    "qwen2_5_vl": {
        "text_config": SHAPE | MROPE,
        "vision_config": QWEN_SEES | {"fullatt_block_indexes": [0]},
        **QWEN_IDS,
    },
    "qwen3_vl": {
        "text_config": TIED | MROPE,
        "vision_config": QWEN_SEES | {"num_position_embeddings": 16, "deepstack_visual_indexes": [0]},
        "tie_word_embeddings": True,
        **QWEN_IDS,
    },
    "qwen3_vl_moe": {
        "text_config": SHAPE | EXPERTS | MROPE | {"norm_topk_prob": True},
        "vision_config": QWEN_SEES | {"num_position_embeddings": 16, "deepstack_visual_indexes": [0]},
        **QWEN_IDS,
    },
    "gemma3": {
        "text_config": TIED | GEMMA3,
        "vision_config": PIXELS,
        "mm_tokens_per_image": 4,
        "image_token_index": 1390,
        "tie_word_embeddings": True,
    },
    "gemma4": {
        "text_config": TIED
        | {
            "sliding_window": 16,
            "hidden_size_per_layer_input": 32,
            "vocab_size_per_layer_input": 1408,
            "num_kv_shared_layers": 0,
        },
        "vision_config": GEMMA4_SEES,
        "tie_word_embeddings": True,
        **GEMMA4_IDS,
    },
    "gemma4 whose keys are values": {
        "text_config": TIED
        | {
            "sliding_window": 16,
            "hidden_size_per_layer_input": 0,
            "enable_moe_block": True,
            "num_experts": 4,
            "top_k_experts": 2,
            "moe_intermediate_size": 32,
            "attention_k_eq_v": True,
            "num_global_key_value_heads": 1,
        },
        "vision_config": GEMMA4_SEES,
        "tie_word_embeddings": True,
        **GEMMA4_IDS,
    },
    "gemma4 whose layers share": {
        "text_config": TIED
        | {
            "num_hidden_layers": 4,
            "layer_types": ["sliding_attention", "full_attention"] * 2,
            "sliding_window": 16,
            "hidden_size_per_layer_input": 32,
            "vocab_size_per_layer_input": 1408,
            "num_kv_shared_layers": 2,
            "use_double_wide_mlp": True,
            "final_logit_softcapping": 30.0,
        },
        "vision_config": GEMMA4_SEES,
        "tie_word_embeddings": True,
        **GEMMA4_IDS,
        "audio_config": GEMMA4_HEARS,
    },
    "gemma4_unified": {
        "text_config": TIED | {"sliding_window": 16},
        "vision_config": {"mm_embed_dim": 32, "output_proj_dims": 32, "mm_posemb_size": 16},
        "tie_word_embeddings": True,
        **GEMMA4_IDS,
        "audio_config": {"audio_embed_dim": 32},
    },
    "mistral3": MISTRAL_SEES | {"text_config": MINISTRAL},
    "mistral3 of Mistral": MISTRAL_SEES | {"text_config": SHAPE | {"model_type": "mistral", "sliding_window": None}},
    "mistral3 whose queries grow": MISTRAL_SEES
    | {
        "text_config": MINISTRAL
        | {
            "rope_parameters": {
                "rope_type": "yarn",
                "rope_theta": 10000.0,
                "factor": 32.0,
                "original_max_position_embeddings": 32,
                "mscale": 1.0,
                "mscale_all_dim": 1.0,
                "llama_4_scaling_beta": 0.5,
            }
        }
    },
    "phi3 turned in part": SHAPE
    | {
        "partial_rotary_factor": 0.75,
        "original_max_position_embeddings": 32,
        "rope_parameters": {
            "rope_type": "longrope",
            "rope_theta": 10000.0,
            "short_factor": [1.0] * 12,
            "long_factor": [1.0 + index / 2 for index in range(12)],
            "original_max_position_embeddings": 32,
        },
    },
    "olmo3": SHAPE | {"sliding_window": 16},
    "exaone4": SHAPE | ONE_OF_EACH | {"sliding_window_pattern": "LG"},
    "cohere2": TIED | ONE_OF_EACH | {"logit_scale": 0.25},
    "apertus": SHAPE,
    "hunyuan_v1_dense": TIED | HUNYUAN,
    "hunyuan_v1_moe": SHAPE
    | EXPERTS
    | HUNYUAN
    | {"moe_topk": [2, 2], "num_shared_expert": [1, 1], "moe_intermediate_size": [128, 128]},
    "ernie4_5": TIED,
    "ernie4_5_moe": SHAPE
    | {
        "moe_num_experts": 4,
        "moe_k": 2,
        "moe_intermediate_size": 32,
        "moe_num_shared_experts": 1,
        "moe_layer_start_index": 1,
        "moe_layer_end_index": 1,
        "moe_layer_interval": 1,
    },
    "glm4_moe_lite": SHAPE | SHARED_EXPERTS | LATENT | SCALED,
    "afmoe": SHAPE
    | SHARED_EXPERTS
    | ONE_OF_EACH
    | {
        "num_dense_layers": 1,
        "num_shared_experts": 1,
        "score_func": "sigmoid",
        "route_norm": True,
        "route_scale": 2.826,
        "mup_enabled": True,
    },
    "granitemoehybrid": TIED
    | MAMBA
    | GRANITE
    | {
        "layer_types": ["mamba", "attention"],
        "num_local_experts": 4,
        "num_experts_per_tok": 2,
        "shared_intermediate_size": 64,
        "position_embedding_type": "nope",
    },
    "granitemoehybrid dense": TIED
    | MAMBA
    | GRANITE
    | {
        "layer_types": ["mamba", "attention"],
        "num_local_experts": 0,
        "num_experts_per_tok": 0,
        "shared_intermediate_size": 64,
        "position_embedding_type": "nope",
    },
    "granitemoehybrid without states": TIED
    | GRANITE
    | {
        "layer_types": ["attention", "attention"],
        "num_local_experts": 0,
        "num_experts_per_tok": 0,
        "shared_intermediate_size": 64,
        "position_embedding_type": "rope",
    },
    "lfm2": TIED
    | LFM
    | {"layer_types": ["conv", "full_attention"], "block_auto_adjust_ff_dim": False, "conv_L_cache": 3},
    "lfm2_moe": TIED
    | LFM
    | EXPERTS
    | {
        "layer_types": ["conv", "full_attention"],
        "num_dense_layers": 1,
        "conv_L_cache": 3,
        "norm_topk_prob": True,
        "use_expert_bias": True,
    },
    "nemotron_h": SHAPE | NEMOTRON | {"layers_block_type": ["mamba", "attention", "mlp"]},
    "nemotron_h moe": SHAPE
    | SHARED_EXPERTS
    | SCALED
    | NEMOTRON
    | {
        "layers_block_type": ["mamba", "attention", "moe"],
        "moe_shared_expert_intermediate_size": 32,
        "moe_latent_size": None,
    },
    "falcon_h1": SHAPE
    | MAMBA
    | {
        "mamba_d_ssm": 256,
        "embedding_multiplier": 5.7,
        "lm_head_multiplier": 0.5,
        "key_multiplier": 0.4,
        "attention_in_multiplier": 0.9,
        "attention_out_multiplier": 0.9,
        "mlp_multipliers": [0.9, 0.3],
        "ssm_in_multiplier": 1.2,
        "ssm_out_multiplier": 0.3,
        "ssm_multipliers": [0.4, 0.3, 0.2, 0.5, 0.4],
    },
    "olmo_hybrid": SHAPE | GATED,
    "glm4": SHAPE,
    "glm4v": {"text_config": SHAPE | GLM_BIAS, "vision_config": GLM_SEES, **QWEN_IDS},
    "glm4v_moe": {
        "text_config": SHAPE | SHARED_EXPERTS | SCALED | {"use_qk_norm": False} | GLM_BIAS,
        "vision_config": GLM_SEES,
        **QWEN_IDS,
    },
    "granite_swa": SHAPE | GRANITE | ONE_OF_EACH,
    "mellum": SHAPE | EXPERTS | ONE_OF_EACH | {"norm_topk_prob": True},
    "exaone4_5": {
        "text_config": SHAPE | ONE_OF_EACH | {"model_type": "exaone4", "sliding_window_pattern": "LG"},
        "vision_config": QWEN_SEES | {"num_key_value_heads": 2},
        "image_token_id": 1390,
        "video_token_id": 1391,
    },
    "muse_glimmer": {
        "text_config": SHAPE
        | ONE_OF_EACH
        | {
            "qk_scale_factor": 3.0,
            "output_multiplier": 0.3,
            "rope_parameters": {"rope_type": "default", "rope_theta": 500_000.0},
        },
        "vision_config": SEES | {"pos_emb_height": 4, "pos_emb_width": 4, "output_dim": 128, "adapter_dim": 32},
        "image_token_id": 1390,
        "video_token_id": 1391,
        "out_hidden_size": 128,
        "projector_hidden_size": 32,
    },
    "qwen2_moe": SHAPE | EXPERTS | {"shared_expert_intermediate_size": 32},
    "olmo2": SHAPE,
    "exaone_moe": SHAPE | SHARED_EXPERTS | ONE_OF_EACH | SCALED,
    "hy_v3": SHAPE
    | EXPERTS
    | {"first_k_dense_replace": 1, "expert_hidden_dim": 32, "route_norm": True, "qk_norm": True},
    "laguna": SHAPE | EXPERTS | {"num_attention_heads_per_layer": [4, 4], "shared_expert_intermediate_size": 32},
    "idefics3": {"text_config": SHAPE | {"model_type": "llama"}, "vision_config": PIXELS, "image_token_id": 1390},
}
"""The layouts in which families are published: parts that see, nested settings, several kinds of layers. What follows a
family's name tells its variants apart."""

WITH_ROPE_PARAMETERS = (
    "exaone4_5",
    "exaone_moe",
    "gemma4",
    "gemma4_unified",
    "granite_swa",
    "hy_v3",
    "laguna",
    "mellum",
    "ministral3",
    "mistral3",
    "muse_glimmer",
    "olmo_hybrid",
    "qwen3_5",
    "qwen3_5_moe",
)
"""Families whose files have `rope_parameters`."""
FLAT = ("qwen2_5_vl",)
"""Families that see whose files have the fields of the language model at the top."""
OLDER: dict[str, dict[str, tuple[str, Any]]] = {
    "cohere2": {"layer_types": ("sliding_window_pattern", 2)},
    "lfm2": {"layer_types": ("full_attn_idxs", [1])},
    "nemotron_h": {"layers_block_type": ("hybrid_override_pattern", "M*-")},
}
"""What files have instead of the fields of today's classes."""

TRANSPOSED = "qwen3_vl_moe"
"""The family whose experts are published as inputs x outputs, which transformers reads but does not write."""

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
    "llama yarn": {"rope_type": "yarn", "factor": 32.0, "original_max_position_embeddings": ORIGINAL},
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

CODE = {"auto_map": {"AutoConfig": "configuration.Config"}}
REFUSED: dict[str, dict[str, Any]] = {
    "openai/gpt-oss-20b": {"model_type": "gpt_oss", "quantization_config": {"quant_method": "mxfp4"}},
    "Qwen/Qwen3-8B-FP8": {"model_type": "qwen3", "quantization_config": {"quant_method": "fp8"}},
    "Qwen/Qwen3-8B-AWQ": {"model_type": "qwen3", "quantization_config": {"quant_method": "awq"}},
    "Qwen/Qwen2.5-7B-Instruct-GPTQ-Int4": {"model_type": "qwen2", "quantization_config": {"quant_method": "gptq"}},
    "RedHatAI/Llama-3.1-8B-Instruct-w4a16": {
        "model_type": "llama",
        "compression_config": {"quant_method": "compressed-tensors"},
    },
    "deepseek-ai/DeepSeek-V3": {"model_type": "deepseek_v3", "quantization_config": {"quant_method": "fp8"}},
    "moonshotai/Kimi-K2.5": {
        "model_type": "kimi_k25",
        "architectures": ["KimiK25ForConditionalGeneration"],
        "text_config": {"quantization_config": {"quant_method": "compressed-tensors"}},
    },
    "moonshotai/Kimi-K3": {"model_type": "kimi_k3", "architectures": ["KimiK3ForConditionalGeneration"], **CODE},
    "deepseek-ai/DeepSeek-V3.2": {
        "model_type": "deepseek_v32",
        "architectures": ["DeepseekV32ForCausalLM"],
        "quantization_config": {"quant_method": "fp8"},
    },
    "zai-org/GLM-5": {"model_type": "glm_moe_dsa", "architectures": ["GlmMoeDsaForCausalLM"], "qk_rope_head_dim": 64},
    "MiniMaxAI/MiniMax-M3": {
        "model_type": "minimax_m3_vl",
        "architectures": ["MiniMaxM3SparseForConditionalGeneration"],
    },
    "stepfun-ai/Step-3.5-Flash": {"model_type": "step3p5", "architectures": ["Step3p5ForCausalLM"], **CODE},
    "Qwen/Qwen4-Exp": {
        "model_type": "qwen4_exp",
        "architectures": ["Qwen4ExpForConditionalGeneration"],
        "text_config": {
            "indexer_n_heads": 4,
            "indexer_kv_heads": 1,
            "indexer_head_dim": 256,
            "indexer_budget": 64,
            "indexer_compress_ratio": 4,
        },
    },
    "tencent/Hy4-preview": {"model_type": "hy_v4", "architectures": ["HYV4ForCausalLM"]},
    "zai-org/GLM-5.3-Flash": {
        "model_type": "glm5_next",
        "architectures": ["Glm5NextForConditionalGeneration"],
        "num_key_value_heads": 4,
    },
    "CohereLabs/command-a-plus-05-2026": {"model_type": "cohere2_moe", "architectures": ["Cohere2MoeForCausalLM"]},
    "moonshotai/Kimi-K2-Base": {"model_type": "kimi_k2", "architectures": ["DeepseekV3ForCausalLM"], **CODE},
    "moonshotai/Kimi-Linear-48B-A3B-Instruct": {
        "model_type": "kimi_linear",
        "architectures": ["KimiLinearForCausalLM"],
        **CODE,
    },
    "meta-llama/Llama-4-Scout-17B-16E-Instruct": {
        "model_type": "llama4",
        "architectures": ["Llama4ForConditionalGeneration"],
    },
    "meta-llama/Llama-3.2-11B-Vision-Instruct": {
        "model_type": "mllama",
        "architectures": ["MllamaForConditionalGeneration"],
    },
    "google/gemma-3n-E4B-it": {"model_type": "gemma3n", "architectures": ["Gemma3nForConditionalGeneration"]},
    "microsoft/Phi-3.5-MoE-instruct": {"model_type": "phimoe", "architectures": ["PhiMoEForCausalLM"]},
    "stabilityai/stablelm-2-1_6b-chat": {"model_type": "stablelm", "architectures": ["StableLmForCausalLM"]},
    "Zyphra/Zamba2-2.7B-instruct": {"model_type": "zamba2", "architectures": ["Zamba2ForCausalLM"]},
    "XiaomiMiMo/MiMo-V2-Flash": {
        "model_type": "mimo_v2_flash",
        "architectures": ["MiMoV2FlashForCausalLM"],
        "sliding_window": 128,
        **CODE,
    },
}
"""Models that are refused, by their names on the hub, and the fields of their config.json that decide it."""

WITHOUT_TREES = ("gemma2", "gpt_oss", "granite_swa")
"""Families that train each sequence alone: soft-capped scores, attention sinks."""


def refused_model(name: str, folder: Path) -> BaseModel:
    """A model of REFUSED without weights: art/tiny's configuration but for what decides."""
    config = json.loads((TINY_DIR / "config.json").read_text()) | REFUSED[name]
    (folder / "config.json").write_text(json.dumps(config))
    return BaseModel(name, folder)


def toy_settings(name: str) -> dict[str, Any]:
    """The settings of the model of FAMILIES, PUBLISHED or ROPES."""
    settings = PUBLISHED.get(name) or SHAPE | FAMILIES.get(name.partition(" ")[0], {})
    if name in ROPES:
        settings |= {"rope_parameters": {"rope_theta": 10000.0, **ROPES[name]}}
        if "original_max_position_embeddings" in ROPES[name]:
            settings |= {"original_max_position_embeddings": ORIGINAL}
    return settings


def published_file(name: str) -> dict[str, Any]:
    """The content of that model's config.json."""
    return as_published(name, toy_settings(name), toy_config(name))


def toy_config(name: str) -> Any:
    """transformers' configuration of that model, in float32. Any: its class follows from the name."""
    config = AutoConfig.for_model(name.partition(" ")[0], **toy_settings(name))
    config.dtype = torch.float32
    return config


def as_published(name: str, settings: dict[str, Any], config: Any) -> dict[str, Any]:
    """The fields of that model's file, as publishers write it: those that differ from the class's defaults, rotary
    embeddings in the form of the family's time. Any: the configuration's class follows from the name."""
    usual = json.loads(type(config)().to_json_string(use_diff=False))
    known = usual.keys() | config.attribute_map.keys()  # EXPERTS has every family's names
    has_older_rope = name.partition(" ")[0] not in WITH_ROPE_PARAMETERS
    fields: dict[str, Any] = {"model_type": config.model_type}
    for key, value in settings.items():
        if key.endswith("_config") and isinstance(value, dict):
            inner = as_published(name, value, getattr(config, key))
            if name in FLAT and key == "text_config":
                inner.pop("model_type")
                fields |= inner
            else:
                fields[key] = inner
        elif key == "rope_parameters" and has_older_rope:
            fields |= older_rope(value)
        elif (key in known or EXPERTS.get(key) != value) and usual.get(key, ...) != value:
            fields[key] = value
    for key, (older, content) in OLDER.get(name, {}).items():
        del fields[key]
        fields[older] = content
    return fields


def older_rope(rope: dict[str, Any]) -> dict[str, Any]:
    """Fields of rotary embeddings, as files of before 2026 have them."""
    if "full_attention" in rope:  # Gemma 3
        local = rope["sliding_attention"]["rope_theta"]
        return older_rope(rope["full_attention"]) | {"rope_local_base_freq": local}
    moved = {key: rope[key] for key in ("rope_theta", "partial_rotary_factor") if key in rope}
    return moved | {"rope_scaling": {key: rope[key] for key in rope if key not in moved}}


def make_model(name: str, folder: Path) -> Path:
    """Writes that model with random weights into a new folder; returns the folder."""
    config = toy_config(name)
    torch.manual_seed(0)
    model = find_class(config)(config)
    with torch.no_grad():
        for tensor in model.state_dict().values():
            if tensor.ndim == 1 and tensor.is_floating_point():
                # Norms start as ones and biases, the routers' too, as zeros, which would hide that one side leaves them out.
                tensor += 0.1 * torch.randn_like(tensor)
    model.save_pretrained(folder)
    if name == TRANSPOSED:
        weights = load_file(folder / "model.safetensors")
        for key in weights:
            if ".experts." in key:
                weights[key] = weights[key].transpose(1, 2).contiguous()
        save_file(weights, folder / "model.safetensors", {"format": "pt"})
    head = {"architectures": [type(model).__name__], "torch_dtype": "float32"}
    (folder / "config.json").write_text(json.dumps(head | published_file(name)))
    for name in ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja"):
        shutil.copy(TINY_DIR / name, folder / name)
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": 1401}))
    return folder
