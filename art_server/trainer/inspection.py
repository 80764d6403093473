"""A program that prints the facts about a base model (`base_facts.py`) from its folder, which needs no weights.

python -m art_server.trainer.inspection FOLDER
"""

import ast
import functools
import importlib.util
import json
import sys
from pathlib import Path
from typing import Any

import torch
import transformers
from transformers import GenerationConfig, PreTrainedModel
from transformers.pytorch_utils import Conv1D

from art_server.base_facts import Facts
from art_server.children import claim_stdout
from art_server.trainer.base import find_class, outline, read_config
from art_server.trainer.layers import Layers, find_layers

FUSED = ("qkv_proj", "query_key_value", "c_attn", "Wqkv", "W_pack", "att_proj")
"""Layers that compute queries, keys and values at once."""
ACTIVE_EXPERTS = ("num_experts_per_tok", "top_k_experts", "moe_k", "moe_topk")


def inspect(folder: Path) -> Facts:
    raw = json.loads((folder / "config.json").read_text())
    family = str(raw.get("model_type", ""))
    method, has_8_bits = find_quantization(folder, raw)
    told: dict[str, Any] = {"model_type": family, "quantization": method, "has_8_bits": has_8_bits}
    try:
        config = read_config(str(folder))
    except (ValueError, KeyError, TypeError, AttributeError, ImportError) as error:
        return Facts(**told, problem=_unreadable(family, raw, error))
    text = config.get_text_config()
    rope = getattr(text, "rope_parameters", None) or {}
    ropes = {
        str(each.get("rope_type") or each.get("type"))
        for each in [rope, *(part for part in rope.values() if isinstance(part, dict))]
    }
    told["ropes"] = tuple(sorted(ropes - {"None"}))
    architecture = (raw.get("architectures") or [""])[0]
    if architecture and (problem := engine_problem(architecture)):
        return Facts(**told, problem=problem)
    try:
        find_class(config)
        model = outline(str(folder))
    except (ValueError, ImportError, AttributeError, TypeError) as error:
        reason = (str(error).strip().splitlines() or [type(error).__name__])[0]
        return Facts(**told, problem=f"transformers cannot make its model: {reason[:300]}")
    positions = getattr(text, "max_position_embeddings", None)
    if not positions:
        return Facts(
            **told,
            problem="its configuration does not say how many positions it has (max_position_embeddings)",
        )
    layers = find_layers(model)
    kv_heads = getattr(text, "num_key_value_heads", None) or text.num_attention_heads
    is_latent = bool(getattr(text, "kv_lora_rank", None))
    return Facts(
        **told,
        vocabulary=int(text.vocab_size),
        max_positions=int(positions),
        num_layers=int(text.num_hidden_layers),
        hidden=int(text.hidden_size),
        intermediate=_intermediate(text, layers),
        kv_per_token=_kv_per_token(model, text),
        kv_heads=1 if is_latent else int(kv_heads),
        is_mixture=layers.is_mixture,
        lora_width=sum(sum(_shape(model.get_submodule(path))) for path in layers.takes),
        lora_modules=tuple(sorted({path.rpartition(".")[2] for path in layers.takes})),
        stop_ids=_stop_ids(folder, config),
    )


def find_quantization(folder: Path, raw: dict[str, Any]) -> tuple[str | None, bool]:
    """How the weights are quantised, and whether bitsandbytes did it to 8 bits, from any of the places where it stands."""
    text = raw.get("text_config") or {}
    for part in (raw, text):
        for key in ("quantization_config", "compression_config"):
            if found := part.get(key):
                usual = "bitsandbytes" if found.get("load_in_4bit") else "unknown"
                is_8 = bool(found.get("load_in_8bit"))
                return str(found.get("quant_method") or ("bitsandbytes" if is_8 else usual)), is_8
    if (folder / "hf_quant_config.json").exists():
        return "modelopt", False
    return None, False


def engine_problem(architecture: str) -> str | None:
    """Why vLLM serves no adapters of a class, if it does not."""
    spec = importlib.util.find_spec("vllm")
    if spec is None or spec.origin is None:
        return None
    models = Path(spec.origin).parent / "model_executor" / "models"
    known, gone = _registry(models / "registry.py")
    if architecture in gone:
        return f"vLLM no longer serves its class {architecture}"
    if architecture not in known:
        return None  # vLLM runs transformers' own class
    module, name = known[architecture]
    file = _file_of(
        module if module.startswith("vllm.") else f"vllm.model_executor.models.{module}"
    )
    if "SupportsLoRA" in _ancestors(file, name):
        return None
    return f"vLLM serves no adapters of its class {architecture}"


