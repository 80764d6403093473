"""Which base models are refused before their weights are downloaded, and in which words."""

import json
import re
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
from transformers import AutoConfig

from art_server.engine.device.computing import check_number_types
from art_server.engine.inspection_process.tested import TESTED
from art_server.errors import InvalidInput
from art_server.settings import ServerConfig
from art_server.store.base_facts import read_facts
from art_server.store.base_models import TINY_DIR, BaseModel, check_on_cpu, check_trainable
from art_server.trainer.base import find_class
from tests.makers.toy_models import (
    FAMILIES,
    PUBLISHED,
    REFUSED,
    make_model,
    published_file,
    refused_model,
    toy_config,
)
from tests.refusals import refused

pytestmark = pytest.mark.usefixtures("in_process")

TINY = json.loads((TINY_DIR / "config.json").read_text())
INDEXED = {
    "architectures": None,
    "kv_lora_rank": 512,
    "n_routed_experts": 4,
    "qk_rope_head_dim": 64,
}
BNB = {"quant_method": "bitsandbytes"}


def base(folder: Path, name: str = "a base", **config: Any) -> BaseModel:
    """A base model of which only config.json is known: art/tiny's, with some fields changed."""
    (folder / "config.json").write_text(json.dumps(TINY | config))
    return BaseModel(name, folder)


def refusal(model: BaseModel, trainer: str = "auto") -> str:
    with pytest.raises(InvalidInput) as refused:
        check_trainable(model, trainer)
    assert (refused.value.code, refused.value.param) == ("not_trainable", "base_model")
    assert "\n" not in refused.value.message
    return refused.value.message


@pytest.mark.parametrize("method", ["fp8", "mxfp4", "awq", "gptq", "compressed-tensors"])
@pytest.mark.parametrize("field", ["quantization_config", "text_config", "compression_config"])
def test_a_quantised_base_is_refused_wherever_it_says_so(method: str, field: str, tmp_path: Path) -> None:
    quantization: dict[str, Any] = {"quant_method": method}
    if field == "text_config":
        quantization = {"quantization_config": quantization}
    message = refusal(base(tmp_path, "a base", **{field: quantization}))
    assert f"quantised by '{method}'" in message and "bitsandbytes" in message


def test_a_quantised_base_that_only_modelopt_describes_is_refused(tmp_path: Path) -> None:
    (tmp_path / "hf_quant_config.json").write_text("{}")
    assert "quantised by 'modelopt'" in refusal(base(tmp_path))


@pytest.mark.parametrize(("file", "method"), [("quantize_config.json", "gptq"), ("quant_config.json", "awq")])
def test_a_quantised_base_of_which_only_a_file_says_so_is_refused(file: str, method: str, tmp_path: Path) -> None:
    (tmp_path / file).write_text("{}")
    assert f"quantised by '{method}'" in refusal(base(tmp_path))


def test_a_quantised_base_that_could_not_be_trained_anyway_says_so(tmp_path: Path) -> None:
    """Else its user takes the copy without quantisation, and is refused again."""
    config = {"model_type": "gemma3n", "architectures": ["Gemma3nForConditionalGeneration"]}
    message = refusal(base(tmp_path, **config, quantization_config={"quant_method": "fp8"}))
    assert "serves no adapters of its class" in message and "gemma-3-4b-it" in message


@pytest.mark.parametrize(
    ("name", "family", "instead"),
    [
        ("Qwen/Qwen3-8B-FP8", "qwen3", "use Qwen/Qwen3-8B,"),
        ("Qwen/Qwen2.5-7B-Instruct-GPTQ-Int4", "qwen2", "use Qwen/Qwen2.5-7B-Instruct,"),
        ("RedHatAI/Llama-3.1-8B-w4a16", "llama", "use Llama-3.1-8B of its publisher, or another"),
        ("TheBloke/Mistral-7B-GPTQ", "mistral", "use Mistral-7B of its publisher, or another"),
        ("acme/my-agent-oss", "gpt_oss", "use a copy of it without quantisation, or another base"),
        ("/models/gpt-oss", "gpt_oss", "use a copy of it without quantisation, or another base"),
        ("openai/gpt-oss-20b", "gpt_oss", "use unsloth/gpt-oss-20b-BF16,"),
        ("unsloth/gpt-oss-20b-unsloth-bnb-4bit", "gpt_oss", "use unsloth/gpt-oss-20b-BF16,"),
        ("nvidia/NVIDIA-Nemotron-3-Nano-30B-A3B-FP8", "qwen3", "-30B-A3B-BF16,"),
        ("/models/packed", "qwen3", "such as Qwen/Qwen3-4B-Instruct-2507, or"),
        ("mistralai/M", "mistral", "such as mistralai/Mistral-7B-Instruct-v0.3, or"),
    ],
)
def test_the_refusal_of_a_quantised_base_names_the_one_to_take(
    name: str, family: str, instead: str, tmp_path: Path
) -> None:
    config = {"model_type": family, "quantization_config": {"quant_method": "fp8"}}
    assert instead in refusal(base(tmp_path, name, **config))


