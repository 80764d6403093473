"""What a base model is, from its small files, as transformers reads them."""

import json
import math
from pathlib import Path
from typing import Any

import torch
import transformers
from huggingface_hub.errors import StrictDataclassError
from transformers import CONFIG_MAPPING, GenerationConfig, PreTrainedModel
from transformers.pytorch_utils import Conv1D

from art_server.base_facts import Facts
from art_server.inspection.engine_classes import engine_problem
from art_server.inspection.parsers import seen_parsers
from art_server.inspection.template import find_notes, find_rules, read_templates
from art_server.trainer.base import outline, read_config
from art_server.trainer.layers import Layers, find_layers

FUSED = ("qkv_proj", "kv_proj", "query_key_value", "c_attn", "Wqkv", "W_pack", "att_proj")
"""Layers that compute keys and values at once, and most also queries."""
UNREADABLE = (
    ValueError,
    KeyError,
    TypeError,
    AttributeError,
    ImportError,
    StrictDataclassError,
)
"""What transformers raises for a configuration that it does not understand."""
QUANTIZATION_FILES = {
    "hf_quant_config.json": "modelopt",
    "quantize_config.json": "gptq",
    "quant_config.json": "awq",
}
"""Files beside config.json that say how the weights are quantised, from which vLLM's classes read it."""
NO_LANGUAGE_MODELS = ("Classification", "QuestionAnswering", "MaskedLM", "RewardModel")
"""What the classes of published models for other tasks have in their names."""
TESTED = frozenset(
    [
        "afmoe",
        "apertus",
        "cohere2",
        "deepseek_v3",
        "ernie4_5",
        "ernie4_5_moe",
        "exaone4",
        "exaone4_5",
        "exaone_moe",
        "falcon_h1",
        "gemma2",
        "gemma3",
        "gemma3_text",
        "gemma4",
        "gemma4_text",
        "gemma4_unified",
        "glm4",
        "glm4_moe",
        "glm4_moe_lite",
        "glm4v",
        "glm4v_moe",
        "gpt_oss",
        "granite",
        "granite_swa",
        "granitemoehybrid",
        "hunyuan_v1_dense",
        "hunyuan_v1_moe",
        "hy_v3",
        "idefics3",
        "laguna",
        "lfm2",
        "lfm2_moe",
        "llama",
        "mellum",
        "minimax_m2",
        "mistral",
        "mistral3",
        "mixtral",
        "muse_glimmer",
        "nemotron_h",
        "olmo2",
        "olmo3",
        "olmo_hybrid",
        "phi3",
        "qwen2",
        "qwen2_5_vl",
        "qwen2_moe",
        "qwen3",
        "qwen3_5",
        "qwen3_5_moe",
        "qwen3_5_text",
        "qwen3_moe",
        "qwen3_next",
        "qwen3_vl",
        "qwen3_vl_moe",
        "seed_oss",
        "smollm3",
    ]
)
"""The families in docs/models.md, each compared between trainer and engine."""
UNTESTED = (
    "untested: no model of its family '{}' is in docs/models.md; engine and trainer are compared before its first job, and "
    "nothing is trained if they differ"
)
STATE_SIZES = (
    ("num_heads", "head_dim", "ssm_state_size"),
    ("num_v_heads", "head_k_dim", "head_v_dim"),
)
"""transformers' names of the sizes of a recurrent state: of state-space layers, of gated delta rules."""
ACTIVE_EXPERTS = ("num_experts_per_tok", "top_k_experts", "moe_k", "moe_topk")


