"""The base model that an adapter is trained on: the class that loads it, and its attention.

A model that also reads images is loaded whole, as vLLM serves it. Only its language model is adapted (`layers.py`): text
gives the other parts no gradient.
"""

import math
from typing import Any

import torch
from peft import LoraConfig as PeftLoraConfig
from peft import PeftModel, get_peft_model_state_dict
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoModelForImageTextToText,
    GenerationConfig,
    PreTrainedModel,
)

from art_protocol.wire import LoRAConfig
from art_server.store.adapter_layers import find_targets
from art_server.trainer.layers import find_layers


def load_base(base_model: str, dtype: torch.dtype, device: torch.device) -> PreTrainedModel:
    """The model on the device. Dropout is off, because it would change the policy that was sampled from.

    Weights are loaded from safetensors only, directly to the device. No code from the model's folder runs.
    """
    config = read_config(base_model)
    for part in (config, config.get_text_config()):
        # Gradient checkpointing puts layers into training mode, which would switch dropout on.
        for name, value in list(vars(part).items()):
            if name.endswith(("dropout", "pdrop")) and type(value) in (int, float):
                setattr(part, name, 0.0)
    model_class = find_class(config)
    base = model_class.from_pretrained(
        base_model,
        config=config,
        dtype=dtype,
        device_map={"": device},
        attn_implementation=usual_attention(model_class, config),
        use_safetensors=True,
        trust_remote_code=False,
        # Nothing is generated here, and transformers would refuse some files that vLLM reads.
        generation_config=GenerationConfig(),
    )
    match_engine(base)
    return base.eval()


def match_engine(model: PreTrainedModel) -> None:
    """Has the model's layers compute what vLLM's layers compute, where the two differ."""
    config: Any = model.config.get_text_config()
    # In Cohere 2 a token attends to `sliding_window` tokens before it, and to itself (vLLM 0.32, models/commandr.py);
    # transformers counts the token itself in the window.
    has_wider_window = config.model_type == "cohere2"
    if has_wider_window:  # for the masks
        config.sliding_window += 1
    for module in model.modules():
        layer: Any = module
        if has_wider_window and getattr(layer, "sliding_window", None) is not None:
            layer.sliding_window += 1
        if hasattr(layer, "time_step_limit"):
            # vLLM's state-space layers have no limits (0.32, mamba_mixer2.py); Nemotron-H's layers in transformers have limits.
            layer.time_step_limit = (0.0, math.inf)


def meta_model(base_model: str) -> PreTrainedModel:
    """The model without weights, for names and shapes."""
    config = read_config(base_model)
    with torch.device("meta"):
        return find_class(config)._from_config(config)


def read_config(base_model: str) -> Any:
    """The model's configuration. Any: transformers has a class for each family."""
    return AutoConfig.from_pretrained(base_model, trust_remote_code=False)


def find_class(config: Any) -> Any:
    """The family's class that generates text, from text alone or also from images.

    Any: transformers' classes are chosen by configuration.

    Raises:
        ValueError: the family has none.
    """
    autos = [AutoModelForCausalLM, AutoModelForImageTextToText]
    if config.get_text_config() is not config:
        # For some of these AutoModelForCausalLM has the class of the language model alone, which takes another
        # configuration and names its layers otherwise than vLLM's class.
        autos.reverse()
    for auto in autos:
        mapping: Any = auto._model_mapping  # pyright: ignore[reportAttributeAccessIssue]
        if type(config) in mapping:
            return mapping[type(config)]
    raise ValueError(
        f"transformers has no model class of a decoder that generates text for the family '{config.model_type}'"
    )


def usual_attention(model_class: Any, config: Any) -> str:
    """The attention implementation for unshared sequences: sdpa where the model supports it. gpt-oss does not support it,
    and for Gemma 2 sdpa would leave out the cap of attention scores, which vLLM applies.

    Any: in transformers each family has its own classes of model and configuration.
    """
    has_cap = getattr(config.get_text_config(), "attn_logit_softcapping", None) is not None
    has_sdpa = getattr(model_class, "_supports_sdpa", False) and not has_cap
    return "sdpa" if has_sdpa else "eager"


def peft_config(lora: LoRAConfig, model: PreTrainedModel) -> PeftLoraConfig:
    """PEFT's configuration of an adapter of this model.

    Raises:
        UnknownLayers: `target_modules` names something else than layers that take an adapter.
    """
    return PeftLoraConfig(
        r=lora.rank,
        lora_alpha=lora.alpha,  # pyright: ignore[reportArgumentType]  # PEFT declares int but only divides it by r
        target_modules=find_targets(lora.target_modules, find_layers(model)),
        lora_dropout=0.0,
        bias="none",
        task_type="CAUSAL_LM",
    )


def adapter_tensors(model: PeftModel) -> dict[str, torch.Tensor]:
    """The adapter of a model, by the names of PEFT's files."""
    # By default PEFT (0.21) reads the base's config.json at each call, to see whether its vocabulary has changed.
    return get_peft_model_state_dict(model, save_embedding_layers=False)
