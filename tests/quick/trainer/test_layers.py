"""Which layers take an adapter: those of the language model, in each published layout, and no layer of the same name."""

import re
from typing import Any

import pytest
import torch
from peft import get_peft_model
from transformers import AutoConfig

from art_protocol.wire import LoRAConfig
from art_server.trainer.base import find_class, peft_config
from art_server.trainer.layers import find_layers
from tests.makers.toy_models import PUBLISHED

QKVO = "self_attn.q_proj self_attn.k_proj self_attn.v_proj self_attn.o_proj"
MLP = "mlp.gate_proj mlp.up_proj mlp.down_proj"
FEED = "feed_forward.w1 feed_forward.w2 feed_forward.w3"
MIXER = "mixer.q_proj mixer.k_proj mixer.v_proj mixer.o_proj"
LATENT = "self_attn.q_a_proj self_attn.q_b_proj self_attn.kv_a_proj_with_mqa self_attn.o_proj"
GATED = " ".join(f"linear_attn.{name}" for name in ("in_proj_qkv", "in_proj_z", "in_proj_a", "in_proj_b", "out_proj"))  # fmt: skip
MOE_QKVO = dict.fromkeys(
    (
        *("hunyuan_v1_moe", "ernie4_5_moe", "afmoe", "granitemoehybrid", "qwen3_vl_moe"),
        *("exaone_moe", "hy_v3", "glm4v_moe", "qwen2_moe", "mellum"),
    ),
    QKVO,
)
DENSE = dict.fromkeys(
    ("olmo3", "exaone4", "cohere2", "hunyuan_v1_dense", "ernie4_5", "qwen2_5_vl", "qwen3_vl", "gemma3", "mistral3", "mistral3 whose queries grow", "mistral3 of Mistral", "idefics3", "gemma4_unified", "granite_swa", "exaone4_5", "olmo2"),
    f"{QKVO} {MLP}",
)  # fmt: skip
TAKES = MOE_QKVO | DENSE | {
    "apertus": f"{QKVO} mlp.up_proj mlp.down_proj",
    "qwen3_next": f"{QKVO} linear_attn.in_proj_qkvz linear_attn.in_proj_ba linear_attn.out_proj",
    "qwen3_5": f"{QKVO} {MLP} {GATED}",
    "qwen3_5_moe": f"{QKVO} {GATED}",
    "gemma4": f"{QKVO} {MLP} per_layer_input_gate per_layer_projection",
    "gemma4 whose keys are values": QKVO,
    "gemma4 whose layers share": f"{QKVO} {MLP} per_layer_input_gate per_layer_projection",
    "muse_glimmer": f"{QKVO} self_attn.gate_proj {MLP}",
    "glm4_moe_lite": LATENT,
    "granitemoehybrid dense": f"{QKVO} mamba.in_proj mamba.out_proj shared_mlp.input_linear shared_mlp.output_linear",
    "granitemoehybrid without states": f"{QKVO} shared_mlp.input_linear shared_mlp.output_linear",
    "lfm2": f"{QKVO} conv.in_proj conv.out_proj {FEED}".replace("o_proj", "out_proj"),
    "lfm2_moe": QKVO.replace("o_proj", "out_proj"),
    "nemotron_h": f"{MIXER} mixer.in_proj mixer.up_proj mixer.down_proj",
    "nemotron_h moe": MIXER,
    "phi3 turned in part": "self_attn.qkv_proj self_attn.o_proj mlp.gate_up_proj mlp.down_proj",
    "glm4": f"{QKVO} mlp.down_proj",
    "glm4v": f"{QKVO} mlp.gate_up_proj mlp.down_proj",
    "laguna": f"{QKVO} self_attn.g_proj",
    "olmo_hybrid": f"{QKVO} {MLP} " + " ".join(f"linear_attn.{name}_proj" for name in "abgkoqv"),
    "falcon_h1": f"{QKVO} mamba.in_proj {MLP}".replace("mlp.", "feed_forward."),
}  # fmt: skip
"""Paths in a layer."""
INSIDE = dict.fromkeys(
    ("qwen2_5_vl", "qwen3_vl", "qwen3_vl_moe", "qwen3_5", "qwen3_5_moe", "gemma3", "gemma4", "gemma4 whose keys are values", "mistral3", "gemma4 whose layers share", "gemma4_unified", "mistral3 whose queries grow", "mistral3 of Mistral", "glm4v", "glm4v_moe", "exaone4_5", "muse_glimmer"),
    "model.language_model.layers",
) | {"idefics3": "model.text_model.layers"}  # fmt: skip
"""Families whose language model is a part of a larger model, and the path of its layers."""


def outline(name: str) -> Any:
    with torch.device("meta"):
        config = AutoConfig.for_model(name.partition(" ")[0], **PUBLISHED[name])
        return find_class(config)._from_config(config)


def adapted(model: Any, lora: LoRAConfig) -> set[str]:
    """The paths of the layers that PEFT gives an adapter."""
    with torch.device("meta"):
        wrapped = get_peft_model(model, peft_config(lora, model))
    names = [name for name, _ in wrapped.named_parameters() if ".lora_" in name]
    return {name.split(".lora_")[0].removeprefix("base_model.model.") for name in names}


@pytest.mark.parametrize("name", PUBLISHED)
def test_the_language_models_layers_take_an_adapter_and_no_others(name: str) -> None:
    model = outline(name)
    layers = find_layers(model)
    assert adapted(model, LoRAConfig()) == layers.takes
    before = INSIDE.get(name, "model.layers")
    assert {re.sub(rf"^{re.escape(before)}\.\d+\.", "", path) for path in layers.takes} == set(TAKES[name].split())


def test_layers_that_vllm_folds_into_others_take_none() -> None:
    latent, values = outline("glm4_moe_lite"), outline("gemma4 whose keys are values")
    assert {path.rpartition(".")[2] for path in find_layers(latent).folded} == {"kv_b_proj"}
    folded = "model.language_model.layers.1.self_attn.k_proj"
    assert find_layers(values).folded == (folded,)
    assert folded.replace("1", "0") in find_layers(values).takes
    for model, name in ((latent, "kv_b_proj"), (values, "k_proj"), (values, folded)):
        with pytest.raises(ValueError, match=f"target_modules .*{re.escape(name)},"):
            adapted(model, LoRAConfig(target_modules=[name]))


@pytest.mark.parametrize(
    ("name", "targets", "taken"),
    [
        ("lfm2_moe", ["out_proj"], {"model.layers.1.self_attn.out_proj"}),
        ("qwen2_5_vl", ["gate_proj"], {f"model.language_model.layers.{n}.mlp.gate_proj" for n in (0, 1)}),
        ("mistral3", ["layers.1.self_attn.q_proj"], {"model.language_model.layers.1.self_attn.q_proj"}),
        ("nemotron_h moe", ["q_proj"], {"model.layers.1.mixer.q_proj"}),
    ],
)  # fmt: skip
def test_names_mean_layers_of_the_language_model(name: str, targets: list[str], taken: set[str]) -> None:
    assert adapted(outline(name), LoRAConfig(target_modules=targets)) == taken


@pytest.mark.parametrize(
    ("name", "target"),
    [
        ("qwen3_vl_moe", "gate"),
        ("qwen3_vl", "qkv"),
        ("gemma3", "lm_head"),
        ("falcon_h1", "out_proj"),
        ("afmoe", "gate_proj"),
    ],
)
def test_other_layers_are_refused(name: str, target: str) -> None:
    with pytest.raises(ValueError, match=f"target_modules .*{target},"):
        adapted(outline(name), LoRAConfig(target_modules=["q_proj", target]))