def inspect(folder: Path, template: Path | None = None) -> Facts:
    """The facts; `template` is a file with a chat template for the model, None its own."""
    raw = json.loads((folder / "config.json").read_text())
    family = str(raw.get("model_type", ""))
    method, has_8_bits = find_quantization(folder, raw)
    told: dict[str, Any] = {"model_type": family, "quantization": method, "has_8_bits": has_8_bits}
    try:
        config = read_config(str(folder))
    except UNREADABLE as error:
        return Facts(**told, problem=_unreadable(family, raw, error))
    text = config.get_text_config()
    rope = getattr(text, "rope_parameters", None) or {}
    ropes = {
        str(each.get("rope_type") or each.get("type"))
        for each in [rope, *(part for part in rope.values() if isinstance(part, dict))]
    }
    told["ropes"] = tuple(sorted(ropes - {"None"}))
    architecture = (raw.get("architectures") or [""])[0]
    if any(kind in architecture for kind in NO_LANGUAGE_MODELS):
        return Facts(**told, problem=f"its class {architecture} writes no text")
    if architecture and (problem := engine_problem(architecture)):
        return Facts(**told, problem=problem)
    try:
        model = outline(str(folder))
    except Exception as error:  # whatever the constructors of transformers' classes raise
        if method not in (None, "bitsandbytes"):
            return Facts(**told)  # it is refused as quantised, which names the copy to take
        reason = (str(error).strip().splitlines() or [type(error).__name__])[0]
        cannot = (
            "" if reason.startswith("transformers ") else "transformers cannot make its model: "
        )
        return Facts(**told, problem=f"{cannot}{reason[:300]}")
    if not architecture and (problem := engine_problem(type(model).__name__)):
        return Facts(**told, problem=problem)
    try:
        return _of_model(folder, template, config, model, told)
    except (AttributeError, KeyError, TypeError) as error:
        return Facts(**told, problem=f"its layers are of an unknown kind: {str(error)[:300]}")


def _of_model(
    folder: Path, template: Path | None, config: Any, model: PreTrainedModel, told: dict[str, Any]
) -> Facts:
    """The facts of a model without weights. Any: transformers has a class of configurations for each family."""
    family, text = told["model_type"], config.get_text_config()
    if any(path.endswith(".indexer") for path, _ in model.named_modules()):
        return Facts(
            **told,
            problem="each token reads only those that an indexer chooses, which is not trained here",
        )
    positions = getattr(text, "max_position_embeddings", None)
    if not positions:
        return Facts(
            **told,
            problem="its configuration does not say how many positions it has (max_position_embeddings)",
        )
    templates = read_templates(folder, template)
    untested = () if family in TESTED else (UNTESTED.format(family),)
    layers = find_layers(model)
    if not layers.takes:
        return Facts(**told, problem="none of its layers takes an adapter")
    is_latent = bool(getattr(text, "kv_lora_rank", None))
    return Facts(
        **told,
        vocabulary=int(text.vocab_size),
        max_positions=int(positions),
        num_layers=int(text.num_hidden_layers),
        hidden=int(text.hidden_size),
        intermediate=_intermediate(model, text, layers),
        kv_per_token=_kv_per_token(model, text),
        state_per_sequence=_state_per_sequence(model),
        kv_heads=1 if is_latent else _kv_heads(text),
        is_mixture=layers.is_mixture,
        has_latent_attention=is_latent,
        has_delta_rule=bool(getattr(text, "linear_num_key_heads", None)),
        lora_width=sum(sum(_shape(model.get_submodule(path))) for path in layers.takes),
        lora_modules=tuple(sorted({path.rpartition(".")[2] for path in layers.takes})),
        stop_ids=find_stop_ids(folder, config),
        overrides=find_overrides(config),
        notes=find_notes(templates, folder) + untested,
        parsers=seen_parsers(templates, family),
        rules=find_rules(templates),
    )


def find_quantization(folder: Path, raw: dict[str, Any]) -> tuple[str | None, bool]:
    """How the weights are quantised, and whether bitsandbytes did it to 8 bits, from any of the places where it stands."""
    text = raw.get("text_config") or {}
    for part in (raw, text):
        for key in ("quantization_config", "compression_config", "quantization"):
            if found := part.get(key):
                is_8 = bool(found.get("load_in_8bit"))
                is_bitsandbytes = is_8 or found.get("load_in_4bit")
                usual = "mlx" if "group_size" in found else "unknown"
                usual = "bitsandbytes" if is_bitsandbytes else usual
                return str(found.get("quant_method") or usual), is_8
    for name, method in QUANTIZATION_FILES.items():
        if (folder / name).exists():
            return method, False
    return None, False


def _unreadable(family: str, raw: dict[str, Any], error: Exception) -> str:
    if not family:
        return "its config.json names no model_type"
    if family not in CONFIG_MAPPING:
        code = "it needs code of its own, which is never run, and " if "auto_map" in raw else ""
        return (
            f"{code}transformers {transformers.__version__} has no class for its family '{family}'"
        )
    reason = " ".join(str(error).split()) or type(error).__name__
    return f"transformers {transformers.__version__} cannot read its configuration: {reason[:300]}"


