"""The layers of a base model that take an adapter: linear layers of the language model's decoder, by their paths.

Layers of other parts (towers that see or hear, projectors, routers, experts, heads) can have the same last names, so a
name alone chooses none.
"""

import contextlib
import re
from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass

import torch
from transformers import PreTrainedModel
from transformers.modeling_layers import GradientCheckpointingLayer
from transformers.pytorch_utils import Conv1D

PEFT_REFUSES_OUT_PROJ = ("falcon_h1", "mamba", "mamba2", "falcon_mamba", "nemotron_h")
"""Families in which PEFT treats every `out_proj` as a state-space layer's, whose product another kernel computes."""
EXPERT_NAMES = ("gate_proj", "up_proj", "down_proj")
"""In a mixture PEFT treats every layer with such a name as part of an expert (Arcee Trinity's attention has a `gate_proj`)."""

HALVED = {"glm4": "gate_up_proj"}
"""By family: a layer that vLLM's class splits into halves, which have names and adapters of their own."""


@dataclass(frozen=True, slots=True)
class Layers:
    """The linear layers of a decoder, by path."""

    takes: frozenset[str]
    """Layers that take an adapter."""
    folded: frozenset[str]
    """Layers whose weights vLLM folds into others when it loads the model: an adapter there would be lost or refused."""
    is_mixture: bool
    """Whether the model is a mixture of experts. Its adapters change attention only: routers stay as they are, and vLLM
    supports adapted experts on few devices."""


def find_layers(model: PreTrainedModel) -> Layers:
    """The layers of a model, which may be without weights."""
    modules = _decoder_modules(model)
    family = model.config.model_type
    is_mixture = any(_holds_experts(path, module) for path, module in modules.items())
    takes, folded = set[str](), set[str]()
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
            folded.add(path)
        else:
            takes.add(path)
    return Layers(frozenset(takes), frozenset(folded), is_mixture)


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


def layer_kind(path: str) -> str:
    """The part of a layer's path behind its decoder layer's number: `model.layers.3.mlp.up_proj` -> `mlp.up_proj`."""
    before, _, behind = _split(path)
    return behind or before


def find_targets(names: list[str] | None, model: PreTrainedModel) -> list[str] | str:
    """PEFT's `target_modules` for the layers that `names` means (None: all layers that take an adapter): last names if
    these mean no other layer of the model, else a pattern of paths.

    Raises:
        ValueError: `names` means something else than layers that take an adapter.
    """
    layers = find_layers(model)
    if names == []:
        raise ValueError("lora.target_modules is empty: name layers, or leave it out")
    everywhere = {name for name, _ in model.named_modules()}
    chosen = layers.takes if names is None else _named_layers(names, layers, everywhere)
    usual = sorted(names or {path.rpartition(".")[2] for path in chosen})
    meant = set[str]()
    for name in usual:
        meant |= _ending_with(name, everywhere)
    return usual if meant == chosen else _pattern(chosen, everywhere)


def renamed(names: list[str] | None, preferred: Iterable[list[str] | None], model: PreTrainedModel) -> list[str] | None:
    """Shorter names for the layers of `names`, if these are paths; other names stay. The first that means exactly these
    layers: an entry of `preferred`, None (all layers), the layers' last names. Without one the paths stay."""
    layers = find_layers(model)
    if names is None or not layers.takes.issuperset(names):
        return names
    everywhere = {name for name, _ in model.named_modules()}
    for candidate in (*preferred, None, sorted({name.rpartition(".")[2] for name in names})):
        with contextlib.suppress(ValueError):  # the candidate's names mean layers that take no adapter
            chosen = layers.takes if candidate is None else _named_layers(candidate, layers, everywhere)
            if chosen == set(names):
                return candidate
    return names


def _named_layers(names: list[str], layers: Layers, everywhere: set[str]) -> frozenset[str]:
    """The layers that `names` means, by path. Raises ValueError if some of these layers take no adapter."""
    inside = layers.takes | layers.folded
    chosen, beyond = set[str](), list[str]()
    for name in names:
        matches = _ending_with(name, everywhere)
        matches = matches & inside or matches  # the same name may occur in other parts of the model
        chosen |= matches
        if not matches or not matches <= layers.takes:
            beyond.append(name)
    if beyond:
        raise ValueError(_beyond(sorted(beyond), layers))
    return frozenset(chosen)


def _ending_with(name: str, paths: set[str]) -> set[str]:
    """The paths that end with a whole name: `q_proj` matches `self_attn.q_proj`, not `self_attn.kq_proj`."""
    return {path for path in paths if f".{path}".endswith(f".{name}")}


def _beyond(names: list[str], layers: Layers) -> str:
    rule = "only the linear layers of the language model take an adapter, without the output head"
    if layers.is_mixture:
        rule = "in a mixture of experts only the attention takes an adapter"
    if any(f".{path}".endswith(f".{name}") for name in names for path in layers.folded):
        rule = "vLLM folds this layer into others when it loads the model, so an adapter would be lost"
    choices = ", ".join(sorted({path.rpartition(".")[2] for path in layers.takes}))
    return (
        f"lora.target_modules names {', '.join(names)}, but {rule}: choose from {choices}, or leave target_modules out"
    )


def _pattern(paths: frozenset[str], modules: set[str]) -> str:
    """A pattern that matches these paths of a model's modules, and no others."""
    numbers, in_model = _numbers(paths), _numbers(modules)
    groups: dict[tuple[str, str], list[str]] = defaultdict(list)
    for (before, behind), layer_numbers in sorted(numbers.items()):
        is_everywhere = layer_numbers == in_model[before, behind]
        which = r"\d+" if is_everywhere else f"({'|'.join(sorted(layer_numbers, key=int))})"
        groups[before, which].append(re.escape(behind))
    return "|".join(rf"{re.escape(before)}\.{which}\.({'|'.join(names)})" for (before, which), names in groups.items())


def _numbers(paths: Iterable[str]) -> dict[tuple[str, str], set[str]]:
    """The layer numbers of paths, by the parts of a path before and behind the number."""
    numbers: dict[tuple[str, str], set[str]] = defaultdict(set)
    for path in paths:
        before, number, behind = _split(path)
        numbers[before, behind].add(number)
    return numbers


def _split(path: str) -> tuple[str, str, str]:
    """The parts of a path before, at and behind the layer's number: `layers.3.mlp.up_proj` -> `layers`, `3`, `mlp.up_proj`.
    A path without a number is the first part, and the other parts are empty."""
    match = re.match(r"(.*?)\.(\d+)\.(.*)$", path)
    return (match[1], match[2], match[3]) if match else (path, "", "")
