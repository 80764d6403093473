"""Each family of models trains a step, at toy size with random weights."""

import json
import math
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import (
    AutoConfig,
    Gemma3Config,
    Gemma3ForConditionalGeneration,
    Qwen3ForCausalLM,
)

from art_protocol.wire import LoRAConfig
from art_server.store.base_models import TINY_DIR
from art_server.trainer.base import find_class, load_base
from art_server.trainer.policy import Policy
from tests.makers.first_steps import write_first_checkpoint
from tests.makers.toy_models import make_model


def test_a_window_is_as_long_as_the_engines(tmp_path: Path) -> None:
    """vLLM's layers of Cohere 2 see one token more than transformers' (tests/long/integration/family_engine.py compares them)."""
    base = make_model("cohere2", tmp_path / "base")
    written = json.loads((base / "config.json").read_text())["sliding_window"]
    loaded = load_base(str(base), torch.float32, torch.device("cpu"))
    first = loaded.get_submodule("model.layers.0.self_attn")
    assert (first.sliding_window, loaded.config.sliding_window) == (written + 1, written + 1)


@pytest.mark.parametrize("toy", ["nemotron_h", "granitemoehybrid dense", "falcon_h1"])
def test_steps_of_state_space_layers_have_the_engines_limits(toy: str, tmp_path: Path) -> None:
    """vLLM's have no limits (tests/long/integration/family_engine.py compares them)."""
    loaded = load_base(str(make_model(toy, tmp_path / "base")), torch.float32, torch.device("cpu"))
    limits = {module.time_step_limit for module in loaded.modules() if hasattr(module, "time_step_limit")}
    assert limits == {(0.0, math.inf)}


def test_of_a_model_that_sees_only_the_language_model_is_adapted(tmp_path: Path) -> None:
    small = {"hidden_size": 32, "intermediate_size": 48, "num_attention_heads": 2}
    small |= {"num_hidden_layers": 1}
    text = small | {"vocab_size": 64, "num_key_value_heads": 1, "head_dim": 16}
    sees = Gemma3Config(text_config=text, vision_config=small | {"image_size": 28, "patch_size": 14})
    Gemma3ForConditionalGeneration(sees).save_pretrained(tmp_path / "base")
    policy = Policy(str(tmp_path / "base"))
    policy.init_adapter(LoRAConfig(rank=4), 0)
    assert policy.parameters and all(".language_model." in name for name in policy.parameters)
    policy.init_adapter(LoRAConfig(rank=4, target_modules=["q_proj", "o_proj"]), 0)
    layers = {name.split(".lora_")[0] for name in policy.parameters}
    assert layers and all(".language_model." in name for name in layers)
    assert {name.rpartition(".")[2] for name in layers} == {"q_proj", "o_proj"}


@pytest.mark.parametrize(
    ("family", "name"),
    [
        ("qwen3", "Qwen3ForCausalLM"),
        ("qwen2_5_vl", "Qwen2_5_VLForConditionalGeneration"),
        ("qwen3_vl", "Qwen3VLForConditionalGeneration"),
    ],
)
def test_a_family_that_sees_has_a_class_that_writes(family: str, name: str) -> None:
    assert find_class(AutoConfig.for_model(family)).__name__ == name


def test_a_family_that_writes_no_text_is_refused() -> None:
    with pytest.raises(ValueError, match="'vit'"):
        find_class(AutoConfig.for_model("vit"))


def test_weights_go_to_the_device_directly(monkeypatch: pytest.MonkeyPatch) -> None:
    """Not by way of main memory, where vLLM keeps its own copy."""
    asked: dict[str, Any] = {}
    real = Qwen3ForCausalLM.from_pretrained

    def load(*arguments: Any, **keywords: Any) -> Any:
        asked.update(keywords)
        return real(*arguments, **keywords)

    monkeypatch.setattr(Qwen3ForCausalLM, "from_pretrained", load)
    load_base(str(TINY_DIR), torch.float32, torch.device("cpu"))
    assert asked["device_map"] == {"": torch.device("cpu")}


def test_an_adapter_of_a_mixtures_experts_is_refused(tmp_path: Path) -> None:
    base = str(make_model("qwen3_moe", tmp_path / "base"))
    write_first_checkpoint(base, LoRAConfig(target_modules=["q_proj", "o_proj"]), 0, tmp_path / "0")
    with pytest.raises(ValueError, match=r"target_modules .*gate, gate_proj,"):
        write_first_checkpoint(base, LoRAConfig(target_modules=["q_proj", "gate", "gate_proj"]), 0, tmp_path / "1")