def _registry(file: Path) -> tuple[dict[str, tuple[str, str]], set[str]]:
    """vLLM's classes by architecture, as module and name, and the architectures that it no longer serves. Read from its
    source, because its import takes half a minute."""
    known: dict[str, tuple[str, str]] = {}
    gone: set[str] = set()
    for statement in ast.parse(file.read_text()).body:
        if not isinstance(statement, ast.Assign | ast.AnnAssign):
            continue
        target = statement.target if isinstance(statement, ast.AnnAssign) else statement.targets[0]
        if not isinstance(statement.value, ast.Dict) or not isinstance(target, ast.Name):
            continue
        for key, value in zip(statement.value.keys, statement.value.values, strict=True):
            if not isinstance(key, ast.Constant):
                continue
            if target.id == "_PREVIOUSLY_SUPPORTED_MODELS":
                gone.add(str(key.value))
            elif isinstance(value, ast.Tuple):
                module, name = (ast.literal_eval(each) for each in value.elts[:2])
                known.setdefault(str(key.value), (module, name))
    return known, gone


def _file_of(module: str) -> Path:
    """The source of a module of vLLM, which is not imported."""
    spec = importlib.util.find_spec("vllm")
    assert spec is not None and spec.origin is not None, "checked by the caller"
    path = Path(spec.origin).parent.joinpath(*module.split(".")[1:])
    return path / "__init__.py" if path.is_dir() else path.with_suffix(".py")


@functools.cache
def _ancestors(file: Path, name: str) -> frozenset[str]:
    """The names of a class and of all that it inherits from, as far as vLLM's sources tell."""
    found = {name}
    if not file.is_file():
        return frozenset(found)
    tree = ast.parse(file.read_text())
    made = [each for each in ast.walk(tree) if isinstance(each, ast.ClassDef) and each.name == name]
    for base in [base for each in made for base in each.bases]:
        base = base.value if isinstance(base, ast.Subscript) else base
        found |= _ancestors(file, ast.unparse(base).rpartition(".")[2])
    if not made:
        package = ["vllm", *file.relative_to(_file_of("vllm").parent).parent.parts]
        for each in ast.walk(tree):
            if isinstance(each, ast.ImportFrom):
                before = package[: len(package) - each.level + 1] if each.level else []
                module = ".".join([*before, *(each.module or "").split(".")]).rstrip(".")
                for alias in each.names:
                    if (alias.asname or alias.name) == name and module.startswith("vllm."):
                        found |= _ancestors(_file_of(module), alias.name)
    return frozenset(found)


def _unreadable(family: str, raw: dict[str, Any], error: Exception) -> str:
    if not family:
        return "its config.json names no model_type"
    if "auto_map" in raw:
        return (
            f"it needs code of its own, which is never run, and transformers {transformers.__version__} has no class for its "
            f"family '{family}'"
        )
    reason = (str(error).strip().splitlines() or [type(error).__name__])[0]
    return f"transformers {transformers.__version__} cannot read its configuration: {reason[:300]}"


def _intermediate(text: Any, layers: Layers) -> int:
    """Any: the fields that language models share."""
    inner = getattr(text, "intermediate_size", None) or 4 * text.hidden_size
    inner = max(inner) if isinstance(inner, list | tuple) else inner
    if not layers.is_mixture:
        return int(inner)
    active = next((each for name in ACTIVE_EXPERTS if (each := getattr(text, name, None))), 1)
    active = max(active) if isinstance(active, list | tuple) else active
    return int(getattr(text, "moe_intermediate_size", None) or inner) * int(active)


def _kv_per_token(model: PreTrainedModel, text: Any) -> int:
    """The numbers that a token keeps: outputs of the layers that make keys and values, in each layer that has some."""
    total = 0
    for path, module in model.get_decoder().named_modules():
        linear = {
            name: shape[0] for name, each in module.named_children() if (shape := _shape(each))
        }
        if "kv_a_proj_with_mqa" in linear:  # multi-head latent attention keeps one small vector
            total += linear["kv_a_proj_with_mqa"]
        elif "k_proj" in linear:
            total += linear["k_proj"] + linear.get("v_proj", linear["k_proj"])
        elif any(name in linear for name in FUSED) and "linear" not in path:
            heads = text.num_attention_heads
            size = getattr(text, "head_dim", None) or text.hidden_size // heads
            total += 2 * int(getattr(text, "num_key_value_heads", None) or heads) * int(size)
    return total


def _shape(module: torch.nn.Module) -> tuple[int, ...]:
    """The shape of a layer's weights, outputs first; empty without weights."""
    weight = getattr(module, "weight", None)
    shape = tuple(weight.shape) if isinstance(weight, torch.Tensor) else ()
    return shape[::-1] if isinstance(module, Conv1D) else shape


def _stop_ids(folder: Path, config: Any) -> tuple[int, ...]:
    """The end-of-sequence tokens of configuration and generation configuration, as vLLM reads them."""
    parts = [config, config.get_text_config()]
    if (folder / "generation_config.json").exists():
        parts.append(GenerationConfig.from_pretrained(str(folder)))
    found: set[int] = set()
    for part in parts:
        ids = getattr(part, "eos_token_id", None)
        found.update(ids if isinstance(ids, list | tuple) else [] if ids is None else [ids])
    return tuple(sorted(found))


if __name__ == "__main__":
    answers = claim_stdout()
    transformers.logging.set_verbosity_error()
    answers.write(inspect(Path(sys.argv[1])).model_dump_json().encode())
    answers.close()
