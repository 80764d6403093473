"""The base model that an adapter is trained on: which class loads it, which attention it has, which layers take LoRA.

A model that also reads images is loaded whole, as vLLM serves it, and adapted in its language model only: its other parts see
no gradient from text.
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
"""What transformers calls the part of a larger model that reads and writes text."""


def load_base(base_model: str, dtype: torch.dtype, device: torch.device) -> PreTrainedModel:
    """The model on the device, without dropout: it would make the policy another one than was sampled.

    Loading is from safetensors only, straight to the device, and runs no code from the model's folder.
    """
    model_class = find_class(read_config(base_model))
    base = model_class.from_pretrained(
        base_model,
        dtype=dtype,
        device_map={"": device},
        attn_implementation=usual_attention(model_class),
        use_safetensors=True,
        trust_remote_code=False,
    )
    return base.eval()


def outline(base_model: str) -> PreTrainedModel:
    """The same model without weights, for names and shapes."""
    config = read_config(base_model)
    with torch.device("meta"):
        return find_class(config)._from_config(config)


def read_config(base_model: str) -> Any:
    """Any: transformers' configurations have a class for each family."""
    return AutoConfig.from_pretrained(base_model, trust_remote_code=False)


def find_class(config: Any) -> Any:
    """The class that writes text, alone or as a part of what it does.

    Any: transformers' classes are chosen by configuration. Raises ValueError for a family that writes none.
    """
    for auto in (AutoModelForCausalLM, AutoModelForImageTextToText):
        mapping: Any = auto._model_mapping  # pyright: ignore[reportAttributeAccessIssue]
        if type(config) in mapping:
            return mapping[type(config)]
    raise ValueError(
        f"models of the family '{config.model_type}' write no text, as far as transformers knows"
    )


def usual_attention(model_class: Any) -> str:
    """How the model's own attention is computed where trees are not; gpt-oss has no other than its own."""
    return "sdpa" if getattr(model_class, "_supports_sdpa", False) else "eager"


def peft_config(lora: LoRAConfig, model: PreTrainedModel) -> PeftLoraConfig:
    """PEFT's configuration of an adapter of this model; by default of all linear layers of its language model, in a mixture
    of experts of those of its attention.

    Raises ValueError for layers of a mixture that take no adapter.
    """
    attention = _attention_layers(model)
    targets: Any = lora.target_modules
    if targets is None:
        targets = attention or _language_layers(model) or "all-linear"
    elif attention and not set(targets) <= set(attention):
        beyond = ", ".join(sorted(set(targets) - set(attention)))
        raise ValueError(
            f"lora.target_modules names {beyond}, and of a mixture of experts only the attention takes an adapter: name "
            f"some of {', '.join(attention)}, or leave target_modules out"
        )
    return PeftLoraConfig(
        r=lora.rank,
        lora_alpha=lora.alpha,  # pyright: ignore[reportArgumentType]  # PEFT says int and divides it by r
        target_modules=targets,
        lora_dropout=0.0,
        bias="none",
        task_type="CAUSAL_LM",
    )


def _attention_layers(model: PreTrainedModel) -> list[str] | None:
    """Names of a mixture's layers that take an adapter; None for other models."""
    if not has_experts(model.config.get_text_config().to_dict()):
        return None
    linear = (name for name, each in model.named_modules() if isinstance(each, torch.nn.Linear))
    return sorted({name.rpartition(".")[2] for name in linear if is_attention(name)})


def _language_layers(model: PreTrainedModel) -> str | None:
    """A pattern of the linear layers in the language model of a larger one; None where it is all there is."""
    inside = [
        name.rpartition(".")[2]
        for name, module in model.named_modules()
        if f".{LANGUAGE_MODEL}." in f".{name}" and isinstance(module, torch.nn.Linear)
    ]
    if not inside:
        return None
    return rf"(.*\.)?{LANGUAGE_MODEL}\..*\.({'|'.join(sorted(set(inside)))})"
