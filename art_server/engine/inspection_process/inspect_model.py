"""What a base model is, from its small files, as transformers reads them."""

import json
from pathlib import Path
from typing import Any

import transformers
from huggingface_hub.errors import StrictDataclassError
from transformers import CONFIG_MAPPING, GenerationConfig, PreTrainedModel

from art_server.engine.inspection_process.adapter_config import read_adapter_config
from art_server.engine.inspection_process.engine_classes import engine_problem
from art_server.engine.inspection_process.parsers import seen_parsers
from art_server.engine.inspection_process.quantization import find_quantization
from art_server.engine.inspection_process.sizes import (
    intermediate,
    kv_heads,
    kv_per_token,
    state_per_sequence,
)
from art_server.engine.inspection_process.template import find_notes, find_rules, read_templates
from art_server.engine.inspection_process.tested import TESTED, UNTESTED
from art_server.store.base_facts import Facts
from art_server.trainer.base import meta_model, read_config
from art_server.trainer.layers import find_layers

UNREADABLE = (
    ValueError,
    KeyError,
    TypeError,
    AttributeError,
    ImportError,
    StrictDataclassError,
)
"""What transformers raises for a configuration that it does not understand."""
UNADAPTABLE = (ValueError, TypeError, AttributeError, ImportError, RuntimeError)
"""What PEFT raises for layers of which it makes no adapter."""
NO_LANGUAGE_MODELS = ("Classification", "QuestionAnswering", "MaskedLM", "RewardModel")
"""Parts of the names of classes for other tasks, which published models have."""


def inspect(folder: Path, template: Path | None = None) -> Facts:
    """The facts about the model in `folder`. `template` is a file with a chat template for the model; None: the model's own."""
    raw = json.loads((folder / "config.json").read_text())
    family = str(raw.get("model_type", ""))
    quantization, has_8_bits = find_quantization(folder, raw)
    facts = Facts(model_type=family, quantization=quantization, has_8_bits=has_8_bits)
    try:
        config = read_config(str(folder))
    except UNREADABLE as error:
        return _refused(facts, _unreadable(family, raw, error))
    facts = facts.model_copy(update={"ropes": _ropes(config)})
    architecture = next(iter(raw.get("architectures") or ()), "")
    if architecture and (problem := _class_problem(architecture)):
        return _refused(facts, problem)
    try:
        model = meta_model(str(folder))
    except Exception as error:  # constructors of transformers' classes raise errors of any kind
        if quantization not in (None, "bitsandbytes"):
            return facts  # the model is refused as quantised, and that refusal names the copy to take
        return _refused(facts, _unmakeable(error))
    # Without `architectures` vLLM (0.32, transformers_utils/config.py) takes the class that transformers has for the family.
    if not architecture and (problem := engine_problem(type(model).__name__)):
        return _refused(facts, problem)
    try:
        facts = _with_model(facts, folder, template, config, model)
    except (AttributeError, KeyError, TypeError) as error:
        return _refused(facts, f"its layers are of an unknown kind: {str(error)[:300]}")
    if facts.problem is not None or quantization not in (None, "bitsandbytes"):
        return facts
    try:
        return facts.model_copy(update={"adapter_config": read_adapter_config(model, facts.layers)})
    except UNADAPTABLE as error:
        return _refused(facts, f"PEFT makes no adapter of its layers: {str(error)[:300]}")


def _refused(facts: Facts, problem: str) -> Facts:
    return facts.model_copy(update={"problem": problem})


def _ropes(config: Any) -> tuple[str, ...]:
    """The kinds of rotary embeddings: one for all layers, or one for each kind of layer. Any: as `_with_model`."""
    rope = getattr(config.get_text_config(), "rope_parameters", None) or {}
    of_layers = [part for part in rope.values() if isinstance(part, dict)]
    kinds = {part.get("rope_type") or part.get("type") for part in [rope, *of_layers]}
    return tuple(sorted(str(kind) for kind in kinds - {None}))


def _class_problem(architecture: str) -> str | None:
    if any(kind in architecture for kind in NO_LANGUAGE_MODELS):
        return f"its class {architecture} writes no text"
    return engine_problem(architecture)


def _unreadable(family: str, raw: dict[str, Any], error: Exception) -> str:
    if not family:
        return "its config.json names no model_type"
    if family not in CONFIG_MAPPING:
        code = "it needs code of its own, which is never run, and " if "auto_map" in raw else ""
        return f"{code}transformers {transformers.__version__} has no class for its family '{family}'"
    reason = " ".join(str(error).split()) or type(error).__name__
    return f"transformers {transformers.__version__} cannot read its configuration: {reason[:300]}"


def _unmakeable(error: Exception) -> str:
    reason = (str(error).strip().splitlines() or [type(error).__name__])[0][:300]
    return reason if reason.startswith("transformers ") else f"transformers cannot make its model: {reason}"


def _with_model(facts: Facts, folder: Path, template: Path | None, config: Any, model: PreTrainedModel) -> Facts:
    """The facts of a model without weights. Any: transformers has a class of configurations for each family."""
    text = config.get_text_config()
    if any(path.endswith(".indexer") for path, _ in model.named_modules()):
        problem = "each token reads only those that an indexer chooses, which is not trained here"
        return _refused(facts, problem)
    positions = getattr(text, "max_position_embeddings", None)
    if not positions:
        problem = "its configuration does not say how many positions it has (max_position_embeddings)"
        return _refused(facts, problem)
    layers = find_layers(model)
    if not layers.shapes:
        return _refused(facts, "none of its layers takes an adapter")
    family = facts.model_type
    templates = read_templates(folder, template)
    untested = () if family in TESTED else (UNTESTED.format(family),)
    has_latent_attention = bool(getattr(text, "kv_lora_rank", None))
    return Facts(
        model_type=family,
        quantization=facts.quantization,
        has_8_bits=facts.has_8_bits,
        ropes=facts.ropes,
        vocabulary=int(text.vocab_size),
        max_positions=int(positions),
        num_layers=int(text.num_hidden_layers),
        hidden=int(text.hidden_size),
        intermediate=intermediate(model, text, layers),
        kv_per_token=kv_per_token(model, text),
        state_per_sequence=state_per_sequence(model),
        kv_heads=1 if has_latent_attention else kv_heads(text),
        has_latent_attention=has_latent_attention,
        has_delta_rule=bool(getattr(text, "linear_num_key_heads", None)),
        layers=layers,
        stop_ids=find_stop_ids(folder, config),
        overrides=find_overrides(config),
        notes=find_notes(templates, folder) + untested,
        parsers=seen_parsers(templates, family),
        rules=find_rules(templates),
    )


def find_overrides(config: Any) -> dict[str, Any]:
    """The configuration for vLLM that Ministral 3 needs: its queries grow with the position, and vLLM reads the growth from
    Mistral's own format only."""
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


def find_stop_ids(folder: Path, config: Any) -> tuple[int, ...]:
    """The end-of-sequence tokens of configuration and generation configuration, as vLLM reads them."""
    parts = [config, config.get_text_config()]
    if (folder / "generation_config.json").exists():
        parts.append(GenerationConfig.from_pretrained(str(folder)))
    stop_ids: set[int] = set()
    for part in parts:
        ids = getattr(part, "eos_token_id", None)
        if isinstance(ids, list | tuple):
            stop_ids.update(ids)
        elif ids is not None:
            stop_ids.add(ids)
    return tuple(sorted(stop_ids))