def test_bitsandbytes_trains_but_8_bits_not_with_unsloth(tmp_path: Path) -> None:
    check_trainable(base(tmp_path, quantization_config=BNB | {"load_in_4bit": True}))
    check_trainable(base(tmp_path, quantization_config={"load_in_4bit": True}), "unsloth")
    eight = base(tmp_path, quantization_config=BNB | {"load_in_8bit": True})
    check_trainable(eight, "peft")
    assert "--trainer peft" in refusal(eight, "unsloth")
    check_trainable(BaseModel("art/tiny", TINY_DIR))


@pytest.mark.parametrize(
    ("config", "words", "instead"),
    [
        ({"model_type": "llama4"}, "vLLM serves wrongly", "Llama-3.1-8B-Instruct"),
        ({"model_type": "phimoe"}, "vLLM serves wrongly", "Phi-4-mini-instruct"),
        (
            {"model_type": "gemma3n", "architectures": ["Gemma3nForConditionalGeneration"]},
            "vLLM serves no adapters of its class Gemma3nForConditionalGeneration",
            "gemma-3-4b-it",
        ),
        (
            {"model_type": "mllama", "architectures": ["MllamaForConditionalGeneration"]},
            "vLLM no longer serves its class MllamaForConditionalGeneration",
            "Llama-3.1-8B-Instruct",
        ),
        (
            {"model_type": "kimi_k2", "auto_map": {"AutoConfig": "configuration.Config"}},
            "it needs code of its own, which is never run",
            "Qwen/Qwen3-4B",
        ),
        (
            {"model_type": "mimo_v2_flash", "sliding_window": "wide"},
            "cannot read its configuration: Validation error for field 'sliding_window': TypeError: Field",
            "Qwen/Qwen3-4B",
        ),
        (
            {"model_type": "qwen3", "architectures": ["Qwen3ForSequenceClassification"]},
            "its class Qwen3ForSequenceClassification writes no text",
            "Qwen/Qwen3-4B",
        ),
        (
            {"model_type": "stablelm", "architectures": None},
            "serves no adapters of its class StableLmForCausalLM",
            "Qwen/Qwen3-4B",
        ),
        ({"model_type": "of_tomorrow"}, "has no class for its family 'of_tomor", "Qwen/Qwen3-4B"),
        (
            {"model_type": "cohere2_moe", "architectures": ["Cohere2MoeForCausalLM"]},
            "vLLM serves no adapters of its class Cohere2MoeForCausalLM",
            "Qwen/Qwen3-4B",
        ),
        *(
            ({"model_type": family, **INDEXED}, "only those that an indexer chooses", "Qwen/Qwen3")
            for family in ("deepseek_v32", "glm_moe_dsa", "hy_v4")
        ),
        ({"model_type": ""}, "names no model_type", "Qwen/Qwen3-4B"),
        (
            {"model_type": "rwkv", "architectures": ["RwkvForCausalLM"]},
            "vLLM has no class for it and cannot run transformers' RwkvForCausalLM",
            "Qwen/Qwen3-4B",
        ),
        (
            {"model_type": "bart", "architectures": ["BartForConditionalGeneration"]},
            "vLLM no longer serves its class BartForConditionalGeneration",
            "Qwen/Qwen3-4B",
        ),
        (
            {
                "model_type": "gpt_neo",
                "architectures": ["GPTNeoForCausalLM"],
                "attention_types": [[["global"], 4]],
            },
            "vLLM has no class for it and cannot run transformers' GPTNeoForCausalLM",
            "Qwen/Qwen3-4B",
        ),
        (
            {"model_type": "vit", "architectures": ["ViTModel"]},
            "here: transformers has no model class of a decoder that generates text for the family 'vit'",
            "Qwen/Qwen3-4B",
        ),
    ],
)
def test_a_family_that_cannot_be_trained_and_served_is_refused(
    config: dict[str, Any], words: str, instead: str, tmp_path: Path
) -> None:
    message = refusal(base(tmp_path, **config))
    assert words in message and instead in message


@pytest.mark.parametrize("name", REFUSED)
def test_the_refusal_of_a_published_model_names_one_to_take(name: str, tmp_path: Path) -> None:
    message = refusal(refused_model(name, tmp_path))
    assert (
        name in message
        and "/" in message.partition(": ")[2]
        and re.search(
            r"use (another|unsloth/|Qwen/|[\w.-]+ of its publisher, or another|a copy of it without quantisation, or another)",
            message,
        )
    )


