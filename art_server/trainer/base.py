"""The base model that an adapter is trained on: the class that loads it, its attention, and the layers that take LoRA.

A model that also reads images is loaded whole, as vLLM serves it. Only its language model is adapted: text gives the
other parts no gradient.
"""

from typing import Any

import torch
from peft import LoraConfig as PeftLoraConfig
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoModelForImageTextToText,
    PreTrainedModel,
)

from art.wire import LoRAConfig
from art_server.base_models import has_experts, is_attention

LANGUAGE_MODEL = "language_model"
"""transformers' name for the part of a larger model that reads and writes text."""


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
        attn_implementation=usual_attention(model_class),
        use_safetensors=True,
        trust_remote_code=False,
    )
    return base.eval()


def outline(base_model: str) -> PreTrainedModel:
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
    for auto in (AutoModelForCausalLM, AutoModelForImageTextToText):
        mapping: Any = auto._model_mapping  # pyright: ignore[reportAttributeAccessIssue]
        if type(config) in mapping:
            return mapping[type(config)]
    raise ValueError(
        f"transformers has no model class that generates text for the family '{config.model_type}'"
    )


def usual_attention(model_class: Any) -> str:
    """The attention implementation for unshared sequences: sdpa where the model supports it (gpt-oss does not)."""
    return "sdpa" if getattr(model_class, "_supports_sdpa", False) else "eager"


def peft_config(lora: LoRAConfig, model: PreTrainedModel) -> PeftLoraConfig:
    """PEFT's configuration of an adapter of this model.

    By default it covers all linear layers of the language model, or those of the attention in a mixture of experts.

    Raises:
        ValueError: `target_modules` names layers of a mixture of experts outside its attention.
    """
    attention = _attention_layers(model)
    targets: Any = lora.target_modules
    if targets is None:
        targets = attention or _language_layers(model) or "all-linear"
    elif attention and not set(targets) <= set(attention):
        beyond = ", ".join(sorted(set(targets) - set(attention)))
        raise ValueError(
            f"lora.target_modules names {beyond}, but in a mixture of experts only the attention takes an adapter: "
            f"choose from {', '.join(attention)}, or leave target_modules out"
        )
    return PeftLoraConfig(
        r=lora.rank,
        lora_alpha=lora.alpha,  # pyright: ignore[reportArgumentType]  # PEFT declares int but only divides it by r
        target_modules=targets,
        lora_dropout=0.0,
        bias="none",
        task_type="CAUSAL_LM",
    )


def _attention_layers(model: PreTrainedModel) -> list[str] | None:
    """Names of a mixture of experts' layers that take an adapter; None for other models."""
    if not has_experts(model.config.get_text_config().to_dict()):
        return None
    linear = (name for name, each in model.named_modules() if isinstance(each, torch.nn.Linear))
    return sorted({name.rpartition(".")[2] for name in linear if is_attention(name)})


def _language_layers(model: PreTrainedModel) -> str | None:
    """A pattern for the linear layers of the language model inside a larger model; None if there is no larger model."""
    inside = [
        name.rpartition(".")[2]
        for name, module in model.named_modules()
        if f".{LANGUAGE_MODEL}." in f".{name}" and isinstance(module, torch.nn.Linear)
    ]
    if not inside:
        return None
    return rf"(.*\.)?{LANGUAGE_MODEL}\..*\.({'|'.join(sorted(set(inside)))})"
