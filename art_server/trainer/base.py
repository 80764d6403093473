"""The base model that an adapter is trained on: the class that loads it, its attention, and the layers that take LoRA.

A model that also reads images is loaded whole, as vLLM serves it. Only its language model is adapted: text gives the
other parts no gradient.
"""

import re
from typing import Any

import torch
from peft import LoraConfig as PeftLoraConfig
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoModelForImageTextToText,
    PreTrainedModel,
)
from transformers.pytorch_utils import Conv1D

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

    Raises:
        ValueError: `target_modules` names something else than layers that take an adapter.
    """
    return PeftLoraConfig(
        r=lora.rank,
        lora_alpha=lora.alpha,  # pyright: ignore[reportArgumentType]  # PEFT declares int but only divides it by r
        target_modules=_targets(lora.target_modules, model),
        lora_dropout=0.0,
        bias="none",
        task_type="CAUSAL_LM",
    )


def _targets(names: list[str] | None, model: PreTrainedModel) -> list[str] | str:
    """PEFT's `target_modules`: names of layers, or a pattern for those inside a larger model.

    By default an adapter covers all linear layers of the language model, or those of the attention in a mixture of
    experts. Others take none: of embeddings and output heads vLLM serves adapters for few families, and does not apply
    those of heads to the log-probabilities of prompts.
    """
    takes = _adaptable(model)
    choices = sorted({name.rpartition(".")[2] for name in takes})
    is_inside = any(_is_inside(name) for name in takes)
    is_mixture = has_experts(model.config.get_text_config().to_dict())
    if names == []:
        raise ValueError("lora.target_modules is empty: name layers, or leave it out")
    if names is None:
        if is_inside:
            return _pattern(choices)
        return choices if is_mixture else "all-linear"
    found = {
        name: {each for each, _ in model.named_modules() if f".{each}".endswith(f".{name}")}
        for name in names
    }
    if is_inside:
        found = {name: {each for each in ones if _is_inside(each)} for name, ones in found.items()}
    if beyond := [name for name, ones in found.items() if not ones or not ones <= takes]:
        rule = (
            "in a mixture of experts only the attention takes an adapter"
            if is_mixture
            else "only the linear layers of the language model take an adapter, without the output head"
        )
        raise ValueError(
            f"lora.target_modules names {', '.join(sorted(beyond))}, but {rule}: choose from {', '.join(choices)}, or "
            "leave target_modules out"
        )
    # The same names may occur in the parts that read images.
    is_elsewhere = is_inside and any("." not in name for name in names)
    return _pattern(names) if is_elsewhere else names


def _adaptable(model: PreTrainedModel) -> set[str]:
    """Full names of the layers that may take an adapter."""
    head = model.get_output_embeddings()
    linear = {
        name
        for name, each in model.named_modules()
        if isinstance(each, torch.nn.Linear | Conv1D) and each is not head
    }
    linear = {name for name in linear if _is_inside(name)} or linear
    if has_experts(model.config.get_text_config().to_dict()):
        return {name for name in linear if is_attention(name)}
    return linear


def _is_inside(name: str) -> bool:
    """Whether a layer belongs to the language model inside a larger model."""
    return f".{LANGUAGE_MODEL}." in f".{name}"


def _pattern(names: list[str]) -> str:
    """A pattern for the layers of these names in the language model inside a larger model."""
    return rf"(.*\.)?{LANGUAGE_MODEL}\..*\.({'|'.join(map(re.escape, sorted(set(names))))})"