@pytest.mark.parametrize("toy", [*FAMILIES, *PUBLISHED])
def test_each_published_layout_is_interpreted(toy: str, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(published_file(toy)))
    facts = read_facts(tmp_path)
    assert (facts.problem, facts.vocabulary, facts.max_positions) == (None, 1408, 1024)
    assert facts.kv_heads == {"gemma4 whose keys are values": 1}.get(toy, 1 if facts.has_latent_attention else 2)
    assert facts.layers.shapes and facts.adapter_config["peft_type"] == "LORA"


USELESS = {
    "granitemoehybrid": "none of its layers takes an adapter",  # experts and state-space layers only
    "hunyuan_v1_dense": "unsupported operand",
    "hunyuan_v1_moe": "unsupported operand",
    "idefics3": "Padding_idx must be within num_embeddings",
    "lfm2_moe": "object is not subscriptable",
}
"""Families of which transformers cannot make a useful model by its own defaults."""


@pytest.mark.parametrize("family", sorted(TESTED))
def test_a_file_may_leave_out_all_that_transformers_knows(family: str, tmp_path: Path) -> None:
    config = AutoConfig.for_model(family)
    text = config.get_text_config()
    fields = {"model_type": family, "architectures": [find_class(config).__name__]}
    (tmp_path / "config.json").write_text(json.dumps(fields))
    if family in USELESS:
        assert USELESS[family] in refusal(BaseModel(family, tmp_path))
        return
    facts = read_facts(tmp_path)
    assert facts.problem is None and facts.kv_per_token > 0 and facts.lora_width > 0
    assert (facts.vocabulary, facts.max_positions, facts.num_layers, facts.hidden) == (
        text.vocab_size,
        text.max_position_embeddings,
        text.num_hidden_layers,
        text.hidden_size,
    )


@pytest.mark.parametrize(
    ("toy", "section"), [("mistral3 whose queries grow", "text_config"), ("ministral3 yarn", None)]
)
def test_how_queries_grow_with_the_position_is_known(toy: str, section: str | None, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(published_file(toy)))
    scaling = {"llama_4_scaling": {"original_max_position_embeddings": 32, "beta": 0.5}}
    assert read_facts(tmp_path).overrides == ({section: scaling} if section else scaling)
    assert BaseModel("art/tiny", TINY_DIR).facts.overrides == {}


@pytest.mark.parametrize("suffix", ["bnb-4bit", "unsloth-bnb-4bit"])
def test_a_cpu_serves_no_quantised_base(suffix: str, tmp_path: Path) -> None:
    model = base(tmp_path, f"unsloth/Qwen3-4B-{suffix}", quantization_config=BNB)
    check_trainable(model)
    with refused(InvalidInput, "not_trainable", "base_model"):
        check_on_cpu(model)
    check_on_cpu(BaseModel("art/tiny", TINY_DIR))


@pytest.mark.parametrize(
    ("toy", "is_refused"),
    [
        ("minimax_m2", True),
        ("ernie4_5_moe", True),
        ("nemotron_h moe", True),
        ("olmo_hybrid", True),
        ("laguna", True),
        ("nemotron_h", False),
        ("qwen3_moe", False),
    ],
)
def test_a_cpu_serves_no_layers_that_vllm_computes_otherwise(toy: str, is_refused: bool, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(published_file(toy)))
    model = BaseModel("a base", tmp_path)
    check_trainable(model)
    with refused(InvalidInput, "not_trainable", "base_model") if is_refused else nullcontext():
        check_on_cpu(model)


LONG = {"short_factor": [1.0] * 32, "long_factor": [2.0] * 32}


@pytest.mark.parametrize(
    ("family", "rope", "trainer", "is_refused"),
    [
        ("llama", {"rope_type": "longrope", **LONG}, "peft", False),
        ("llama", {"rope_type": "longrope", **LONG}, "unsloth", True),
        ("llama", {"type": "longrope", **LONG}, "unsloth", True),
        ("llama", {"rope_type": "dynamic", "factor": 2.0}, "unsloth", True),
        ("llama", {"rope_type": "linear", "factor": 2.0}, "unsloth", False),
        ("llama", None, "unsloth", False),
    ],
)  # fmt: skip
def test_positions_that_would_depend_on_neighbours_are_refused(
    family: str, rope: dict[str, Any] | None, trainer: str, is_refused: bool, tmp_path: Path
) -> None:
    fields = {"model_type": family, "architectures": [], "rope_parameters": None}
    model = base(tmp_path, **fields, rope_scaling=rope, original_max_position_embeddings=64)
    if is_refused:
        assert "which sequences train together" in refusal(model, trainer)
    else:
        check_trainable(model, trainer)


