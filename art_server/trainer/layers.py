"""The layers of a base model that take an adapter: linear layers of the language model's decoder.

Layers of other parts (towers that see or hear, projectors, routers, experts, heads) take none. Which of the layers an adapter
has is chosen by name (`store/adapter_layers.py`).
"""

import torch
from transformers import PreTrainedModel
from transformers.modeling_layers import GradientCheckpointingLayer
from transformers.pytorch_utils import Conv1D

from art_server.store.adapter_layers import Layers

PEFT_REFUSES_OUT_PROJ = ("falcon_h1", "mamba", "mamba2", "falcon_mamba", "nemotron_h")
"""Families in which PEFT treats every `out_proj` as a state-space layer's, whose product another kernel computes."""
EXPERT_NAMES = ("gate_proj", "up_proj", "down_proj")
"""In a mixture PEFT treats every layer with such a name as part of an expert (Arcee Trinity's attention has a `gate_proj`)."""

HALVED = {"glm4": "gate_up_proj"}
"""By family: a layer that vLLM's class splits into halves, which have names and adapters of their own."""


def find_layers(model: PreTrainedModel) -> Layers:
    """The layers of a model, which may be without weights."""
    modules = _decoder_modules(model)
    family = model.config.model_type
    is_mixture = any(_holds_experts(path, module) for path, module in modules.items())
    shapes: dict[str, tuple[int, int]] = {}
    folded: list[str] = []
    for path, module in modules.items():
        before, _, last = path.rpartition(".")
        if not isinstance(module, torch.nn.Linear | Conv1D):
            continue
        if is_mixture and (last in EXPERT_NAMES or not _is_attention(path, model)):
            continue
        if last == "out_proj" and family in PEFT_REFUSES_OUT_PROJ:
            continue
        # vLLM makes two matrices of latent attention's kv_b_proj. Keys without a value layer are the values, too.
        is_value = last == "k_proj" and f"{before}.v_proj" not in modules
        if last == "kv_b_proj" or is_value or last == HALVED.get(family):
            folded.append(path)
        else:
            shapes[path] = _shape(module)
    others = {name for name, _ in model.named_modules()} - {*shapes, *folded}
    names = {path.rpartition(".")[2] for path in shapes}
    namesakes = sorted(path for path in others if path.rpartition(".")[2] in names)
    return Layers(shapes, tuple(folded), tuple(namesakes), is_mixture)


def _shape(layer: torch.nn.Linear | Conv1D) -> tuple[int, int]:
    """The numbers of inputs and outputs of a layer."""
    if isinstance(layer, Conv1D):
        return layer.nx, layer.nf
    return layer.in_features, layer.out_features


def _decoder_modules(model: PreTrainedModel) -> dict[str, torch.nn.Module]:
    """The modules inside the layers of a model's decoder, by path."""
    decoder = model.get_decoder()
    prefix = next(name for name, module in model.named_modules() if module is decoder)
    modules: dict[str, torch.nn.Module] = {}
    for name, layer in decoder.named_modules(prefix=prefix):
        if isinstance(layer, GradientCheckpointingLayer):
            for path, module in layer.named_modules(prefix=name):
                if path != name:
                    modules[path] = module
    return modules


def _holds_experts(path: str, module: torch.nn.Module) -> bool:
    is_stack = any(parameter.dim() == 3 for parameter in module.parameters(recurse=False))
    is_convolution = isinstance(module, torch.nn.Conv1d)
    return "experts" in path.split(".") or (is_stack and not is_convolution)


def _is_attention(path: str, model: PreTrainedModel) -> bool:
    """Whether a layer lies in attention, also in linear attention."""
    parent = type(model.get_submodule(path.rpartition(".")[0])).__name__
    return "Attention" in parent or any("attn" in part for part in path.split("."))