def _intermediate(model: PreTrainedModel, text: Any, layers: Layers) -> int:
    """Any: the fields that language models share."""
    inner = _largest(getattr(text, "intermediate_size", None) or 4 * text.hidden_size)
    if not layers.is_mixture:
        widest = max(max(_shape(model.get_submodule(path))) for path in layers.takes)
        return min(inner, widest)  # LFM2's layers are narrower than its file says
    active = next((each for name in ACTIVE_EXPERTS if (each := getattr(text, name, None))), 1)
    return _largest(getattr(text, "moe_intermediate_size", None) or inner) * _largest(active)


def _largest(value: Any) -> int:
    """Of a number, or of one for each layer. Any: a field of a configuration."""
    return int(max(value) if isinstance(value, list | tuple) else value)


def find_overrides(config: Any) -> dict[str, Any]:
    """For Ministral 3, whose queries grow with the position: vLLM reads by how much from Mistral's own format only."""
    text = config.get_text_config()
    rope = getattr(text, "rope_parameters", None) or {}
    if rope.get("llama_4_scaling_beta") is None:
        return {}
    length = rope["original_max_position_embeddings"]
    scaling = {
        "llama_4_scaling": {
            "original_max_position_embeddings": length,
            "beta": rope["llama_4_scaling_beta"],
        }
    }
    return scaling if text is config else {"text_config": scaling}


def _kv_heads(text: Any) -> int:
    """Of keys and values, in the layer that has the fewest: Gemma 4's layers differ."""
    return min(
        int(getattr(layer, "num_key_value_heads", None) or layer.num_attention_heads)
        for layer in getattr(text, "per_layer_config", [text])
    )


def _kv_per_token(model: PreTrainedModel, text: Any) -> int:
    """The numbers that a token keeps: outputs of the layers that make keys and values, in each layer that has some."""
    total = 0
    for path, module in model.get_decoder().named_modules():
        linear = {
            name: shape[0] for name, each in module.named_children() if (shape := _shape(each))
        }
        if "kv_a_proj_with_mqa" in linear:  # multi-head latent attention keeps one small vector
            total += linear["kv_a_proj_with_mqa"]
        elif "linear" in path:  # a recurrent state, which does not grow
            continue
        elif "k_proj" in linear:
            total += linear["k_proj"] + linear.get("v_proj", linear["k_proj"])
        elif any(name in linear for name in FUSED):
            heads = text.num_attention_heads
            size = getattr(text, "head_dim", None) or text.hidden_size // heads
            total += 2 * int(getattr(text, "num_key_value_heads", None) or heads) * int(size)
    return total


def _state_per_sequence(model: PreTrainedModel) -> int:
    """The numbers that a sequence keeps: of a convolution the tokens before the last, and the heads' matrices of state-space
    layers and gated delta rules."""
    total = 0
    for module in model.get_decoder().modules():
        convolutions = [each for each in module.children() if isinstance(each, torch.nn.Conv1d)]
        total += sum(each.in_channels * (each.kernel_size[0] - 1) for each in convolutions)
        if not convolutions:
            continue
        if isinstance(decay := getattr(module, "A_log", None), torch.Tensor) and decay.dim() == 2:
            total += decay.numel()  # of the first Mamba, channels x state
        for names in STATE_SIZES:
            if all(hasattr(module, name) for name in names):
                total += math.prod(int(getattr(module, name)) for name in names)
    return total


def _shape(module: torch.nn.Module) -> tuple[int, ...]:
    """The shape of a layer's weights, outputs first; empty without weights."""
    weight = getattr(module, "weight", None)
    shape = tuple(weight.shape) if isinstance(weight, torch.Tensor) else ()
    return shape[::-1] if isinstance(module, Conv1D) else shape


def find_stop_ids(folder: Path, config: Any) -> tuple[int, ...]:
    """The end-of-sequence tokens of configuration and generation configuration, as vLLM reads them."""
    parts = [config, config.get_text_config()]
    if (folder / "generation_config.json").exists():
        parts.append(GenerationConfig.from_pretrained(str(folder)))
    found: set[int] = set()
    for part in parts:
        ids = getattr(part, "eos_token_id", None)
        found.update(ids if isinstance(ids, list | tuple) else [] if ids is None else [ids])
    return tuple(sorted(found))