@pytest.mark.parametrize(
    ("options", "flag"),
    [({"exact": True}, "--exact"), ({"dtype": "float32"}, "--dtype float32"), ({}, None)],
)
def test_gated_delta_layers_on_a_cpu_want_bfloat16(options: dict[str, Any], flag: str | None, tmp_path: Path) -> None:
    make_model("qwen3_5_text", tmp_path / "base")
    model, config = BaseModel("a base", tmp_path / "base"), ServerConfig(**options)
    assert model.facts.has_delta_rule and not BaseModel("art/tiny", TINY_DIR).facts.has_delta_rule
    check_number_types(config, BaseModel("art/tiny", TINY_DIR))
    if flag is None:
        check_number_types(config, model)
        return
    with refused(InvalidInput, "not_trainable", "base_model") as caught:
        check_number_types(config, model)
    assert flag in caught.value.message


def test_a_family_that_no_toy_has_is_called_untested(tmp_path: Path) -> None:
    assert {toy_config(name).model_type for name in (*FAMILIES, *PUBLISHED)} == TESTED
    *_, note = base(tmp_path, model_type="mistral4").facts.notes
    assert note.startswith("untested: no model of its family 'mistral4'")
    assert "untested" not in str(base(tmp_path, model_type="qwen3").facts.notes)


@pytest.mark.parametrize("toy", ["olmo_hybrid", "qwen3_next"])
def test_a_recurrent_layer_keeps_nothing_for_a_token(toy: str, tmp_path: Path) -> None:
    text = toy_config(toy).get_text_config()
    num_attention = sum(kind == "full_attention" for kind in text.layer_types)
    assert 0 < num_attention < text.num_hidden_layers
    text.save_pretrained(tmp_path)
    of_layer = 2 * text.num_key_value_heads * text.head_dim
    assert BaseModel(toy, tmp_path).facts.kv_per_token == num_attention * of_layer


@pytest.mark.parametrize("key", ["quantization", "quantization_config"])
def test_quantisation_by_mlx_is_called_so(key: str, tmp_path: Path) -> None:
    fields: dict[str, Any] = {key: {"bits": 4, "group_size": 64}}
    message = refusal(base(tmp_path, **fields))
    assert "is quantised by 'mlx'" in message


def test_layers_of_an_unknown_kind_are_refused(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "blt"}))
    message = refusal(BaseModel("a base", tmp_path))
    assert "its layers are of an unknown kind: 'BltConfig' object has no attribute" in message


def test_a_field_may_have_a_number_for_each_layer(tmp_path: Path) -> None:
    config = AutoConfig.for_model("ernie4_5_vl_moe")
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "ernie4_5_vl_moe"}))
    facts = read_facts(tmp_path)
    text = config.get_text_config()
    assert facts.intermediate == max(text.moe_intermediate_size) * text.moe_k


def test_numbers_are_those_of_the_layers(tmp_path: Path) -> None:
    """By hand: LFM2's feed-forward network has two thirds of the file's width, rounded up to `block_multiple_of`; JetMoE's
    layers make keys and values at once; Jamba's have Mamba's first state."""
    (tmp_path / "config.json").write_text(
        json.dumps({"model_type": "lfm2", "hidden_size": 2048, "intermediate_size": 12_288})
    )
    assert read_facts(tmp_path).intermediate == 8192
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "jetmoe"}))
    config = AutoConfig.for_model("jetmoe")
    of_layer = 2 * config.num_key_value_heads * config.kv_channels
    assert read_facts(tmp_path).kv_per_token == config.num_hidden_layers * of_layer
    jamba = {"model_type": "jamba", "hidden_size": 64, "num_hidden_layers": 8, "num_experts": 2}
    (tmp_path / "config.json").write_text(json.dumps(jamba))
    assert read_facts(tmp_path).state_per_sequence == 7 * 128 * (3 + 16)


@pytest.mark.parametrize(
    ("toy", "state"),
    [
        ("qwen3_5", 3 * (3 * (2 * 2 * 128 + 4 * 128) + 4 * 128 * 128)),
        ("nemotron_h", 3 * (8 * 32 + 2 * 16) + 8 * 32 * 16),
        ("lfm2", 2 * 128),
        ("qwen3_moe", 0),
    ],
)
def test_recurrent_layers_keep_a_state_for_a_sequence(toy: str, state: int, tmp_path: Path) -> None:
    """By hand, as vLLM's MambaStateShapeCalculator: channels times (kernel - 1), heads times the two sizes of a head."""
    (tmp_path / "config.json").write_text(json.dumps(published_file(toy)))
    assert BaseModel(toy, tmp_path).facts.state_per_sequence == state
